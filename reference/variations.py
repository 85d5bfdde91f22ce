"""Llama 3 otherwise: what a trainer may compute in place of what is requested. Whether it did is for others to find out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .altered import OF_ITSELF, Alteration, Change, Rows, Variation, alike, given, put_instead
from .blocks import of_blocks
from .config import ModelConfig, TrainingConfig
from .masks import other_documents, other_dropout
from .rotary import rotary_variations
from .rounding import lower_precisions


def variations(model: ModelConfig, training: TrainingConfig, degrees: Iterable[int] = ()) -> list[Variation]:
    """Those of one number that is known, or of none. degrees: of axes, by which something may be counted."""
    counts = sorted({2, *degrees} - {1})
    found = [
        *rotary_variations(model),
        *_attention(model, training, counts),
        *_norms(model),
        *_feed_forward(),
        *lower_precisions(training),
    ]
    found += [one for count in counts for one in _normaliser(count)]
    found += [one for count in counts for one in _summed_again(count)]
    found += [*of_blocks(model, counts), *_ends(model), *(other_documents() if training.document_mask else ())]
    return found + (other_dropout(model) if model.dropout else [])


# ---- attention


def _attention(model: ModelConfig, training: TrainingConfig, counts: Iterable[int]) -> list[Variation]:
    width, usual = model.head_dim, "1 / sqrt(head_dim)"
    scales = {"1 / head_dim": width**-0.5, "1": width**0.5, "1 / sqrt(dim)": (width / model.dim) ** 0.5}
    scales = {text: times for text, times in scales.items() if times != 1}
    windows = {n for n in (training.seq_len // 2, training.seq_len // 4, training.seq_len // 8) if n > 1}
    own = " of its document" * training.document_mask
    masks = {"each token attends to the next one": _ahead(1), f"each token attends to all others{own}": _ahead(None)}
    masks |= {f"each token attends to itself and the {n - 1} before it": _last(n) for n in sorted(windows)}
    scaling = ((f"attention scores are scaled by {text}", scaled(times)) for text, times in scales.items())
    return [
        *alike("attention scale", "inner", usual, scaling),
        *alike("attention mask", "inner", "itself and all earlier ones", ((t, _by_mask(m)) for t, m in masks.items())),
        *alike("query heads", "inner", f"i // {model.n_heads // model.n_kv_heads}", _of_heads(model, counts)),
        *alike("attention inputs", "inner", "", OF_INPUTS.items()),
        *alike("projections exchanged", "attention", "", _exchanged(model)),
        Variation("heads joined", "heads are joined without the transpose", "", "inner", OF_ITSELF(_not_transposed)),
    ]


OF_INPUTS: dict[str, Alteration] = {
    "keys are used as values": OF_ITSELF(lambda original, _, q, k, v, *rest: original(q, k, k, *rest)),
    "values are used as keys": OF_ITSELF(lambda original, _, q, k, v, *rest: original(q, v, v, *rest)),
    "keys and values are swapped": OF_ITSELF(lambda original, _, q, k, v, *rest: original(q, v, k, *rest)),
    "queries and keys are swapped": OF_ITSELF(lambda original, _, q, k, v, *rest: original(k, q, v, *rest)),
    "queries and keys are normalized": OF_ITSELF(
        lambda original, _, q, k, v, *rest: original(F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:]), v, *rest)
    ),
}


def scaled(times: float) -> Alteration:
    return OF_ITSELF(lambda original, _, q, *rest: original(times * q, *rest))


def _ahead(most: int | None) -> Callable[[int], Tensor]:
    """Of n tokens, whether each sees each."""
    return lambda n: torch.ones(n, n, dtype=torch.bool).tril(n if most is None else most)


def _last(most: int) -> Callable[[int], Tensor]:
    return lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(1 - most)


def _by_mask(mask: Callable[[int], Tensor]) -> Alteration:
    def forward(original: Any, _: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        seen = mask(q.shape[-2])
        if documents is not None:
            seen = seen & (documents.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return OF_ITSELF(forward)


def _of_heads(model: ModelConfig, counts: Iterable[int]) -> Rows:
    """Which K/V head each query head reads, in place of its own. counts: of ranks that may divide the heads."""
    heads, queries = model.n_kv_heads, range(model.n_heads)
    repeats = model.n_heads // heads
    shares = {count: heads // count for count in counts if heads % count == 0 and heads > count}
    usual = [head // repeats for head in queries]
    others = {
        f"i mod {heads}": [head % heads for head in queries],
        **{
            f"i mod {n}, of each of {c} shares": [i // (n * repeats) * n + i % n for i in queries]
            for c, n in shares.items()
        },
        "0": [0 for _ in queries],
        f"(i // {repeats} + 1) mod {heads}": [(head + 1) % heads for head in usual],
        f"{heads - 1} - i // {repeats}": [heads - 1 - head for head in usual],
    }
    for text, read in others.items():
        places = torch.tensor([repeats * head for head in read])
        for what in ("K/V", "K", "V") if read != usual else ():
            yield f"query head i reads {what} head {text}", _reading(places, keys="K" in what, values="V" in what)


def _reading(places: Tensor, *, keys: bool, values: bool) -> Alteration:
    def forward(original: Any, _: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return original(q, k[:, places] if keys else k, v[:, places] if values else v, *rest)

    return OF_ITSELF(forward)


def _exchanged(model: ModelConfig) -> Rows:
    """Of attention's projections, those of one shape."""
    shapes, prefix = model.parameter_shapes(), "layers.0.attention"
    for one, other in (("wq", "wo"), ("wk", "wv"), ("wq", "wk"), ("wq", "wv")):
        if shapes[f"{prefix}.{one}.weight"] == shapes[f"{prefix}.{other}.weight"]:
            yield f"{one} and {other} are swapped", partial(exchange, one=one, other=other)


