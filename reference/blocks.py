"""Llama 3's blocks otherwise: in another order, left out, run twice; what they add counted, left out, or added elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .altered import Alteration, Variation, instead
from .config import ModelConfig

FEW = 8  # layers, of which any two change places; of more, only neighbours
Added = Callable[[Tensor], Tensor]
Forward = Callable[[nn.Module, Tensor, Added, Added], Tensor]
"""What a block gives: (the block, what goes in, what its attention adds, what its feed-forward adds)."""


def of_blocks(model: ModelConfig, counts: Sequence[int]) -> list[Variation]:
    """counts: by which something may be counted too often."""
    found = [Variation(name, text, "", "block", block_of(forward)) for name, text, forward in OTHERWISE]
    for times in counts:
        found += [
            Variation(name, text.format(times), "once", "block", block_of(forward(times)))
            for name, text, forward in COUNTED
        ]
    return [*found, *_orders(model.n_layers)]


def _counting(stream: float, attention: float, second_stream: float, feed_forward: float) -> Forward:
    def forward(_: nn.Module, x: Tensor, attends: Added, feeds: Added) -> Tensor:
        x = stream * x + attention * attends(x)
        return second_stream * x + feed_forward * feeds(x)

    return forward


def _again(times: int) -> Forward:
    def forward(_: nn.Module, x: Tensor, attends: Added, feeds: Added) -> Tensor:
        middle = x + attends(x)
        return middle + feeds(middle) + (times - 1) * x

    return forward


def _in_parallel(_: nn.Module, x: Tensor, attends: Added, feeds: Added) -> Tensor:
    return x + attends(x) + feeds(x)


def _feeding_first(_: nn.Module, x: Tensor, attends: Added, feeds: Added) -> Tensor:
    x = x + feeds(x)
    return x + attends(x)


def _from_norms(first: bool, second: bool) -> Forward:
    """The stream goes on from what the norm gives, not from what it is given."""

    def forward(block: nn.Module, x: Tensor, attends: Added, feeds: Added) -> Tensor:
        x = (block.attention_norm(x) if first else x) + attends(x)
        return (block.ffn_norm(x) if second else x) + feeds(x)

    return forward


ATTENTION, FEED_FORWARD = "where attention is added", "where feed-forward is added"
OTHERWISE: list[tuple[str, str, Forward]] = [
    ("residual left out", f"the residual stream is left out {ATTENTION}", _counting(0, 1, 1, 1)),
    ("residual left out", f"the residual stream is left out {FEED_FORWARD}", _counting(1, 1, 0, 1)),
    ("part left out", "attention is left out", _counting(1, 0, 1, 1)),
    ("part left out", "feed-forward is left out", _counting(1, 1, 1, 0)),
    ("part subtracted", "the output of attention is subtracted", _counting(1, -1, 1, 1)),
    ("part subtracted", "the output of feed-forward is subtracted", _counting(1, 1, 1, -1)),
    ("parts in parallel", "attention and feed-forward run in parallel on the same input", _in_parallel),
    ("parts exchanged", "feed-forward comes before attention", _feeding_first),
    ("residual after the norm", f"the residual stream is taken after the norm {ATTENTION}", _from_norms(True, False)),
    (
        "residual after the norm",
        f"the residual stream is taken after the norm {FEED_FORWARD}",
        _from_norms(False, True),
    ),
    (
        "residual after the norm",
        "both residual additions take the norm's output, requested its input",
        _from_norms(True, True),
    ),
]
COUNTED: list[tuple[str, str, Callable[[int], Forward]]] = [
    ("residual counted", f"the residual stream is counted {{}} times {ATTENTION}", lambda n: _counting(n, 1, 1, 1)),
    ("residual counted", f"the residual stream is counted {{}} times {FEED_FORWARD}", lambda n: _counting(1, 1, n, 1)),
    ("residual counted", "a block's input is added to its output {} times", _again),
    ("part counted", "the output of attention is counted {} times", lambda n: _counting(1, n, 1, 1)),
    ("part counted", "the output of feed-forward is counted {} times", lambda n: _counting(1, 1, 1, n)),
]


def block_of(forward: Forward) -> Alteration:
    def other(_: Any, block: nn.Module, x: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        def attends(x: Tensor) -> Tensor:
            return block.attention_dropout(block.attention(block.attention_norm(x), positions, documents))

        def feeds(x: Tensor) -> Tensor:
            return block.ffn_dropout(block.feed_forward(block.ffn_norm(x)))

        return forward(block, x, attends, feeds)

    return instead("")(other)


# ---- the order of blocks


def _orders(count: int) -> list[Variation]:
    usual = list(range(count))
    found = [
        Variation("order of layers", text, ", ".join(map(str, usual)), "model", _in_order(order))
        for text, order in _other_orders(usual)
    ]
    return found if count > 1 else []


def _other_orders(usual: list[int]) -> Iterator[tuple[str, list[int]]]:
    """By name, the layers that run, one after the other."""
    if len(usual) > 2:
        yield "layers run in reverse", usual[::-1]
        yield "the first layer runs last", [*usual[1:], usual[0]]
        yield "the last layer runs first", [usual[-1], *usual[:-1]]
    for one, other in itertools.combinations(usual, 2):
        if other == one + 1 or len(usual) <= FEW:
            order = list(usual)
            order[one], order[other] = other, one
            yield f"layers {one} and {other} run in swapped order", order
    for one in usual:
        yield f"layer {one} is left out", [layer for layer in usual if layer != one]
        yield f"layer {one} runs twice", sorted([*usual, one])
    for one, other in itertools.permutations(usual, 2):
        if abs(one - other) == 1 or len(usual) <= FEW:
            yield f"layer {one} runs in place of layer {other}", [one if at == other else at for at in usual]
    yield "all layers run twice", [*usual, *usual]


def _in_order(order: Sequence[int]) -> Alteration:
    def forward(original: Any, model: nn.Module, *inputs: Any, **named: Any) -> Tensor:
        before = model._modules
        model.__dict__["_modules"] = {**before, "layers": _Layers([before["layers"][str(layer)] for layer in order])}
        try:
            return original(*inputs, **named)
        finally:
            model.__dict__["_modules"] = before

    return instead("")(forward)


class _Layers(nn.Module):
    """Blocks in the order in which they run; one may run twice."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.values = lambda: blocks
