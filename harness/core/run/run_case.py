"""The line from a case to its judgement: launch, evidence, trial, checks. `run_case` acts, `judge_folder` only reads.

One folder holds all that is known of one run of a case and can be judged anywhere, later.

    case.json        the case            run/         the launch: job, logs, ranks/rank_00.npz, run.json.
    traits.json      what the trainer chose in each launch, as its adapter declares it or as it was measured.
    reference.npz    the reference       repeat/      the second launch, where the case requests one.
    report.txt       what was found      verdict.json the same, for programs.
    reference_model_only.npz             that of a last launch that starts from weights alone.
    saved_1 ..       earlier launches, each with what its checkpoint holds (checkpoint.npz).
    checkpoint/      what they saved, kept only if the case does not pass.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.core import rings, trainers
from harness.core.case import case as requested
from harness.core.case import traits
from harness.core.case.case import Case
from harness.core.evidence.store import CASE_FILE, load_stored, save_stored, write_text
from harness.core.judge import golden
from harness.core.judge.judgement import Judgement
from harness.core.judge.order import reorder_reference
from harness.core.judge.result import Verdict
from harness.core.judge.stored_trial import reference_file
from harness.core.plan.make_plan import make_plan
from harness.core.report.stored import store_report
from harness.core.run.folders import folder_of, make_fresh_folder
from harness.core.run.judging import judge_folder
from harness.core.run.launches import CHECKPOINT, launch_all
from harness.core.run.locks import exclusive_lock
from harness.core.run.measuring import write_measured_traits
from harness.core.run.options import Options, Unsupported
from harness.core.run.reference_cache import link_or_copy, reference_folder
from harness.core.run.supported import reason_unsupported
from harness.reference.record import ReferenceRun

Stage = Callable[[str], None]
"""What is called with the name of each part of the line as it begins."""


def run_case(case: Case, options: Options, stage: Stage = lambda _: None) -> Judgement:
    """Run a case, judge it, store evidence and report in its folder, and return the judgement.

    Raises Unsupported, CaseError, EvidenceError, LaunchError. A failing rank is a finding, not an error. stage: called
    with the name of each part as it begins.
    """
    if reason := reason_unsupported(case, options):
        raise Unsupported(reason)
    with locked_case_folder(case, options) as folder:
        make_evidence(case, options, stage)
        stage("checks")
        judgement = judge_and_report(folder)
        for on_judged in rings.functions_of("judged"):
            on_judged(case, options, folder, judgement)
        return judgement


@contextmanager
def locked_case_folder(case: Case, options: Options) -> Iterator[Path]:
    """Hold the lock of a case's folder while the block runs, waiting for another process that has it. Yield the folder.

    The lock is the file OUT/.locks/FOLDER.lock. The folder itself is neither made nor emptied. Raises EvidenceError if
    the lock's file cannot be written.
    """
    folder = folder_of(case, options)
    with exclusive_lock(options.out / ".locks" / f"{folder.name}.lock"):
        yield folder


def make_evidence(case: Case, options: Options, stage: Stage = lambda _: None) -> Path:
    """Make all evidence of a case in its folder, which is emptied before, and return the folder. Raises as run_case does.

    The caller holds `locked_case_folder`. This is the left half of the line.
    """
    declared_traits = trainers.traits_by_launch(case, options.trainer)
    target = folder_of(case, options)
    case = traits.with_trainer_choices(case, declared_traits)
    for name, launched in case.launches.items():
        make_plan(launched, declared_traits[name])
    stage("reference on one device")
    cached = {
        reference_file(launched): reference_folder(launched, options)
        for launched in golden.launches_with_reference(case)
    }
    folder = make_fresh_folder(target)
    write_text(folder / CASE_FILE, json.dumps(requested.to_json(case), indent=1))
    for name, cached_folder in cached.items():
        place_reference(case, cached_folder / "reference.npz", folder / name, options)
    launch_all(case, folder, cached[reference_file(case.first_launch)] / "weights.npz", options, stage)
    write_measured_traits(case, folder, declared_traits)
    return folder


def place_reference(case: Case, cached: Path, target: Path, options: Options) -> None:
    """Put the reference beside the evidence, its rows in the trainer's order: a link, or a file of its own if rows are
    reordered.

    Ranks cannot reorder theirs: a slice of reordered rows is no slice of the reference's.
    """
    if rows := trainers.rows_of_trainer(case, options.trainer):
        save_stored(target, reorder_reference(load_stored(cached, ReferenceRun), rows))
    else:
        link_or_copy(cached, target)


def judge_and_report(folder: Path) -> Judgement:
    """Judge the evidence in a folder, store the report beside it, and return the judgement: the right half of the line.

    On a PASS the checkpoints are deleted. Raises EvidenceError.
    """
    judgement = judge_folder(folder)
    store_report(judgement)
    if judgement.verdict is Verdict.PASS:  # both sides of every checkpoint are in the ranks' evidence
        shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    return judgement
