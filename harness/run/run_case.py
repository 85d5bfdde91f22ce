"""The straight line: case -> launch -> evidence -> trial -> judgement. `run_case` acts, `judge_folder` only reads.

One folder holds all that is known of one run of a case and can be judged anywhere, later:

    case.json        the case            run/         the launch: job, logs, ranks/rank_00.npz, run.json
    reference.npz    the oracle          repeat/      the second launch, where the case requests one
    report.txt       what was found      verdict.json the same, for programs
    saved_1 ..       earlier launches, each with what its checkpoint holds (checkpoint.npz)
    checkpoint/      what they saved, kept only if the case does not pass
"""

from __future__ import annotations

import json
import shutil
import time

from harness import trainers
from harness.evidence.store import write_text
from harness.judge.judgement import Judgement
from harness.judge.result import Verdict
from harness.plan.make_plan import make_plan
from harness.report.stored import store_report
from harness.run.folders import folder_of, fresh_folder
from harness.run.judging import judge_folder
from harness.run.launches import CHECKPOINT, launch_all
from harness.run.locks import only_one
from harness.run.options import Options, Unsupported
from harness.run.reference_cache import hard_link, reference_folder
from harness.run.supported import owned, unsupported
from harness.spec.case import Case, to_json


def run_case(case: Case, options: Options) -> Judgement:
    """The whole line. Raises Unsupported, CaseError, EvidenceError, LaunchError; a failing rank is a finding, not an error."""
    reason = unsupported(case, options)
    if reason:
        raise Unsupported(reason)
    case = owned(case, trainers.load(options.trainer))
    for launched in case.launches.values():
        make_plan(launched)
    started = time.monotonic()
    cached = reference_folder(case, options)
    folder = folder_of(case, options)
    with only_one(options.out / ".locks" / f"{folder.name}.lock"):
        fresh_folder(folder)
        write_text(folder / "case.json", json.dumps(to_json(case), indent=1))
        hard_link(cached / "reference.npz", folder / "reference.npz")
        launch_all(case, folder, cached / "weights.npz", options)
        judgement = judge_folder(folder, seconds=time.monotonic() - started)
        store_report(judgement)
        if judgement.verdict is Verdict.PASS:  # both sides of every checkpoint are in the ranks' evidence
            shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    return judgement