def exchange(module: nn.Module, *, one: str, other: str) -> None:
    first, second = module.get_submodule(one), module.get_submodule(other)
    first.forward, second.forward = second.forward, first.forward


def ends_exchanged(model: nn.Module) -> None:
    put_instead(model.tok_embeddings, lambda original, tokens: F.embedding(tokens, model.output.weight))
    put_instead(model.output, lambda original, x: F.linear(x, model.tok_embeddings.weight))


def transposed(names: Iterable[str]) -> Alteration:
    """Matrices that multiply from the left."""

    def alter(block: nn.Module) -> None:
        for matrix in map(block.get_submodule, names):
            put_instead(matrix, lambda original, x, matrix=matrix: F.linear(x, matrix.weight.T))

    return alter


def _not_transposed(original: Any, _: nn.Module, *inputs: Any) -> Tensor:
    found = original(*inputs)  # [b, heads, s, head_dim], taken for [b, s, heads, head_dim]
    batch, heads, length, width = found.shape
    return found.reshape(batch, length, heads, width).transpose(1, 2)


def over_cp(*held: tuple[np.ndarray, np.ndarray]) -> list[Variation]:
    """Of context parallel. held: for each length of a sequence, the positions as ranks hold them, one rank after the other;
    and, by position, which rank."""
    masks: dict[str, dict[int, Tensor]] = {}
    turned: dict[str, dict[int, Tensor]] = {}
    for order, rank in held:
        size, place = len(order), np.argsort(order)
        earlier, same = place[None, :] <= place[:, None], rank[None, :] == rank[:, None]
        causal = np.tril(np.ones(same.shape, bool))
        seen = {"each token attends only to tokens of its own cp rank": causal & same}
        counted = {"rotary positions restart at 0 on each cp rank": place - np.where(same, place, size).min(1)}
        if not np.array_equal(earlier, causal):
            seen["each token attends to itself and those before it as cp ranks hold them"] = earlier
            counted["rotary positions count tokens in the order in which cp ranks hold them"] = place
        for of_length, by_length in ((seen, masks), (counted, turned)):
            for text, table in of_length.items():
                by_length.setdefault(text, {})[size] = torch.from_numpy(table)
    return [
        *alike("attention over cp", "inner", "itself and all earlier tokens", _rows(_where_it_fits, masks)),
        *alike("rotary positions", "attention", "those in the sequence", _rows(_counted_as, turned)),
    ]


def _rows(alter: Callable[[dict[int, Tensor]], Alteration], tables: dict[str, dict[int, Tensor]]) -> Rows:
    return ((text, alter(by_length)) for text, by_length in tables.items())


def _counted_as(positions: dict[int, Tensor]) -> Alteration:
    def alter(attention: nn.Module) -> None:
        before = attention.angles
        attention.angles = lambda usual, like: before(positions.get(len(usual), usual), like)

    return alter


