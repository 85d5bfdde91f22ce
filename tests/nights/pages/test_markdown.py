"""What CI shows of a run: causes first, each once, and nothing that a case's words could turn into something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.case.case import Case
from harness.core.cli import main
from harness.core.report.outcome import Outcome
from harness.core.run import verdicts
from harness.core.run.options import Options
from harness.nights.pages.markdown import MAX_SUMMARY_BYTES, github_annotations, markdown_summary

GOOD = Outcome("fsdp_2", "PASS", 2, checks={"loss": "PASS"}, layout="dp_shard 2", folder="fsdp_2")
BAD = replace(
    GOOD,
    case="hsdp",
    verdict="FAIL",
    checks={"traffic": "FAIL"},
    cause="ran as *FSDP*: 1%",
    again="run hsdp",
    folder="h",
)
LOST = Outcome("tp_2", "ERROR", reason="no | disk\n::error::", folder="tp_2")


def test_the_summary_begins_with_causes_and_ends_with_all_cases() -> None:
    assert markdown_summary(
        [GOOD, BAD, LOST, replace(BAD, case="also")], ["of today"], ["shard 2/2 is not here"]
    ).splitlines() == [
        "## 4 cases: 1 PASS, 2 FAIL, 1 ERROR",
        "",
        "**shard 2/2 is not here**",
        "",
        "### ran as &#42;FSDP&#42;: 1%",
        "",
        "- FAIL `hsdp` 0 of 1 pass; fail: traffic",
        "- FAIL `also` 0 of 1 pass; fail: traffic",
        "",
        "    run hsdp",
        "",
        "### no &#124; disk ::error::",
        "",
        "- ERROR `tp_2`",
        "",
        "<details><summary>all 4 cases</summary>",
        "",
        "| case | verdict | requested | checks |",
        "|---|---|---|---|",
        "| `fsdp_2` | PASS | dp&#95;shard 2 | 1 of 1 pass |",
        "| `hsdp` | FAIL | dp&#95;shard 2 | 0 of 1 pass; fail: traffic |",
        "| `tp_2` | ERROR |  | no &#124; disk ::error:: |",
        "| `also` | FAIL | dp&#95;shard 2 | 0 of 1 pass; fail: traffic |",
        "",
        "</details>",
        "",
        "of today",
    ]


def test_a_case_whose_cause_has_other_numbers_shows_its_own() -> None:
    larger = replace(BAD, case="larger", ranks=8, cause="ran as *FSDP*: 2%")
    text = markdown_summary([larger, BAD], [])
    assert text.count("### ") == 1 and text.index("`hsdp`") < text.index("`larger` ran as &#42;FSDP&#42;: 2%")


def test_a_summary_that_would_not_be_shown_is_cut_below_its_causes() -> None:
    many = [replace(GOOD, case=f"case_{number:06}" * 5) for number in range(20_000)]
    text = markdown_summary([*many, BAD], [])
    assert len(text.encode()) < MAX_SUMMARY_BYTES + 100 and "ran as" in text and text.endswith("a mebibyte.\n")


def test_an_annotation_is_one_line_for_each_cause_and_holds_no_command_of_a_case() -> None:
    assert github_annotations([GOOD, BAD, LOST, replace(BAD, case="a:b")]) == [
        "::error title=hsdp%2C a%3Ab::ran as *FSDP*: 1%25%0Aagain: run hsdp",
        "::warning title=tp_2::no | disk%0A::error::",
    ]


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("annotations", "::error title=hsdp::ran as *FSDP*: 1%25%0Aagain: run hsdp\n"),
        ("folders", "{out}/h\n"),
        ("markdown", "## 2 cases: 1 PASS, 1 FAIL\n"),
    ],
)
def test_report_as_what_ci_reads_exits_as_the_cases_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, shown: str
) -> None:
    record = verdicts.begin_record([Case("fsdp_2", "a test"), Case("hsdp", "a test")], Options(tmp_path), "")
    record.append_outcome(GOOD)
    record.append_outcome(BAD)
    assert main(["report", str(tmp_path), "--as", form]) == 1
    assert capsys.readouterr().out.startswith(shown.format(out=tmp_path))
