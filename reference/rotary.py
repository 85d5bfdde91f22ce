"""The rotary embedding otherwise: other bases, pairs and frequencies, or queries and keys that are not turned alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from .altered import Alteration, Change, Variation, angles, put_instead, setting
from .config import ModelConfig, RopeScaling
from .model import at_least_float32, kept_share, rescale, rotary_frequencies, rotate


def rotary_variations(model: ModelConfig) -> list[Variation]:
    bases = [base for base in (10_000.0, 500_000.0, 1_000_000.0) if base != model.rope_theta]
    rows: list[tuple[str, str, str, Alteration]] = [
        *(("base", f"the rotary base is {b:g}", f"{model.rope_theta:g}", setting(rope_theta=b)) for b in bases),
        ("pairs", "rotary embedding rotates pairs (i, i + d/2)", "adjacent pairs", turn_halves),
        ("left out", "queries and keys are not rotated", "rotary embedding", angles(lambda a: 0 * a)),
        ("reversed", "queries and keys are rotated backwards", "forwards", angles(torch.neg)),
        ("half", "half of each head is rotated", "all of it", angles(_first_half)),
        ("of keys", "keys are not rotated, queries are", "both", _turned_by("wk", -1)),
        ("of queries", "queries are not rotated, keys are", "both", _turned_by("wq", -1)),
        ("of values", "values are rotated as well", "queries and keys", _turned_by("wv", 1)),
    ]
    if model.rope_scaling is None:
        rows += [
            ("scaling", f"rotary frequencies are rescaled by {f:g}", "no rescaling", _scaled_by(f)) for f in (8, 32)
        ]
    else:
        rows.append(("scaling", "rotary frequencies are not rescaled", "rescaled", setting(rope_scaling=None)))
        rows += [
            ("scaling", f"rotary frequencies are rescaled {text}", wanted, setting(rope_scaling=other))
            for text, wanted, other in _other_scalings(model.rope_scaling)
        ]
        rows += _other_rescalings(model, model.rope_scaling)
    return [Variation(f"rotary {name}", text, wanted, "attention", alter) for name, text, wanted, alter in rows]


def _scaled_by(factor: float) -> Alteration:
    return setting(rope_scaling=RopeScaling(factor=factor))


def _other_scalings(usual: RopeScaling) -> Iterable[tuple[str, str, RopeScaling]]:
    """One number of it otherwise: as published for another model, or half or twice of it; or wavelengths."""
    low, high = usual.low_freq_factor / math.tau, usual.high_freq_factor / math.tau
    turned = replace(usual, low_freq_factor=low, high_freq_factor=high)
    yield "with wavelengths 1 / frequency", "2 pi / frequency", turned
    for key, own in vars(usual).items():
        known = {"factor": (8.0, 32.0, 16.0), "original_max_position": (8192, 4096, 2048)}.get(key, ())
        for value in dict.fromkeys((*known, 2 * own, own / 2)):
            if value != own:
                yield f"with {key} {value:g}", f"{own:g}", replace(usual, **{key: type(own)(value)})


def _other_rescalings(model: ModelConfig, usual: RopeScaling) -> Iterable[tuple[str, str, str, Alteration]]:
    """What other models do in its place, and Llama 3.1's without the limits of the share that is kept."""
    slow, all_of_them = "those of slow pairs only", replace(usual, low_freq_factor=1e9, high_freq_factor=2e9)
    linear = f"all rotary frequencies are divided by {usual.factor:g} (linear interpolation)"
    yield "scaling", linear, slow, setting(rope_scaling=all_of_them)
    base = model.rope_theta * usual.factor ** (model.head_dim / (model.head_dim - 2))
    ntk = f"rotary frequencies are rescaled by another base, {base:.6g} (NTK)"
    yield "scaling", ntk, f"{usual.factor:g} for slow pairs", setting(rope_scaling=None, rope_theta=base)
    plain = rotary_frequencies(replace(model, rope_scaling=None), torch.empty(0, dtype=torch.float64))
    keep = kept_share(plain, usual)
    times = ((1 - keep) / usual.factor + keep) * plain / rescale(plain, usual)
    unlimited = "rotary frequencies are rescaled without limits: fast pairs turn faster, slow ones slower still"
    yield "scaling", unlimited, "between 1 / factor and 1", angles(lambda a: a * times.to(a.dtype))


def _first_half(angles: Tensor) -> Tensor:
    pairs = torch.arange(angles.shape[-1], device=angles.device)
    return torch.where(pairs < angles.shape[-1] // 2, angles, 0)


def turn_halves(attention: nn.Module) -> None:
    """Columns of a head in the order in which adjacent ones are those that turn together: a dot product does not mind."""
    width = attention.config.head_dim
    order = torch.arange(width).view(2, -1).T.flatten()
    for name in ("wq", "wk"):
        put_instead(
            attention.get_submodule(name),
            lambda original, x: original(x).unflatten(-1, (-1, width))[..., order].flatten(-2),
        )


def _turned_by(name: str, times: int) -> Alteration:
    """What a projection gives, turned besides what is done with it: backwards undoes that."""

    def alter(attention: nn.Module) -> None:
        def turned(original: Change, x: Tensor) -> Tensor:
            heads = original(x).unflatten(-1, (-1, attention.config.head_dim))
            angles = attention.angles(torch.arange(x.shape[1]), at_least_float32(heads))
            return rotate(heads, times * angles).flatten(-2)

        put_instead(attention.get_submodule(name), turned)

    return alter
