"""Summary of one rank of a recorded job: what a page on all ranks needs of it.

Many things are one number here: ranks that have the same number have the same things. Ranks of groups are written as a
person writes ranges, for a group may have thousands.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.core.evidence.alike import rank_class_of_record
from harness.core.evidence.claimed import (
    claimed_slice_keys,
    copied_contents,
    group_roles,
    ignored_digests,
    placement_text,
    unclaimed_digests,
    uncut_contents,
)
from harness.core.evidence.format import INLINED
from harness.core.evidence.keys import ranks_key, stable_digest
from harness.core.evidence.recording import Fed, RankRecord
from harness.core.evidence.records import BACKGROUND, Collective, RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.summary_parts import (
    Contents,
    Environment,
    Groups,
    Issued,
    Modules,
    Outside,
    Parameters,
    Progress,
    RankClass,
    Received,
    Recorder,
    Resources,
    Traffic,
    Use,
)

INSIDE = ("forward", "backward", "pipeline")
POINT_TO_POINT = ("send", "recv")
Kind = tuple[str, str, str, str]  # ranks, op, phase, dtype
MOST_INPUTS = 16  # of a step
UNEVEN = ("all_to_all", "scatter", "gather")  # ranks may rightly pass different numbers of bytes


@dataclass(frozen=True)
class Summary:
    """What is seen of one rank at a glance. Files have the fields of its parts among its own."""

    STORED_ORDER = (
        *("rank", "world", "ended", "error", "host", "steps_seen", "last", "parts", "optimizers", "model"),
        *("parameters", "elements", "placements", "slices", "contents", "fed", "not_finite", "shown", "uses", "issued"),
        *("idle", "waits", "unstepped", "memory", "kept", "settings", "versions", "wrappers", "roles", "argv"),
        *("left_out", "seconds", "peak", "own", "outside", "whole", "background", "copies", "kind", "places"),
        *("tokens", "inputs", "ignored", "joined", "failed", "idle_steps", "launch", "reached", "hooks", "unclaimed"),
        *("own_groups", "beside"),
    )

    rank: int
    """Global rank."""
    world: int
    """Number of ranks of the job, as this rank sees it."""
    shown: int
    """Step that is shown: what is here of one step is of this one; 0 if none was recorded."""
    progress: Progress = field(metadata=INLINED)
    """How far it came, and how it ended."""
    environment: Environment = field(metadata=INLINED)
    """Where and how its process ran."""
    recorder: Recorder = field(metadata=INLINED)
    """What the recorder itself did."""
    modules: Modules = field(metadata=INLINED)
    """Its models, their wrappers and optimizers."""
    parameters: Parameters = field(metadata=INLINED)
    """Names, shapes and placements of its parameters."""
    contents: Contents = field(metadata=INLINED)
    """What its parameters hold, by step."""
    received: Received = field(metadata=INLINED)
    """Samples that it received, by step."""
    traffic: Traffic = field(metadata=INLINED)
    """What it moved."""
    groups: Groups = field(metadata=INLINED)
    """Process groups that it is a member of."""
    resources: Resources = field(metadata=INLINED)
    """Time and memory."""
    rank_class: RankClass = field(metadata=INLINED)
    """Which ranks left alike records."""

    @property
    def saw_a_step(self) -> bool:
        """Whether the step that is shown came to its end: what did not run in it was left out."""
        return 0 < self.shown <= self.progress.steps_seen


def summary_of(record: RankRecord) -> Summary:
    """Return the summary of a rank that left this record, with the class of ranks that left alike records."""
    number_of_class, groups = rank_class_of_record(record)
    return _summary(record, RankClass(number=number_of_class, groups=groups))


def summary_without_class(record: RankRecord) -> Summary:
    """Return the summary with class 0 and no groups of the class, for use where nobody looks for ranks with alike
    records.
    """
    return _summary(record, RankClass(number=0, groups=()))


def _summary(record: RankRecord, rank_class: RankClass) -> Summary:
    """Return the summary; what it has of one step alone is of step_shown(record)."""
    evidence = record.evidence
    shown = step_to_show(record)
    step = next((step for step in evidence.steps if step.step == shown), None)
    return Summary(
        rank=evidence.rank,
        world=evidence.world_size,
        shown=shown,
        progress=Progress(
            ended=record.ended,
            error=record.error,
            steps_seen=record.steps_seen,
            last=record.last,
            joined=evidence.joined,
            reached=record.reached,
        ),
        environment=_environment(record, step),
        recorder=Recorder(left_out=record.left_out, failed=record.failed, seconds=record.own),
        modules=_modules(record),
        parameters=_parameters(evidence),
        contents=_contents(record),
        received=_received(record),
        traffic=_traffic(record, shown),
        groups=_groups(record),
        resources=_resources(record, step),
        rank_class=rank_class,
    )


def _environment(record: RankRecord, shown: StepEvidence | None) -> Environment:
    """Return where and how the process ran. Settings are those of the step that is shown; none if no step is."""
    evidence = record.evidence
    settings = shown.settings if shown else {}
    return Environment(
        host=record.host,
        launch=evidence.launch,
        argv=record.argv,
        versions=evidence.environment,
        settings={name: " and ".join(values) for name, values in settings.items()},
    )


def _modules(record: RankRecord) -> Modules:
    """Return models, wrappers and optimizers. Without a list of stepped parameters, none counts as unstepped."""
    wrappers = record.evidence.structure.values()
    names = {tensor.fqn for tensor in record.evidence.parameters}
    return Modules(
        classes=record.parts,
        wrappers=dict(Counter(wrapper.kind for wrapper in wrappers)),
        hooks=tuple(sorted({wrapper.comm_hook for wrapper in wrappers} - {""})),
        optimizers=record.optimizers,
        unstepped=len(names - set(record.stepped)) if record.stepped else 0,
        buffers=record.buffers,
    )


def _parameters(evidence: RankEvidence) -> Parameters:
    """Return counts, placements, and one number each for model and slices; 0 slices where nothing claims any."""
    parameters = evidence.parameters
    places = claimed_slice_keys(evidence)
    return Parameters(
        model=stable_digest(sorted((tensor.fqn, tensor.global_shape, tensor.dtype) for tensor in parameters)),
        count=len(parameters),
        elements=sum(math.prod(tensor.global_shape) for tensor in parameters),
        placements=dict(Counter(placement_text(tensor) for tensor in parameters)),
        slices=stable_digest(places) if places else 0,
    )


def _contents(record: RankRecord) -> Contents:
    """Return what parameters hold, by step, as digests. Steps without numbers that are not finite are left out of
    `not_finite`.
    """
    return Contents(
        by_step=_contents_by_step(record),
        copies=copied_contents(record),
        ignored=ignored_digests(record),
        unclaimed=unclaimed_digests(record),
        not_finite={step.step: step.not_finite for step in record.steps if step.not_finite},
        idle_steps=idle_steps(record),
        uncut=uncut_contents(record),
    )


def _contents_by_step(record: RankRecord) -> dict[int, int]:
    """Return, by step, one number for the parameters of which something claims where they lie; for all if nothing
    claims any.

    Steps without digests are left out.
    """
    claimed = {fqn for fqn, *_ in claimed_slice_keys(record.evidence)}
    compared = claimed or {tensor.fqn for tensor in record.evidence.parameters}
    contents = {}
    for step in record.steps:
        if digests := sorted((fqn, digest) for fqn, digest in step.digests.items() if fqn in compared):
            contents[step.step] = stable_digest(digests)
    return contents


def _received(record: RankRecord) -> Received:
    """Return digests of what the rank was fed, by step. `tokens` has integers alone; a step without any is left out."""
    fed = {step.step: step.fed for step in record.steps if step.fed}
    integers = {step: [batch for batch in batches if "int" in batch.dtype] for step, batches in fed.items()}
    return Received(
        batches={step: _inputs_digest(batches) for step, batches in fed.items()},
        tokens={step: _inputs_digest(batches) for step, batches in integers.items() if batches},
        inputs={step: _all_input_digests(batches) for step, batches in fed.items()},
        drawn=record.drawn,
        samples=record.samples,
    )


def _traffic(record: RankRecord, shown: int) -> Traffic:
    """Return what moved: in the step that is shown, and outside of forward and backward in all whole steps."""
    evidence = record.evidence
    return Traffic(
        uses=uses_in_step(evidence, shown, record.ended_steps),
        waits=_count_barriers(evidence, shown),
        outside=moved_outside_of_passes(evidence, followed_steps(record)),
        whole=followed_steps(record),
        background=background_traffic(evidence),
    )


def _groups(record: RankRecord) -> Groups:
    """Return the groups that the rank is a member of: roles, what it issued over each, and those that nothing ran over."""
    evidence = record.evidence
    return Groups(
        roles=group_roles(evidence),
        issued=issued_sequences(evidence),
        idle=tuple(sorted({ranks_key(group.ranks) for group in _unused_groups(evidence)})),
        own=evidence.own_groups,
        beside=record.beside,
    )


def _resources(record: RankRecord, shown: StepEvidence | None) -> Resources:
    """Return seconds by step, and bytes: the peak of all steps, and what was held in the step that is shown."""
    return Resources(
        seconds={step.step: step.seconds for step in record.steps if step.seconds},
        peak=max((step.peak for step in record.steps), default=0),
        memory=dict(shown.memory) if shown else {},
        after_forward=max((unit.storage for unit in shown.after_forward), default=0) if shown else 0,
    )


def idle_steps(record: RankRecord) -> tuple[int, ...]:
    """Return the steps in which no parameter that an optimizer has, and this rank holds some of, had a gradient.

    Empty if the optimizers have none of the model's tensors. Trap: optimizers that step on other tensors than the
    model's, as ZeRO's do, look for no gradient there.
    """
    fqns = {tensor.fqn for tensor in record.evidence.parameters if tensor.value.size} & {*record.stepped}
    return tuple(step.step for step in record.steps if step.step and fqns and fqns <= {*step.ungraded})


def _inputs_digest(fed: Iterable[Fed]) -> int:
    """Return one number for digests and shapes of the first inputs of these passes, in order."""
    return stable_digest([(batch.digest, batch.shape) for batch in fed])


def _all_input_digests(fed: Iterable[Fed]) -> tuple[int, ...]:
    """Return the digests of all inputs of these passes, in order, at most MOST_INPUTS."""
    digests: list[int] = []
    for batch in fed:
        digests += (batch.digest, *batch.others)
    return tuple(digests[:MOST_INPUTS])


def step_to_show(record: RankRecord) -> int:
    """Return the step that a summary shows: 2 if it was recorded, for groups are set up and caches filled by then; else
    the last.

    Steps that did not end count only if none did. 0 without any.
    """
    steps = record.ended_steps or tuple(step.step for step in record.evidence.steps)
    return 2 if 2 in steps else max(steps, default=0)


def uses_in_step(evidence: RankEvidence, shown: int, ended: Sequence[int] = ()) -> tuple[Use, ...]:
    """Return what moved in forward, backward and pipeline of the step that is shown, by group, collective, phase and
    dtype.

    Barriers and groups of one rank are left out. `steps` of a use says in which steps as much moved, for a rank may do
    something once, as DDP broadcasts its buckets in the second step alone. ended: steps that did.
    """
    inside = [call for call in evidence.collectives if call.phase in INSIDE and call.op != "barrier"]
    moved = _amounts_by_kind_and_step(call for call in inside if len(call.ranks) > 1)
    steps = tuple(sorted(step.step for step in evidence.steps))
    all_uses, blocked = [], _seconds_blocked(inside, ended)
    for kind, by_step in sorted(moved.items()):
        if shown in by_step:
            as_much = tuple(step for step in steps if by_step.get(step) == by_step[shown])
            always = as_much == steps and len(steps) > 1
            named = "" if always else ranks_key(as_much)
            all_uses.append(Use(*kind, *by_step[shown], steps=named, blocked=blocked.get(kind, {})))
    return tuple(all_uses)


def _seconds_blocked(calls: Sequence[Collective], steps: Sequence[int]) -> dict[Kind, dict[int, float]]:
    """Return, by kind and by each of these steps, the seconds for which calls blocked their thread.

    A kind of which some call was not seen to return is left out.
    """
    seconds_by_kind: dict[Kind, dict[int, float]] = defaultdict(lambda: dict.fromkeys(steps, 0.0))
    for call in calls:
        if call.step in steps:
            kind = ranks_key(call.ranks), call.op, call.phase, call.dtype
            seconds_by_kind[kind][call.step] += math.nan if call.blocked is None else call.blocked
    return {kind: by_step for kind, by_step in seconds_by_kind.items() if not math.isnan(sum(by_step.values()))}


def _amounts_by_kind_and_step(calls: Iterable[Collective]) -> dict[Kind, dict[int, tuple[int, int]]]:
    """Return, by kind and step, (number of calls, their bytes)."""
    amounts_by_kind: dict[Kind, dict[int, tuple[int, int]]] = defaultdict(dict)
    for call in calls:
        by_step = amounts_by_kind[ranks_key(call.ranks), call.op, call.phase, call.dtype]
        count, size = by_step.get(call.step, (0, 0))
        by_step[call.step] = (count + 1, size + call.bytes)
    return amounts_by_kind


def followed_steps(record: RankRecord) -> tuple[int, ...]:
    """Return the steps that ended and that another step followed, or the only step of a job.

    What comes after a job's last step, such as a checkpoint, is on the account of that step.
    """
    steps = [step.step for step in record.evidence.steps]
    last = max(record.steps_seen, *steps, 0)
    return tuple(step for step in record.ended_steps if step < last or len(steps) == 1)


def moved_outside_of_passes(evidence: RankEvidence, steps: tuple[int, ...]) -> tuple[Outside, ...]:
    """Return what moved losses, norms and so on: outside of forward, backward and pipeline, in these steps.

    Equal calls and bytes in several steps are one entry, with its steps. A correct job may move such things in some
    steps only.
    """
    calls = [call for call in evidence.collectives if call.step in steps and call.phase not in INSIDE]
    alike: dict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    for kind, by_step in _amounts_by_kind_and_step(call for call in calls if len(call.ranks) > 1).items():
        for step, (count, size) in sorted(by_step.items()):
            alike[kind, count, size].append(step)
    rows = []
    for (kind, count, size), steps_alike in sorted(alike.items()):
        rows.append(Outside(*kind, count, size, steps=ranks_key(tuple(steps_alike))))
    return tuple(rows)


def background_traffic(evidence: RankEvidence) -> tuple[Use, ...]:
    """Return what other threads moved over groups of several ranks, which is of no step."""
    moved = _amounts_by_kind_and_step(
        call for call in evidence.collectives if call.phase == BACKGROUND and len(call.ranks) > 1
    )
    return tuple(Use(*kind, *by_step[0]) for kind, by_step in sorted(moved.items()))


def issued_sequences(evidence: RankEvidence) -> tuple[Issued, ...]:
    """Return what was issued over each group of several ranks, as one number for all and one for each step.

    Sends and receives are left out: what goes from one rank to another has no order that others share.
    """
    sequences: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for call in evidence.collectives:
        if call.op not in POINT_TO_POINT and len(call.ranks) > 1:
            sequences[call.group, ranks_key(call.ranks)].append(_as_issued(call))
    return tuple(
        Issued(*key, len(calls), stable_digest(_without_place(calls)), _digests_by_step(calls))
        for key, calls in sorted(sequences.items())
    )


def _digests_by_step(calls: Sequence[Any]) -> dict[int, int]:
    """Return, by step, one number for its calls. calls: as _as_issued returns them, the step last."""
    return {
        step: stable_digest([call for call in calls if call[-1] == step])
        for step in dict.fromkeys(c[-1] for c in calls)
    }


WITHOUT_PLACE = "broadcast"
"""DDP broadcasts its module's buffers in each rank's first forward pass, which on some ranks may be one that trains nothing."""


def _as_issued(call: Collective) -> list[Any]:
    """Return what members of a group should issue alike: [op, dtype, bytes, place of the root, step].

    Bytes are 0 for collectives of which ranks may pass different numbers of bytes.
    """
    return [call.op, call.dtype, 0 if call.op in UNEVEN else call.bytes, call.root_place, call.step]


def _without_place(calls: Sequence[list[Any]]) -> list[list[Any]]:
    """Return the calls with the step of each WITHOUT_PLACE set to 0."""
    return [[*call[:-1], 0] if call[0] == WITHOUT_PLACE else call for call in calls]


def _unused_groups(evidence: RankEvidence) -> list[Any]:
    """Return the groups of several ranks over which this rank issued nothing."""
    used = {call.ranks for call in evidence.collectives}
    return [group for group in evidence.groups if len(group.ranks) > 1 and group.ranks not in used]


def _count_barriers(evidence: RankEvidence, step: int) -> int:
    """Return the number of barriers in forward, backward and pipeline of a step."""
    return sum(c.op == "barrier" and c.step == step and c.phase in INSIDE for c in evidence.collectives)
