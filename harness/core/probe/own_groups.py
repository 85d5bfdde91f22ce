"""Process groups that a trainer makes itself, of which torch has no ranks, and calls that pass torch's dispatcher by.

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

COLLECTIVE_OF_METHOD = {
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
MAX_GROUPS = 1000
"""Groups on record: the first ones."""


def group_rank_by_rank(group: dist.ProcessGroup) -> dict[int, int]:
    """Return the position in the group by global rank; empty if torch does not list the group's ranks.

    Trap: the map holds -100 for groups that this rank is not a member of. A trainer may also write another job's ranks there.
    Then they do not fit the size and rank of the group itself."""
    ranks_by_group = dist.distributed_c10d._world.pg_group_ranks
    ranks = ranks_by_group.get(group)
    if ranks is None:  # a view of the group made by C++ is another Python object: look it up by name
        ranks = ranks_by_group.get(_registered_group(group), {})
    group_ranks: dict[int, int] = {rank: group_rank for rank, group_rank in ranks.items() if rank >= 0}
    matches_own_rank = (
        group_ranks and dist.is_initialized() and group_ranks.get(dist.get_rank()) == ask_rank_or_size(group, "rank")
    )
    return group_ranks if matches_own_rank and len(group_ranks) == ask_rank_or_size(group, "size") else {}


def _registered_group(group: dist.ProcessGroup) -> Any:
    """Return the registered group of that name; None where it has no name, or none is registered."""
    try:
        return dist.distributed_c10d._resolve_process_group(group.group_name)
    except (RuntimeError, ValueError, LookupError):
        return None


def name_of_group(group: dist.ProcessGroup) -> str:
    """Return a group's name, or the one that torch gave it: a Python class may have none. Empty if torch has none either."""
    try:
        return str(group.group_name)
    except (RuntimeError, ValueError):
        return str(dist.distributed_c10d._world.pg_names.get(group, ""))


def ask_rank_or_size(group: Any, method: str) -> int | None:
    """Return this rank's position in a group, or the group's size. None where a class of the trainer's own does not say.

    method: "rank" or "size".
    """
    try:
        return int(getattr(group, method)())
    except Exception:  # whatever the trainer's own method raises
        return None


@dataclass
class _RecordedGroup:
    """A group or backend that the trainer made itself, and its calls so far."""

    kind: str
    """Name of its class."""
    made_at: str
    """File and line that made it; empty if that is not known."""
    step: int
    """The step in which it was first seen."""
    group_ref: weakref.ref[Any]
    """The group or backend."""
    group_rank: int | None = None
    """This rank's position in it."""
    size: int | None = None
    """How many ranks it has."""
    issued: int = 0
    """How many calls were issued on it."""
    is_registered: bool = False
    """Whether torch has ranks of it, or of the group that it is the backend of."""
    delegates: bool = False
    """Whether it does its work through other groups, which are on record."""
    calls: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)
    """(collective, dtype, phase, step) -> calls."""
    bytes: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)
    """(collective, dtype, phase, step) -> bytes."""


@dataclass
class DirectCall:
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
        tensors_by_argument = (list(iterate_tensors(argument)) for argument in self.args)
        return max(
            tensors_by_argument, key=lambda tensors: sum(t.numel() * t.element_size() for t in tensors), default=[]
        )


@dataclass
class _InnerCalls:
    """What a call led to."""

    known_group_calls: int = 0
    """Calls of groups that torch has ranks of."""
    other_calls: list[DirectCall] = field(default_factory=list)
    """All others."""


