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

import numpy as np

from harness.evidence.alike import alike, lines_through
from harness.evidence.keys import number, ranks_key
from harness.evidence.recording import Beside, Fed, Last, RankRecord, Reached
from harness.evidence.records import BACKGROUND, Collective, OwnGroup, RankEvidence, TensorEvidence
from harness.evidence.unclaimed import unclaimed

INSIDE = ("forward", "backward", "pipeline")
POINT_TO_POINT = ("send", "recv")
Kind = tuple[str, str, str, str]  # ranks, op, phase, dtype
UNEVEN = ("all_to_all", "scatter", "gather")  # ranks may rightly pass different numbers of bytes


@dataclass(frozen=True)
class Use:
    """What a rank moved in the step that is shown, over one group, by one collective in one phase. steps: of those recorded the
    ones in which it moved as much, in the words of ranks_key; empty where those are all."""

    ranks: str
    op: str
    phase: str
    dtype: str
    calls: int
    bytes: int
    steps: str = ""


@dataclass(frozen=True)
class Outside:
    """What a rank moved outside of forward and backward, over one group, by one collective: the same in each of these steps.
    phase: "optimizer", "evaluation", "checkpoint" or "other". steps: in the words of ranks_key."""

    ranks: str
    op: str
    phase: str
    dtype: str
    calls: int
    bytes: int
    steps: str


@dataclass(frozen=True)
class Issued:
    """All that a rank issued over one group in the steps recorded, in order, as one number; and what of each step."""

    group: str
    ranks: str
    calls: int
    digest: int
    steps: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """model: names, whole shapes and dtypes of its parameters. placements: how many are claimed to lie so. slices: which parts
    of them it claims to hold, 0 where something claims nothing. contents, fed: by step. shown: the step of `uses`. idle:
    groups over which nothing ran. waits: barriers inside forward and backward. kept: bytes of parameters that are in
    memory as forward ends. roles: of groups, what wrappers and DTensors claim of them. copies: by group, over which some
    parameters are cut, the contents by step of those that are copied over it. unstepped: parameters that no optimizer has.
    digests of parameters, in `contents`, are of those that `slices` are of, where there are any. whole: the steps that
    `outside` is of. background: what other threads moved than the one that trains, as far as it is on record; of no step.
    kind, places: as evidence.alike has them; 0 where nobody looked. tokens: as `fed`, of inputs that are integers.
    ignored: by fqn, the contents by step of parameters that a wrapper ignores, but for those that begin as constants.
    joined, own_groups, failed, beside: as in RankEvidence and RankRecord. idle_steps: those without gradients of its own.
    """

    rank: int
    world: int
    ended: str
    error: str
    host: str
    steps_seen: int
    last: Last | None
    parts: tuple[str, ...]
    optimizers: tuple[str, ...]
    model: int
    parameters: int
    elements: int
    placements: dict[str, int]
    slices: int
    contents: dict[int, int]
    fed: dict[int, int]
    not_finite: dict[int, tuple[str, ...]]
    shown: int
    uses: tuple[Use, ...]
    issued: tuple[Issued, ...]
    idle: tuple[str, ...]
    waits: int
    unstepped: int
    memory: dict[str, int]
    kept: int
    settings: dict[str, str]
    versions: dict[str, str]
    wrappers: dict[str, int]
    roles: dict[str, str]
    argv: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: dict[int, float]
    peak: int
    own: float
    outside: tuple[Outside, ...] = ()
    whole: tuple[int, ...] = ()
    background: tuple[Use, ...] = ()
    copies: dict[str, dict[int, int]] = field(default_factory=dict)
    kind: int = 0
    places: tuple[tuple[str, str], ...] = ()
    tokens: dict[int, int] = field(default_factory=dict)
    ignored: dict[str, dict[int, int]] = field(default_factory=dict)
    joined: int | None = None
    failed: tuple[str, ...] = ()
    idle_steps: tuple[int, ...] = ()
    launch: str = ""  # the id of the recording
    reached: Reached | None = None  # how far the rank came
    hooks: tuple[str, ...] = ()  # DDP's communication hooks
    unclaimed: dict[str, tuple[int, int]] = field(default_factory=dict)  # as evidence.unclaimed has it
    own_groups: tuple[OwnGroup, ...] = ()
    beside: tuple[Beside, ...] = ()


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
        **plain | _model(record) | _steps(record) | _shown(evidence, step_shown(evidence)),
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
        "not_finite": {s.step: s.not_finite for s in record.steps if s.not_finite},
        "seconds": {s.step: s.seconds for s in record.steps if s.seconds},
        "peak": max((s.peak for s in record.steps), default=0),
    }


