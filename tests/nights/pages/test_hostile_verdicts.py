"""Text that somebody else wrote into verdicts.jsonl is shown as text, and a line that is no outcome is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest

from harness.core.cli import main
from harness.core.report.outcome import Outcome
from harness.core.report.page import Page, page_html
from harness.nights.pages.junit import junit_xml
from harness.nights.pages.markdown import github_annotations, markdown_summary

HOSTILE = (
    "# head\n- [a](https://x.example) <script>1</script> `code` | @team ![i](//e/i.png)\n"
    "www.x.example ::error::x\n```\n| a |"
)
FIELDS: tuple[str, ...] = ("case", "layout", "again", "cause", "reason", "verdict")


def hostile(**fields: Any) -> Outcome:
    usual: dict[str, Any] = {"case": "pair", "verdict": "FAIL", "cause": "wrong", "checks": {"loss": "FAIL"}}
    return Outcome(**usual | fields)


@pytest.mark.parametrize("field", FIELDS)
def test_markdown_obeys_nothing_that_an_outcome_says(field: str) -> None:
    shown = markdown_summary([hostile(**{field: HOSTILE})], [HOSTILE], [HOSTILE], {"pair": HOSTILE})
    calm = markdown_summary([hostile(**{field: "calm"})], ["calm"], ["calm"], {"pair": "calm"})
    assert len(shown.splitlines()) == len(calm.splitlines())
    alive = "\n".join(line for line in shown.splitlines() if not line.startswith("    "))
    assert re.findall(r"<(?!/?details>|/?summary>)|\]\(|@team|https://|www\.|```", alive) == []
    assert [line.count("|") for line in alive.splitlines() if line.startswith("| ")] == [5, 5]


@pytest.mark.parametrize("field", FIELDS)
def test_an_annotation_is_one_line(field: str) -> None:
    lines = github_annotations([hostile(**{field: HOSTILE})])
    assert ["\n" in line for line in lines] == [False]
    assert lines[0].startswith(("::error title=", "::warning title="))


def test_xml_holds_any_text() -> None:
    text = HOSTILE + "\x00\x1b\ufffe"
    one = hostile(case=text, cause=text, report=text)
    assert fromstring(junit_xml([one], [text])).find("testcase/failure") is not None


def test_the_page_has_no_script_of_an_outcome() -> None:
    shown = page_html(Page([hostile(case=HOSTILE, cause=HOSTILE, again=HOSTILE, layout=HOSTILE)], [], ""))
    assert "<script>1" not in shown


BEGINS = {
    "cases": {"pair": ""},
    "began": "2026-01-01",
    "machine": "m",
    "trainer": "llama3",
    "torch": "2.13",
    "shard": "",
}
WRONG: dict[str, dict[str, Any]] = {
    "verdict": {"verdict": "GREAT"},
    "surrogate": {"cause": "\ud800"},
    "type of seconds": {"seconds": "1"},
    "type of ranks": {"ranks": True},
    "type of checks": {"checks": ["loss"]},
    "verdict of a check": {"checks": {"loss": "GREAT"}},
    "type of a measure": {"measures": {"peak": "1"}},
    "type of cause": {"cause": {}},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("form", [None, "markdown", "annotations", "junit", "folders"])
def test_a_line_that_is_no_outcome_is_left_out_and_its_case_has_no_verdict(
    wrong: dict[str, Any], form: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"run": "1", "begins": BEGINS}, {"run": "1", "ended": {"case": "pair", "verdict": "PASS"} | wrong}]
    (tmp_path / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path), *(["--as", form] if form else [])]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("begins", [{"shard": "x"}, {"shard": "0/0"}, {"began": 3}, {"trainer": []}, {"cases": 1}])
def test_a_run_that_begins_wrongly_is_none(begins: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "verdicts.jsonl").write_text(json.dumps({"run": "1", "begins": BEGINS | begins}) + "\n")
    assert main(["report", str(tmp_path)]) == 2
