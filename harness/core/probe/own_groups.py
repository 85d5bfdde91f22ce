"""Sees process groups that a trainer makes itself, of which torch has no ranks, and calls that pass torch's dispatcher by.

A backend may be made by its class, or taken out of a group (`group._get_backend(device)`) and called. A Python subclass of
ProcessGroup may do a collective by itself. Both are noticed where they are made, and where Python calls them. Where a call
leads to another one inside it, the one is on record that torch has ranks of, else the innermost.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.core.evidence.records import OwnCalls, OwnGroup

METHODS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("allgather", "_allgather_base", "allgather_coalesced"), "all_gather"),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), "reduce_scatter"),
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), "all_to_all"),
    **dict.fromkeys(("barrier", "monitored_barrier"), "barrier"),
    **dict.fromkeys(("recv", "recv_anysource"), "recv"),
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "send")},
}
"""Methods of groups and backends -> the collective."""
MOST = 1000
"""Groups on record: the first ones."""


def places_of(group: dist.ProcessGroup) -> dict[int, int]:
    """Return by global rank its position in the group; empty if torch does not list them. Trap: the map holds -100 for groups
    that this rank is not a member of. A trainer may also write another job's ranks there. Then they do not fit the size and
    rank of the group itself."""
    known = dist.distributed_c10d._world.pg_group_ranks
    ranks = known.get(group)
    if ranks is None:  # a view of the group made by C++ is another Python object: look it up by name
        ranks = known.get(_by_name(group), {})
    places = {rank: place for rank, place in ranks.items() if rank >= 0}
    as_told = places and dist.is_initialized() and places.get(dist.get_rank()) == number_of(group, "rank")
    return places if as_told and len(places) == number_of(group, "size") else {}


def _by_name(group: dist.ProcessGroup) -> Any:
    """Return the registered group of that name; None where it has no name, or none is registered."""
    try:
        return dist.distributed_c10d._resolve_process_group(group.group_name)
    except (RuntimeError, ValueError, LookupError):
        return None


def name_of(group: dist.ProcessGroup) -> str:
    """Return its name, or the one that torch gave it: a Python class may have none."""
    try:
        return str(group.group_name)
    except (RuntimeError, ValueError):
        return str(dist.distributed_c10d._world.pg_names.get(group, ""))


def number_of(group: Any, what: str) -> int | None:
    """Return its rank or size; None where a class of the trainer's own does not say."""
    try:
        return int(getattr(group, what)())
    except Exception:  # whatever the trainer's own method raises
        return None


@dataclass
class _Own:
    kind: str
    made: str
    step: int
    seen: weakref.ref[Any]
    place: int | None = None
    size: int | None = None
    issued: int = 0
    registered: bool = False
    hands_on: bool = False
    calls: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)


@dataclass
class Call:
    """One call of a method of a group or a backend."""

    op: str
    """Name of the collective."""
    group: Any
    """The group or backend that it is called on."""
    args: tuple[Any, ...] = ()
    """Arguments, those given by name last."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The unsharded tensor or tensors: the argument that is largest."""
        given = (list(tensors_in(one)) for one in self.args)
        return max(given, key=lambda tensors: sum(t.numel() * t.element_size() for t in tensors), default=[])


@dataclass
class _Within:
    """What a call led to."""

    placed: int = 0
    """Calls of groups that torch has ranks of."""
    others: list[Call] = field(default_factory=list)
    """All others."""


