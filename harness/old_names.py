"""Modules under the names of the release before: `harness.probe.values` is `harness.core.probe.values`, the same object.

What others import from is harness.adapter. These names go with the next release.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NOW = {
    "affected": "nights.affected",
    "bisect": "nights.bisect",
    "checks": "core.checks",
    "cli": "core.cli",
    "cli.bisect": "nights.cli.bisect",
    "cli.compare": "nights.cli.compare",
    "cli.doctor": "adapters.cli.doctor",
    "cli.faults": "faults.cli.faults",
    "cli.init": "adapters.cli.init",
    "cli.nightly": "nights.cli.nightly",
    "cli.plan": "clusters.cli.plan",
    "cli.preflight": "clusters.cli.preflight",
    "cli.record": "recording.cli.record",
    "cli.report": "nights.cli.report",
    "cli.same_training": "recording.cli.same_training",
    "cli.work.bisect": "nights.cli.work.bisect",
    "cli.work.compare": "nights.cli.work.compare",
    "cli.work.doctor": "adapters.cli.work.doctor",
    "cli.work.faults": "faults.cli.work.faults",
    "cli.work.history_report": "nights.cli.work.history_report",
    "cli.work.init": "adapters.cli.work.init",
    "cli.work.layout_case": "clusters.cli.work.layout_case",
    "cli.work.nightly": "nights.cli.work.nightly",
    "cli.work.plan": "clusters.cli.work.plan",
    "cli.work.preflight": "clusters.cli.work.preflight",
    "cli.work.rank_servers": "core.cli.work.run",
    "cli.work.record": "recording.cli.work.record",
    "cli.work.recording_report": "recording.cli.work.recording_report",
    "cli.work.report": "nights.cli.work.report",
    "cli.work.run_report": "nights.cli.work.run_report",
    "cli.work.same_training": "recording.cli.work.same_training",
    "cli.work.trace_report": "recording.cli.work.trace_report",
    "diagnosis": "core.causes",
    "diagnosis.backward": "hypotheses.backward",
    "diagnosis.dropout": "hypotheses.dropout",
    "diagnosis.exported": "hypotheses.exported",
    "diagnosis.fed": "hypotheses.fed",
    "diagnosis.other_groups": "hypotheses.other_groups",
    "diagnosis.passed_back": "hypotheses.passed_back",
    "diagnosis.piece_weights": "hypotheses.piece_weights",
    "diagnosis.received": "hypotheses.received",
    "diagnosis.recipe": "hypotheses.recipe",
    "diagnosis.reported_numbers": "hypotheses.reported_numbers",
    "diagnosis.resumed": "hypotheses.resumed",
    "diagnosis.sketched": "recording.judged.sketched",
    "diagnosis.sketched_gradients": "recording.judged.sketched_gradients",
    "diagnosis.sketched_passes": "recording.judged.sketched_passes",
    "diagnosis.sketched_resumed": "recording.judged.sketched_resumed",
    "diagnosis.sketched_steps": "recording.judged.sketched_steps",
    "diagnosis.started": "hypotheses.started",
    "diagnosis.tied": "hypotheses.tied",
    "diagnosis.ways": "hypotheses.ways",
    "diagnosis.whose": "hypotheses.whose",
    "evidence": "core.evidence",
    "evidence.sketches": "recording.sketches",
    "evidence.unclaimed": "core.evidence.claimed",
    "judge": "core.judge",
    "judge.adapters": "core.checks.features",
    "judge.clipped_by_hand": "recording.judged.same_training",
    "judge.figures": "recording.judged.figures",
    "judge.gathered_ahead": "core.checks.traffic",
    "judge.going_on": "recording.judged.same_training",
    "judge.observed_order": "core.checks.exchange",
    "judge.outside_passes": "recording.judged.outside_passes",
    "judge.recorded": "recording.judged.recorded",
    "judge.recorded_ends": "recording.judged.recorded_ends",
    "judge.recorded_recipe": "recording.judged.recorded_recipe",
    "judge.recorded_waits": "recording.judged.recorded_calls",
    "judge.row_cuts": "core.judge.stored_trial",
    "judge.run_as_recording": "recording.judged.run_as_recording",
    "judge.same_rows": "recording.judged.same_rows",
    "judge.same_training": "recording.judged.judge_same_training",
    "judge.sketch_distances": "recording.judged.sketch_distances",
    "judge.sketched": "recording.judged.judge_sketched",
    "judge.stored_recording": "recording.judged.stored_recording",
    "judge.structure": "recording.judged.structure",
    "launch": "core.launch",
    "launch.blame": "core.blame.culprits",
    "launch.rank_exit": "core.blame.rank_exit",
    "launch.sequences": "core.blame.waits",
    "onboarding": "adapters.onboarding",
    "plan": "core.plan",
    "plan.traffic.zero": "core.plan.traffic.data_parallel",
    "plugin.checks": "core.plugin.checks",
    "plugin.items": "core.plugin.items",
    "plugin.same_training": "recording.same_training",
    "preflight": "clusters",
    "probe": "core.probe",
    "record": "recording",
    "record.changed": "recording.numbers",
    "record.declared": "recording.recorder",
    "record.errors": "recording.ends",
    "record.inputs": "core.probe.inputs",
    "record.scalers": "recording.numbers",
    "report": "core.report",
    "report.catalogue": "faults.catalogue_text",
    "report.compared": "recording.pages.compared",
    "report.compared_runs": "nights.pages.compared_runs",
    "report.fitting_text": "clusters.pages.fitting_text",
    "report.hang_page": "recording.pages.hang_page",
    "report.junit": "nights.pages.junit",
    "report.layout_documents": "clusters.pages.layout_documents",
    "report.markdown": "nights.pages.markdown",
    "report.pictures": "nights.pages.pictures",
    "report.recording_jobs": "recording.pages.recording_jobs",
    "report.recording_layout": "recording.pages.recording_layout",
    "report.recording_odd": "recording.judged.anomalies",
    "report.recording_outside": "recording.pages.recording_page",
    "report.recording_own": "recording.pages.recording_own",
    "report.recording_page": "recording.pages.recording_page",
    "report.same_training": "recording.pages.same_training",
    "report.timeline_page": "recording.pages.timeline_page",
    "report.trace_page": "recording.pages.trace_page",
    "report.trace_times": "recording.pages.trace_times",
    "run": "core.run",
    "run.catalogue": "faults.run_catalogue",
    "run.changes": "nights.changes",
    "run.comparison": "nights.comparison",
    "run.gang_files": "nights.gang_files",
    "run.history": "nights.history",
    "run.history_text": "nights.history_text",
    "run.mapping": "nights.mapping",
    "run.margins": "faults.margins",
    "run.merged": "nights.merged",
    "run.nights": "nights.nights",
    "run.page": "nights.page",
    "run.ray_cluster": "nights.ray_cluster",
    "run.recorded_layout": "recording.judged.recorded_layout",
    "run.same_training": "recording.judged.same_training",
    "run.stand_ins": "recording.judged.stand_ins",
    "run.stored_kind": "nights.stored_kind",
    "run.stored_run": "faults.run_catalogue",
    "run.traced": "recording.judged.traced",
    "spec": "core.case",
    "spec.quarantine": "nights.quarantine",
    "traces": "recording.traces",
    "trainers": "core.trainers",
    "trainers.deepspeed": "adapters.deepspeed",
    "trainers.megatron": "adapters.megatron",
    "trainers.picotron": "adapters.picotron",
    "trainers.support.checkout": "adapters.support.checkout",
    "trainers.support.float64": "adapters.support.float64",
    "trainers.support.learning_rate": "adapters.support.learning_rate",
    "trainers.support.requests": "adapters.support.requests",
    "trainers.support.rows": "adapters.support.rows",
    "trainers.support.script": "adapters.support.script",
    "trainers.support.script_adapter": "adapters.support.script_adapter",
    "trainers.support.training_function": "adapters.support.training_function",
    "trainers.torchtitan": "adapters.torchtitan",
    "trainers.torchtitan.loss": "adapters.torchtitan.trainer_config",
    "trainers.torchtitan.optimizer": "adapters.torchtitan.trainer_config",
    "trainers.transformers": "adapters.transformers",
}
"""Old name -> name of today, both without "harness."; what is not here has moved with the package around it."""
ROOMS = frozenset(name.partition(".")[0] for name in NOW)


def name_of_today(name: str) -> str | None:
    """Return today's name of a module with an old name, such as harness.core.probe of harness.probe; None for any other
    name."""
    top, _, rest = name.partition(".")
    if top != "harness" or rest.partition(".")[0] not in ROOMS:
        return None
    parts = rest.split(".")
    for known in range(len(parts), 0, -1):
        if (now := NOW.get(".".join(parts[:known]))) is not None:
            return ".".join(["harness", now, *parts[known:]])
    return None


class OldNames:
    """A finder of imports that finds a module of today by its old name, with a FutureWarning, once a process.

    It comes before other finders, which would load the file once more.
    """

    warned = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module of today for an old name; None for any other name, which other finders then
        look up."""
        now = name_of_today(name)
        if now is None:
            return None
        if not OldNames.warned:
            OldNames.warned = True
            message = f"{name} is {now} now; what adapters and faults need is in harness.adapter"
            warnings.warn(message, FutureWarning, stacklevel=2)
        return ModuleSpec(name, _SameModule(now), origin=now)  # type: ignore[arg-type]


class _SameModule:
    """A loader that returns the module of today in place of a new one."""

    def __init__(self, now: str) -> None:
        self.now = now
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.now)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; the import that goes on has given it the spec of the old name."""
        module.__spec__ = self.spec


def install() -> None:
    """Let old names be imported, once a process."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