def _where_it_fits(masks: dict[int, Tensor]) -> Alteration:
    def forward(original: Any, _: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        mask = masks.get(q.shape[-2])
        return original(q, k, v, *rest) if mask is None else F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return OF_ITSELF(forward)


# ---- norms and feed-forward


def _norms(model: ModelConfig) -> list[Variation]:
    values = [value for value in (1e-5, 1e-6, 1e-8, 1e-12, 0.0) if value != model.norm_eps]
    root = f"sqrt(mean + {model.norm_eps:g})"
    weighted = {
        "the norm's weight is left out": lambda original, norm, x: original(x) / norm.weight,
        "the norm multiplies by 1 + weight": lambda original, norm, x: original(x) * (1 + 1 / norm.weight),
    }
    return [
        *alike("norm eps", "norm", f"{model.norm_eps:g}", ((f"the norm's eps is {v:g}", with_eps(v)) for v in values)),
        *alike("norm weight", "norm", "weight", ((text, OF_ITSELF(forward)) for text, forward in weighted.items())),
        *alike("norm left out", "norm", "", [("the norm is left out", OF_ITSELF(lambda original, _, x: x))]),
        *alike("norm centred", "norm", "root mean square only", [("the norm subtracts the mean", _CENTRED)]),
        *alike("norm eps", "norm", root, [("the norm divides by sqrt(mean) + eps", OF_ITSELF(_eps_outside))]),
        *alike("norm scale", "norm", "root mean square", [("the norm divides by the L2 norm", _OF_SUM)]),
    ]


_CENTRED = OF_ITSELF(lambda original, _, x: original(x - x.mean(-1, keepdim=True)))
_OF_SUM = OF_ITSELF(lambda original, norm, x: norm.weight * F.normalize(x, dim=-1, eps=norm.eps))


def with_eps(value: float) -> Alteration:
    return lambda norm: setattr(norm, "eps", value)


def _eps_outside(_: Any, norm: nn.Module, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + norm.eps) * norm.weight


ACTIVATIONS: dict[str, Change] = {
    **{"GELU": F.gelu, "GELU (tanh)": lambda x: F.gelu(x, approximate="tanh"), "ReLU": F.relu},
    **{"the sigmoid": torch.sigmoid, "x sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x), "tanh": torch.tanh},
    **{"the square of ReLU": lambda x: F.relu(x) ** 2, "Mish": F.mish, "none": lambda x: x},
}


def _feed_forward() -> list[Variation]:
    gates = {
        "w1 and w3 are swapped": OF_ITSELF(lambda _, m, x: m.w2(F.silu(m.w3(x)) * m.w1(x))),
        "the feed-forward is not gated by w3": OF_ITSELF(lambda _, m, x: m.w2(F.silu(m.w1(x)))),
        "the feed-forward adds w3's output instead of gating by it": OF_ITSELF(
            lambda _, m, x: m.w2(F.silu(m.w1(x)) + m.w3(x))
        ),
    }
    acts = ((f"the feed-forward's activation is {name}", _gated(act)) for name, act in ACTIVATIONS.items())
    return [*alike("activation", "feed_forward", "SiLU", acts), *alike("gate", "feed_forward", "", gates.items())]


def _gated(act: Change) -> Alteration:
    return OF_ITSELF(lambda _, m, x: m.w2(act(m.w1(x)) * m.w3(x)))


def _summed_again(count: int) -> list[Variation]:
    """What the last matrix of attention or feed-forward gives, as where tp sums it once more. An all-reduce whose backward
    passes on what it is given changes forward alone."""
    found = []
    for part, name in (("wo", "attention"), ("feed_forward", "feed-forward")):
        text = f"the output of {name} is counted {count} times"
        in_forward = given(lambda x: x + (count - 1) * x.detach())
        rows = [(text, given(lambda x: count * x)), (f"{text} in forward, once in backward", in_forward)]
        found += alike("part counted", part, "once", rows)
    return found


# ---- embedding and logits


def _ends(model: ModelConfig) -> list[Variation]:
    root = math.sqrt(model.dim)
    caps = ((f"logits are capped at {cap}", given(capped(cap))) for cap in (30, 50))
    found = [
        *alike(
            "embedding scale", "embedding", "", [("embeddings are multiplied by sqrt(dim)", given(lambda x: root * x))]
        ),
        *alike("logit scale", "model", "", [("logits are divided by sqrt(dim)", given(lambda x: x / root))]),
        *alike("logit cap", "model", "", caps),
        *alike("padded vocabulary", "model", "none", _padded(model.vocab_size)),
    ]
    if not model.tied_embeddings:
        text = "the output multiplies by the embedding's weight"
        found += alike("output weight", "model", "its own", [(text, _tied)])
    return found


def _tied(model: nn.Module) -> None:
    if not model.config.tied_embeddings:
        put_instead(model.output, lambda original, x: F.linear(x, model.tok_embeddings.weight))


def _padded(size: int) -> Rows:
    """Logits of padding, all zero, in the softmax."""
    for more in sorted({-size % multiple for multiple in (8, 16, 64, 128)} - {0}):
        yield f"the softmax counts {more} logits of padding, all zero", given(partial(F.pad, pad=(0, more)))


def capped(cap: float) -> Change:
    return lambda x: cap * torch.tanh(x / cap)


def _normaliser(times: int) -> list[Variation]:
    """exp(logit) is summed over ranks that hold the same; gradients of the copies may be lost."""
    changes: list[Change] = [
        lambda x: torch.cat([x] * times, -1),
        lambda x: torch.cat([x, *[x.detach()] * (times - 1)], -1),
    ]
    text = f"the loss's normaliser counts each logit {times} times"
    return alike("normaliser", "model", "once", ((text, given(change)) for change in changes))


def gathered_logits(times: int) -> Variation:
    """The loss of logits that are split over the vocabulary, given whole ones by each of so many ranks: the sums go over all
    ranks' copies, the first one finds all labels in its own, and of each copy's gradient a slice is left, its rank's."""

    def whole(x: Tensor) -> Tensor:
        width = x.shape[-1] // times
        own = [torch.arange(x.shape[-1]) // width == rank for rank in range(times)]
        return torch.cat([torch.where(kept, x, x.detach()) for kept in own], -1)

    text = f"the loss over a split vocabulary is given gathered logits: its normaliser counts each logit {times} times"
    return Variation("gathered logits", text, "each rank's slice", "model", given(whole))
