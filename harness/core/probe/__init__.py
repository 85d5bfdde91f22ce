"""The probe: what one rank observes about itself, from outside the trainer. Needs torch, numpy and nothing else.

    probe = Probe(rank, world_size)
    probe.install()                      before the trainer is built.
    probe.attach(trainer.model_parts)    when it is built, before its first step.
    probe.note_resume(step)              if it resumed: when it has, before it goes on.
    trainer.train()
    with probe.saving_checkpoint(): ..   around a checkpoint that it writes before it goes on.
    probe.finish_training()              before it writes its last one.
    evidence = probe.evidence(...)       afterwards.
    probe.remove()

Where the trainer's tensors have no memory, `with probe.watching_without_memory(fake_mode): ..` stands around all that it does.

CONTRIBUTING.md says what belongs to a further observation.
"""

from __future__ import annotations

import contextlib
import gc
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from harness.core.evidence.numbers import Number
from harness.core.evidence.records import Collective, HeldTensor, RankEvidence, TensorEvidence
from harness.core.evidence.step import Activity, StepEvidence
from harness.core.probe import host_copies, live_tensors, structure
from harness.core.probe.activity import ActivityRecorder
from harness.core.probe.clock import Clock
from harness.core.probe.collectives import CollectiveRecorder
from harness.core.probe.compiler import CompilerRecorder, compiler_counts
from harness.core.probe.copies import CopyRecorder
from harness.core.probe.device import DeviceRecorder
from harness.core.probe.growth import GrowthRecorder
from harness.core.probe.optimizer_steps import OptimizerSteps
from harness.core.probe.pipeline import PipelineRecorder
from harness.core.probe.precision import QuantizedRecorder
from harness.core.probe.resharding import GatheredRecorder
from harness.core.probe.retained_graphs import RetainedGraphs
from harness.core.probe.samples import SampleRecorder
from harness.core.probe.saved_tensors import SavedTensorsRecorder
from harness.core.probe.settings import SettingsRecorder
from harness.core.probe.shards import fused_starts_of
from harness.core.probe.values import StepValues, ValueRecorder
from harness.core.probe.without_memory import registered_mode
from harness.core.probe.witness import Witness

ReportedNumbers = tuple[float | None, ...]
"""Loss, gradient norm, learning rate and largest loss; those at the end may be left out."""

FREEZE_THRESHOLD = 10_000
"""Of Python's old objects that are worth freezing. A rank that was forked from a frozen server has fewer. Trap:
gc.get_freeze_count() walks through all that is frozen, which takes 30 ms of CPU in each rank."""


