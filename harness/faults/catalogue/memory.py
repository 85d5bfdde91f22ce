"""Memory that is taken besides what the plan knows: the numbers are right, and so is what is held when training has ended."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="the logits of every step are kept in a list, as one does to look at them later",
    bug="of the family of P15 pytorch #164756: what was computed lingers",
    case="fsdp_2",
    caught_by="memory",
    named="more are kept after every step: float64 [",
)
def logits_of_every_step_kept(fired: Fired) -> None:
    from harness.reference.model import Llama

    kept = []

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            logits = original(self, *args, **kwargs)
            fired()
            kept.append(logits.detach())
            return logits

        return forward

    replace(Llama, "forward", make)


@fault(
    breaks="before each optimizer step all weights are copied, for the length of the update, and then given up",
    bug="of the family of P15 pytorch #164756: memory for what nobody needs at once",
    case="hsdp_2x2",
    caught_by="memory",
    named="of copies of weights exist at once outside of forward and backward in step",
)
def weights_copied_during_each_step(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            fired()
            weights = [weight for group in self.param_groups for weight in group["params"]]
            before = [weight.detach().clone() for weight in weights]
            done = original(self, *args, **kwargs)
            self.moved = [
                float((weight.detach() - old).abs().max()) for weight, old in zip(weights, before, strict=True)
            ]
            return done

        return step

    replace(torch.optim.AdamW, "step", make)


@fault(
    breaks="a moving average of the weights is retained, which nobody declared",
    bug="of the family of P15 pytorch #164756: weights beside the weights",
    case="fsdp_2",
    caught_by="memory",
    named="525.6 kB of float64 are retained in unaccounted tensors: 21 tensors",
)
def moving_average_not_declared(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(self, *args, **kwargs)
            fired()
            weights = [weight.detach().to_local() for group in self.param_groups for weight in group["params"]]
            if not hasattr(self, "average"):
                self.average = [weight.clone() for weight in weights]
            for average, weight in zip(self.average, weights, strict=True):
                average.lerp_(weight, 0.1)
            return done

        return step

    replace(torch.optim.AdamW, "step", make)