def _inputs(fed: Iterable[Fed]) -> int:
    return number([(one.digest, one.shape) for one in fed])


def _shown(evidence: RankEvidence, shown: int) -> dict[str, Any]:
    """What is shown of one step only."""
    seen = next((step for step in evidence.steps if step.step == shown), None)
    return {
        "shown": shown,
        "uses": uses(evidence, shown),
        "waits": _waits(evidence, shown),
        "memory": dict(seen.memory) if seen else {},
        "kept": max((after.storage for after in seen.after_forward), default=0) if seen else 0,
        "settings": {name: " and ".join(values) for name, values in seen.settings.items()} if seen else {},
    }


def step_shown(evidence: RankEvidence) -> int:
    """The second, in which groups are set up and caches filled; else the last that was recorded. 0: there is none."""
    steps = [step.step for step in evidence.steps]
    return 2 if 2 in steps else max(steps, default=0)


def uses(evidence: RankEvidence, shown: int) -> tuple[Use, ...]:
    """A rank may do something once, as DDP broadcasts its buckets in the second step alone."""
    inside = [call for call in evidence.collectives if call.phase in INSIDE and call.op != "barrier"]
    moved = _by_step(call for call in inside if len(call.ranks) > 1)
    steps = tuple(sorted(step.step for step in evidence.steps))
    found = []
    for kind, by_step in sorted(moved.items()):
        if shown in by_step:
            as_much = tuple(step for step in steps if by_step.get(step) == by_step[shown])
            found.append(Use(*kind, *by_step[shown], steps="" if as_much == steps else ranks_key(as_much)))
    return tuple(found)


def _by_step(calls: Iterable[Collective]) -> dict[Kind, dict[int, tuple[int, int]]]:
    """How many of each kind, and their bytes."""
    found: dict[Kind, dict[int, tuple[int, int]]] = defaultdict(dict)
    for call in calls:
        by_step = found[ranks_key(call.ranks), call.op, call.phase, call.dtype]
        count, size = by_step.get(call.step, (0, 0))
        by_step[call.step] = (count + 1, size + call.bytes)
    return found


def whole_steps(record: RankRecord) -> tuple[int, ...]:
    """Those that another step followed, for what comes after a job's last step, a checkpoint, is on the account of that step.
    Of a job of one step that one."""
    steps = tuple(sorted(step.step for step in record.evidence.steps))
    return tuple(step for step in steps if step < max(record.steps_seen, steps[-1]) or len(steps) == 1)


def outside(evidence: RankEvidence, steps: tuple[int, ...]) -> tuple[Outside, ...]:
    """Losses, norms and the like: a correct job may do so in some steps only, so each step is looked at."""
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
    """By group. What is sent from one rank to another has no order that others share."""
    sequences: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for call in evidence.collectives:
        if call.op not in POINT_TO_POINT and len(call.ranks) > 1:
            sequences[call.group, ranks_key(call.ranks)].append(_as_issued(call))
    return tuple(Issued(*key, len(calls), number(calls), _by_steps(calls)) for key, calls in sorted(sequences.items()))


def _by_steps(calls: Sequence[Any]) -> dict[int, int]:
    """calls: as issued, the step last."""
    return {step: number([call for call in calls if call[-1] == step]) for step in dict.fromkeys(c[-1] for c in calls)}


def _as_issued(call: Collective) -> list[Any]:
    return [call.op, call.dtype, 0 if call.op in UNEVEN else call.bytes, call.root_place, call.step]


def _idle(evidence: RankEvidence) -> list[Any]:
    used = {call.ranks for call in evidence.collectives}
    return [group for group in evidence.groups if len(group.ranks) > 1 and group.ranks not in used]


def _waits(evidence: RankEvidence, step: int) -> int:
    return sum(c.op == "barrier" and c.step == step and c.phase in INSIDE for c in evidence.collectives)


# ---- claims. A mesh may have thousands of ranks, and most parameters are on the same one


NOWHERE: list[int] = []
_known: dict[int, tuple[Any, np.ndarray, int]] = {}


def _looked_up(mesh: Any) -> tuple[Any, np.ndarray, int]:
    """The mesh itself, so that its address is not used again; as an array; and its ranks as one number."""
    if id(mesh) not in _known:
        if len(_known) > 64:
            _known.clear()
        array = np.array(mesh)
        _known[id(mesh)] = (mesh, array, number(sorted(array.flatten().tolist())))
    return _known[id(mesh)]


def placement_text(tensor: TensorEvidence) -> str:
    """ "Replicate over 2, Shard(0) over 8"; "plain"."""
    if tensor.mesh is None:
        return "plain"
    degrees = _looked_up(tensor.mesh)[1].shape
    texts = [f"{kind} over {n}" for kind, n in zip(tensor.placements, degrees, strict=True) if n > 1]
    return ", ".join(texts) or "on one rank"


