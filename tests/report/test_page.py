"""The page: causes first, nothing from elsewhere, readable on a phone and in the dark, and no best on a CPU."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from literal import SGD, tiny_case, trial_of, without_rank

from harness.cli import main
from harness.report.causes import causes
from harness.report.drawings import drawn
from harness.report.outcome import Outcome
from harness.report.page import Page, Past, Shown, html, measured
from harness.run import verdicts
from harness.run.options import Options
from harness.run.page import shown
from harness.spec.case import Case
from harness.spec.dims import ParallelDims

TOOK = {"seconds of a step": 0.5, "bytes held": 4e6, "bytes moved": 1e6, "bytes moved over dp_shard": 1e6}
GOOD = Outcome(
    "fsdp_2",
    "PASS",
    2,
    1.5,
    checks={"loss": "PASS"},
    layout="dp_shard 2",
    recipe="debug",
    measures=TOOK,
    folder="fsdp_2",
)
BAD = replace(
    GOOD,
    case="hsdp_2x2",
    verdict="FAIL",
    cause="HSDP ran as <FSDP>",
    checks={"loss": "PASS", "traffic": "FAIL"},
    again="harness run hsdp_2x2",
    report="FAIL hsdp_2x2\n  HSDP ran as <FSDP>",
    folder="hsdp_2x2",
)
LOST = Outcome("tp_2", "ERROR", 2, reason="no space left")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def hsdp_as_fsdp() -> Shown:
    return Shown("hsdp_2x2", drawn(trial_of(tiny_case("hsdp_2x2", SGD), tiny_case(ParallelDims(dp_shard=4), SGD))))


def a_page() -> Page:
    also = replace(BAD, case="hsdp_2x4")
    past = {"fsdp_2": [Past("2026-01-01", "abc", "FAIL"), Past("2026-01-02", "def", "PASS")]}
    return Page([GOOD, LOST, BAD, also], ["4 cases of a test"], past=past, shown={"hsdp_2x2": hsdp_as_fsdp()})


def plain(text: str) -> str:
    """What a person reads of it."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text.partition("<main>")[2]))


def test_a_cause_comes_first_and_once_with_all_its_cases() -> None:
    shared = causes([GOOD, LOST, BAD, replace(BAD, case="hsdp_2x4")])
    assert [(one.text, [case.case for case in one.cases], one.broken) for one in shared] == [
        ("HSDP ran as <FSDP>", ["hsdp_2x2", "hsdp_2x4"], True),
        ("no space left", ["tp_2"], False),
    ]
    text = plain(html(a_page()))
    places = [text.index(said) for said in ("What is wrong", "HSDP ran as", "no space left", "All cases", "took")]
    assert places == sorted(places)
    assert "FAIL hsdp_2x2 Requested: dp_shard 2, 2 ranks; debug" in text
    assert "Run it again harness run hsdp_2x2 " in text


def test_the_page_loads_nothing_and_what_a_rank_says_is_text() -> None:
    text = html(a_page())
    assert not re.search(r"https?:|<script|<link|@import|src=", text)
    assert "HSDP ran as <FSDP>" not in text and "HSDP ran as &lt;FSDP&gt;" in text


def test_every_verdict_is_a_word_and_history_is_letters_with_a_legend() -> None:
    text = html(a_page())
    assert re.findall(r'<span class="verdict (\w+)">(\w+)</span>\s*</td>', text) == [
        ("good", "PASS"),
        ("open", "ERROR"),
        ("bad", "FAIL"),
        ("bad", "FAIL"),
    ]
    assert re.findall(r'title="([^"]+)">(\w)<', text) == [
        ("FAIL, 2026-01-01, commit abc", "F"),
        ("PASS, 2026-01-02, commit def", "P"),
    ]
    assert "P PASS, F FAIL, ? UNKNOWN, X XFAIL, S SKIPPED, E ERROR." in plain(text)


def test_groups_that_were_requested_and_idle_stand_beside_those_that_moved_something() -> None:
    found = hsdp_as_fsdp().drawn
    assert found and [(row[0], row[1], row[4]) for row in found.groups] == [
        ("[0,1]", "dp_shard", "idle"),
        ("[0,2]", "dp_replicate", "idle"),
        ("[1,3]", "dp_replicate", "idle"),
        ("[2,3]", "dp_shard", "idle"),
        ("[0-3]", "-", "not in the plan"),
    ]
    requested, observed = (drawing.svg for drawing in found.drawings[:2])
    assert ('class="odd"' in requested, observed.count('class="odd"')) == (False, 4)
    assert [drawing.title for drawing in found.drawings[2:]] == [
        "Loss by step",
        "Difference of the loss",
        "Largest difference of gradients",
    ]


