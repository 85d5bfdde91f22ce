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
from harness.core.judge.local_training import local_by, not_averaged
from harness.core.judge.observed import copied, differing, most_and_others, replicas, uncut
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.separate_models import joined_sets
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.slices import Slice, numel

STAGE = "numbers"
NEEDS = frozenset({"contents"})
OF_GRADIENTS = True

Replicated = tuple[str, Slice]
"""A parameter's fqn, and a slice of it."""


def check(trial: Trial) -> Result:
    return _by_values(trial) if "values" in trial.provided else _by_digests(trial)


def _by_values(trial: Trial) -> Result:
    families, planned = replica_families(trial), planned_families(trial)
    if not families and (not planned or trial.assumption.references):
        return not_applicable("replica_agreement", "no two ranks hold the same slice of anything")
    findings, examined = [], 0
    for step in trial.case.steps:
        for what, alike in (("gradients", gradient_families(trial, families)), ("parameters", families)):
            for (fqn, _), ranks in alike.items():
                examined += len(ranks) - 1
                findings += _differing(trial, step, what, fqn, ranks)
    apart = [key for key, ranks in planned.items() if not set(ranks) <= set(families.get(key, ()))]
    apart = [] if trial.assumption.references else apart
    if apart and not findings:
        text = f"ranks {ranks_text(planned[apart[0]])} should hold the same slice of {apart[0][0]} and do not"
        note = f"{text} ({len(apart)} of {len(planned)} such slices); see `shard_contents`"
        return Result("replica_agreement", Verdict.UNKNOWN, examined, note=note)
    return verdict_of("replica_agreement", findings, examined)


def planned_families(trial: Trial) -> dict[Replicated, list[int]]:
    return _shared({rank: trial.plan.slices[rank] for rank in sorted(trial.ranks)})


def replica_families(trial: Trial) -> dict[Replicated, list[int]]:
    """Compare ranks that train by the same reference: a hypothesis may say that some train separately."""
    found: dict[Replicated, list[int]] = {}
    for together in _together(trial):
        held = {rank: {fqn: trial.slice_of(rank, fqn) for fqn in trial.holdings[rank]} for rank in together}
        found |= {key: ranks for key, ranks in _shared(held).items() if key not in found}
    return found


def gradient_families(trial: Trial, families: dict[Replicated, list[int]]) -> dict[Replicated, list[int]]:
    """Return the slices of parameters, or those of the plan if ZeRO cuts gradients separately."""
    apart = trial.plan.gradient_slices
    return _shared({rank: apart[rank] for rank in sorted(trial.ranks)}) if apart else families


