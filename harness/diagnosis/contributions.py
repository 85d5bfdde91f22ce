"""Samples and tokens that contribute unequally to a gradient, found from the weights that a fit gives each of them.

A weight of 1 is due; 0 is a sample that is lost, other numbers are means taken in the wrong place. Trap: a weight says
nothing unless the fit explains the whole gradient (`Weights.explained`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from harness.diagnosis.differences import Pair
from harness.diagnosis.factors import factor_text, times_text
from harness.diagnosis.words import rank_words
from harness.evidence.text import ranks_text
from harness.judge import attribution
from harness.judge.losses import losses
from harness.judge.received_samples import shares_of_samples
from harness.judge.trial import Trial
from harness.plan.grid import coordinate

DATA_AXES = ("dp_replicate", "dp_shard")


def unreduced_microbatches(trial: Trial, wrong: list[Pair]) -> str | None:
    """Of some microbatches a rank's gradient holds its own samples only, of the others everybody's."""
    if trial.case.features.accumulation == 1:
        return None
    received, size, axes = shares_of_samples(trial, 1), trial.case.local_batch, set(trial.plan.groups) & {*DATA_AXES}
    lost: set[int] = set()
    for rank in received:
        weights = attribution.sample_weights(trial, [rank])
        if weights is None or not weights.explained:
            return None
        peers = [id_ for other, others in received.items() if other != rank for id_ in enumerate(others)]
        lost |= {
            i // size + 1
            for i, id_ in peers
            if id_ is not None and abs(weights.by_sample.get(id_, 1.0)) < weights.close
        }
    if not lost or len(lost) == trial.case.passes:
        return None
    which = f"microbatch{'es' * (len(lost) > 1)} {', '.join(map(str, sorted(lost)))} of {trial.case.passes}"
    return f"gradients of {which} are not reduced over {' and '.join(sorted(axes))}: each rank adds its own only"


def unequal_parts(trial: Trial, wrong: list[Pair]) -> str | None:
    """Context parallel: tokens count by the cp rank that computes them, whatever sample they are of."""
    if trial.case.dims.cp == 1:
        return None
    by_rank = {rank: attribution.part_weights(trial, [rank]) for rank in sorted({rank for rank, _ in wrong})}
    known = {rank: weights for rank, weights in by_rank.items() if weights is not None and weights.explained}
    if len(known) < len(by_rank):
        return None
    for rank, weights in known.items():
        contributing = [place for place, weight in weights.by_sample.items() if abs(weight) > weights.close]
        if len(contributing) < len(weights.by_sample):
            text = f"rank {rank}'s gradient holds the tokens of {contributing} of {trial.case.dims.cp} cp ranks only"
            return f"gradient reduction without effect over cp: {text}"
    weights = next(iter(known.values()))
    return None if weights.uniform is not None else _parts_text(trial, weights)


def _parts_text(trial: Trial, weights: attribution.Weights) -> str:
    shown = ", ".join(f"{weight:.4g}" for weight in weights.by_sample.values())
    factor = _divided_by_own_tokens(trial, weights)
    if factor is None:
        return f"tokens count unequally in the gradient: weights {shown} by cp rank, each should have 1"
    cause = "the loss is averaged per cp rank: each divides by its own number of valid tokens, not by the global one"
    more = "" if math.isclose(factor, 1.0, rel_tol=1e-6) else f", and gradients are {times_text(factor)} that"
    return f"{cause}{more} (weights {shown})"


def _divided_by_own_tokens(trial: Trial, weights: attribution.Weights) -> float | None:
    """The factor k if each cp rank's part counts as k * all / (cp * its own) valid tokens."""
    counts = dict.fromkeys(weights.by_sample, 0)
    for rank in trial.last_stages():
        place = coordinate(trial.case.dims, rank)
        if place["tp"] == 0 and place["cp"] in counts:
            counts[place["cp"]] += sum(count for _, count in losses(trial, rank, 1))
    if not all(counts.values()):
        return None
    total = sum(counts.values())
    ratios = [w * trial.case.dims.cp * counts[place] / total for place, w in weights.by_sample.items()]
    return ratios[0] if np.allclose(ratios, ratios[0], rtol=1e-6) else None


