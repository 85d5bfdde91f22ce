"""Every collective of this process, with the ranks it really ran over.

A Python kernel (kernels.py) sits in front of every operator of torch's `c10d` namespace. Every call that torch
dispatches passes through it: from Python, DDP's C++ reducer, functional collectives, compiled code, another thread.
The kernel notes operator, group, dtype and bytes, then passes the call on unchanged. own_groups.py sees groups whose ranks
torch does not list, and calls that bypass the dispatcher.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.core.evidence.records import BACKGROUND, CHECKPOINT, Collective
from harness.core.probe.call_times import CallTimes
from harness.core.probe.clock import Account
from harness.core.probe.kernels import KEYS_BELOW, OperatorKernels
from harness.core.probe.own_groups import DirectCall, OwnGroups, group_rank_by_rank, iterate_tensors, name_of_group

# name of the c10d operator -> (canonical name, position of the argument whose bytes are counted).
# Operators that a torch version lacks are left out when the recorder is installed.
C10D_OPERATORS: dict[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "barrier": ("barrier", 0),
    "monitored_barrier_": ("barrier", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}


INPUT_POSITIONS = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "gather": 1,
    "scatter": 1,
    "all_reduce": 0,
    "reduce": 0,
    "send": 0,
}
"""Position of the argument that holds what this rank passes. Of other operators none is read."""
ROOT_POSITIONS = {"broadcast": 2, "reduce": 3, "gather": 3, "scatter": 3}
"""Position of the argument that is the root's place in the group."""