def _together(trial: Trial) -> list[list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(trial.ranks):
        groups[id(trial.reference_of(rank))].append(rank)
    return list(groups.values())


def _shared(held: Mapping[int, Mapping[str, Slice | None]]) -> dict[Replicated, list[int]]:
    """Return, by parameter and slice, the ranks that hold it, where there are several."""
    families: dict[Replicated, list[int]] = defaultdict(list)
    for rank, slices in held.items():
        for fqn, part in slices.items():
            if part is not None and numel(part):
                families[fqn, part].append(rank)
    return {key: ranks for key, ranks in families.items() if len(ranks) > 1}


def _differing(trial: Trial, step: int, what: str, fqn: str, ranks: list[int]) -> list[Finding]:
    values = {rank: _value(trial, rank, step, what, fqn) for rank in ranks}
    pair = most_and_others({rank: _key(value) for rank, value in values.items()})
    if pair is None:
        return []
    first, other = pair[0][0], pair[1][0]
    one, another = values[first], values[other]
    seen = None if one is None or another is None else _distance(another, one)
    return [
        Finding(
            ranks=tuple(ranks),
            step=step,
            kind="parameter",
            name=fqn,
            quantity="gradient" if what == "gradients" else "value",
            expected="the same bytes on all",
            observed=seen,
            unit="of the largest entry" if isinstance(seen, float) else "",
            note=f"on rank {first if one is None else other}, compared with rank {other if one is None else first}",
        )
    ]


def _value(trial: Trial, rank: int, step: int, what: str, fqn: str) -> np.ndarray | None:
    return next(getattr(s, what).get(fqn) for s in trial.ranks[rank].steps if s.step == step)


def _key(value: np.ndarray | None) -> Hashable:
    """What is equal where contents are, as digests are of a recording: shape and bytes."""
    return ("nothing",) if value is None else (value.shape, value.tobytes())


def _distance(one: np.ndarray, other: np.ndarray) -> str | float:
    if one.shape != other.shape:
        return "another shape"
    scale = float(np.max(np.abs(other))) or 1.0
    return float(np.max(np.abs(one - other))) / scale


# ---- where only digests are there


UNREAD = (
    "no parameter was read after a step: optimizers step on tensors that are not the model's parameters, as ZeRO's do, so these"
    " are read in the next recorded step; record two steps or more in a row (--steps 1-3)"
)
SOME_STEPPED = "no step was over on every rank, so no parameters could be compared after one"
UNSTEPPED = "no parameter was read after a step: no step of an optimizer was over"


def _by_digests(trial: Trial) -> Result:
    summaries, dims = trial.glances, trial.plan.dims
    apart, compared = _ignored_replicas(summaries, dims)
    claimed = [*replicas(summaries), *_replicas_by_layout(summaries, dims)]
    if local := not_averaged(claimed):
        ranks = ranks_text(tuple(one.rank for one in local[0]))
        told = f"ranks {ranks} train locally by {local_by(local[0])}, and no recorded step leaves them the same bytes again"
        return Result("replica_agreement", Verdict.UNKNOWN, note=told)
    own = [family for family in claimed if not local_by(family)]
    averaged_again = len(claimed) - len(own)
    families = [*own, *copied(summaries), *uncut(summaries)]
    if others := _other_parameters(trial):
        told = f"ranks {ranks_text(others)} are replicas by the layout, but of each other parameters are on record"
        return Result("replica_agreement", Verdict.UNKNOWN, note=told)
    parted = _parted_replicas(trial)
    if not families and not compared and not parted and not averaged_again:
        none = "no two ranks claim the same parts of all parameters"
        return not_applicable("replica_agreement", f"{none}, or are replicas by the layout and began alike")
    findings = [
        Finding(
            ranks=tuple(others),
            step=step,
            quantity="parameters after the step",
            expected=f"the bytes of ranks {ranks_text(most)}",
            observed="other bytes",
        )
        for step, pairs in differing(families).items()
        for most, others in pairs
    ]
    examined = compared + _compared(families) + len(parted) + averaged_again
    if not examined and any(one.shown and 0 in one.contents for one in summaries):
        stepped = sum(bool(one.optimizers) for one in summaries)
        why = UNREAD if stepped == len(summaries) else SOME_STEPPED if stepped else UNSTEPPED
        return Result("replica_agreement", Verdict.UNKNOWN, note=why)
    return verdict_of("replica_agreement", [*findings, *apart, *parted], examined)


def _parted_replicas(trial: Trial) -> list[Finding]:
    """Return the ranks of one line that nothing joins: gradients are reduced between none of them, whatever they began with.
    Bytes are compared for ranks that claim something or began alike."""
    summaries = trial.glances
    home = {rank: ranks for ranks in joined_sets(summaries) for rank in ranks}
    lines = trial.lines("dp_replicate") if trial.plan.dims.world_size == len(home) else {}
    began = {one.rank: (one.contents.get(0), one.slices) for one in summaries}
    findings = []
    for line in sorted(set(lines.values())):
        sets = sorted({home[rank] for rank in line})
        if len(sets) > 1 and len({began[rank] for rank in line}) == len(line):
            text = " and ".join(ranks_text(ranks) for ranks in sets[:2]) + " and others" * (len(sets) > 2)
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


def _compared(families: Sequence[list[Summary]]) -> int:
    return sum((len(family) - 1) * len([s for s in family[0].contents if s]) for family in families)


def _ignored_replicas(summaries: Sequence[Summary], dims: ParallelDims) -> tuple[list[Finding], int]:
    """The first step after which each of them differs, and how many were compared."""
    findings, compared = [], 0
    for fqn in sorted({fqn for one in summaries for fqn in one.ignored}):
        alone = [replace(one, slices=0, model=0, contents=one.ignored[fqn]) for one in summaries if fqn in one.ignored]
        families = _replicas_by_layout(alone, dims)
        compared += _compared(families)
        for step, ((most, others), *_) in list(differing(families).items())[:1]:
            findings.append(
                Finding(
                    ranks=tuple(others),
                    step=step,
                    kind="parameter",
                    name=fqn,
                    quantity="value after the step",
                    expected=f"the bytes of ranks {ranks_text(most)}",
                    observed="other bytes",
                    note="they began alike, and its wrapper ignores it",
                )
            )
    return findings, compared


def _other_parameters(trial: Trial) -> tuple[int, ...]:
    """Ranks that claim nothing, differ in dp_replicate alone, and have parameters of other names or shapes: by a mistake, or
    as experts that are spread over them have."""
    lines = trial.lines("dp_replicate")
    models = {one.rank: one.model for one in trial.glances if not one.slices}
    for line in lines.values():
        if len({models[rank] for rank in line if rank in models}) > 1:
            return line
    return ()


def _replicas_by_layout(summaries: Sequence[Summary], dims: ParallelDims) -> list[list[Summary]]:
    """Return the replicas of a job without wrappers: ranks that differ in dp_replicate, and in cp where nothing shards over it.
    Their parameters are the same ones with the same bytes before the first step. Ranks that cut by hand begin with others."""
    found: dict[tuple[object, ...], list[Summary]] = {}
    for one in summaries:
        if not one.slices and 0 in one.contents:
            at = coordinate(dims, one.rank)
            cp = at["cp"] if dims.dp_shard > 1 else 0
            found.setdefault((at["pp"], at["dp_shard"], cp, at["tp"], one.model, one.contents[0]), []).append(one)
    return [family for family in found.values() if len(family) > 1]