class OwnGroups:
    """A recorder of such groups and calls, while it is installed.

    where: answers (step, phase). is_recorded: whether a call of this phase is on record. record_placed: records a call on a
    group whose ranks torch lists. on_error: gets errors of the probe."""

    def __init__(
        self,
        where: Callable[[], tuple[int, str]],
        is_recorded: Callable[[str], bool],
        record_placed: Callable[[DirectCall, dist.ProcessGroup], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self._step_and_phase = where
        self._is_recorded = is_recorded
        self._record_placed = record_placed
        self._on_error = on_error
        self._groups: list[_RecordedGroup] = []
        self._groups_by_id: dict[int, _RecordedGroup] = {}
        self._owner_by_backend: dict[int, tuple[weakref.ref[Any], int, Any]] = {}
        self._patched: list[tuple[type, str, Any]] = []
        self._wrapped: set[type] = set()
        self._running = threading.local()
        self._lock = threading.Lock()

    # ---- hooks

    def install(self) -> None:
        """Patch the constructors of groups and backends, the registering of backends, and the collectives of all backends."""
        backends = [*all_subclasses(torch._C._distributed_c10d.Backend)]
        for kind in (dist.ProcessGroup, *backends):
            if "__init__" in vars(kind):
                self._patch(kind, "__init__", self._wrap_constructor(kind.__init__))
        self._patch(
            dist.ProcessGroup, "_register_backend", self._wrap_registration(dist.ProcessGroup._register_backend)
        )
        for kind in backends:
            self._wrap_methods(kind, COLLECTIVE_OF_METHOD.keys() & {*dir(kind)})

    def close(self) -> None:
        """Leave every class as it was."""
        for kind, name, original in reversed(self._patched):
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)
        self._patched.clear()
        self._wrapped.clear()

    def _patch(self, kind: type, name: str, replacement: Any) -> None:
        self._patched.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, replacement)

    def _wrap_methods(self, kind: type, names: Any) -> None:
        """Patch the named collective methods of a class of groups or backends."""
        self._wrapped.add(kind)
        for name in sorted(names):
            self._patch(kind, name, self._wrap_method(getattr(kind, name), COLLECTIVE_OF_METHOD[name]))

    def _wrap_constructor(self, original: Any) -> Any:
        """Return a constructor that also notes the group it made, and the line that called it."""

        @functools.wraps(original)
        def construct(group: Any, *args: Any, **kwargs: Any) -> None:
            original(group, *args, **kwargs)
            try:
                self._note_construction(group, sys._getframe(1))
            except Exception as error:
                self._on_error(f"the making of {type(group).__name__}", error)

        return construct

    def _wrap_registration(self, original: Any) -> Any:
        """Return `_register_backend` with groups noted as delegating that another group takes for its backend."""

        @functools.wraps(original)
        def register(group: Any, *args: Any, **kwargs: Any) -> None:
            original(group, *args, **kwargs)
            arguments: tuple[Any, ...] = (*args, *kwargs.values())
            for argument in arguments:
                if (own := self._groups_by_id.get(id(argument))) is not None and own.group_ref() is argument:
                    own.delegates = True  # the group that has it now is on record

        return register

    def _note_construction(self, group: Any, frame: types.FrameType) -> None:
        """Put a new group on record, unless torch itself made it. Patch the collectives of its Python classes."""
        for kind in type(group).__mro__:
            if kind is dist.ProcessGroup:
                break
            if kind not in self._wrapped:
                self._wrap_methods(
                    kind, [n for n in COLLECTIVE_OF_METHOD if isinstance(vars(kind).get(n), types.FunctionType)]
                )
        outside = _constructing_frame(frame, group)
        if outside.f_globals.get("__name__") != dist.distributed_c10d.__name__:
            self._find_or_add_group(group, _source_line(outside))

    def _wrap_method(self, original: Any, op: str) -> Any:
        """Return a collective's method with the call recorded when it ends, and what it led to.

        op: name of the collective.
        """

        @functools.wraps(original)
        def call_and_record(group: Any, *args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._running, "within", None)
            inner = _InnerCalls()
            self._running.within = inner
            try:
                return original(group, *args, **kwargs)
            finally:
                self._running.within = outer
                self._note_call_end(DirectCall(op, group, (*args, *kwargs.values())), inner, outer)

        return call_and_record

    # ---- calls

    def note_dispatched_call(self) -> None:
        """Note that a call of a group that torch has ranks of has passed the dispatcher in this thread."""
        within = getattr(self._running, "within", None)
        if within is not None:
            within.known_group_calls += 1

    def note_unknown_group_call(self, op: str, group: Any, payload: Any) -> None:
        """Note that a call of another group has passed the dispatcher in this thread."""
        self._record_call(DirectCall(op, group, (payload,)), getattr(self._running, "within", None))

    def _note_call_end(self, call: DirectCall, inner: _InnerCalls, outer: _InnerCalls | None) -> None:
        """Record what a call came to: itself on the group that torch has ranks of, if it is the backend of one; else the
        calls that it led to, and itself if there were none.

        outer: the call in which it was made; None for the outermost, which alone is put on record.
        """
        try:
            owner = self._owner_of_backend(call.group)
            if owner is not None and not inner.known_group_calls:
                self._record_placed(call, owner)
                inner.known_group_calls = 1
                inner.other_calls = []
            elif inner.known_group_calls or inner.other_calls:
                self._mark_as_delegating(call.group)
            if outer is not None:
                outer.known_group_calls += inner.known_group_calls
            innermost = inner.other_calls if inner.other_calls or inner.known_group_calls else [call]
            for innermost_call in innermost:
                self._record_call(innermost_call, outer)
        except Exception as error:
            self._on_error(call.op, error)

    def _mark_as_delegating(self, group: Any) -> None:
        """Note that a group does its work through other groups, which are on record."""
        if (own := self._find_or_add_group(group, "")) is not None:
            own.delegates = True

    def _record_call(self, call: DirectCall, outer: _InnerCalls | None) -> None:
        """Count a call, and its bytes by collective, dtype, phase and step. Within another call it is only handed to that."""
        if outer is not None:
            outer.other_calls.append(call)
            return
        own = self._find_or_add_group(call.group, "")
        step, phase = self._step_and_phase()
        if own is None:
            return
        with self._lock:
            own.issued += 1
            own.group_rank = ask_rank_or_size(call.group, "rank")
            own.size = ask_rank_or_size(call.group, "size")
            if self._is_recorded(phase):
                tensors = call.tensors
                dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"
                kind = (call.op, dtype, phase, step)
                own.calls[kind] += 1
                own.bytes[kind] += sum(t.numel() * t.element_size() for t in tensors) if call.op != "barrier" else 0

    def _find_or_add_group(self, group: Any, place_in_source: str) -> _RecordedGroup | None:
        """Return what is on record of it; None beyond the first ones."""
        own = self._groups_by_id.get(id(group))
        if own is not None and own.group_ref() is group:
            own.made_at = own.made_at or place_in_source
            return own
        if len(self._groups) >= MAX_GROUPS:
            return None
        own = _RecordedGroup(type(group).__name__, place_in_source, self._step_and_phase()[0], weakref.ref(group))
        own.group_rank = ask_rank_or_size(group, "rank")
        own.size = ask_rank_or_size(group, "size")
        self._groups.append(own)
        self._groups_by_id[id(group)] = own
        return own

    def _owner_of_backend(self, group: Any) -> Any:
        """Return the group that torch has ranks of: itself, or the one that has this backend; None if there is none."""
        if isinstance(group, dist.ProcessGroup):
            return group if group_rank_by_rank(group) else None
        groups_of_torch = dist.distributed_c10d._world.pg_map
        backend_ref, group_count, owner = self._owner_by_backend.get(id(group), (None, -1, None))
        if backend_ref is None or backend_ref() is not group or (owner is None and group_count != len(groups_of_torch)):
            owner = next((candidate for candidate in groups_of_torch if _has_backend(candidate, group)), None)
            self._owner_by_backend[id(group)] = (weakref.ref(group), len(groups_of_torch), owner)
        return owner if owner is not None and group_rank_by_rank(owner) else None

    # ---- what is left behind

    def final_groups(self) -> tuple[OwnGroup, ...]:
        """Return those that torch has no ranks of: of several ranks, or called."""
        for own in self._groups:
            group = own.group_ref()
            own.is_registered = own.is_registered or (group is not None and self._owner_of_backend(group) is not None)
        reported = [
            own for own in self._groups if own.issued or not (own.is_registered or own.delegates or own.size in (0, 1))
        ]
        return tuple(_group_evidence(own) for own in reported)


