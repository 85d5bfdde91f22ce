"""Ranks that hold the same slice of a parameter hold the same bytes of it after every step, and of its gradient.

Who holds the same slice is found from contents, so replicas of any kind are compared: dp_replicate, and tp for norms. Who
should is in the plan: what is planned and not found was not compared, and is not a PASS.

With digests of parameters alone, ranks hold the same if they claim so. They claim the same parts of all parameters, or of
those that DTensors copy over the ranks that cut others. Parameters that lie outside of such a mesh are compared over it, if
they began alike: under tensor parallelism, for example, norms that are on the data ranks alone. Ranks that claim nothing are
compared if they are replicas by the layout and began with the same bytes. A parameter that a wrapper was configured to ignore
is compared, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.core.case.dims import ParallelDims
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import ranks_text
from harness.core.judge.finding import Finding
from harness.core.judge.local_training import local_training_means, never_averaged_families
from harness.core.judge.observed import (
    copied_families,
    differing_by_step,
    families_of_replicas,
    split_by_majority,
    uncut_families,
    with_contents_by_step,
)
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.separate_models import connected_rank_sets
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import Slice, numel

STAGE = "numbers"
NEEDS = frozenset({"contents"})
OF_GRADIENTS = True

ReplicatedSlice = tuple[str, Slice]
"""A parameter's fqn, and a slice of it."""


def check(trial: Trial) -> Result:
    """Compare replicas by values where the evidence has them, otherwise by digests of parameters."""
    return _judge_values(trial) if "values" in trial.provided else _judge_digests(trial)


def _judge_values(trial: Trial) -> Result:
    """Compare the gradients and parameters of ranks that hold the same slice, after every step.

    NOT APPLICABLE if no two ranks hold one. UNKNOWN if ranks that should by the plan do not, and nothing differs.
    Examined are, for each family, all ranks but one.
    """
    families = replica_families(trial)
    planned = planned_families(trial)
    if not families and (not planned or trial.assumption.references):
        return not_applicable("replica_agreement", "no two ranks hold the same slice of anything")
    findings: list[Finding] = []
    examined = 0
    for step in trial.case.steps:
        for quantity, replicated in (("gradients", gradient_families(trial, families)), ("parameters", families)):
            for (fqn, _), ranks in replicated.items():
                examined += len(ranks) - 1
                findings += _difference_findings(trial, step, quantity, fqn, ranks)
    not_found: list[ReplicatedSlice] = []
    if not trial.assumption.references:
        not_found = [key for key, ranks in planned.items() if not set(ranks) <= set(families.get(key, ()))]
    if not_found and not findings:
        first_key = not_found[0]
        text = f"ranks {ranks_text(planned[first_key])} should hold the same slice of {first_key[0]} and do not"
        note = f"{text} ({len(not_found)} of {len(planned)} such slices); see `shard_contents`"
        return Result("replica_agreement", Verdict.UNKNOWN, examined, note=note)
    return verdict_of("replica_agreement", findings, examined)


def planned_families(trial: Trial) -> dict[ReplicatedSlice, list[int]]:
    """Return, by (fqn, slice), the ranks that should hold it by the plan. Slices of a single rank are left out."""
    return _families_of_slices({rank: trial.plan.slices[rank] for rank in sorted(trial.ranks)})


def replica_families(trial: Trial) -> dict[ReplicatedSlice, list[int]]:
    """Return, by (fqn, slice), the ranks that hold it, if several ranks that train by the same reference do.

    A hypothesis may assume that some ranks train separately. Of such sets only the first that shares a slice is
    returned.
    """
    families: dict[ReplicatedSlice, list[int]] = {}
    for ranks_of_reference in _ranks_by_reference(trial):
        local_slices: dict[int, dict[str, Slice | None]] = {}
        for rank in ranks_of_reference:
            local_slices[rank] = {fqn: trial.slice_of(rank, fqn) for fqn in trial.local_slices[rank]}
        families |= {key: ranks for key, ranks in _families_of_slices(local_slices).items() if key not in families}
    return families


