"""Gradients before clipping are not the reference's: scaled, not reduced, not accumulated, averaged in the wrong place.

Judged in step 1, where all ranks still start from the same weights, so that nothing but the gradient itself can be wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from harness.diagnosis.differences import (
    Pair,
    common_factor,
    expected_gradient,
    factor_of,
    fqns_of,
    loss_off,
    seen_gradients,
    where_text,
    wrong_pairs,
)
from harness.diagnosis.factors import factor_text, times_text
from harness.diagnosis.forward import documents_see_each_other, unexplained
from harness.diagnosis.words import Broken, finding_line, groups_text, rank_words, some, traffic_lines
from harness.evidence.text import ranks_text
from harness.judge import attribution, tolerance
from harness.judge.losses import losses
from harness.judge.received_samples import shares_of_samples
from harness.judge.result import Diagnosis
from harness.judge.traffic import observed as observed_traffic
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.plan.stages import parameters_of_stage

DATA_AXES = ("dp_replicate", "dp_shard")
TIED = "tok_embeddings.weight"  # the output's weight as well, where embeddings are tied


def wrong_gradients(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "gradients" not in broken:
        return None
    wrong = wrong_pairs(trial, 1)
    if not wrong:
        return None
    for explain in (
        _misshapen,
        _not_finite,
        _nothing_goes_round,
        documents_see_each_other,
        _scaled,
        _scaled_by_stage,
        _missing_reduction,
        _norms_not_summed,
        _untied,
        scaled_by_powers,
        _lost_before,
        _unequal_parts,
        _unequal_samples,
        _unreduced_microbatches,
        _own_samples_only,
    ):
        cause = explain(trial, wrong)
        if cause:
            return Diagnosis(cause, (*_why(cause), *_gradient_lines(trial, wrong), *_reduction_lines(cause, trial)))
    cause, lines = unexplained(trial, wrong), _gradient_lines(trial, wrong)
    if "features" in broken and trial.case.dims.cp == 1:  # what was seen, before what numbers make one think of
        return Diagnosis(
            f"features: {finding_line('features', broken['features'])[1]}; {cause}", (*_why(cause), *lines)
        )
    return Diagnosis(cause, (*_why(cause), *lines))


# ---- the kinds of mistakes, each None if it is not that


def _misshapen(trial: Trial, wrong: list[Pair]) -> str | None:
    held = {
        (rank, fqn): part for rank, e in trial.ranks.items() for fqn, part in ((t.fqn, t.value) for t in e.parameters)
    }
    bad = [(rank, fqn) for rank, fqn in wrong if seen_gradients(trial, rank, 1)[fqn].shape != held[rank, fqn].shape]
    if not bad:
        return None
    rank, fqn = bad[0]
    seen = f"rank {rank}, {fqn}: gradient {seen_gradients(trial, rank, 1)[fqn].shape} of a parameter {held[rank, fqn].shape}"
    return f"gradients have another shape than their parameters {where_text(trial, bad)}: {seen}"


def _not_finite(trial: Trial, wrong: list[Pair]) -> str | None:
    bad = [(rank, fqn) for rank, fqn in wrong if not np.isfinite(seen_gradients(trial, rank, 1)[fqn]).all()]
    if not bad:
        return None
    seen = [m.loss_sum for e in trial.ranks.values() for m in e.steps[0].microbatches if m.loss_sum is not None]
    finite = all(map(math.isfinite, seen))
    what = "gradients are" if finite else "loss and gradients are"
    told = f"{what} NaN or infinite in step 1 {where_text(trial, bad)}{', the losses are finite' if finite and seen else ''}"
    return told + (_mean_over_none(trial) if finite else "")


def _mean_over_none(trial: Trial) -> str:
    empty = [rank for rank in trial.one_rank_per_share() if rank not in attribution.speakers(trial)]
    have = "has" if len(empty) == 1 else "have"
    return f": {rank_words(empty)} {have} no valid token, and a mean over none is 0/0" if empty else ""


def _nothing_goes_round(trial: Trial, wrong: list[Pair]) -> str | None:
    """Context parallel: planned flows of attention over cp of which nothing was seen, beside what else runs there."""
    seen, flows = observed_traffic(trial.ranks[0], 1), trial.plan.flows[0]
    for role, text in CP_ROLES.items():
        for flow in (flow for flow in flows if flow.role == role):
            others = [
                f.bytes for f in flows if f is not flow and (f.axis, f.op, f.phase) == (flow.axis, flow.op, flow.phase)
            ]
            if seen.get((trial.plan.group_of(0, flow.axis), flow.op, flow.phase), 0) <= sum(others):
                return text
    return None


CP_ROLES = {
    "keys and values": "no keys and values go round over cp: attention sees its own part of the sequence only",
    "gradients of keys and values": "gradients of keys and values do not go round over cp: each rank keeps its own",
}


def _scaled(trial: Trial, wrong: list[Pair]) -> str | None:
    """All that is wrong is one and the same multiple of what it should be."""
    factor = common_factor(trial, wrong, 1)
    if factor is None:
        return None
    where = where_text(trial, wrong)
    if abs(factor) < 1e-12:
        return f"gradients are zero {where}"
    everywhere = len(fqns_of(trial, wrong)) == len(trial.plan.shapes)
    name = factor_text(trial, factor, everywhere)
    if trial.case.model.tied_embeddings and fqns_of(trial, wrong) == [TIED] and math.isclose(factor, 2, rel_tol=1e-6):
        name = f": counted for the embedding and again for the output, which share it{name.replace(':', ', or', 1)}"
    return f"gradients are {times_text(factor)} what they should be {where}{name}"


def _scaled_by_stage(trial: Trial, wrong: list[Pair]) -> str | None:
    """Under pp each stage's gradients are another multiple of what they should be: each stage passes on a scaled one."""
    by_stage: dict[int, float] = {}
    for stage in range(trial.case.n_stages) if trial.case.dims.pp > 1 else ():
        fqns = set(parameters_of_stage(trial.case, stage))
        mine = [(rank, fqn) for rank, fqn in wrong if fqn in fqns]
        factor = common_factor(trial, mine, 1) if mine else 1.0
        if factor is None:
            return None
        by_stage[stage] = factor
    if len({round(factor, 9) for factor in by_stage.values()}) < 2:
        return None
    shown = ", ".join(f"{factor:.6g} in stage {stage}" for stage, factor in by_stage.items())
    return f"gradients are off by stage, times {shown}: what a stage sends back, or its own part, is scaled"


