"""What `harness matrix` prints: a row a case, a column a check, and below it what was not applicable."""

from __future__ import annotations

from pathlib import Path

from harness.core.case.case import Case
from harness.core.checks import all_checks
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict
from harness.core.report.grid import counts_text, grid_text, not_applicable_text
from harness.core.report.outcome import Outcome, error_outcome, judged_outcome, skipped_outcome


def test_the_grid_names_checks_over_their_columns_and_reasons_in_the_row() -> None:
    outcomes = [
        skipped_outcome(Case("tp_2", "x"), "no GPU"),
        error_outcome(Case("ddp_2", "x"), "disk full"),
    ]
    lines = grid_text(outcomes).splitlines()
    assert lines[:3] == [
        "a column a check, in this order:",
        "  process    completed",
        "  structure  collective_order exchange features memory placements process_groups reshard schedule",
    ]
    assert lines[-3:] == ["       p structure   data   numbers", "tp_2   SKIPPED: no GPU", "ddp_2  ERROR: disk full"]
    assert len(lines) <= 13 and max(map(len, lines)) <= 100
    assert counts_text(outcomes, 1.25) == "2 cases in 1.2 s: 1 SKIPPED, 1 ERROR"


def test_a_row_of_the_grid_has_a_letter_for_each_check_and_below_it_the_checks_that_are_broken() -> None:
    found = dict.fromkeys(all_checks(), Verdict.PASS)
    found |= {"memory": Verdict.FAIL, "loss": Verdict.FAIL, "schedule": Verdict.NOT_APPLICABLE}
    found |= {"golden": Verdict.UNKNOWN}
    results = tuple(Result(check, verdict, 1) for check, verdict in found.items())
    judgement = Judgement(Case("ddp_2", "x"), Path("x"), results, None, 9.0)
    row, below = grid_text([judged_outcome(judgement)]).splitlines()[-2:]
    name, *marks, verdict, seconds, _ = row.split()
    assert (name, verdict, seconds, below) == ("ddp_2", "FAIL", "9.0", "    F memory loss")
    letters = dict(zip(all_checks(), "".join(marks), strict=True))
    assert {check: letter for check, letter in letters.items() if letter != "P"} == {
        "memory": "F",
        "loss": "F",
        "schedule": "-",
        "golden": "?",
    }


def test_under_the_grid_stands_which_checks_were_not_applicable_in_how_many_cases_and_why() -> None:
    def one(**notes: str) -> Outcome:
        results = (
            Result("loss", Verdict.PASS, 1),
            *(Result(c, Verdict.NOT_APPLICABLE, note=n) for c, n in notes.items()),
        )
        return judged_outcome(Judgement(Case("x", "x"), Path("x"), results, None, 1.0))

    text = not_applicable_text([one(resume="nothing is resumed"), one(resume="nothing is resumed", schedule="pp 1")])
    assert text.splitlines() == [
        f"1 of {len(all_checks())} checks were judged in a case; not applicable were:",
        "  resume      2 x  nothing is resumed",
        "  schedule    1 x  pp 1",
    ]