def claimed_places(evidence: RankEvidence) -> list[tuple[Any, ...]]:
    """Which of its parts this rank claims to hold, of each parameter of which something claims it. Ranks with equal places are
    replicas. What DDP looks after is whole on the ranks of its group, and what FSDP1 shards over no ranks."""
    wrappers = evidence.structure.values()
    ignored = {fqn for wrapper in wrappers for fqn in wrapper.ignored}
    whole = {w.replicate_ranks for w in wrappers if w.kind in ("ddp", "replicate")} - {()}  # of a group without ranks
    if wrappers and all(w.kind == "fsdp1" and len(w.shard_ranks) <= 1 for w in wrappers):  # NO_SHARD
        whole = {w.replicate_ranks for w in wrappers if len(w.replicate_ranks) > 1}
    of_ddp = (ranks_key(whole.pop()),) if len(whole) == 1 else None
    found = []
    for tensor in evidence.parameters:
        plain = None if tensor.fqn in ignored else of_ddp
        place = _place(evidence.rank, tensor) if tensor.mesh is not None else plain
        if place is not None:
            found.append((tensor.fqn, *place))
    return found


def _place(rank: int, tensor: TensorEvidence) -> tuple[Any, ...] | None:
    """The mesh, and by sharded axis of it how the tensor is cut, in how many parts, and which one this is."""
    if rank not in (mesh := _looked_up(tensor.mesh)[1]):
        return None
    at = [int(index) for index in np.argwhere(mesh == rank)[0]]
    cut = [(kind, n, i) for kind, n, i in zip(tensor.placements, mesh.shape, at, strict=True) if n > 1]
    if any(kind == "Partial" for kind, _, _ in cut):
        return None
    return (_looked_up(tensor.mesh)[2], *(one for one in cut if one[0] != "Replicate"))


def roles(evidence: RankEvidence) -> dict[str, str]:
    """By group, what is claimed: that a wrapper shards parameters over it, or replicates them; that DTensors are cut or copied
    over it, of which nobody says whether that is tensor parallelism."""
    found: dict[str, str] = {}
    for tensor in evidence.parameters:
        for kind, ranks in _lines(evidence.rank, tensor):
            found[ranks] = "cut" if "Shard" in kind else found.get(ranks, "copied")
    for wrapper in evidence.structure.values():
        if len(wrapper.shard_ranks) > 1:
            found[ranks_key(tuple(sorted(wrapper.shard_ranks)))] = f"sharded by {wrapper.kind}"
        if len(wrapper.replicate_ranks) > 1:
            alone = " alone" * (wrapper.kind.startswith("fsdp") and len(wrapper.shard_ranks) <= 1)
            found[ranks_key(tuple(sorted(wrapper.replicate_ranks)))] = f"replicated by {wrapper.kind}{alone}"
    return found


def copies(record: RankRecord) -> dict[str, dict[int, int]]:
    """By group, as DTensors claim: norms and the like under tensor parallelism."""
    copied, cut = defaultdict[str, set[str]](set), set[str]()
    for tensor in record.evidence.parameters:
        for kind, ranks in _lines(record.evidence.rank, tensor):
            if "Shard" in kind:
                cut.add(ranks)
            elif kind == "Replicate" and "Partial" not in tensor.placements:
                copied[ranks].add(tensor.fqn)
    found: dict[str, dict[int, int]] = {}
    for ranks in sorted(cut.intersection(copied)):
        of = copied[ranks]
        told = {s.step: sorted((f, value) for f, value in s.digests.items() if f in of) for s in record.steps}
        found[ranks] = {step: number(values) for step, values in told.items() if values}
    return found


def ignored(record: RankRecord) -> dict[str, dict[int, int]]:
    """Experts of its own, or replicas that a wrapper was told to ignore by mistake. Two experts may both begin with zeros."""
    constant = {fqn for step in record.steps for fqn in step.constant}
    names = {fqn for wrapper in record.evidence.structure.values() for fqn in wrapper.ignored} - constant
    return {fqn: {s.step: s.digests[fqn] for s in record.steps if fqn in s.digests} for fqn in sorted(names)}


def _lines(rank: int, tensor: TensorEvidence) -> list[tuple[str, str]]:
    """Of each axis of its mesh, the placement and the ranks along it."""
    if rank not in (mesh := _looked_up(tensor.mesh if tensor.mesh is not None else NOWHERE)[1]):
        return []
    named = zip(tensor.placements, lines_through(rank, mesh), strict=True)
    return [(kind, ranks_key(tuple(sorted(line)))) for kind, line in named if len(line) > 1]