class Probe:
    """All observers of one rank's training. The module's docstring says in which order its methods are called."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_issue: Callable[[Collective], None] | None = None,
        row_length: Callable[[int], int] | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        """row_length: how many tokens of each sample this rank receives in a step, for trainers that lay them end to end.
        settings: torch's switches as they were before the trainer's code ran; by default as `install` finds them."""
        self.rank = rank
        self.world_size = world_size
        self.clock = Clock()
        self.collectives = CollectiveRecorder(
            self.clock.step_and_phase, on_issue, lambda: self.clock.account, reads_inputs=True
        )
        self.values = ValueRecorder(self.clock)
        self.samples = SampleRecorder(self.clock, row_length)
        self.activity = ActivityRecorder(self.clock)
        self.pipeline = PipelineRecorder(self.clock)
        self.gather_recorder = GatheredRecorder(self.clock)
        self.quantized_recorder = QuantizedRecorder(self.clock)
        self.compiler = CompilerRecorder(self.clock)
        self.saved_tensors_recorder = SavedTensorsRecorder(self.clock)
        self.settings = SettingsRecorder(self.clock, settings)
        self.activity.on_phase = self.settings.note_settings
        self.clock.on_between_steps = self._between_steps
        self._parameters: tuple[TensorEvidence, ...] = ()
        self._parts: tuple[nn.Module, ...] = ()
        self._unaccounted: tuple[HeldTensor, ...] | None = None
        self.growth = GrowthRecorder(self.clock, self._unaccounted_tensors)
        self.copies = CopyRecorder(self.clock)
        self.device = DeviceRecorder(self.clock)
        self.retained_graphs = RetainedGraphs(self.clock)
        self.optimizer_steps = OptimizerSteps(
            self.clock,
            before=(
                self.values.before_optimizer,
                self.settings.note_settings,
                self.gather_recorder.before_optimizer,
            ),
            after=(
                self.values.after_optimizer,
                self.compiler.after_optimizer,
                self.device.after_optimizer,
            ),
        )
        self._has_frozen = False  # Python's objects, at install

    def install(self) -> None:
        """Begin to watch: patch torch. Call it before the trainer is made.

        Above FREEZE_THRESHOLD old objects of Python, gc.freeze() excludes all living ones until `remove`. They hold no
        tensor of the training, so the search for live tensors in each step leaves them out.
        """
        self._has_frozen = len(gc.get_objects(generation=2)) > FREEZE_THRESHOLD
        if self._has_frozen:
            gc.freeze()
        self.collectives.install()
        self.optimizer_steps.install()
        self.values.install()
        self.samples.install()
        self.activity.install()
        self.pipeline.install()
        self.saved_tensors_recorder.install()
        self.settings.install()
        self.copies.install()
        self.device.install()
        self.retained_graphs.install()

    @contextlib.contextmanager
    def watching_without_memory(self, mode: Any) -> Iterator[Witness]:
        """Watch a trainer whose tensors are of this FakeTensorMode, with a probe that is installed. Yield the witness.

        The witness stands above the mode and sees what is computed, in place of the recorders' own kernels. Only shapes of
        values are kept."""
        for recorder in (self.collectives, self.activity, self.copies):
            recorder.close()
        self.values.record_shapes_only()
        with mode, registered_mode(mode), Witness(self) as witness, witness.storages.noting_resizes():
            yield witness

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Hook the model parts, and copy the parameters that they begin with. Call it once the trainer is built."""
        self._parts = self.values.parts = tuple(parts)
        self.activity.attach(self._parts)
        self.gather_recorder.attach(self._parts)  # before samples: its hook ends the forward pass
        self.quantized_recorder.attach(self._parts)
        self.samples.attach(self._parts)
        self.copies.attach(self._parts)
        self.growth.attach()
        self._parameters = structure.parameter_evidence(self._parts, host_copies.copy_to_host)

    def _between_steps(self) -> None:
        self.values.note_changes_between_steps()
        self.gather_recorder.note_leftovers(self._parts)

    def note_resume(self, step: int) -> None:
        """Note that the trainer has read a checkpoint that was written after this step."""
        self.clock.resume_after(step)
        self.values.watch_resumed()

    @contextlib.contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        """Surround the writing of a checkpoint after which the trainer goes on.

        What happens meanwhile belongs to no step. The parameters that it leaves are compared when the next step begins."""
        self.values.keep_final_state()
        with self.clock.outside_of_steps():
            yield

    def finish_training(self) -> None:
        """Note that training has ended: what follows belongs to no step. Look for the last time at what is retained."""
        last_step = self.clock.step
        self.clock.finish()
        self.values.keep_final_state()
        self._unaccounted = self._unaccounted_tensors(patient=True)  # the last look: growth is what is kept then, too
        self.growth.note_after_last_step(last_step, self._unaccounted)

    def _unaccounted_tensors(self, *, patient: bool = False) -> tuple[HeldTensor, ...]:
        """Return the tensors that live beside parameters, gradients, optimizer state and the probe's own."""
        probe_tensors = [*self.samples.kept_tensors(), *host_copies.pending_copies()]
        return live_tensors.find_unaccounted_tensors(
            self._parts, self.values.optimizers, probe_tensors, evaluated=self.clock.has_evaluated, patient=patient
        )

    def remove(self) -> None:
        """Take hooks, patches and kernels out of torch and the model again, and unfreeze objects that `install` froze.

        What was recorded stays."""
        if self._has_frozen:
            gc.unfreeze()
        self.retained_graphs.remove()
        self.saved_tensors_recorder.remove()
        self.copies.remove()
        self.pipeline.remove()
        self.quantized_recorder.remove()
        self.activity.remove()
        self.gather_recorder.remove()
        self.samples.remove()
        self.values.remove()
        self.optimizer_steps.remove()
        self.collectives.remove()

    def evidence(
        self,
        reported: Mapping[int, ReportedNumbers],
        fault: bool | None = None,
        numbers: Mapping[int, Mapping[str, Number]] = MappingProxyType({}),
    ) -> RankEvidence:
        """Return all that was seen on this rank, read from the device after waiting for it.

        Steps are those after the one that the run resumed from.
        reported: step -> loss, gradient norm, learning rate and largest loss, as the trainer shows its user.
        numbers: step -> other numbers that it shows, by name. fault: whether a fault was applied; None if none was requested.
        """
        host_copies.wait_for_copies()
        self.values.read_copies()
        steps = sorted(step for step in self.values.steps if step > self.clock.start_step)
        return RankEvidence(
            rank=self.rank,
            world_size=self.world_size,
            parameters=tuple(
                replace(parameter, value=host_copies.read_copy(parameter.value)) for parameter in self._parameters
            ),
            groups=structure.group_evidence(),
            collectives=self.collectives.final_records(),
            steps=tuple(
                replace(
                    self._step_evidence(step, self.values.steps[step], reported), numbers=dict(numbers.get(step, {}))
                )
                for step in steps
            ),
            structure=structure.wrapper_evidence(self._parts),
            switches=structure.fsdp2_switches(self._parts),
            environment=describe_environment(),
            compiler=compiler_counts(),
            fault=fault,
            resumed=self.values.resumed,
            held=self._unaccounted,
            settings=self.settings.settings_at_start,
            after_evaluation=tuple(self.gather_recorder.after_evaluation),
            own_groups=self.collectives.own_groups.final_groups(),
            passed=self.collectives.input_bit_sums,
        )

    @property
    def fused_starts(self) -> dict[str, int]:
        """Return at which element of a fused tensor this rank's interval begins, by the trainer's name of it."""
        return fused_starts_of(self._parts)

    def _step_evidence(self, step: int, values: StepValues, reported: Mapping[int, ReportedNumbers]) -> StepEvidence:
        """Return one step as the evidence has it: what each recorder noted, and the numbers that the trainer reported."""
        loss, gradient_norm, learning_rate, largest_loss = (*reported.get(step, ()), *[None] * 4)[:4]
        return StepEvidence(
            step=step,
            microbatches=self.samples.microbatches(step),
            actions=tuple(self.pipeline.actions.get(step, ())),
            reported_loss=loss,
            grad_norm=gradient_norm,
            lr=None if values.lr is None else float(values.lr),
            reported_lr=learning_rate,
            reported_largest=largest_loss,
            gradients=values.gradients,
            unsettled=values.unsettled,
            parameters=values.parameters,
            optimizer_state=values.optimizer_state,
            memory=values.memory,
            changed=values.changed_since,
            scaled=values.scale_factor,
            seconds=self.device.step_seconds(step),
            allocator=self.device.allocator_of(step),
            activity=self._activity(step),
            graphs=self.compiler.graphs_after(step),
            settings=self.settings.settings_of(step),
            positions=self.samples.positions_of_step(step),
            after_forward=self.gather_recorder.after_forward_of(step),
            kept=self.growth.retained_bytes(step),
            unwaited=self.growth.unwaited_collectives_of(step),
            graphs_retained=self.retained_graphs.retained_graphs_of(step),
            copied=self.copies.peak_copies_of(step),
            gathered=self.gather_recorder.gathered_after_backward(step),
            evaluated=self.samples.evaluation_microbatches(step),
        )

    def _activity(self, step: int) -> Activity:
        """Return what was computed in a step, with its matmuls in 8 bits and the hooks on saved tensors."""
        computed = self.activity.activity_of(step)
        return replace(
            computed,
            quantized=self.quantized_recorder.matmuls_of(step),
            saved=self.saved_tensors_recorder.hooks_of(step),
        )


def describe_environment() -> dict[str, str]:
    """Return the versions of Python and torch, the machine's processor, and the GPU's name ("cpu" if none is in use)."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
    }
