"""Other masks: those of dropout, those that documents make, and that of a vocabulary whose rows lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .altered import OF_ITSELF, Alter, Alteration, Variation, alike, put_instead
from .config import ModelConfig, TrainingConfig
from .data import SEPARATOR, documents
from .model import mask_seed


def other_dropout(model: ModelConfig) -> list[Variation]:
    usual = model.dropout
    others = [p for p in dict.fromkeys((0.1, 0.2, 0.5, usual / 2, 2 * usual, 1 - usual)) if 0 < p < 1 and p != usual]
    parts = {"attention": "attention_dropout", "feed-forward": "ffn_dropout"}
    rows = [
        ("no dropout took place", _with_p(0.0)),
        *((f"dropout has probability {p:g}", _with_p(p)) for p in others),
        *((f"no dropout took place after {name}", _with_p(0.0, only)) for name, only in parts.items()),
        *(
            (f"no dropout took place after {name}, nor were random numbers drawn", _left_out(only))
            for name, only in parts.items()
        ),
        ("dropout does not divide by 1 - p", _undivided),
    ]
    return [*alike("dropout", "model", f"{usual:g}", rows), *_dropout_of_sums()]


def _dropout_of_sums() -> list[Variation]:
    places = {"attention": (True, False), "feed-forward": (False, True), "attention and feed-forward": (True, True)}
    text, expected = "dropout after {} is applied to the sum with the residual stream", "before that sum"
    rows = ((text.format(name), OF_ITSELF(partial(_dropped_sum, *of))) for name, of in places.items())
    return alike("dropout", "block", expected, rows)


def _dropped_sum(first: bool, second: bool, _: Any, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    added, drop = block.attention(block.attention_norm(x), *rest), block.attention_dropout
    x = drop(x + added) if first else x + drop(added)
    added, drop = block.feed_forward(block.ffn_norm(x)), block.ffn_dropout
    return drop(x + added) if second else x + drop(added)


def masks_of_other_steps(training: TrainingConfig, instead: Callable[[int], int]) -> Alteration:
    """Each step's are those of the step that `instead` gives."""
    table = {mask_seed(training.seed, n): mask_seed(training.seed, instead(n)) for n in range(1, training.steps + 1)}

    def forward(original: Any, model: nn.Module, *inputs: Any, **named: Any) -> Tensor:
        own: Any = model.mask_seed
        model.mask_seed = table.get(own, own)
        try:
            return original(*inputs, **named)
        finally:
            model.mask_seed = own

    return OF_ITSELF(forward)


def dropout_of_other_steps(training: TrainingConfig, first: int) -> list[Variation]:
    """first: the step at which this launch began."""
    rows: list[tuple[str, Callable[[int], int]]] = [
        ("dropout masks are those of step 1 in every step", lambda step: 1),
        ("dropout masks are those of the step before", lambda step: step - 1),
        ("dropout masks are those of the step after", lambda step: step + 1),
    ]
    if first > 1:
        anew = "dropout masks restart after resuming: those of step 1, and so on"
        rows.insert(0, (anew, lambda step: step - first + 1))
    found = ((text, masks_of_other_steps(training, instead)) for text, instead in rows)
    return alike("dropout masks", "model", "each step's own", found)


def _dropouts(model: nn.Module, name: str = "") -> list[nn.Module]:
    return [one for fqn, one in model.named_modules() if isinstance(getattr(one, "p", None), float) and name in fqn]


def _with_p(p: float, name: str = "") -> Alteration:
    """Random numbers are drawn all the same, so that those that are left get their own."""

    def alter(model: nn.Module) -> None:
        for one in _dropouts(model, name):
            one.p = p

    return alter


def _left_out(name: str) -> Alteration:
    def alter(model: nn.Module) -> None:
        for one in _dropouts(model, name):
            put_instead(one, lambda original, x: x)

    return alter


def _undivided(model: nn.Module) -> None:
    for one in _dropouts(model):
        put_instead(one, lambda original, x, kept=1 - one.p: kept * original(x))


def recomputed_without_random_state(names: Sequence[str]) -> Alter:
    """These modules are recomputed in backward, with the random numbers that then come."""

    def alter(model: nn.Module, step: int) -> None:
        for name in names if step == 1 else ():
            put_instead(
                model.get_submodule(name),
                lambda original, *args: checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False),
            )

    return alter


# ---- documents


def other_documents() -> list[Variation]:
    def begins(tokens: Tensor, own: Tensor) -> Tensor:
        return (tokens == SEPARATOR).long().cumsum(dim=-1)

    lost, ends = "attention crosses documents", "the one that it ends"
    unmasked = OF_ITSELF(lambda original, _, q, k, v, documents=None: original(q, k, v))
    return [
        Variation("document mask", lost, "", "model", _mask_of(lambda tokens, own: None)),
        Variation("document mask", "attention reads other documents", "its own only", "inner", unmasked),
        Variation("document mask", "a separator belongs to the document after it", ends, "model", _mask_of(begins)),
        Variation("document positions", "positions restart in each document", "in each row", "model", _restarted),
    ]


def _restarted(model: nn.Module) -> None:
    def forward(original: Any, tokens: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        if documents is None:
            return original(tokens, positions, documents)
        own = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        return original(tokens, own.tril(-1).sum(-1), documents)

    put_instead(model, forward)


def _mask_of(other: Callable[[Tensor, Tensor], Tensor | None]) -> Alteration:
    def forward(original: Any, _: Any, tokens: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        return original(tokens, positions, documents if documents is None else other(tokens, documents))

    return OF_ITSELF(forward)


def mask_of_first_row(first: np.ndarray) -> Variation:
    """first: of each row of the batch, the first row of its microbatch."""
    rows, text = torch.from_numpy(first), "all rows of a microbatch have the documents of its first"
    alter = _mask_of(lambda _, own: own[rows] if len(own) == len(rows) else own)
    return Variation("document mask", text, "each row its own", "model", alter)


def mask_of_step(tokens: np.ndarray, step: int) -> Variation:
    """tokens: of that step, row by row."""
    kept = documents(torch.from_numpy(np.ascontiguousarray(tokens)))
    alter = _mask_of(lambda _, own: kept if own.shape == kept.shape else own)
    return Variation("document mask", f"the document mask of step {step} is used", "the step's own", "model", alter)


# ---- the rows of an embedding that lie on several ranks


def unmasked_embedding(ranks: int) -> list[Variation]:
    """Each rank looks up all tokens in its rows and the results are summed: tokens of other ranks' rows must give zeros."""

    def summed(clamped: bool, _: Any, embedding: nn.Module, tokens: Tensor) -> Tensor:
        size = -(-len(embedding.weight) // ranks)
        found: list[Tensor] = []
        for rows in embedding.weight.split(size):
            first = size * len(found)
            at = tokens - first
            held = (at >= 0) & (at < len(rows))
            found.append(F.embedding(at.clamp(0, len(rows) - 1) if clamped else torch.where(held, at, 0), rows))
        return torch.stack(found).sum(0)

    text = "the embedding sharded over tp does not mask tokens of other ranks' rows: each rank adds its {} for them"
    rows = (
        (text.format("nearest row"), OF_ITSELF(partial(summed, True))),
        (text.format("first row"), OF_ITSELF(partial(summed, False))),
    )
    return alike("embedding not masked", "embedding", "zeros", rows)