def gradient_families(trial: Trial, families: dict[ReplicatedSlice, list[int]]) -> dict[ReplicatedSlice, list[int]]:
    """Return, by (fqn, slice), the ranks that hold this part of a gradient: `families`, those of parameters.

    If ZeRO cuts gradients separately, they are the families of the plan's slices of gradients.
    """
    gradient_slices = trial.plan.gradient_slices
    if not gradient_slices:
        return families
    return _families_of_slices({rank: gradient_slices[rank] for rank in sorted(trial.ranks)})


def _ranks_by_reference(trial: Trial) -> list[list[int]]:
    """Return the ranks that train by the same reference, a list for each reference."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(trial.ranks):
        groups[id(trial.reference_of_rank(rank))].append(rank)
    return list(groups.values())


def _families_of_slices(slices_by_rank: Mapping[int, Mapping[str, Slice | None]]) -> dict[ReplicatedSlice, list[int]]:
    """Return, by (fqn, slice), the ranks that hold it.

    Left out are empty slices, unknown ones (None), and those of a single rank.
    """
    families: dict[ReplicatedSlice, list[int]] = defaultdict(list)
    for rank, slices in slices_by_rank.items():
        for fqn, local_slice in slices.items():
            if local_slice is not None and numel(local_slice):
                families[fqn, local_slice].append(rank)
    return {key: ranks for key, ranks in families.items() if len(ranks) > 1}


def _difference_findings(trial: Trial, step: int, quantity: str, fqn: str, ranks: list[int]) -> list[Finding]:
    """Return a finding if these ranks do not all hold the same bytes in a step. No value differs from any value.

    quantity: "gradients" or "parameters".
    """
    values = {rank: _value_of(trial, rank, step, quantity, fqn) for rank in ranks}
    majority_and_others = split_by_majority({rank: _content_key(value) for rank, value in values.items()})
    if majority_and_others is None:
        return []
    first = majority_and_others[0][0]
    second = majority_and_others[1][0]
    first_value = values[first]
    second_value = values[second]
    difference: str | float | None = None
    if first_value is not None and second_value is not None:
        difference = _relative_distance(second_value, first_value)
    note = f"on rank {second}, compared with rank {first}"
    if first_value is None:
        note = f"on rank {first}, compared with rank {second}"
    return [
        Finding(
            ranks=tuple(ranks),
            step=step,
            kind="parameter",
            name=fqn,
            quantity="gradient" if quantity == "gradients" else "value",
            expected="the same bytes on all",
            observed=difference,
            unit="of the largest entry" if isinstance(difference, float) else "",
            note=note,
        )
    ]


def _value_of(trial: Trial, rank: int, step: int, quantity: str, fqn: str) -> np.ndarray | None:
    """Return a rank's gradient or parameter of a step; None if it has none.

    Raises StopIteration if the step is not on record. quantity: "gradients" or "parameters".
    """
    return next(getattr(record, quantity).get(fqn) for record in trial.ranks[rank].steps if record.step == step)


def _content_key(value: np.ndarray | None) -> Hashable:
    """Return a key that is equal for values of the same shape and bytes. None as a value has a key of its own."""
    return ("nothing",) if value is None else (value.shape, value.tobytes())


def _relative_distance(value: np.ndarray, other: np.ndarray) -> str | float:
    """Return the largest difference, relative to the largest entry of `other`. "another shape" if the shapes differ."""
    if value.shape != other.shape:
        return "another shape"
    scale = float(np.max(np.abs(other))) or 1.0
    return float(np.max(np.abs(value - other))) / scale


# ---- where only digests are there


NO_PARAMETER_READ = (
    "no parameter was read after a step: optimizers step on tensors that are not the model's parameters, as ZeRO's do, so these"
    " are read in the next recorded step; record two steps or more in a row (--steps 1-3)"
)
NOT_ALL_STEPPED = "no step was over on every rank, so no parameters could be compared after one"
NONE_STEPPED = "no parameter was read after a step: no step of an optimizer was over"


def _judge_digests(trial: Trial) -> Result:
    """Compare the digests of parameters of ranks that claim the same slices, or are replicas by the layout.

    NOT APPLICABLE if there are no such ranks. UNKNOWN if replicas train locally and no recorded step leaves them equal.
    UNKNOWN as well if they have other parameters on record, or if no parameters were read after a step.
    """
    summaries = trial.rank_summaries
    dims = trial.plan.dims
    ignored_findings, ignored_compared = _compare_ignored(summaries, dims)
    claimed = [*families_of_replicas(summaries), *_replicas_by_layout(summaries, dims)]
    if local := never_averaged_families(claimed):
        ranks = ranks_text(tuple(summary.rank for summary in local[0]))
        means = local_training_means(local[0])
        note = f"ranks {ranks} train locally by {means}, and no recorded step leaves them the same bytes again"
        return Result("replica_agreement", Verdict.UNKNOWN, note=note)
    not_local = [family for family in claimed if not local_training_means(family)]
    averaged_again = len(claimed) - len(not_local)
    families = [*not_local, *copied_families(summaries), *uncut_families(summaries)]
    if ranks_of_line := _ranks_with_other_parameters(trial):
        note = (
            f"ranks {ranks_text(ranks_of_line)} are replicas by the layout, but of each other parameters are on record"
        )
        return Result("replica_agreement", Verdict.UNKNOWN, note=note)
    separate_findings = _separate_replica_findings(trial)
    if not families and not ignored_compared and not separate_findings and not averaged_again:
        reason = "no two ranks claim the same parts of all parameters"
        return not_applicable("replica_agreement", f"{reason}, or are replicas by the layout and began alike")
    findings: list[Finding] = []
    for step, pairs in differing_by_step(families).items():
        for majority, others in pairs:
            findings.append(
                Finding(
                    ranks=tuple(others),
                    step=step,
                    quantity="parameters after the step",
                    expected=f"the bytes of ranks {ranks_text(majority)}",
                    observed="other bytes",
                )
            )
    examined = ignored_compared + _count_comparisons(families) + len(separate_findings) + averaged_again
    if not examined and any(summary.shown and 0 in summary.contents.by_step for summary in summaries):
        stepped = sum(bool(summary.modules.optimizers) for summary in summaries)
        if stepped == len(summaries):
            note = NO_PARAMETER_READ
        elif stepped:
            note = NOT_ALL_STEPPED
        else:
            note = NONE_STEPPED
        return Result("replica_agreement", Verdict.UNKNOWN, note=note)
    return verdict_of("replica_agreement", [*findings, *ignored_findings, *separate_findings], examined)


def _separate_replica_findings(trial: Trial) -> list[Finding]:
    """Return a finding for each line of ranks along dp_replicate whose gradients no collective reduces.

    Only lines are returned in which all ranks began with other bytes or claims: bytes are compared for all others.
    Empty if it is not known which ranks are connected.
    """
    summaries = trial.rank_summaries
    joined_ranks: dict[int, tuple[int, ...]] = {}
    for ranks in connected_rank_sets(summaries):
        joined_ranks |= dict.fromkeys(ranks, ranks)
    lines = trial.axis_groups_by_rank("dp_replicate") if trial.plan.dims.world_size == len(joined_ranks) else {}
    began = {summary.rank: (summary.contents.by_step.get(0), summary.parameters.slices) for summary in summaries}
    findings: list[Finding] = []
    for line in sorted(set(lines.values())):
        sets = sorted({joined_ranks[rank] for rank in line})
        if len(sets) > 1 and len({began[rank] for rank in line}) == len(line):
            text = " and ".join(ranks_text(ranks) for ranks in sets[:2])
            if len(sets) > 2:
                text += " and others"
            findings.append(
                Finding(
                    ranks=line,
                    step=summaries[0].shown,
                    quantity="gradients of replicas",
                    expected="collectives that reduce them",
                    note=f"between {text}: none in forward or backward, nor as much outside",
                )
            )
    return findings


def _count_comparisons(families: Sequence[list[Summary]]) -> int:
    """Return the number of comparisons: of each family, all ranks but one in all steps on record."""
    comparisons = 0
    for family in families:
        steps = [step for step in family[0].contents.by_step if step]
        comparisons += (len(family) - 1) * len(steps)
    return comparisons


def _with_only(summary: Summary, by_step: dict[int, int]) -> Summary:
    """Return the summary with the digests of one parameter as its contents, and without claims or names."""
    whole = replace(summary, parameters=replace(summary.parameters, slices=0, model=0))
    return with_contents_by_step(whole, by_step)


def _compare_ignored(summaries: Sequence[Summary], dims: ParallelDims) -> tuple[list[Finding], int]:
    """Return a finding for each ignored parameter in which replicas differ, and the number of comparisons.

    A wrapper ignores it. The finding is of the first step after which it differs. Only replicas by the layout that
    began with equal bytes are compared.
    """
    findings: list[Finding] = []
    compared = 0
    ignored: set[str] = set()
    for summary in summaries:
        ignored.update(summary.contents.ignored)
    for fqn in sorted(ignored):
        # The summaries keep this parameter alone, so that only its bytes decide.
        of_parameter = [
            _with_only(summary, summary.contents.ignored[fqn])
            for summary in summaries
            if fqn in summary.contents.ignored
        ]
        families = _replicas_by_layout(of_parameter, dims)
        compared += _count_comparisons(families)
        for step, ((majority, others), *_) in list(differing_by_step(families).items())[:1]:
            findings.append(
                Finding(
                    ranks=tuple(others),
                    step=step,
                    kind="parameter",
                    name=fqn,
                    quantity="value after the step",
                    expected=f"the bytes of ranks {ranks_text(majority)}",
                    observed="other bytes",
                    note="they began alike, and its wrapper ignores it",
                )
            )
    return findings, compared


def _ranks_with_other_parameters(trial: Trial) -> tuple[int, ...]:
    """Return the first line of ranks along dp_replicate in which parameters have other names or shapes on some ranks.

    Such a line is a mistake, or its ranks hold different experts. Only ranks that claim nothing are compared. Empty if
    there is no such line.
    """
    lines = trial.axis_groups_by_rank("dp_replicate")
    models = {
        summary.rank: summary.parameters.model for summary in trial.rank_summaries if not summary.parameters.slices
    }
    for line in lines.values():
        if len({models[rank] for rank in line if rank in models}) > 1:
            return line
    return ()


def _replicas_by_layout(summaries: Sequence[Summary], dims: ParallelDims) -> list[list[Summary]]:
    """Return the families of replicas of a job without wrappers, by the layout: ranks that differ in dp_replicate.

    They may differ in cp as well if nothing shards over it. Left out are ranks that claim slices. Replicas have the
    same parameters with the same bytes before the first step, which ranks that cut by hand have not.
    """
    by_layout: dict[tuple[object, ...], list[Summary]] = {}
    for summary in summaries:
        if not summary.parameters.slices and 0 in summary.contents.by_step:
            mesh_coordinate = coordinate_of_rank(dims, summary.rank)
            cp_coordinate = mesh_coordinate["cp"] if dims.dp_shard > 1 else 0
            pp_coordinate = mesh_coordinate["pp"]
            tp_coordinate = mesh_coordinate["tp"]
            layout_key = (pp_coordinate, mesh_coordinate["dp_shard"], cp_coordinate, tp_coordinate)
            by_layout.setdefault((*layout_key, summary.parameters.model, summary.contents.by_step[0]), []).append(
                summary
            )
    return [family for family in by_layout.values() if len(family) > 1]