class CollectiveRecorder:
    """A record of every collective while it is installed.

    where: answers (step, phase) at the moment of a call. account: answers on whose account it is.
    on_issue: gets every record before the collective starts, so that a rank that never returns from it still leaves a trace.
    reads_inputs: whether to keep the sum of the bits that each call is passed, in `input_bit_sums`.
    """

    def __init__(
        self,
        where: Callable[[], tuple[int, str]],
        on_issue: Callable[[Collective], None] | None = None,
        account: Callable[[], Account | None] = lambda: None,
        *,
        reads_inputs: bool = False,
    ) -> None:
        self.records: list[Collective] = []
        self._input_bit_sums: list[torch.Tensor | int] | None = [] if reads_inputs else None
        self._step_and_phase = where
        self._on_issue = on_issue
        self._current_account = account
        self._undecided_accounts: dict[int, Account] = {}
        self._sequence: Counter[tuple[str, str, int | None]] = Counter()
        self._lock = threading.Lock()
        self._kept_alive: set[int] = set()
        self.call_times = CallTimes()
        self._kernels = OperatorKernels("c10d")
        self.own_groups = OwnGroups(where, self._is_recorded, self._note_direct_call, self._raise_error)

    def install(self) -> None:
        """Put kernels in front of all c10d operators, and observe the trainer's own groups, and waits."""
        self.own_groups.install()
        self.call_times.install()
        self._kernels.install(
            {
                name: functools.partial(self._record_and_call, op, payload)
                for name, (op, payload) in C10D_OPERATORS.items()
            }
        )

    def remove(self) -> None:
        self.close()

    def close(self) -> None:
        """Take the kernels and patches out again. Nothing if they are out already."""
        self.own_groups.close()
        self.call_times.close()
        self._kernels.close()

    def final_records(self) -> tuple[Collective, ...]:
        """Return the records with their times; those of passes that no backward followed have phase "evaluation"."""
        evaluation_indices = {
            index for index, account in self._undecided_accounts.items() if account.kind == "undecided"
        }
        return tuple(self._final_record(index, index in evaluation_indices) for index in range(len(self.records)))

    def _final_record(self, index: int, is_evaluation: bool) -> Collective:
        """Return the record with this index, with its times, and phase "evaluation" if its pass trained nothing."""
        record = self.records[index]
        began, blocked = self.call_times.times_by_call.get(index, (None, None))
        phase = "evaluation" if is_evaluation else record.phase
        return dataclasses.replace(record, phase=phase, began=began, blocked=blocked)

    @property
    def input_bit_sums(self) -> np.ndarray | None:
        """Return the sum of the bits that each call was passed, by index of its record. int64 [records]

        None where inputs are not read; 0 for calls that pass nothing, or bypass the dispatcher.
        """
        return (
            None
            if self._input_bit_sums is None
            else np.array([int(bit_sum) for bit_sum in self._input_bit_sums], np.int64)
        )

    def _record_and_call(self, op: str, payload: int, overload: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a call of an operator, then make it, and time both."""
        with self.call_times.timing_call():
            self._note_operator(op, args[payload], args)
            return overload.redispatch(keyset & KEYS_BELOW, *args, **kwargs)

    def _note_operator(self, op: str, payload: Any, args: tuple[Any, ...]) -> None:
        """Record a call of an operator on a group whose ranks torch lists. A call on another group goes to `own_groups`.

        payload: the unsharded tensor, or several. args: all arguments of the operator.
        """
        group = group_of_call(args)
        self.keep_alive(group)
        group_ranks = group_rank_by_rank(group)
        if not group_ranks:
            self.own_groups.note_unknown_group_call(op, group, payload)
            return
        self.own_groups.note_dispatched_call()
        input_bits = (
            0 if self._input_bit_sums is None or op not in INPUT_POSITIONS else sum_of_bits(args[INPUT_POSITIONS[op]])
        )
        ends = _peer_rank(op, args, group), _root_rank(op, args, group)
        self.note(op, payload, group, *ends, input_bits, ranks=tuple(sorted(group_ranks)))

    def _note_direct_call(self, call: DirectCall, group: dist.ProcessGroup) -> None:
        """Note a call of a method of a group's backend, or of a Python class that is registered."""
        peer_in_group = (
            next((argument for argument in call.args if type(argument) is int), None)
            if call.op in ("send", "recv")
            else None
        )
        root_in_group = next((argument.rootRank for argument in call.args if hasattr(argument, "rootRank")), None)
        peer = None if peer_in_group is None else _global_rank_at(peer_in_group, group)
        root = None if root_in_group is None else _global_rank_at(root_in_group, group)
        self.note(call.op, call.tensors, group, peer, root)

    def _is_recorded(self, phase: str) -> bool:
        return True

    def _raise_error(self, op: str, error: Exception) -> None:
        raise error

    def keep_alive(self, group: dist.ProcessGroup) -> bool:
        """Keep a group alive as long as the process; return whether it is a new one.

        Trap: C++ code that frees a gloo group last, such as DDP's reducer, joins its threads while it holds the GIL. If one of
        them waits for the GIL, to free what the last call held, the process hangs in its exit
        (upstream_bugs/gloo_group_freed_by_ddp.py)."""
        if id(group) in self._kept_alive:
            return False
        self._kept_alive.add(id(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return True

    def note(
        self,
        op: str,
        payload: Any,
        group: dist.ProcessGroup,
        peer: int | None = None,
        root: int | None = None,
        input_bits: torch.Tensor | int = 0,
        *,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        """Record a call.

        payload: the unsharded tensor, or several. peer, root: global ranks. input_bits: sum of the bits that this rank passes.
        ranks: global ranks of the group; looked up if None.
        """
        name = name_of_group(group)
        ranks = global_ranks_of(group) if ranks is None else ranks
        tensors = list(iterate_tensors(payload))
        step, phase = self._step_and_phase()
        phase = CHECKPOINT if phase in ("optimizer", "other") and is_in_checkpointing() else phase
        lane = (name, op, peer) if op in ("send", "recv") else (name, "", None)
        with self._lock:
            record = Collective(
                op=op,
                ranks=ranks,
                group=name,
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
                bytes=sum(t.numel() * t.element_size() for t in tensors) if op != "barrier" else 0,
                phase=phase,
                step=step,
                seq=self._sequence[lane],
                peer=peer,
                root=root,
            )
            self._sequence[lane] += 1
            if (account := self._current_account()) and account.kind == "undecided" and phase != BACKGROUND:
                self._undecided_accounts[len(self.records)] = account
            self.records.append(record)
            if self._input_bit_sums is not None:
                self._input_bit_sums.append(input_bits)
            index = len(self.records) - 1
        if self._on_issue is not None:
            self._on_issue(record)
        self.call_times.note_begin(index)


INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


ELEMENTS_SUMMED_AT_ONCE = 2**18
"""Elements in the host's memory. torch first copies what it sums to int64: larger pieces would leave the CPU's caches."""


def sum_of_bits(tensors: Any) -> torch.Tensor | int:
    """Return the sum of tensors' elements, read as integers: int64 [] on their device, without waiting for it."""
    dense = [tensor for tensor in iterate_tensors(tensors) if tensor.layout is torch.strided and tensor.numel()]
    sums: list[torch.Tensor] = []
    for words in [tensor.detach().contiguous().view(INTEGER_DTYPES[tensor.element_size()]) for tensor in dense]:
        sums += [piece.sum() for piece in _pieces_to_sum(words)]
    return sums[0] if len(sums) == 1 else sum(sums, start=0)


def _pieces_to_sum(words: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the pieces of a tensor that are summed at once: on a GPU all of it."""
    at_once = words.numel() <= ELEMENTS_SUMMED_AT_ONCE or words.device.type != "cpu"
    return (words,) if at_once else words.reshape(-1).split(ELEMENTS_SUMMED_AT_ONCE)


def global_ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group; none where torch has no ranks of it."""
    return tuple(sorted(group_rank_by_rank(group)))


def _global_rank_at(group_rank: int, group: dist.ProcessGroup) -> int:
    """Return the global rank at this position of a group, whose ranks may be in any order. Raises StopIteration if none is."""
    return next(rank for rank, member_rank in group_rank_by_rank(group).items() if member_rank == group_rank)


CHECKPOINT_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed._state_dict_utils",
    "torch.distributed.fsdp._state_dict_utils",
    "megatron.core.dist_checkpointing",
)
"""Modules that write and read checkpoints, or gather what goes into them."""


def is_in_checkpointing() -> bool:
    """Return whether one of these modules called, from wherever, what runs now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(CHECKPOINT_MODULES):
            return True
        frame = frame.f_back
    return False


def group_of_call(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the group among a kernel's arguments, where it comes as a ScriptObject. Raises RuntimeError if there is none."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    raise RuntimeError("a c10d operator was called without a process group")


def _peer_rank(op: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> int | None:
    """Return the global rank of the other side of a send or receive, whose position in the group torch passes; else None.

    A receive from any source has none: its third argument is the tag.
    """
    is_named = op in ("send", "recv") and len(args) > 3 and isinstance(args[2], int)
    return _global_rank_at(args[2], group) if is_named else None


def _root_rank(op: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> int | None:
    """Return the global rank of a collective's root, whose position in the group torch passes; None if it has no root."""
    return _global_rank_at(args[ROOT_POSITIONS[op]], group) if op in ROOT_POSITIONS else None
