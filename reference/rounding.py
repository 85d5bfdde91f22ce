"""Llama 3 in a lower precision than requested: of one kind of module, or of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .altered import OF_ITSELF, Alteration, Change, Variation, angles, given
from .config import TrainingConfig
from .data import IGNORED
from .model import turn_by

LOW = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def lower_precisions(training: TrainingConfig) -> list[Variation]:
    wanted, found = training.dtype, []
    for name, dtype in LOW.items():
        low = lambda x, dtype=dtype: x.to(dtype).to(x.dtype)  # noqa: E731
        rows: list[tuple[str, str, Alteration]] = [
            (f"norms compute in {name}", "norm", OF_ITSELF(_norm_in(dtype))),
            (f"norms multiply by their weights in {name}", "norm", OF_ITSELF(_weighted_in(dtype))),
            (f"rotary angles are rounded to {name}", "attention", angles(low)),
            (f"rotary angles are computed in {name}", "attention", _angles_in(dtype)),
            (f"rotary frequencies are rounded to {name}", "attention", _frequencies_rounded(low)),
            (f"rotary angles and tables are computed in {name}", "attention", _tables_in(dtype)),
            (f"rotary tables are rounded to {name}", "attention", _tables_rounded(low)),
            (f"attention computes in {name}", "inner", OF_ITSELF(_in_dtype(dtype))),
            (f"the output of attention is rounded to {name}", "attention", given(low)),
            (f"the output of feed-forward is rounded to {name}", "feed_forward", given(low)),
            (f"embeddings are rounded to {name}", "embedding", given(low)),
            (f"the residual stream is rounded to {name}", "block", given(low)),
            (f"logits are rounded to {name}", "model", given(low)),
        ]
        found += [Variation("precision", text, wanted, part, alter) for text, part, alter in rows if name != wanted]
        if name != wanted:
            loss = partial(_loss_in, dtype)
            found.append(Variation("precision", f"the loss is computed in {name}", wanted, "model", loss=loss))
    return found


def low_sums(training: TrainingConfig, passes: Sequence[np.ndarray]) -> list[Variation]:
    """Of the loss of each forward pass. passes: where the tokens of each lie in the flattened batch."""
    wanted, places = training.dtype, [torch.from_numpy(at) for at in passes]
    lower = {name: partial(_loss_summed_in, dtype, places) for name, dtype in LOW.items() if name != wanted}
    text = "the loss is computed and summed in {}"
    return [Variation("precision", text.format(name), wanted, "model", loss=loss) for name, loss in lower.items()]


def _loss_in(dtype: torch.dtype, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(dtype), labels, ignore_index=IGNORED, reduction="none").to(logits.dtype)


def _loss_summed_in(dtype: torch.dtype, places: list[Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    """The first token of each pass has the rounded sum, the others 0; gradients are those of the tokens' losses."""
    losses, low = _loss_in(dtype, logits, labels), logits.detach().to(dtype)
    if len(labels) != sum(map(len, places)):
        return losses  # of another batch
    sums = torch.zeros_like(losses)
    for at in places:
        sums[at[0]] = F.cross_entropy(low[at], labels[at], ignore_index=IGNORED, reduction="sum")
    return sums + (losses - losses.detach())


def _norm_in(dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward(_: Any, norm: nn.Module, x: Tensor) -> Tensor:
        low = x.to(dtype)
        return (low * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype) * norm.weight

    return forward


def _weighted_in(dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward(_: Any, norm: nn.Module, x: Tensor) -> Tensor:
        low = x.to(dtype)
        return (low * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.to(dtype)).to(x.dtype)

    return forward


def _angles_in(dtype: torch.dtype) -> Alteration:
    def alter(attention: nn.Module) -> None:
        before = attention.angles
        attention.angles = lambda positions, like: before(positions, like.to(dtype)).to(like.dtype)

    return alter


def _tables_in(dtype: torch.dtype) -> Alteration:
    def alter(attention: nn.Module) -> None:
        before = attention.angles
        attention.angles = lambda positions, like: before(positions, like.to(dtype))  # as which cosines are computed

    return alter


def _frequencies_rounded(low: Change) -> Alteration:
    def alter(attention: nn.Module) -> None:
        before = attention.angles

        def of(positions: Tensor, like: Tensor) -> Tensor:
            return positions.unsqueeze(-1).to(like.dtype) * low(before(torch.ones_like(positions), like))

        attention.angles = of

    return alter


def _tables_rounded(low: Change) -> Alteration:
    """Of cosines and sines, not of the angles."""

    def alter(attention: nn.Module) -> None:
        attention.turn = lambda x, angles: turn_by(x, low(angles.cos()), low(angles.sin()))

    return alter


def _in_dtype(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda original, _, q, k, v, *rest: original(q.to(dtype), k.to(dtype), v.to(dtype), *rest).to(q.dtype)
