"""Gradients before clipping are not the reference's: misshapen, scaled, not reduced, lost on the way back.

Judged in step 1, where all ranks still start from the same weights, so that nothing but the gradient itself can be wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from harness.diagnosis.differences import (
    Pair,
    expected_gradient,
    fqns_of,
    loss_off,
    seen_gradients,
    where_text,
    wrong_pairs,
)
from harness.diagnosis.words import Broken, groups_text, rank_words, some, traffic_lines
from harness.judge import attribution, tolerance
from harness.judge.result import Diagnosis, one_cause
from harness.judge.traffic import observed as observed_traffic
from harness.judge.trial import Trial

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
        _missing_reduction,
        _norms_not_summed,
        _untied,
        _lost_before,
    ):
        cause = explain(trial, wrong)
        if cause:
            return one_cause(cause, (*_why(cause), *_gradient_lines(trial, wrong), *_reduction_lines(cause, trial)))
    return None


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
    text = f"{what} NaN or infinite in step 1 {where_text(trial, bad)}{', the losses are finite' if finite and seen else ''}"
    return text + (_mean_over_none(trial) if finite else "")


def _mean_over_none(trial: Trial) -> str:
    empty = [rank for rank in trial.one_rank_per_share() if rank not in attribution.ranks_with_labels(trial)]
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
    "keys and values": "no K/V exchange over cp: attention sees its own part of the sequence only",
    "gradients of keys and values": "no exchange of K/V gradients over cp: each rank keeps its own",
}


def _missing_reduction(trial: Trial, wrong: list[Pair]) -> str | None:
    """Axes over which some rank should reduce gradients and nothing ran."""
    missing: dict[str, str] = {}
    for rank, evidence in sorted(trial.ranks.items()):
        seen = observed_traffic(evidence, 1)
        for flow in trial.plan.flows[rank]:
            if flow.role == "gradients" and not seen.get((trial.plan.group_of(rank, flow.axis), flow.op, flow.phase)):
                missing[flow.axis] = flow.op
    if not missing:
        return None
    texts = [f"no {op} ran over {groups_text(trial.plan.groups[axis])}" for axis, op in missing.items()]
    instead = sorted({ranks for op in missing.values() for ranks in _groups_of_no_axis(trial, op)})
    more = f", but over {groups_text(instead)}" if instead else ""
    return f"gradient reduction missing over {' and '.join(missing)}: {', '.join(texts)}{more}"


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


# ---- evidence


def _why(cause: str) -> Iterator[tuple[str, str]]:
    if "norm weights" in cause:
        yield (
            "why",
            "with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing",
        )
    if "in mean square" in cause:
        yield (
            "why",
            "a mean square is over all ranks: tokens that changed places, or were turned, show only where they meet",
        )


def _reduction_lines(cause: str, trial: Trial) -> Iterator[tuple[str, str]]:
    if cause.startswith("gradient reduction"):
        yield from traffic_lines(trial)


def _gradient_lines(trial: Trial, wrong: list[Pair]) -> Iterator[tuple[str, str]]:
    """The first parameter that is wrong, on two ranks: one number that a person can check."""
    fqn = wrong[0][1]
    for rank in [rank for rank, other in wrong if other == fqn][:2]:
        seen, expected = seen_gradients(trial, rank, 1)[fqn], expected_gradient(trial, rank, fqn)
        if expected is not None and seen.shape == expected.shape and np.any(expected) and np.isfinite(seen).all():
            ratio = float(np.sum(seen * expected) / np.sum(expected * expected))
            yield "gradients", f"rank {rank}, step 1, {fqn}: {ratio:.4g} times the reference's by best fit"