def test_a_run_as_requested_is_drawn_without_an_odd_part_and_a_missing_rank_is_named() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    found = drawn(trial)
    assert {row[4] for row in found.groups} == {"as requested"}
    assert all("odd" not in drawing.svg and "Above" not in drawing.below for drawing in found.drawings)
    assert drawn(without_rank(trial, 2)).lacking == "ranks [2] left no evidence"


def test_the_least_is_named_only_of_gpus_among_cases_of_as_many_ranks() -> None:
    some = [replace(GOOD, measures=TOOK | {"bytes held": count}) for count in (4e6, 2e6)]
    assert column(some, "cpu", "bytes held") == ["4 MB", "2 MB"]
    assert column(some, "cuda", "bytes held") == ["4 MB", "2 MB (least)"]
    assert column([some[0], replace(some[1], ranks=4)], "cuda", "bytes held") == ["4 MB", "2 MB"]


def column(some: list[Outcome], device: str, name: str) -> list[str]:
    (table,) = measured(some, device)
    return [row[3 + table.columns.index(name)] for row in table.rows]


def test_tokens_per_second_and_peaks_are_shown_of_gpus_and_a_cpu_says_that_it_has_none() -> None:
    took = TOOK | {"peak bytes": 8e6, "parameters held": 1e6}
    some = [
        replace(GOOD, measures=took, tokens=1024),
        replace(GOOD, measures=took | {"seconds of a step": 0.25}, tokens=1024),
    ]
    assert column(some, "cuda", "tokens per second") == ["2,048", "4,096 (most)"]
    assert measured(some, "cuda")[0].columns == (
        *("tokens per second", "seconds of a step", "peak bytes", "bytes held", "parameters held", "bytes moved"),
        "bytes moved over dp_shard",
    )
    assert measured(some, "cpu")[0].columns == (
        *("bytes held", "parameters held", "bytes moved", "bytes moved over dp_shard"),
    )
    assert "tokens per second and peak memory are measured on GPUs only" in html(a_page())
    assert "tokens per second" not in [name for table in measured([GOOD], "cuda") for name in table.columns]


def test_evidence_is_linked_only_where_it_moves_with_the_page(tmp_path: Path) -> None:
    """A link from one machine's page into another's folders leads nowhere."""
    folder = tmp_path / "part" / "hsdp_2x2"
    folder.mkdir(parents=True)
    (folder / "case.json").write_text("{}")
    assert shown(folder, tmp_path / "part" / "page.html").evidence == "hsdp_2x2"
    apart = shown(folder, tmp_path / "night" / "page.html")
    assert (apart.evidence, apart.place) == ("", f"{platform.node()}: {folder}")
    gone = shown(tmp_path / "tp_2", tmp_path / "page.html", "runner-7")
    assert (gone.evidence, gone.place) == ("", "runner-7, in a folder tp_2")
    text = html(Page([BAD], [], shown={"hsdp_2x2": gone}))
    assert "Its evidence is not beside this page. It is on runner-7, in a folder tp_2." in plain(text)


def test_report_html_writes_one_file_and_exits_as_the_cases_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = verdicts.begin([Case("fsdp_2", "a test"), Case("hsdp_2x2", "a test")], Options(tmp_path / "out"), "")
    record.ended(GOOD)
    file = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "out"), "--html", str(file)]) == 2
    assert "hsdp_2x2: no verdict, its run was cut short" in file.read_text()
    record.ended(BAD)
    assert main(["report", str(tmp_path / "out"), "--html", str(file)]) == 1
    assert "Its evidence is not beside this page." in file.read_text()
    assert capsys.readouterr().out == f"{file}\n" * 2


@pytest.mark.skipif(CHROMIUM is None, reason="no browser here: install chromium to have the page opened")
@pytest.mark.parametrize(("width", "scheme", "paper"), [(400, 0, "rgb(20, 24, 29)"), (1200, 1, "rgb(255, 255, 255)")])
def test_a_browser_shows_it_no_wider_than_its_window_by_day_and_in_the_dark(
    tmp_path: Path, width: int, scheme: int, paper: str
) -> None:
    (tmp_path / "page.html").write_text(html(a_page()))
    read = "const d = this.contentDocument; document.title = 'wide ' + d.documentElement.scrollWidth"
    read += " + ' on ' + getComputedStyle(d.body).backgroundColor"
    (tmp_path / "frame.html").write_text(
        f'<meta name="color-scheme" content="light dark">'
        f'<iframe src="page.html" style="width:{width}px" onload="{read}"></iframe>'
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    options += [f"--user-data-dir={tmp_path}/profile", f"--blink-settings=preferredColorScheme={scheme}"]
    command = [str(CHROMIUM), *options, (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>wide (\d+) on (.+)</title>", done.stdout)
    assert found and int(found[1]) <= width, done.stderr[-2000:]
    assert found[2] == paper


def test_a_table_wider_than_the_window_scrolls_by_itself() -> None:
    page = html(a_page())
    assert page.count("<table") == page.count('<div class="wide"><table') > 0