class OwnGroups:
    """Records while installed. `where` answers (step, phase), `recorded` whether a call of this phase is on record. `placed`
    records a call on a group whose ranks torch lists. `wrong` gets errors of the probe."""

    def __init__(
        self,
        where: Callable[[], tuple[int, str]],
        recorded: Callable[[str], bool],
        placed: Callable[[Call, dist.ProcessGroup], None],
        wrong: Callable[[str, Exception], None],
    ) -> None:
        self._where, self._recorded, self._placed, self._wrong = where, recorded, placed, wrong
        self._own: list[_Own] = []
        self._by_id: dict[int, _Own] = {}
        self._owners: dict[int, tuple[weakref.ref[Any], int, Any]] = {}
        self._patched: list[tuple[type, str, Any]] = []
        self._wrapped: set[type] = set()
        self._running = threading.local()
        self._lock = threading.Lock()

    # ---- hooks

    def install(self) -> None:
        backends = [*_subclasses(torch._C._distributed_c10d.Backend)]
        for kind in (dist.ProcessGroup, *backends):
            if "__init__" in vars(kind):
                self._patch(kind, "__init__", self._maker(kind.__init__))
        self._patch(dist.ProcessGroup, "_register_backend", self._putter(dist.ProcessGroup._register_backend))
        for kind in backends:
            self._wrap(kind, METHODS.keys() & {*dir(kind)})

    def close(self) -> None:
        """Leave every class as it was."""
        for kind, name, original in reversed(self._patched):
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)
        self._patched.clear()
        self._wrapped.clear()

    def _patch(self, kind: type, name: str, by: Any) -> None:
        self._patched.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, by)

    def _wrap(self, kind: type, names: Any) -> None:
        self._wrapped.add(kind)
        for name in sorted(names):
            self._patch(kind, name, self._caller(getattr(kind, name), METHODS[name]))

    def _maker(self, original: Any) -> Any:
        @functools.wraps(original)
        def made(group: Any, *args: Any, **kwargs: Any) -> None:
            original(group, *args, **kwargs)
            try:
                self._was_made(group, sys._getframe(1))
            except Exception as error:
                self._wrong(f"the making of {type(group).__name__}", error)

        return made

    def _putter(self, original: Any) -> Any:
        @functools.wraps(original)
        def put(group: Any, *args: Any, **kwargs: Any) -> None:
            original(group, *args, **kwargs)
            given: tuple[Any, ...] = (*args, *kwargs.values())
            for one in given:
                if (own := self._by_id.get(id(one))) is not None and own.seen() is one:
                    own.hands_on = True  # the group that has it now is on record

        return put

    def _was_made(self, group: Any, frame: types.FrameType) -> None:
        for kind in type(group).__mro__:
            if kind is dist.ProcessGroup:
                break
            if kind not in self._wrapped:
                self._wrap(kind, [n for n in METHODS if isinstance(vars(kind).get(n), types.FunctionType)])
        outside = _outside_of_init(frame, group)
        if outside.f_globals.get("__name__") != dist.distributed_c10d.__name__:
            self._of(group, _line(outside))

    def _caller(self, original: Any, op: str) -> Any:
        @functools.wraps(original)
        def called(group: Any, *args: Any, **kwargs: Any) -> Any:
            outer, mine = getattr(self._running, "within", None), _Within()
            self._running.within = mine
            try:
                return original(group, *args, **kwargs)
            finally:
                self._running.within = outer
                self._ended(Call(op, group, (*args, *kwargs.values())), mine, outer)

        return called

    # ---- calls

    def passed(self) -> None:
        """A call of a group that torch has ranks of has passed the dispatcher in this thread."""
        within = getattr(self._running, "within", None)
        if within is not None:
            within.placed += 1

    def unplaced(self, op: str, group: Any, payload: Any) -> None:
        """A call of another group has."""
        self._put(Call(op, group, (payload,)), getattr(self._running, "within", None))

    def _ended(self, call: Call, mine: _Within, outer: _Within | None) -> None:
        try:
            owner = self._owner(call.group)
            if owner is not None and not mine.placed:
                self._placed(call, owner)
                mine.placed, mine.others = 1, []
            elif mine.placed or mine.others:
                self._hand_on(call.group)
            if outer is not None:
                outer.placed += mine.placed
            for one in mine.others if mine.others or mine.placed else [call]:
                self._put(one, outer)
        except Exception as error:
            self._wrong(call.op, error)

    def _hand_on(self, group: Any) -> None:
        """What it does, others do that are on record."""
        if (own := self._of(group, "")) is not None:
            own.hands_on = True

    def _put(self, call: Call, outer: _Within | None) -> None:
        if outer is not None:
            outer.others.append(call)
            return
        own, (step, phase) = self._of(call.group, ""), self._where()
        if own is None:
            return
        with self._lock:
            own.issued += 1
            own.place, own.size = number_of(call.group, "rank"), number_of(call.group, "size")
            if self._recorded(phase):
                tensors = call.tensors
                dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"
                kind = (call.op, dtype, phase, step)
                own.calls[kind] += 1
                own.bytes[kind] += sum(t.numel() * t.element_size() for t in tensors) if call.op != "barrier" else 0

    def _of(self, group: Any, made: str) -> _Own | None:
        """Return what is on record of it; None beyond the first ones."""
        own = self._by_id.get(id(group))
        if own is not None and own.seen() is group:
            own.made = own.made or made
            return own
        if len(self._own) >= MOST:
            return None
        own = _Own(type(group).__name__, made, self._where()[0], weakref.ref(group))
        own.place, own.size = number_of(group, "rank"), number_of(group, "size")
        self._own.append(own)
        self._by_id[id(group)] = own
        return own

    def _owner(self, group: Any) -> Any:
        """Return the group that torch has ranks of: itself, or the one that has this backend; None if there is none."""
        if isinstance(group, dist.ProcessGroup):
            return group if places_of(group) else None
        known = dist.distributed_c10d._world.pg_map
        seen, count, owner = self._owners.get(id(group), (None, -1, None))
        if seen is None or seen() is not group or (owner is None and count != len(known)):
            owner = next((one for one in known if _has(one, group)), None)
            self._owners[id(group)] = (weakref.ref(group), len(known), owner)
        return owner if owner is not None and places_of(owner) else None

    # ---- what is left behind

    def settled(self) -> tuple[OwnGroup, ...]:
        """Return those that torch has no ranks of: of several ranks, or called."""
        for own in self._own:
            group = own.seen()
            own.registered = own.registered or (group is not None and self._owner(group) is not None)
        kept = [own for own in self._own if own.issued or not (own.registered or own.hands_on or own.size in (0, 1))]
        return tuple(_settled(own) for own in kept)


def _settled(own: _Own) -> OwnGroup:
    calls = tuple(OwnCalls(*kind, count, own.bytes[kind]) for kind, count in sorted(own.calls.items()))
    return OwnGroup(own.kind, own.made, own.step, own.place, own.size, own.issued, calls)


def _subclasses(kind: type) -> Iterator[type]:
    one: type
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _has(group: Any, backend: Any) -> bool:
    """Whether it is one of the backends of a group."""
    if not isinstance(group, dist.ProcessGroup):
        return False
    try:
        return any(group._get_backend(device) is backend for device in group._device_types)
    except RuntimeError:  # it has none for that device
        return False


def _outside_of_init(frame: types.FrameType, group: Any) -> types.FrameType:
    """Return the frame that made it, outside of its class's constructors."""
    while frame.f_back is not None and frame.f_code.co_name == "__init__":
        if all(one is not group for one in frame.f_locals.values()):
            break
        frame = frame.f_back
    return frame


def _line(frame: types.FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def tensors_in(payload: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those in lists of them; of anything else none."""
    if isinstance(payload, torch.Tensor):
        yield payload
    elif isinstance(payload, list | tuple):
        for part in payload:
            yield from tensors_in(part)
