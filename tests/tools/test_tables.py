"""Tables of the pages: what stands between two marks is made anew, what was measured takes the place of what was stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.faults import Fault
from harness.faults.attempt import Attempt, Outcome, attempts_from_json, attempts_to_json
from tools.tables import END, accept, with_part

FAULT = Fault("halved", "f.py", "halves", "G01 a/b #1", "tiny", ("gradients",), "0.5 times", lambda fired: None)
ATTEMPT = Attempt("halved", "G01 a/b #1", "gradient reduction", True, "tiny", Outcome.CAUGHT, "gradients are 0.5 times")


def test_what_stands_between_the_marks_is_made_anew_and_the_rest_of_the_page_is_kept() -> None:
    page = "before\n<!-- kinds: python -m tools.tables -->\n{}\n" + END + "\nafter\n"
    assert with_part(page.format("old"), "kinds", "new") == page.format("new")


@pytest.mark.parametrize("page", ["no mark", "<!-- kinds: python -m tools.tables -->\nwithout an end"])
def test_a_page_without_the_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="no <!-- kinds: python -m tools.tables --> .. <!-- end -->"):
        with_part(page, "kinds", "new")


def test_accepting_replaces_what_was_measured_again_and_keeps_the_rest(tmp_path: Path) -> None:
    stored = tmp_path / "results.json"
    gone, old = replace(ATTEMPT, fault="gone"), replace(ATTEMPT, outcome=Outcome.MISSED)
    kept = replace(ATTEMPT, fault="kept", weaker={"exit_code": False})
    stored.write_text(attempts_to_json([gone, old, kept]))
    told = accept([ATTEMPT], [FAULT, replace(FAULT, name="kept")], stored)
    assert attempts_from_json(stored.read_text()) == [ATTEMPT, kept]
    assert told == "results.json: 2 of 2 faults; review `git diff`"