def unequal_samples(trial: Trial, wrong: list[Pair]) -> str | None:
    weights = attribution.sample_weights(trial, sorted(trial.ranks))
    if weights is None or not weights.explained or weights.uniform is not None:
        return None
    return _lost_microbatches(trial, weights) or _averaged_locally(trial, weights) or _weights_text(weights)


def _lost_microbatches(trial: Trial, weights: attribution.Weights) -> str | None:
    passes = trial.case.passes
    each = attribution.by_microbatch(trial, weights) if passes > 1 else None
    if each is None:
        return None
    digits = 9 if trial.case.exact else 2
    shown = ", ".join(f"{round(weight, digits) + 0.0:.6g}" for weight in each)
    lost = [str(i + 1) for i, weight in enumerate(each) if abs(weight) < weights.close]
    if lost:
        return f"microbatches {', '.join(lost)} of {passes} do not contribute to the gradient (weights {shown})"
    if attribution.local_average(trial, weights, "microbatch") is None:
        return f"microbatches contribute with weights {shown} to the gradient, each should have 1"
    return None


def _averaged_locally(trial: Trial, weights: attribution.Weights) -> str | None:
    """Where the mean was taken; all places that are the same here are named."""
    found = {unit: attribution.local_average(trial, weights, unit) for unit in attribution.UNITS}
    factors = {unit: factor for unit, factor in found.items() if factor is not None}
    if trial.case.features.accumulation == 1 and "rank" in factors:
        factors.pop("microbatch of each rank", None)  # the same thing under two names
    if "microbatch" in factors and len(trial.one_rank_per_share()) == 1:
        factors.pop("microbatch of each rank", None)
    if not factors:
        return None
    factor = next(iter(factors.values()))
    cause = f"the loss is averaged per {' or '.join(factors)}: each divides by its own number of valid tokens"
    if math.isclose(factor, 1.0, rel_tol=1e-6):
        return f"{cause}, not by the global one"
    return f"{cause}, and gradients are {times_text(factor)} that{factor_text(trial, factor)}"


def _weights_text(weights: attribution.Weights) -> str:
    values = weights.values.round(9)
    none = int(np.sum(np.abs(values) < 1e-9))
    more = f", {none} of {len(values)} do not count at all" if none else ""
    span = f"{values.min():.4g} to {values.max():.4g}"
    return f"samples count unequally in the gradient: weights {span}{more}, each should have 1"


def own_samples_only(trial: Trial, wrong: list[Pair]) -> str | None:
    """The collective ran and its result was dropped: each rank's gradient is a mix of some ranks' samples."""
    contributing = attribution.contributors(trial)
    if contributing is None or everyone_contributes(trial, contributing):
        return None
    axes = [axis for axis in DATA_AXES if axis in trial.plan.groups]
    missing = [
        axis for axis in axes if all(_nothing_from_peers(trial, contributing, rank, axis) for rank in contributing)
    ]
    rank = next(iter(contributing))
    text = f"rank {rank}'s gradient holds the samples of {rank_words(contributing[rank])} only, though collectives ran"
    over = f" over {' and '.join(missing)}" if missing else ""
    return f"gradient reduction without effect{over}: {text}"


def everyone_contributes(trial: Trial, contributing: dict[int, list[int]] | None) -> bool:
    return contributing is not None and all(
        ranks == attribution.ranks_with_labels(trial) for ranks in contributing.values()
    )


def _nothing_from_peers(trial: Trial, contributing: dict[int, list[int]], rank: int, axis: str) -> bool:
    """Nothing came from the rank's peers along the axis."""
    return not set(trial.plan.group_of(rank, axis)) - {rank} & set(contributing[rank])


def contributor_lines(trial: Trial) -> Iterator[tuple[str, str]]:
    contributing = attribution.contributors(trial)
    for rank, ranks in list((contributing or {}).items())[:2]:
        everyone = ranks_text(attribution.ranks_with_labels(trial))
        yield (
            "samples",
            f"rank {rank}'s gradient holds those received by ranks {ranks_text(ranks)}, expected {everyone}",
        )
