"""The recorder of one rank of a job that knows nothing of it: the probe's observers, put on whatever it turns out to train.

A model is the outermost module that is called while gradients are recorded; there may be several, and stages of a pipeline.
Nothing is hung on it: what is looked at, is looked at where it is called. A step is over when an optimizer has stepped, and
the next forward pass begins another. In steps that are not chosen nothing is copied, computed or waited for.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from harness.core.evidence import relies_on
from harness.core.evidence.recording import RankRecord, record_file, save_record
from harness.core.evidence.summary import summary_of
from harness.core.probe.clock import Clock
from harness.core.probe.optimizer_steps import OptimizerSteps
from harness.core.probe.pipeline import PipelineRecorder
from harness.core.probe.samples import begin_forward_pass, end_forward_pass
from harness.core.probe.without_memory import records_gradients
from harness.recording.boxes import DeclaredSharding
from harness.recording.chosen import StepSelection
from harness.recording.compiling import COMPILER, compiler_imported, no_compiler, not_compiled
from harness.recording.drawn import DrawnSamples
from harness.recording.ends import ProcessEnd
from harness.recording.numbers import NumbersRecorder
from harness.recording.place import (
    claim_folder,
    is_rank_named,
    note_early_error,
    note_exit_at_once,
    note_model_called,
    rank_and_world,
    report_unsaved,
)
from harness.recording.progress import Progress
from harness.recording.seen import RankObserver
from harness.recording.sketches import save_sketches, sketch_file
from harness.recording.trace import TracedCollectives

# ---- What the person who records a job declares of plain tensors: which of them each rank holds a part of


def declared_shardings(text: str) -> tuple[DeclaredSharding, ...]:
    """Return what is declared, for this rank. text: JSON, a list of [pattern, dim, by rank its part, axis]; empty for none."""
    if not text:
        return ()
    rank, _ = rank_and_world()
    declarations = []
    for pattern, dim, part_of_rank, axis in json.loads(text):
        parts = max(part_of_rank) + 1
        part = part_of_rank[rank]
        tp: tuple[int, ...] = ()
        if axis == "tp" and parts > 1:  # tp is the last axis of the grid, so its ranks follow one another
            tp = tuple(range(rank - part, rank - part + parts))
        declarations.append(DeclaredSharding(pattern, dim, parts, part, tp))
    return tuple(declarations)


# ---- the recorder


WRITE_INTERVAL = 20
"""How many times as long as writing took has to pass before it is done again without need."""

_recorder: Recorder | None = None


def imported(module: str) -> None:
    """Install the recorder's part for a module that is now imported; `entry.imported` calls this.

    "torch": make the recorder, for the folder of HARNESS_RECORD and the steps of HARNESS_RECORD_STEPS. COMPILER: have it
    skip the recorder's functions. Any other module is torch's pipelines: patch these, if there is a recorder. Raises
    ImportError, and records nothing more, if they lack what is relied on.
    """
    global _recorder
    if module == "torch":
        _recorder = Recorder(
            Path(os.environ["HARNESS_RECORD"]), StepSelection.parse(os.environ.get("HARNESS_RECORD_STEPS", ""))
        )
        _recorder.install()
    elif module == COMPILER:
        compiler_imported()
    elif _recorder is not None:
        if lacking_text := relies_on.lacking_for_recorder():
            _recorder.failed = lacking_text
            raise ImportError(lacking_text)
        _recorder.pipeline.install()


class Claim(Enum):
    """Whether this process has a folder for its rank's record."""

    OPEN = "not claimed yet"
    HELD = "claimed by this process"
    REFUSED = "this process is not recorded"


