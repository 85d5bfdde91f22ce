"""Llama 3 otherwise: what a trainer may compute in place of what is requested. Whether it did is for others to find out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .altered import Variation, instead, put_instead, setting
from .config import ModelConfig, TrainingConfig
from .data import SEPARATOR, documents
from .model import at_least_float32, rotate

LOW = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OF_ITSELF = instead("")


# ---- what may be otherwise


def variations(model: ModelConfig, training: TrainingConfig, degrees: Iterable[int] = ()) -> list[Variation]:
    """Those of one number that is known, or of none. degrees: of axes, by which something may be counted."""
    counts = sorted({2, *degrees} - {1})
    found = [*_rotary(model), *_attention(model), *_norms(model), *_feed_forward(), *_precision(training)]
    found += [one for count in counts for one in (*_counted(count), *_normaliser(count))]
    found += [*_residuals(), *_ends(model), *(_documents() if training.document_mask else ())]
    return found + ([_no_dropout(model)] if model.dropout else [])


def _rotary(model: ModelConfig) -> list[Variation]:
    theta, scaling = f"{model.rope_theta:g}", model.rope_scaling
    found = [
        Variation("rotary base", f"the rotary base is {base:g}", theta, "attention", setting(rope_theta=base))
        for base in (10_000.0, 500_000.0, 1_000_000.0)
        if base != model.rope_theta
    ]
    found += [
        Variation("rotary pairs", "rotary turns pairs (i, i + d/2)", "adjacent pairs", "attention", _turn_halves),
        Variation(
            "rotary left out", "queries and keys are not turned", "rotary", "attention", _angles(lambda a: 0 * a)
        ),
        Variation(
            "rotary reversed", "queries and keys are turned backwards", "forwards", "attention", _angles(torch.neg)
        ),
        Variation("rotary of keys", "keys are not turned, queries are", "both", "attention", _turn_queries_only),
    ]
    if scaling is not None:
        found.append(
            Variation(
                "rotary scaling",
                "rotary frequencies are not rescaled",
                "rescaled",
                "attention",
                setting(rope_scaling=None),
            )
        )
    return found


def _angles(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def alter(attention: nn.Module) -> None:
        before = attention.angles
        attention.angles = lambda positions, like: change(before(positions, like))

    return alter


def _turn_halves(attention: nn.Module) -> None:
    """Columns of a head in the order in which adjacent ones are those that turn together: a dot product does not mind."""
    width = attention.config.head_dim
    order = torch.arange(width).view(2, -1).T.flatten()
    for name in ("wq", "wk"):
        put_instead(
            attention.get_submodule(name),
            lambda original, x: original(x).unflatten(-1, (-1, width))[..., order].flatten(-2),
        )


def _turn_queries_only(attention: nn.Module) -> None:
    """Turns keys back before they are turned."""

    def turned_back(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        keys = original(x).unflatten(-1, (-1, attention.config.head_dim))
        angles = attention.angles(torch.arange(x.shape[1]), at_least_float32(keys))
        return rotate(keys, -angles).flatten(-2)

    put_instead(attention.wk, turned_back)


def _attention(model: ModelConfig) -> list[Variation]:
    width, usual = model.head_dim, "1 / sqrt(head_dim)"
    scales = {"1 / head_dim": width**-0.5, "1": width**0.5, "1 / sqrt(dim)": (width / model.dim) ** 0.5}
    found = [
        Variation("attention scale", f"attention scores are scaled by {text}", usual, "inner", scaled(times))
        for text, times in scales.items()
    ]
    found += [
        Variation("attention mask", "each token sees the next one", "itself and earlier ones", "inner", _masked(1)),
        Variation("attention mask", "each token sees all others", "itself and earlier ones", "inner", _masked(None)),
    ]
    if model.n_kv_heads not in (1, model.n_heads):
        text = f"query head i reads K/V head i mod {model.n_kv_heads}"
        expected = f"i // {model.n_heads // model.n_kv_heads}"
        found.append(Variation("query heads", text, expected, "inner", _tiled(model.n_kv_heads)))
    return found


def scaled(times: float) -> Callable[[nn.Module], None]:
    return OF_ITSELF(lambda original, _, q, *rest: original(times * q, *rest))


def _masked(ahead: int | None) -> Callable[[nn.Module], None]:
    def forward(original: Any, _: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        mask = mask if ahead is None else mask.tril(ahead)
        if documents is not None:
            mask = mask & (documents.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return OF_ITSELF(forward)


def _tiled(heads: int) -> Callable[[nn.Module], None]:
    def forward(original: Any, _: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        repeats = q.shape[1] // heads
        order = torch.tensor([repeats * (head % heads) for head in range(q.shape[1])])
        return original(q, k[:, order], v[:, order], *rest)

    return OF_ITSELF(forward)


def seen_in_order(order: np.ndarray, rank: np.ndarray) -> list[Variation]:
    """Of context parallel. order: the positions as ranks hold them, one rank after the other; rank: which, by position."""
    place = np.argsort(order)
    earlier, same = place[None, :] <= place[:, None], rank[None, :] == rank[:, None]
    causal = np.tril(np.ones(same.shape, bool))
    masks = {
        "attention masks tokens in the order in which cp ranks hold them": earlier,
        "attention sees the tokens of its own cp rank only": causal & same,
    }
    if np.array_equal(earlier, causal):
        masks.pop(next(iter(masks)))
    return [
        Variation("attention over cp", text, "itself and all earlier tokens", "inner", _by_mask(torch.from_numpy(mask)))
        for text, mask in masks.items()
    ]


def _by_mask(mask: Tensor) -> Callable[[nn.Module], None]:
    return OF_ITSELF(
        lambda original, _, q, k, v, documents=None: (
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            if q.shape[-2] == len(mask)
            else original(q, k, v, documents)
        )
    )


def _norms(model: ModelConfig) -> list[Variation]:
    eps = f"{model.norm_eps:g}"
    found = [
        Variation(
            "norm eps",
            f"the norm's eps is {value:g}",
            eps,
            "norm",
            with_eps(value),
        )
        for value in (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
        if value != model.norm_eps
    ]
    centred = OF_ITSELF(lambda original, _, x: original(x - x.mean(-1, keepdim=True)))
    found += [
        Variation("norm centred", "the norm subtracts the mean", "root mean square only", "norm", centred),
        Variation("norm left out", "the norm is left out", "", "norm", OF_ITSELF(lambda original, _, x: x)),
        Variation("norm weight", "the norm's weight is left out", "", "norm", OF_ITSELF(_unweighted)),
        Variation("norm weight", "the norm multiplies by 1 + weight", "weight", "norm", OF_ITSELF(_one_more)),
    ]
    return found


def with_eps(value: float) -> Callable[[nn.Module], None]:
    return lambda norm: setattr(norm, "eps", value)


def _unweighted(original: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> Tensor:
    return original(x) / norm.weight


def _one_more(original: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> Tensor:
    return original(x) * (1 + 1 / norm.weight)


def _feed_forward() -> list[Variation]:
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        **{"GELU": F.gelu, "GELU by tanh": lambda x: F.gelu(x, approximate="tanh")},
        **{"ReLU": F.relu, "the sigmoid": torch.sigmoid},
    }
    found = [
        Variation("activation", f"the feed-forward's activation is {name}", "SiLU", "feed_forward", _gated(act))
        for name, act in acts.items()
    ]
    exchanged = OF_ITSELF(lambda _, m, x: m.w2(F.silu(m.w3(x)) * m.w1(x)))
    ungated = OF_ITSELF(lambda _, m, x: m.w2(F.silu(m.w1(x))))
    return [
        *found,
        Variation("gate", "w1 and w3 are exchanged", "", "feed_forward", exchanged),
        Variation("gate", "the feed-forward is not gated by w3", "", "feed_forward", ungated),
    ]


def _gated(act: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    return OF_ITSELF(lambda _, m, x: m.w2(act(m.w1(x)) * m.w3(x)))


def _precision(training: TrainingConfig) -> list[Variation]:
    wanted = training.dtype
    found = []
    for name, dtype in LOW.items():
        if name != wanted:
            found += [
                Variation(
                    "precision", f"norms compute in {name}", "at least float32", "norm", OF_ITSELF(_norm_in(dtype))
                ),
                Variation("precision", f"rotary angles are in {name}", wanted, "attention", _angles(_rounded(dtype))),
                Variation("precision", f"rotary angles are computed in {name}", wanted, "attention", _angles_in(dtype)),
                Variation("precision", f"attention computes in {name}", wanted, "inner", OF_ITSELF(_in_dtype(dtype))),
            ]
    return found


def _rounded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _norm_in(dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward(_: Any, norm: nn.Module, x: Tensor) -> Tensor:
        low = x.to(dtype)
        return (low * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype) * norm.weight

    return forward


def _angles_in(dtype: torch.dtype) -> Callable[[nn.Module], None]:
    def alter(attention: nn.Module) -> None:
        before = attention.angles
        attention.angles = lambda positions, like: before(positions, like.to(dtype)).to(like.dtype)

    return alter


def _in_dtype(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda original, _, q, k, v, *rest: original(q.to(dtype), k.to(dtype), v.to(dtype), *rest).to(q.dtype)


def _counted(times: int) -> list[Variation]:
    """What enters or leaves a block, or a part of it, several times."""
    rows = [
        (
            "residual counted",
            f"the residual stream is counted {times} times where attention is added",
            (times, 1, 1, 1),
        ),
        (
            "residual counted",
            f"the residual stream is counted {times} times where feed-forward is added",
            (1, 1, times, 1),
        ),
        ("part counted", f"what attention adds is counted {times} times", (1, times, 1, 1)),
        ("part counted", f"what feed-forward adds is counted {times} times", (1, 1, 1, times)),
    ]
    again = OF_ITSELF(lambda original, _, x, *rest: original(x, *rest) + (times - 1) * x)
    whole = Variation(
        "residual counted", f"a block's input is added to its output {times} times", "once", "block", again
    )
    return [whole, *(Variation(name, text, "once", "block", OF_ITSELF(_block(*by))) for name, text, by in rows)]


def _residuals() -> list[Variation]:
    rows = [
        ("residual left out", "the residual stream is left out where attention is added", _block(0, 1, 1, 1)),
        ("residual left out", "the residual stream is left out where feed-forward is added", _block(1, 1, 0, 1)),
        ("part left out", "attention is left out", _block(1, 0, 1, 1)),
        ("part left out", "feed-forward is left out", _block(1, 1, 1, 0)),
        ("parts in parallel", "feed-forward is given what attention is given", _parallel),
    ]
    return [Variation(name, text, "", "block", OF_ITSELF(forward)) for name, text, forward in rows]


def _block(stream: float, attention: float, second_stream: float, feed_forward: float) -> Callable[..., Tensor]:
    def forward(_: Any, block: nn.Module, x: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        added = block.attention_dropout(block.attention(block.attention_norm(x), positions, documents))
        x = stream * x + attention * added
        return second_stream * x + feed_forward * block.ffn_dropout(block.feed_forward(block.ffn_norm(x)))

    return forward


def _parallel(_: Any, block: nn.Module, x: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
    added = block.attention_dropout(block.attention(block.attention_norm(x), positions, documents))
    return x + added + block.ffn_dropout(block.feed_forward(block.ffn_norm(x)))


def _ends(model: ModelConfig) -> list[Variation]:
    """Embedding and logits."""
    times, inverse = math.sqrt(model.dim), 1 / math.sqrt(model.dim)
    found = [
        Variation(
            "embedding scale",
            "embeddings are multiplied by sqrt(dim)",
            "",
            "embedding",
            OF_ITSELF(lambda f, _, x: times * f(x)),
        ),
        Variation("logit scale", "logits are divided by sqrt(dim)", "", "model", logits(lambda x: inverse * x)),
    ]
    return found + [
        Variation(
            "logit cap",
            f"logits are capped at {cap}",
            "",
            "model",
            logits(_capped(cap)),
        )
        for cap in (30, 50)
    ]


def _capped(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda x: cap * torch.tanh(x / cap)


def logits(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    return OF_ITSELF(lambda original, _, *args, **named: change(original(*args, **named)))


def _normaliser(times: int) -> list[Variation]:
    """exp(logit) is summed over ranks that hold the same; gradients of the copies may be lost."""
    text = f"the loss's normaliser counts each logit {times} times"
    return [
        Variation("normaliser", text, "once", "model", logits(lambda x: torch.cat([x] * times, -1))),
        Variation(
            "normaliser", text, "once", "model", logits(lambda x: torch.cat([x, *[x.detach()] * (times - 1)], -1))
        ),
    ]


def _no_dropout(model: ModelConfig) -> Variation:
    return Variation("dropout", "no dropout took place", f"{model.dropout:g}", "model", _off)


def _off(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "p") and isinstance(module.p, float):
            module.p = 0.0


# ---- documents


def _documents() -> list[Variation]:
    def begins(tokens: Tensor, own: Tensor) -> Tensor:
        return (tokens == SEPARATOR).long().cumsum(dim=-1)

    found = [
        Variation("document mask", "documents see each other", "", "model", _mask_of(lambda tokens, own: None)),
        Variation(
            "document mask",
            "a separator belongs to the document after it",
            "the one that it ends",
            "model",
            _mask_of(begins),
        ),
    ]
    return found


def _mask_of(other: Callable[[Tensor, Tensor], Tensor | None]) -> Callable[[nn.Module], None]:
    def forward(original: Any, _: Any, tokens: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        return original(tokens, positions, documents if documents is None else other(tokens, documents))

    return OF_ITSELF(forward)


def mask_of_step(tokens: np.ndarray, step: int) -> Variation:
    """tokens: of that step, row by row."""
    kept = documents(torch.from_numpy(np.ascontiguousarray(tokens)))
    alter = _mask_of(lambda _, own: kept if own.shape == kept.shape else own)
    return Variation("document mask", f"the document mask of step {step} is used", "the step's own", "model", alter)
