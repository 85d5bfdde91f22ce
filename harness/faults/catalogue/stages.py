"""Mistakes in what the stages of a pipeline hold, and in what is summed over them."""

from __future__ import annotations

import os
from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="the loss is divided by the number of tokens only when the schedule has run backward already",
    bug="L04 pytorch/torchtitan #4194",
    case="pp_2",
    caught_by="gradients grad_norm",
    named="not divided by the number of valid tokens",
)
def loss_normalised_after_backward(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def sum_of_tokens(loss: Any, *, ranks: int, valid_tokens: int) -> Any:
            fired()
            return loss * ranks

        return sum_of_tokens

    replace(trainer, "scaled", make)


@fault(
    breaks="the gradient norm is not summed over the stages: each clips by its own",
    bug="C01 pytorch/torchtitan #649, #596",
    case="pp_2",
    caught_by="grad_norm update",
    named="each rank clips by the norm of its own shards, not by the global norm",
)
def norm_of_each_stage(fired: Fired) -> None:
    from harness.trainers.llama3 import pipeline

    def nobody(mesh: Any) -> None:
        fired()

    replace(pipeline, "group_of", lambda original: nobody)


@fault(
    breaks="each stage gets the same number of layers, and those that are left over are never built",
    bug="P05 pytorch/torchtitan #963",
    case="pp_2_uneven_layers",
    caught_by="completed",
    named="does not hold layers.",
)
def layers_left_over_are_never_built(fired: Fired) -> None:
    from harness.trainers.llama3 import pipeline

    def make(original: Any) -> Any:
        def divided(model: Any, stage: int, n_stages: int) -> None:
            layers = len(model.layers)
            each = layers // n_stages
            original(model, stage, n_stages)
            fired()
            for name in list(model.layers):
                if not stage * each <= int(name) < (stage + 1) * each:
                    del model.layers[name]

        return divided

    replace(pipeline, "cut", make)


@fault(
    breaks="every stage draws its weights from the same seed, so that stages start alike",
    bug="R02 pytorch/torchtitan #689; allenai/OLMo-core #679",
    case="pp_2",
    caught_by="initial_weights",
    named="layers.2.attention.wq.weight holds the values of layers.0.attention.wq.weight",
)
def stages_start_alike(fired: Fired) -> None:
    from harness.trainers.support import weights

    def make(original: Any) -> Any:
        def of_the_first_layers(*args: Any) -> Any:
            weights = dict(original(*args))
            if os.environ.get("RANK") != "1":
                return weights
            fired()
            return {fqn: weights[fqn.replace("layers.2.", "layers.0.")] for fqn in weights}  # 2 is its first one

        return of_the_first_layers

    replace(weights, "read_weights", make)


@fault(
    breaks="only the first of a rank's model parts is clipped",
    bug="P13 pytorch/torchtitan #500, #792: a loop over [model] where all model parts are meant",
    case="pp_2_zbv",
    caught_by="grad_norm update",
    named="clipping",
)
def only_the_first_part_clipped(fired: Fired) -> None:
    from harness.trainers.llama3 import clip

    def make(original: Any) -> Any:
        def first_part(parameters: Any, *args: Any) -> float:
            fired()
            return original(list(parameters)[: len(list(parameters)) // 2], *args)

        return first_part

    replace(clip, "clip_gradients", make)