def _group_evidence(own: _RecordedGroup) -> OwnGroup:
    calls = tuple(OwnCalls(*kind, count, own.bytes[kind]) for kind, count in sorted(own.calls.items()))
    return OwnGroup(own.kind, own.made_at, own.step, own.group_rank, own.size, own.issued, calls)


def all_subclasses(kind: type) -> Iterator[type]:
    """Yield the classes that derive from this one, also through others."""
    subclass: type
    for subclass in kind.__subclasses__():
        yield subclass
        yield from all_subclasses(subclass)


def _has_backend(group: Any, backend: Any) -> bool:
    """Return whether this is one of the backends of a group."""
    if not isinstance(group, dist.ProcessGroup):
        return False
    try:
        return any(group._get_backend(device) is backend for device in group._device_types)
    except RuntimeError:  # it has none for that device
        return False


def _constructing_frame(frame: types.FrameType, group: Any) -> types.FrameType:
    """Return the frame that made it, outside of its class's constructors."""
    while frame.f_back is not None and frame.f_code.co_name == "__init__":
        if all(local_value is not group for local_value in frame.f_locals.values()):
            break
        frame = frame.f_back
    return frame


def _source_line(frame: types.FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def iterate_tensors(payload: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those in lists of them; of anything else none."""
    if isinstance(payload, torch.Tensor):
        yield payload
    elif isinstance(payload, list | tuple):
        for part in payload:
            yield from iterate_tensors(part)