def _missing_reduction(trial: Trial, wrong: list[Pair]) -> str | None:
    """Axes over which some rank should reduce gradients and nothing ran."""
    missing: dict[str, str] = {}
    for rank, evidence in sorted(trial.ranks.items()):
        seen = observed_traffic(evidence, 1)
        for flow in trial.plan.flows[rank]:
            if flow.role == "gradients" and not seen.get((trial.plan.group_of(rank, flow.axis), flow.op, flow.phase)):
                missing[flow.axis] = flow.op
    if not missing or _everyone_is_heard(trial, attribution.heard_of(trial)):
        return None
    told = [f"no {op} ran over {groups_text(trial.plan.groups[axis])}" for axis, op in missing.items()]
    instead = sorted({ranks for op in missing.values() for ranks in _groups_of_no_axis(trial, op)})
    more = f", but over {groups_text(instead)}" if instead else ""
    return f"gradient reduction missing over {' and '.join(missing)}: {', '.join(told)}{more}"


def _groups_of_no_axis(trial: Trial, op: str) -> set[tuple[int, ...]]:
    """The groups over which an operation ran in backward, and that the plan does not know."""
    known = {group for groups in trial.plan.groups.values() for group in groups}
    calls = (call for evidence in trial.ranks.values() for call in evidence.collectives)
    return {c.ranks for c in calls if (c.op, c.phase) == (op, "backward") and len(c.ranks) > 1} - known