class Recorder:
    """The recorder of one process: it sees models, optimizers and collectives, and writes a record for its rank."""

    def __init__(self, directory: Path, chosen: StepSelection) -> None:
        self.directory = directory
        self.chosen = chosen
        self.clock = Clock()
        self.progress = Progress(self.clock)
        self.collectives = TracedCollectives(self.clock, self.is_chosen, self.progress)
        self.pipeline = PipelineRecorder(self.clock)
        self.numbers = NumbersRecorder(
            self.clock,
            os.environ.get("HARNESS_RECORD_NOISE", ""),
            declared_shardings(os.environ.get("HARNESS_RECORD_SHARDED", "")),
            int(os.environ.get("HARNESS_RECORD_ROWS", "0")),
        )
        self.observer = RankObserver(
            self.clock, self.collectives, self.pipeline, lambda: self.own_seconds, self.numbers
        )
        self.drawn = DrawnSamples()
        self.ends = ProcessEnd(directory, end=self.write_last_record, leave=self._note_exit_at_once)
        self.ended = ""
        self.failed = ""
        self.own_seconds = 0.0
        self._inside = self._leaving_join = False
        self._saved = True
        self._recorded = 0
        self._written = 0.0
        self._write_seconds = 0.0
        self._claim = Claim.OPEN
        self._rank_and_world: tuple[int, int] | None = None

    def install(self) -> None:
        """Patch torch and the ways out of this process. Nothing is recorded of calls before this."""
        self.collectives.install()
        OptimizerSteps(self.clock, before=(self._before_optimizer,), after=(self._after_optimizer,)).install()
        self.clock.on_between_steps = self._between_steps
        self._watch_calls()
        self._watch_joins()
        atexit.register(self.write_last_record)
        self.ends.install()
        self.progress.install()
        self.drawn.install(self._call_timed)
        self.numbers.install(self._call_timed, lambda: self.observer.parts)

    def is_chosen(self) -> bool:
        """Return whether what happens now is recorded: in the steps chosen, not after another rank has left a Join.

        In step 0 what sets the job up is.
        """
        joined = self._leaving_join or self.observer.joined is not None
        return not joined and self.clock.step in self.chosen

    # ---- uneven inputs

    def _watch_joins(self) -> None:
        """Note that a rank leaves torch's Join before others. It shadows their collectives, in steps that it does not count."""
        if not dist.is_available():
            return
        from torch.distributed.algorithms.join import Join

        leave = Join.__exit__
        count = getattr(Join, "_get_num_nonjoined_procs", None)
        if count is None:  # another torch may do it differently: nothing is recorded
            return

        @functools.wraps(leave)
        def note_and_leave(join: Join, *error: Any) -> None:
            self._leaving_join = True
            try:
                leave(join, *error)
            finally:
                self._leaving_join = False

        @functools.wraps(count)
        def count_and_note(join: Join) -> Any:
            joined_ranks = count(join)
            if joined_ranks and self.observer.joined is None and self.observer.classes:
                self.observer.joined = self.clock.last_finished_step
                self.observer.close_last_step()
                self.save()
            return joined_ranks

        Join.__exit__ = note_and_leave
        Join._get_num_nonjoined_procs = count_and_note

    # ---- forward passes

    def _watch_calls(self) -> None:
        """Watch calls of all modules, and DDP's forward method, because some trainers call it."""
        nn.Module.__call__ = self._with_calls_recorded(nn.Module.__call__)
        wrapper = nn.parallel.DistributedDataParallel
        wrapper.forward = self._with_calls_recorded(wrapper.forward)

    def _with_calls_recorded(self, original: Callable[..., Any]) -> Any:
        """Return the function with calls of a model recorded.

        Trap: a compiler that traces this sees only that it is compiling, and goes on to the module.
        """

        @not_compiled
        @functools.wraps(original)
        def call_recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._inside:
                return original(module, *args, **kwargs)
            return self._record_call(original, module, args, kwargs)

        return call_recorded

    @not_compiled
    def _record_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record a pass that begins here. A call inside of a known model, or by a recomputation, begins none."""
        if torch._C._current_graph_task_id() != -1 or not self._is_model(module):
            return original(module, *args, **kwargs)
        self._inside = True
        begin_forward_pass(self.clock, module)
        self.progress.pass_begins()
        self.ends.forget_exits()
        output = None
        try:
            self._call_timed(self._write_first_record)
            self._call_timed(self.observer.pass_begins, module, args, kwargs)
            if self.clock.account.kind == "training":
                self.drawn.note_loader_trains()
            output = original(module, *args, **kwargs)
            self._call_timed(self.observer.pass_ends, module)
            self.progress.pass_ended()
        finally:
            end_forward_pass(self.clock, output)
            self._inside = False
        return output

    @not_compiled
    def _is_model(self, module: nn.Module) -> bool:
        """Return whether calls of the module are passes: of a known model, or of one that trains and is attached now."""
        if self.observer.is_part(module):
            return True
        return records_gradients(module) and bool(self._call_timed(self.observer.attach, module))

    @not_compiled
    def _call_timed(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call `act` of the recorder in chosen steps, and add up how long it takes. Return its result, None if not called."""
        if self.failed or not self.is_chosen():
            return None
        began = time.perf_counter()
        try:
            with no_compiler():
                return act(*args)
        except Exception as error:  # a mistake of ours ends the recording, and never the training
            self.failed = f"the recorder itself raised {error!r} in {act.__name__}"
            print(f"harness: nothing more is recorded: {self.failed}", file=sys.stderr)
            return None
        finally:
            self.own_seconds += time.perf_counter() - began

    # ---- optimizers

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """Record what an optimizer is about to step with, and write a first record if there is none."""
        self._call_timed(self.observer.optimizer_begins, optimizer)
        self.progress.optimizer_begins()
        self._call_timed(self._write_first_record, True)

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        """Record what an optimizer's step left."""
        self.progress.optimizer_ended()
        self._call_timed(self.observer.optimizer_ended, optimizer)
        self._saved = False

    def _between_steps(self) -> None:
        """Close the step that is over, read parameters again that were averaged after it, and write the record if it is due.

        Nothing before the first step, or if no optimizer has stepped since the record was written. Nothing is read or
        written after a step that is not chosen.
        """
        if self.clock.step and not self._saved:
            self.observer.close_last_step()
            self._call_timed(self.observer.reread_averaged_parameters)
            self._call_timed(self.observer.note_left_by_evaluation)
            if self._is_writing_due():
                self._call_timed(self.save)

    def _is_writing_due(self) -> bool:
        """Return whether to write after this step.

        A file is written with all earlier steps. So it is written after the 1st, 2nd, 4th, 8th step, and after the last one of
        a span. It is also written where the last time is long ago.
        """
        self._recorded += self.clock.step in self.chosen
        may_wait = self._recorded & (self._recorded - 1) and self.clock.step + 1 in self.chosen
        return not may_wait or time.perf_counter() - self._written > WRITE_INTERVAL * self._write_seconds

    # ---- the end

    def _write_first_record(self, stepping: bool = False) -> None:
        """Write a first record, so that a rank that is killed in its first step leaves one, too.

        Trap: before a process joins others its rank may be unknown, and a process that loads data for a rank has that rank's
        environment.
        """
        if self._claim is not Claim.OPEN or not self.observer.classes:
            return
        is_rank_known = (dist.is_available() and dist.is_initialized()) or is_rank_named() or stepping
        if is_rank_known and not multiprocessing.current_process().daemon:
            self.save()
        else:
            note_model_called(self.directory)

    def _note_exit_at_once(self, code: int) -> None:
        """Record an exit by os._exit. Evidence is not saved: such a process may hang, and reading a device would wait."""
        if self._claim is Claim.HELD and self._rank_and_world and self.observer.pid == os.getpid():
            note_exit_at_once(self.directory, self._rank_and_world[0], code, self.ends.error)
        elif self.ends.error and not self.observer.classes:
            note_early_error(self.directory, self.ends.error)

    def write_last_record(self) -> None:
        """Write the evidence for the last time, as the process ends."""
        if self.observer.classes and self.observer.pid == os.getpid():
            self.ended = "raised" if self.ends.error else "ok"
            if self.ended == "ok":
                self._call_timed(self.observer.reread_averaged_parameters)
            self.save()
        elif self.ends.error and not self.observer.classes:
            note_early_error(self.directory, self.ends.error)

    def save(self) -> None:
        """Write what this rank recorded, its sketches and its last collective. Another process may have claimed the rank:
        then nothing.

        A failure is printed and left in a file beside the records, and training goes on.
        """
        self._saved = True
        rank, world = self._rank_and_world = (
            self._rank_and_world if self._rank_and_world and not dist.is_initialized() else rank_and_world()
        )
        if self._claim is Claim.OPEN:
            folder = claim_folder(self.directory, rank)
            self._claim = Claim.HELD if folder is not None else Claim.REFUSED
            self.directory = folder or self.directory
        if self._claim is Claim.REFUSED:
            return
        began = time.perf_counter()
        try:
            record = self._record(rank, world)
            save_record(record_file(self.directory, rank), summary_of(record), record)
            rank_sketches = self.numbers.build_sketches(rank, world, record.evidence.launch, record.optimizers)
            save_sketches(sketch_file(self.directory, rank), rank_sketches)
            self.progress.open_page(record_file(self.directory, rank), finished=bool(self.ended))
            self.collectives.write_concurrent_beside(record_file(self.directory, rank), finished=bool(self.ended))
        except Exception as error:
            report_unsaved(self.directory, rank, f"the recording of rank {rank} cannot be written: {error!r}")
        self._written = time.perf_counter()
        self._write_seconds = self._written - began

    def _record(self, rank: int, world: int) -> RankRecord:
        """Return what this rank recorded so far."""
        return RankRecord(
            evidence=dataclasses.replace(
                self.observer.evidence(rank, world), launch=os.environ.get("HARNESS_RECORD_LAUNCH", "")
            ),
            steps=self.observer.steps(),
            parts=self.observer.classes,
            optimizers=self.observer.optimizers,
            stepped=self.observer.stepped,
            argv=tuple(sys.argv),
            left_out=tuple(self.observer.left_out),
            failed=tuple(filter(None, [self.failed, self.collectives.failed])),
            ended=self.ended,
            error=self.ends.error if self.ended else "",
            steps_seen=self.clock.last_finished_step,
            last=self.collectives.last,
            host=os.uname().nodename,
            own=self.own_seconds,
            reached=self.progress.reached,
            beside=self.collectives.concurrent_calls,
            drawn=self.drawn.digests,
            buffers=self.observer.buffers,
            samples=self.numbers.samples,
        )
