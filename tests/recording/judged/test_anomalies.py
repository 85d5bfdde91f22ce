"""Verdicts and exit codes of recordings: each kind of anomaly is of one check, and nothing else decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from literal_recording import hsdp

from harness.core.checks import all_checks
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.core.judge.result import Verdict
from harness.recording.cli.work.recording_report import exit_code
from harness.recording.judged.anomalies import CHECK_AND_VERDICT, Kind, find_anomalies, results_of_anomalies
from harness.recording.judged.stored_recording import Recording


def recording(*changed: Any, **told: Any) -> Recording:
    ranks = [hsdp(rank) for rank in range(4)]
    return Recording(Path("run"), {rank.rank: rank for rank in [*ranks, *changed]}, **told)


def test_every_kind_is_of_a_check_that_there_is() -> None:
    assert {*CHECK_AND_VERDICT} == {*Kind}
    assert {check for check, _ in CHECK_AND_VERDICT.values()} <= {*all_checks()}


@pytest.mark.parametrize(
    ("job", "verdicts", "code"),
    [
        (recording(), {"completed": Verdict.PASS}, PASSED),
        (Recording(Path("run"), {}, nothing="torch was not imported"), {"completed": Verdict.UNKNOWN}, NOT_JUDGED),
        (recording(hsdp(0, ended="raised", error="ValueError: x")), {"completed": Verdict.FAIL}, BROKEN),
        (recording(code=3), {"completed": Verdict.FAIL}, BROKEN),
        (recording(hsdp(0, failed=("the recorder raised",))), {"completed": Verdict.UNKNOWN}, NOT_JUDGED),
        (
            recording(hsdp(0, not_finite={2: ("wq",)})),
            {"completed": Verdict.PASS, "finite": Verdict.FAIL},
            BROKEN,
        ),
        (
            recording(hsdp(0, not_finite={2: ("wq",)}, failed=("the recorder raised",))),
            {"completed": Verdict.UNKNOWN, "finite": Verdict.FAIL},
            BROKEN,
        ),
    ],
    ids=["right", "nothing", "raised", "exit code", "recorder", "not finite", "both"],
)
def test_checks_say_what_anomalies_are_and_the_exit_code_follows(
    job: Recording, verdicts: dict[str, Verdict], code: int
) -> None:
    assert {result.check: result.verdict for result in results_of_anomalies(job)} == verdicts
    assert exit_code(job) == code


def test_a_finding_has_the_ranks_the_step_and_the_text_of_its_anomaly() -> None:
    job = recording(hsdp(0, not_finite={2: ("wq",)}))
    (anomaly,) = find_anomalies(job)
    assert (anomaly.ranks, anomaly.step, anomaly.text) == ((0,), 2, "1 parameter (wq) after step 2, on rank 0")
    (finding,) = results_of_anomalies(job)[1].findings
    assert (finding.ranks, finding.step, finding.note) == (anomaly.ranks, anomaly.step, anomaly.text)