def _norms_not_summed(trial: Trial, wrong: list[Pair]) -> str | None:
    """Weights that are whole on every tp rank: each rank's gradient is a share; the shares sum to the reference's."""
    fqns = fqns_of(trial, wrong)
    if trial.case.dims.tp == 1 or not all("norm" in fqn for fqn in fqns):
        return None
    for group in trial.plan.groups["tp"]:
        for fqn in fqns:
            total, expected = (
                sum(seen_gradients(trial, rank, 1)[fqn] for rank in group),
                expected_gradient(trial, group[0], fqn),
            )
            if expected is None or tolerance.relative_difference(np.asarray(total), expected) > 1e-9:
                return None
    return f"gradients of norm weights are not summed over tp: {len(fqns)} parameters wrong, all others right"


def scaled_by_powers(trial: Trial, wrong: list[Pair], step: int = 1) -> str | None:
    """Each parameter is a multiple of what it should be, but not all the same one: some were scaled more often."""
    factors = {(rank, fqn): factor_of(trial, rank, fqn, step) for rank, fqn in wrong}
    by_fqn: dict[str, float] = {fqn: factor for (_, fqn), factor in factors.items() if factor is not None}
    if None in factors.values() or len({round(factor, 9) for factor in by_fqn.values()}) < 2:
        return None
    kinds = sorted({round(factor, 9) for factor in by_fqn.values()})
    told = [f"{kind:.4g} ({some([fqn for fqn, f in by_fqn.items() if round(f, 9) == kind], 1)})" for kind in kinds[:4]]
    causes = "some are scaled more often than others, by bucket, by stage or by wrapper"
    return f"gradients are scaled by different factors {where_text(trial, wrong)}: {', '.join(told)}: {causes}"


def _lost_before(trial: Trial, wrong: list[Pair]) -> str | None:
    """Right down to some place that backward passes, and wrong in all that it reaches later."""
    bad = set(fqns_of(trial, wrong))
    right = [fqn for fqn in trial.plan.shapes if fqn not in bad]
    if not right or loss_off(trial) or not max(map(_depth, bad)) < min(map(_depth, right)):
        return None
    first = [fqn for fqn in right if _depth(fqn) == min(map(_depth, right))]
    cause = f"gradients are right in {some(first)}{' and what follows' * (len(first) < len(right))}"
    return f"{cause}, and wrong in all that lies before: backward loses something there{_less_than_planned(trial)}"


def _depth(fqn: str) -> tuple[int, int]:
    """When forward comes to a parameter: layer, and place in it. The embedding is layer -1, norm and output are last."""
    places = (("attention_norm",), ("wq", "wk", "wv"), ("wo",), ("ffn_norm",), ("w1", "w3"), ("w2",))
    layer, module = re.match(r"(?:layers\.(\d+)\.)?.*?(\w+)\.weight", fqn).groups()  # type: ignore[union-attr]
    if layer is None:
        return {"tok_embeddings": (-1, 0), "norm": (10**6, 0)}.get(module, (10**6, 1))
    return int(layer), next((i for i, names in enumerate(places) if module in names), 0)


def _less_than_planned(trial: Trial) -> str:
    """The axes over which rank 0 moved less in backward than the plan says, besides its gradients."""
    seen, flows = observed_traffic(trial.ranks[0], 1), trial.plan.flows[0]
    wanted: dict[tuple[str, str], int] = {}
    for flow in flows:
        if flow.phase == "backward":
            wanted[flow.axis, flow.op] = wanted.get((flow.axis, flow.op), 0) + flow.bytes
    short = [
        axis
        for (axis, op), count in wanted.items()
        if seen.get((trial.plan.group_of(0, axis), op, "backward"), 0) < count
    ]
    return f", a sum over {' and '.join(dict.fromkeys(short))}" if short else ""


def _unreduced_microbatches(trial: Trial, wrong: list[Pair]) -> str | None:
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


def _unequal_parts(trial: Trial, wrong: list[Pair]) -> str | None:
    """Context parallel: tokens count by the cp rank that computes them, whatever sample they are of."""
    if trial.case.dims.cp == 1:
        return None
    by_rank = {rank: attribution.part_weights(trial, [rank]) for rank in sorted({rank for rank, _ in wrong})}
    known = {rank: weights for rank, weights in by_rank.items() if weights is not None and weights.explained}
    if len(known) < len(by_rank):
        return None
    for rank, weights in known.items():
        heard = [place for place, weight in weights.by_sample.items() if abs(weight) > weights.close]
        if len(heard) < len(weights.by_sample):
            told = f"rank {rank}'s gradient holds the tokens of {heard} of {trial.case.dims.cp} cp ranks only"
            return f"gradient reduction without effect over cp: {told}"
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


