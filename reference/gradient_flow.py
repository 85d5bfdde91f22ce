"""Llama 3 whose backward pass does something else than its forward pass says: gradients that are lost or counted on the way."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .altered import OF_ITSELF, Alteration, Rows, Variation, alike, copy_of, given, put_instead
from .blocks import Added, block_of

PARTS = {"attention": "attention", "feed_forward": "feed-forward", "norm": "the norm", "inner": "softmax attention"}


def gradient_flows(counts: Iterable[int]) -> list[Variation]:
    """counts: by which a gradient may be counted too often, or divided."""
    found, counts = [], [*counts]
    for part, name in PARTS.items():
        rows: list[tuple[str, Alteration]] = [(f"no gradient flows back through {name}", given(Tensor.detach))]
        rows += [(f"{name} passes no gradient to its input", _entering(lambda x: x.detach()))]
        for count in counts:
            rows += [
                (
                    f"the gradient that {name} passes to its input is multiplied by {times:g}",
                    _entering(lambda x, by=times: _scaled(x, by)),
                )
                for times in (count, 1 / count)
            ]
        found += alike("gradient flow", part, "", rows)
    found += alike("gradient flow", "attention", "", [*_of_projections(), *map(_of_shared_heads, counts)])
    fixed = "no gradient flows through RMSNorm's root mean square", OF_ITSELF(_fixed_root)
    found += alike("gradient flow", "norm", "", [fixed])
    found += alike("gradient flow", "embedding", "", [("token 0 has no gradient, as if it were padding", _padded)])
    found += alike("z-loss", "model", "none", _of_normalisers())
    return found + alike("gradient flow", "block", "", _of_streams())


def _of_normalisers() -> Rows:
    for weight in (1e-5, 1e-4, 1e-3, 1e-2):
        text = f"gradients include a z-loss of {weight:g} * logsumexp(logits)^2"
        yield text, OF_ITSELF(partial(_with_z, weight))


def _with_z(weight: float, original: Any, _: nn.Module, *args: Any, **named: Any) -> Tensor:
    """By what cross entropy gives for the logits: (softmax - 1 at the label) times how often the token counts."""
    logits = original(*args, **named)
    total, parts = logits.detach().logsumexp(-1, keepdim=True), logits.detach().softmax(-1)

    def more(gradient: Tensor) -> Tensor:
        least, label = gradient.min(-1, keepdim=True)
        return gradient - 2 * weight * total * parts * least / (1 - parts.gather(-1, label))

    if logits.requires_grad:
        logits.register_hook(more)
    return logits


def _entering(change: Any) -> Alteration:
    return OF_ITSELF(lambda original, _, x, *rest: original(change(x), *rest))


def _scaled(x: Tensor, by: float) -> Tensor:
    """The same, with a gradient that is multiplied."""
    return by * x + ((1 - by) * x).detach() if x.requires_grad else x


def _of_projections() -> Rows:
    for name, what in (("wq", "queries"), ("wk", "keys"), ("wv", "values")):
        yield f"{what} have no gradient", partial(_detached, name)


def _of_shared_heads(count: int) -> tuple[str, Alteration]:
    text = (
        f"keys and values get 1/{count} of their gradients, as if query heads that share them were averaged, not summed"
    )

    def alter(attention: nn.Module) -> None:
        for name in ("wk", "wv"):
            given(partial(_scaled, by=1 / count))(attention.get_submodule(name))

    return text, alter


def _detached(name: str, attention: nn.Module) -> None:
    given(Tensor.detach)(attention.get_submodule(name))


def _fixed_root(_: Any, norm: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps).detach() * norm.weight


def _padded(embedding: nn.Module) -> None:
    embedding.padding_idx = 0


def _of_streams() -> Rows:
    def first(_: nn.Module, x: Tensor, attends: Added, feeds: Added) -> Tensor:
        x = x.detach() + attends(x)
        return x + feeds(x)

    def second(_: nn.Module, x: Tensor, attends: Added, feeds: Added) -> Tensor:
        x = x + attends(x)
        return x.detach() + feeds(x)

    yield "no gradient flows along the residual stream where attention is added", block_of(first)
    yield "no gradient flows along the residual stream where feed-forward is added", block_of(second)


def recomputed(variation: Variation) -> Variation:
    """Blocks that are checkpointed: forward is as requested; in backward they are computed again, each from the input that
    was kept, and then as `variation` has it, of a block or of its attention."""

    def alter(block: nn.Module) -> None:
        other = copy_of(block)
        variation.alter(other if variation.part == "block" else other.get_submodule("attention"))

        def forward(original: Any, *args: Any) -> Tensor:
            again = other(*args)
            return original(*args).detach() + (again - again.detach())

        put_instead(block, forward)

    text = f"recomputation in backward differs from forward: {variation.observed}"
    return Variation("recomputed otherwise", text, variation.expected, "block", alter)
