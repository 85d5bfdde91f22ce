"""What a page on all ranks of a recorded job needs of one of them.

Many things are one number here: ranks that have the same number have the same things. Ranks of groups are written as a
person writes ranges, for a group may have thousands.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from harness.core.evidence.alike import alike
from harness.core.evidence.claimed import claimed_places, copies, ignored, placement_text, roles, unclaimed, uncut
from harness.core.evidence.format import LATER
from harness.core.evidence.keys import number, ranks_key
from harness.core.evidence.recording import Beside, Fed, Last, RankRecord, Reached
from harness.core.evidence.records import BACKGROUND, Collective, OwnGroup, RankEvidence

INSIDE = ("forward", "backward", "pipeline")
POINT_TO_POINT = ("send", "recv")
Kind = tuple[str, str, str, str]  # ranks, op, phase, dtype
MOST_INPUTS = 16  # of a step
UNEVEN = ("all_to_all", "scatter", "gather")  # ranks may rightly pass different numbers of bytes


@dataclass(frozen=True)
class Use:
    """What a rank moved in the step that is shown, over one group, by one collective in one phase."""

    ranks: str
    """Global ranks of the group, in the words of ranks_key."""
    op: str
    """Name of the collective."""
    phase: str
    """Phase of the step."""
    dtype: str
    """Dtype of the elements."""
    calls: int
    """Number of calls."""
    bytes: int
    """Bytes of all calls."""
    steps: str = ""
    """Recorded steps in which it moved as much, in the words of ranks_key; empty for all of several."""
    blocked: dict[int, float] = field(default_factory=dict, metadata=LATER, compare=False)
    """Recorded step that ended -> seconds in which its calls blocked their thread, where that was seen of all of them."""


@dataclass(frozen=True)
class Outside:
    """What a rank moved outside of forward and backward, over one group, by one collective: the same in each of these steps."""

    ranks: str
    """Global ranks of the group, in the words of ranks_key."""
    op: str
    """Name of the collective."""
    phase: str
    """Phase: optimizer, evaluation, checkpoint or other."""
    dtype: str
    """Dtype of the elements."""
    calls: int
    """Number of calls."""
    bytes: int
    """Bytes of all calls."""
    steps: str
    """Steps, in the words of ranks_key."""


@dataclass(frozen=True)
class Issued:
    """All that a rank issued over one group in the recorded steps, in order."""

    group: str
    """Name of the group."""
    ranks: str
    """Global ranks of the group, in the words of ranks_key."""
    calls: int
    """Number of calls."""
    digest: int
    """One number for all calls."""
    steps: dict[int, int] = field(default_factory=dict)
    """Step -> one number for its calls."""


@dataclass(frozen=True)
class Summary:
    """What is seen of one rank at a glance."""

    rank: int
    """Global rank."""
    world: int
    """Number of ranks of the job, as this rank sees it."""
    ended: str
    """Word for how it ended, as in RankRecord."""
    error: str
    """What it raised; empty if nothing."""
    host: str
    """Name of its machine."""
    steps_seen: int
    """Number of all steps that it trained to their end."""
    last: Last | None
    """Last collective that it issued; None if it issued none."""
    parts: tuple[str, ...]
    """Classes of its models."""
    optimizers: tuple[str, ...]
    """Optimizers, each in one line."""
    model: int
    """One number for names, whole shapes and dtypes of its parameters."""
    parameters: int
    """Number of its parameters."""
    elements: int
    """Number of their elements, as whole tensors."""
    placements: dict[str, int]
    """Placement as text -> number of parameters that are claimed to lie so."""
    slices: int
    """One number for the parts of parameters that it claims to hold; 0 where nothing is claimed."""
    contents: dict[int, int]
    """Step -> one number for the bytes of parameters: of those that `slices` is of, where there are any."""
    fed: dict[int, int]
    """Step -> one number for the samples of its forward passes."""
    not_finite: dict[int, tuple[str, ...]]
    """Step -> parameters with infinite numbers or NaN."""
    shown: int
    """Step that `uses`, `waits`, `memory`, `kept` and `settings` are of; 0 if none was recorded."""
    uses: tuple[Use, ...]
    """What it moved inside forward and backward."""
    issued: tuple[Issued, ...]
    """What it issued over each group."""
    idle: tuple[str, ...]
    """Groups over which nothing ran."""
    waits: int
    """Number of barriers inside forward and backward."""
    unstepped: int
    """Number of parameters that no optimizer has."""
    memory: dict[str, int]
    """Kind -> bytes between steps."""
    kept: int
    """Bytes of parameters that are in memory as forward ends."""
    settings: dict[str, str]
    """Values of torch switches by name."""
    versions: dict[str, str]
    """Versions of python and torch, machine and device."""
    wrappers: dict[str, int]
    """Kind -> number of wrappers."""
    roles: dict[str, str]
    """Group -> what wrappers and DTensors claim of it."""
    argv: tuple[str, ...]
    """Command line of the process."""
    left_out: tuple[str, ...]
    """Models that are not recorded, and why."""
    seconds: dict[int, float]
    """Step -> seconds until the next one began."""
    peak: int
    """Most bytes of memory that were in use."""
    own: float
    """Seconds that the recorder took."""
    outside: tuple[Outside, ...] = ()
    """What it moved outside of forward and backward in `whole`."""
    whole: tuple[int, ...] = ()
    """Recorded steps of which all is on record."""
    background: tuple[Use, ...] = ()
    """What other threads moved than the one that trains, as far as it is on record; of no step."""
    copies: dict[str, dict[int, int]] = field(default_factory=dict)
    """Group over which some parameters are cut -> the contents by step of those that are copied over it."""
    kind: int = 0
    """Number that ranks with alike records have in common, as in evidence.alike; 0 where it was not computed."""
    places: tuple[tuple[str, str], ...] = ()
    """Groups that the record names, as in evidence.alike."""
    tokens: dict[int, int] = field(default_factory=dict)
    """The same as `fed`, for samples that are integers."""
    inputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Step -> digests of all tensors that its forward passes were called with; the first ones of many."""
    ignored: dict[str, dict[int, int]] = field(default_factory=dict)
    """Fqn -> the contents by step of parameters that a wrapper ignores, but for those that begin as constants."""
    joined: int | None = None
    """Step after which it ran out of inputs, as in RankEvidence."""
    failed: tuple[str, ...] = ()
    """What the recorder itself raised."""
    idle_steps: tuple[int, ...] = ()
    """Steps in which none of its parameters had a gradient."""
    launch: str = ""
    """Id of the recording."""
    reached: Reached | None = None
    """How far it came; None before the first pass."""
    hooks: tuple[str, ...] = ()
    """Communication hooks of DDP."""
    unclaimed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Fqn of parameters that nothing claims -> two digests, as in evidence.unclaimed."""
    own_groups: tuple[OwnGroup, ...] = ()
    """Process groups that the trainer made itself, of which torch has no ranks."""
    beside: tuple[Beside, ...] = ()
    """What other threads issued over groups of the thread that trains."""
    drawn: tuple[int, ...] = field(default=(), metadata=LATER)
    """Digests of the indices of its samples, as in RankRecord."""
    buffers: int = field(default=0, metadata=LATER)
    """Number of buffers of floating-point numbers."""
    samples: dict[int, tuple[int, ...]] = field(default_factory=dict, metadata=LATER)
    """Step -> digests of single samples, as in RankRecord."""
    uncut: dict[str, dict[int, int]] = field(default_factory=dict, metadata=LATER)
    """Group over which DTensors cut others, and how parameters began -> the contents by step, as in evidence.claimed.uncut."""

    @property
    def saw_a_step(self) -> bool:
        """Whether the step that is shown came to its end: what did not run in it was left out."""
        return 0 < self.shown <= self.steps_seen


COPIED = sorted({one.name for one in fields(RankRecord)} & {one.name for one in fields(Summary)})
"""What a summary has of the record as it is."""


def summary_of(record: RankRecord, *, places: bool = True) -> Summary:
    """places: whether ranks that are alike are looked for."""
    evidence, plain = record.evidence, {name: getattr(record, name) for name in COPIED}
    kind, named = alike(record) if places else (0, ())
    return Summary(
        rank=evidence.rank,
        world=evidence.world_size,
        placements=dict(Counter(placement_text(tensor) for tensor in evidence.parameters)),
        issued=issued(evidence),
        idle=tuple(sorted({ranks_key(group.ranks) for group in _idle(evidence)})),
        versions=evidence.environment,
        wrappers=dict(Counter(wrapper.kind for wrapper in evidence.structure.values())),
        roles=roles(evidence),
        copies=copies(record),
        uncut=uncut(record),
        ignored=ignored(record),
        joined=evidence.joined,
        own_groups=evidence.own_groups,
        launch=evidence.launch,
        hooks=tuple(sorted({wrapper.comm_hook for wrapper in evidence.structure.values()} - {""})),
        unclaimed=unclaimed(record),
        idle_steps=idle_steps(record),
        outside=outside(evidence, whole_steps(record)),
        whole=whole_steps(record),
        background=background(evidence),
        kind=kind,
        places=named,
        **plain | _model(record) | _steps(record) | _shown(record),
    )


def idle_steps(record: RankRecord) -> tuple[int, ...]:
    """Trap: optimizers that step on other tensors than the model's, as ZeRO's do, look for no gradient there."""
    held = {tensor.fqn for tensor in record.evidence.parameters if tensor.value.size} & {*record.stepped}
    return tuple(step.step for step in record.steps if step.step and held and held <= {*step.ungraded})


def _model(record: RankRecord) -> dict[str, Any]:
    parameters = record.evidence.parameters
    return {
        "model": number(sorted((t.fqn, t.global_shape, t.dtype) for t in parameters)),
        "parameters": len(parameters),
        "elements": sum(math.prod(t.global_shape) for t in parameters),
        "unstepped": len({t.fqn for t in parameters} - set(record.stepped)) if record.stepped else 0,
    }


def _steps(record: RankRecord) -> dict[str, Any]:
    """What is compared in every step that was recorded."""
    places = claimed_places(record.evidence)
    of = {fqn for fqn, *_ in places} or {tensor.fqn for tensor in record.evidence.parameters}
    held = {s.step: sorted((fqn, value) for fqn, value in s.digests.items() if fqn in of) for s in record.steps}
    return {
        "slices": number(places) if places else 0,
        "contents": {step: number(values) for step, values in held.items() if values},
        "fed": {s.step: _inputs(s.fed) for s in record.steps if s.fed},
        "tokens": {s.step: _inputs(whole) for s in record.steps if (whole := [f for f in s.fed if "int" in f.dtype])},
        "inputs": {s.step: _each_input(s.fed) for s in record.steps if s.fed},
        "not_finite": {s.step: s.not_finite for s in record.steps if s.not_finite},
        "seconds": {s.step: s.seconds for s in record.steps if s.seconds},
        "peak": max((s.peak for s in record.steps), default=0),
    }


def _inputs(fed: Iterable[Fed]) -> int:
    return number([(one.digest, one.shape) for one in fed])


def _each_input(fed: Iterable[Fed]) -> tuple[int, ...]:
    return tuple(digest for one in fed for digest in (one.digest, *one.others))[:MOST_INPUTS]


def _shown(record: RankRecord) -> dict[str, Any]:
    """What is shown of one step only."""
    evidence, shown = record.evidence, step_shown(record)
    seen = next((step for step in evidence.steps if step.step == shown), None)
    return {
        "shown": shown,
        "uses": uses(evidence, shown, record.ended_steps),
        "waits": _waits(evidence, shown),
        "memory": dict(seen.memory) if seen else {},
        "kept": max((after.storage for after in seen.after_forward), default=0) if seen else 0,
        "settings": {name: " and ".join(values) for name, values in seen.settings.items()} if seen else {},
    }


def step_shown(record: RankRecord) -> int:
    """The second, in which groups are set up and caches filled; else the last that was recorded, and ended if any did. 0: there
    is none."""
    steps = record.ended_steps or tuple(step.step for step in record.evidence.steps)
    return 2 if 2 in steps else max(steps, default=0)


def uses(evidence: RankEvidence, shown: int, ended: Sequence[int] = ()) -> tuple[Use, ...]:
    """A rank may do something once, as DDP broadcasts its buckets in the second step alone. ended: steps that did."""
    inside = [call for call in evidence.collectives if call.phase in INSIDE and call.op != "barrier"]
    moved = _by_step(call for call in inside if len(call.ranks) > 1)
    steps = tuple(sorted(step.step for step in evidence.steps))
    found, blocked = [], _blocked(inside, ended)
    for kind, by_step in sorted(moved.items()):
        if shown in by_step:
            as_much = tuple(step for step in steps if by_step.get(step) == by_step[shown])
            always = as_much == steps and len(steps) > 1
            named = "" if always else ranks_key(as_much)
            found.append(Use(*kind, *by_step[shown], steps=named, blocked=blocked.get(kind, {})))
    return tuple(found)


def _blocked(calls: Sequence[Collective], steps: Sequence[int]) -> dict[Kind, dict[int, float]]:
    """Return by kind and step how long calls blocked; nothing of a kind of which some call was not seen to return."""
    found: dict[Kind, dict[int, float]] = defaultdict(lambda: dict.fromkeys(steps, 0.0))
    for call in calls:
        if call.step in steps:
            kind = ranks_key(call.ranks), call.op, call.phase, call.dtype
            found[kind][call.step] += math.nan if call.blocked is None else call.blocked
    return {kind: by_step for kind, by_step in found.items() if not math.isnan(sum(by_step.values()))}


def _by_step(calls: Iterable[Collective]) -> dict[Kind, dict[int, tuple[int, int]]]:
    """How many of each kind, and their bytes."""
    found: dict[Kind, dict[int, tuple[int, int]]] = defaultdict(dict)
    for call in calls:
        by_step = found[ranks_key(call.ranks), call.op, call.phase, call.dtype]
        count, size = by_step.get(call.step, (0, 0))
        by_step[call.step] = (count + 1, size + call.bytes)
    return found


def whole_steps(record: RankRecord) -> tuple[int, ...]:
    """Return the steps that another step followed, or the only step of a job. What comes after a job's last step, such as a
    checkpoint, is on the account of that step."""
    steps = [step.step for step in record.evidence.steps]
    last = max(record.steps_seen, *steps, 0)
    return tuple(step for step in record.ended_steps if step < last or len(steps) == 1)


def outside(evidence: RankEvidence, steps: tuple[int, ...]) -> tuple[Outside, ...]:
    """Return what moved losses, norms and so on. A correct job may do so in some steps only, so each step is looked at."""
    calls = [call for call in evidence.collectives if call.step in steps and call.phase not in INSIDE]
    alike: dict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    for kind, by_step in _by_step(call for call in calls if len(call.ranks) > 1).items():
        for step, (count, size) in sorted(by_step.items()):
            alike[kind, count, size].append(step)
    listed = sorted(alike.items())
    return tuple(Outside(*kind, count, size, steps=ranks_key(tuple(at))) for (kind, count, size), at in listed)


def background(evidence: RankEvidence) -> tuple[Use, ...]:
    moved = _by_step(call for call in evidence.collectives if call.phase == BACKGROUND and len(call.ranks) > 1)
    return tuple(Use(*kind, *by_step[0]) for kind, by_step in sorted(moved.items()))


def issued(evidence: RankEvidence) -> tuple[Issued, ...]:
    """Return what was issued by group. What is sent from one rank to another has no order that others share."""
    sequences: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for call in evidence.collectives:
        if call.op not in POINT_TO_POINT and len(call.ranks) > 1:
            sequences[call.group, ranks_key(call.ranks)].append(_as_issued(call))
    return tuple(
        Issued(*key, len(calls), number(_without_place(calls)), _by_steps(calls))
        for key, calls in sorted(sequences.items())
    )


def _by_steps(calls: Sequence[Any]) -> dict[int, int]:
    """calls: as issued, the step last."""
    return {step: number([call for call in calls if call[-1] == step]) for step in dict.fromkeys(c[-1] for c in calls)}


WITHOUT_PLACE = "broadcast"
"""DDP broadcasts its module's buffers in each rank's first forward pass, which on some ranks may be one that trains nothing."""


def _as_issued(call: Collective) -> list[Any]:
    return [call.op, call.dtype, 0 if call.op in UNEVEN else call.bytes, call.root_place, call.step]


def _without_place(calls: Sequence[list[Any]]) -> list[list[Any]]:
    return [[*call[:-1], 0] if call[0] == WITHOUT_PLACE else call for call in calls]


def _idle(evidence: RankEvidence) -> list[Any]:
    used = {call.ranks for call in evidence.collectives}
    return [group for group in evidence.groups if len(group.ranks) > 1 and group.ranks not in used]


def _waits(evidence: RankEvidence, step: int) -> int:
    return sum(c.op == "barrier" and c.step == step and c.phase in INSIDE for c in evidence.collectives)