def _untied(trial: Trial, wrong: list[Pair]) -> str | None:
    """The embedding alone gives a gradient to the rows of tokens that were read; rows of others get the output's only."""
    if not trial.case.model.tied_embeddings or fqns_of(trial, wrong) != [TIED]:
        return None
    read = np.unique(trial.reference.tokens[[trial.reference.sample_ids.index(i) for i in trial.reference.samples[0]]])
    for rank, _ in wrong:
        part, seen = trial.slice_of(rank, TIED), seen_gradients(trial, rank, 1)[TIED]
        if part is None or np.any(seen[~np.isin(np.arange(*part[0]), read)]):
            return None
    return "the output's part of the gradient of the tied weight is missing: tok_embeddings.weight has the embedding's only"


def _unequal_samples(trial: Trial, wrong: list[Pair]) -> str | None:
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


def _own_samples_only(trial: Trial, wrong: list[Pair]) -> str | None:
    """The collective ran and its result was dropped: each rank's gradient is a mix of some ranks' samples."""
    heard = attribution.heard_of(trial)
    if heard is None or _everyone_is_heard(trial, heard):
        return None
    axes = [axis for axis in ("dp_replicate", "dp_shard") if axis in trial.plan.groups]
    missing = [axis for axis in axes if all(_deaf(trial, heard, rank, axis) for rank in heard)]
    rank = next(iter(heard))
    told = f"rank {rank}'s gradient holds the samples of {rank_words(heard[rank])} only, though collectives ran"
    over = f" over {' and '.join(missing)}" if missing else ""
    return f"gradient reduction without effect{over}: {told}"


def _everyone_is_heard(trial: Trial, heard: dict[int, list[int]] | None) -> bool:
    return heard is not None and all(ranks == attribution.speakers(trial) for ranks in heard.values())


def _deaf(trial: Trial, heard: dict[int, list[int]], rank: int, axis: str) -> bool:
    """Nothing came from the rank's peers along the axis."""
    return not set(trial.plan.group_of(rank, axis)) - {rank} & set(heard[rank])


# ---- evidence


def _why(cause: str) -> Iterator[tuple[str, str]]:
    if "norm weights" in cause:
        yield (
            "why",
            "with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing",
        )
    if "as long as it should be" in cause:
        yield (
            "why",
            "lengths are mean squares over all ranks: tokens that changed places, or were turned, show only where they meet",
        )


def _reduction_lines(cause: str, trial: Trial) -> Iterator[tuple[str, str]]:
    if cause.startswith("gradient reduction"):
        yield from _heard_lines(trial)
        yield from traffic_lines(trial)


def _heard_lines(trial: Trial) -> Iterator[tuple[str, str]]:
    heard = attribution.heard_of(trial)
    for rank, ranks in list((heard or {}).items())[:2]:
        everyone = ranks_text(attribution.speakers(trial))
        yield (
            "samples",
            f"rank {rank}'s gradient holds those received by ranks {ranks_text(ranks)}, expected {everyone}",
        )


def _gradient_lines(trial: Trial, wrong: list[Pair]) -> Iterator[tuple[str, str]]:
    """The first parameter that is wrong, on two ranks: one number that a person can check."""
    fqn = wrong[0][1]
    for rank in [rank for rank, other in wrong if other == fqn][:2]:
        seen, expected = seen_gradients(trial, rank, 1)[fqn], expected_gradient(trial, rank, fqn)
        if expected is not None and seen.shape == expected.shape and np.any(expected) and np.isfinite(seen).all():
            ratio = float(np.sum(seen * expected) / np.sum(expected * expected))
            yield "gradients", f"rank {rank}, step 1, {fqn}: {ratio:.4g} times the reference's by best fit"
