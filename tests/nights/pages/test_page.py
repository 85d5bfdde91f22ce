"""The page: causes first, nothing from elsewhere, readable on a phone and in the dark, and no best on a CPU."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from literal import (
    ADAMW,
    SGD,
    tiny_case,
    trial_of,
    with_collectives,
    with_parameter,
    with_step,
    with_value,
    without_rank,
)

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.cli import main
from harness.core.judge.measures import OUTSIDE_THE_PLAN
from harness.core.judge.trial import Trial
from harness.core.report.causes import shared_causes
from harness.core.report.drawings import CaseDrawings, draw_case
from harness.core.report.outcome import Outcome
from harness.core.report.page import Page, PastVerdict, ShownEvidence, measure_tables, page_html
from harness.core.report.shown import AS_REQUESTED, UsedGroup, used_groups
from harness.core.report.svg import LETTER_WIDTH, Strip, strips_svg
from harness.core.run import verdicts
from harness.core.run.options import Options
from harness.nights.page import build_shown
from harness.nights.pages.pictures import group_label

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


def hsdp_as_fsdp() -> ShownEvidence:
    return ShownEvidence(
        "hsdp_2x2", draw_case(trial_of(tiny_case("hsdp_2x2", SGD), tiny_case(ParallelDims(dp_shard=4), SGD)))
    )


def a_page() -> Page:
    also = replace(BAD, case="hsdp_2x4")
    past = {"fsdp_2": [PastVerdict("2026-01-01", "abc", "FAIL"), PastVerdict("2026-01-02", "def", "PASS")]}
    return Page([GOOD, LOST, BAD, also], ["4 cases of a test"], past=past, shown={"hsdp_2x2": hsdp_as_fsdp()})


def main_of(text: str) -> str:
    return text.partition("<main>")[2]


def test_a_cause_comes_first_and_once_with_all_its_cases() -> None:
    shared = shared_causes([GOOD, LOST, BAD, replace(BAD, case="hsdp_2x4")])
    assert [(one.text, [case.case for case in one.cases], one.broken) for one in shared] == [
        ("HSDP ran as <FSDP>", ["hsdp_2x2", "hsdp_2x4"], True),
        ("no space left", ["tp_2"], False),
    ]


def test_a_cause_is_one_whatever_its_numbers_are_and_its_smallest_case_comes_first() -> None:
    def ran(case: str, ranks: int, cause: str, verdict: str = "FAIL") -> Outcome:
        return replace(BAD, case=case, ranks=ranks, cause=cause, verdict=verdict)

    shared = shared_causes(
        [
            ran("c_16", 16, "parameters are sharded over 16 ranks: [0-15]"),
            ran("c_4", 4, "parameters are sharded over 4 ranks: [0,2] [1,3]"),
            ran("c_2", 2, "parameters are sharded over 2 ranks: [0,1]", "UNKNOWN"),
            ran("c_8", 8, "parameters are sharded over 8 ranks: [0,4] [1,5] .. [3,7]"),
            ran("layer_0", 2, "wrong in layers.0"),
            ran("layer_1", 2, "wrong in layers.1"),
        ]
    )
    assert [[case.case for case in one.cases] for one in shared] == [
        ["c_4", "c_8", "c_16", "c_2"],
        ["layer_0"],
        ["layer_1"],
    ]
    assert shared[0].text == "parameters are sharded over 4 ranks: [0,2] [1,3]"


def test_the_list_of_causes_comes_first_and_all_but_the_smallest_case_are_folded() -> None:
    text = main_of(page_html(a_page()))
    listed = re.findall(r'<tr><td><a href="#(cause-\d)">(.+?)</a></td><td[^>]*>(\d+)</td>', text)
    assert listed == [("cause-1", "HSDP ran as &lt;FSDP&gt;", "2"), ("cause-2", "no space left", "1")]
    assert re.findall(r'<article id="([^"]+)"', text) == ["cause-1", "cause-2"]
    assert re.findall(r'<(h3|details)[^>]* id="([^"]+)"', text) == [
        ("h3", "hsdp_2x2"),
        ("details", "hsdp_2x4"),
        ("h3", "tp_2"),
    ]
    assert re.findall(r"<pre[^>]*>(harness .+?)</pre>", text) == ["harness run hsdp_2x2"] * 2
    places = [text.index(said) for said in ('"causes"', "<article", 'data-is="launches"', 'data-is="bytes moved"')]
    assert places == sorted(places)


def test_title_and_head_name_the_trainer_and_the_repository() -> None:
    text = page_html(replace(a_page(), trainer="my_adapter", repository="ours/<train>"))
    title, head = re.findall(r"<title>(.+?)</title>", text), text[text.index("<header>") : text.index("</header>")]
    for name in ("my_adapter", "ours/&lt;train&gt;"):
        assert name in title[0] and name in head
    assert Page([], []).names == ""


def test_no_cell_of_a_table_is_empty() -> None:
    text = page_html(replace(a_page(), outcomes=[GOOD, LOST, BAD, Outcome("gone", "ERROR", reason="lost")]))
    assert re.findall(r"<td[^>]*>\s*</td>", text) == []


def test_the_page_loads_nothing_and_what_a_rank_says_is_text() -> None:
    text = page_html(a_page())
    assert not re.search(r"https?:|<script|<link|@import|src=", text)
    assert "HSDP ran as <FSDP>" not in text and "HSDP ran as &lt;FSDP&gt;" in text


def test_every_verdict_is_a_word_and_history_is_letters_with_a_legend() -> None:
    text = page_html(a_page())
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


def tables(found: CaseDrawings) -> dict[str, list[tuple[str, ...]]]:
    return {table.head[0]: list(table.rows) for section in found.sections for table in section.tables}


def differing(trial: Trial) -> list[str]:
    """The first words of the sections that differ, which come first."""
    sections = draw_case(trial).sections
    assert [section.differs for section in sections] == sorted((one.differs for one in sections), reverse=True)
    return [section.title.split()[0] for section in sections if section.differs]


def test_groups_that_were_requested_and_idle_stand_beside_those_that_moved_something() -> None:
    found = hsdp_as_fsdp().drawn
    assert found and [(row[0], row[1], row[4]) for row in tables(found)["group"]] == [
        ("[0,1]", "dp_shard", "idle"),
        ("[0,2]", "dp_replicate", "idle"),
        ("[1,3]", "dp_replicate", "idle"),
        ("[2,3]", "dp_shard", "idle"),
        ("[0-3]", OUTSIDE_THE_PLAN, "not in the plan"),
    ]
    requested, observed = (drawing.svg for drawing in found.sections[0].drawings)
    assert ('class="odd"' in requested, observed.count('class="odd"')) == (False, 4)
    rows = tables(found)["group"]
    assert all(row[2] != "0 B" for row in rows[:4]) and all(row[3] == "0 B" for row in rows[:4])


def test_a_run_as_requested_is_drawn_without_an_odd_part_and_a_missing_rank_is_named() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    found = draw_case(trial)
    assert {row[4] for row in tables(found)["group"]} == {AS_REQUESTED}
    assert differing(trial) == []
    assert all("odd" not in drawing.svg for section in found.sections for drawing in section.drawings)
    assert draw_case(without_rank(trial, 2)).lacking == "ranks [2] left no evidence"


def test_what_is_the_evidence_comes_first() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    twice = with_collectives(trial, 0, lambda call: (call, call))
    assert differing(twice) == ["What"]
    fqn = "norm.weight"
    doubled = with_value(trial, 1, 2, "gradients", fqn, lambda value: value * 2)
    assert differing(doubled) == ["Losses"]
    assert differing(with_step(trial, 3, 2, memory={"parameters": 1_000_000})) == ["Memory"]


def test_memory_is_of_the_rank_that_differs_most_with_what_was_requested_of_it() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    (row, *_) = tables(draw_case(with_step(trial, 1, 2, memory={"parameters": 3})))["kind"]
    assert (row[0], row[1], row[3]) == ("parameters", "1", "3 B") and row[2] not in ("0 B", "3 B")


def test_a_rank_that_holds_something_else_is_drawn_however_many_ranks_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.core.report.drawings.MOST_RANKS", 2)
    trial = trial_of(tiny_case(ParallelDims(dp_shard=4)))
    fqn = "tok_embeddings.weight"
    held = next(one for one in trial.ranks[3].parameters if one.fqn == fqn)
    odd = with_parameter(trial, 3, fqn, value=held.value * 3)
    _, observed = draw_case(odd).sections[0].drawings
    assert draw_case(odd).sections[0].differs and "[3]" in observed.below
    assert re.findall(r'text-anchor="end">(\d+)<', observed.svg) == ["0", "3"]


def test_the_number_of_a_rank_and_its_place_lie_inside_of_the_drawing() -> None:
    row = Strip("16383", "pp15 rep127 shard7 cp3 tp7", 0.0, 0.5, "[130000:131072, 4000:8000]")
    drawing = strips_svg("observed", [row, replace(row, rank="0")])
    width = int(re.findall(r'viewBox="0 0 (\d+) ', drawing)[0])
    found = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">([^<]+)<', drawing)
    ends = [(float(x) - LETTER_WIDTH * len(text) * (side == "end"), float(x), text, side) for x, side, text in found]
    assert min(start for start, *_ in ends) >= -0.1
    assert max(x + LETTER_WIDTH * len(text) * (side == "start") for _, x, text, side in ends) <= width
    bars = [float(at) for at in re.findall(r'class="whole" x="([\d.]+)"', drawing)]
    assert min(bars) >= LETTER_WIDTH * (len(row.rank) + 1 + len(row.place))


def test_a_picture_never_says_0_of_bytes_that_were_requested() -> None:
    group = UsedGroup((0, 2), "dp_replicate", 1_051_000, 0, 0)
    assert {"0 B", "requested 1.051 MB"} <= set(re.split(r"  |, ", group_label(group)))
    assert "0 B" not in group_label(replace(group, moved=12))


def test_bytes_that_are_planned_outside_of_passes_are_none_of_those_that_are_drawn() -> None:
    muon = trial_of(tiny_case("fsdp_2", replace(ADAMW, optimizer="muon")))
    assert {group.comparison_text for group in used_groups(muon)} == {AS_REQUESTED}


def test_the_least_is_named_only_of_gpus_among_cases_of_as_many_ranks() -> None:
    some = [replace(GOOD, measures=TOOK | {"bytes held": count}) for count in (4e6, 2e6)]
    assert column(some, "cpu", "bytes held") == ["4 MB", "2 MB"]
    assert column(some, "cuda", "bytes held") == ["4 MB", "2 MB (least)"]
    assert column([some[0], replace(some[1], ranks=4)], "cuda", "bytes held") == ["4 MB", "2 MB"]


def column(some: list[Outcome], device: str, name: str) -> list[str]:
    (table,) = measure_tables(some, device)
    return [row[3 + table.columns.index(name)] for row in table.rows]


def test_tokens_per_second_and_peaks_are_shown_of_gpus_and_a_cpu_says_that_it_has_none() -> None:
    took = TOOK | {"peak bytes": 8e6, "parameters held": 1e6}
    some = [
        replace(GOOD, measures=took, tokens=1024),
        replace(GOOD, measures=took | {"seconds of a step": 0.25}, tokens=1024),
    ]
    assert column(some, "cuda", "tokens per second") == ["2,048", "4,096 (most)"]
    assert measure_tables(some, "cuda")[0].columns == (
        *("tokens per second", "seconds of a step", "peak bytes", "bytes held", "parameters held", "bytes moved"),
        "bytes moved over dp_shard",
    )
    assert measure_tables(some, "cpu")[0].columns == (
        *("bytes held", "parameters held", "bytes moved", "bytes moved over dp_shard"),
    )
    assert "tokens per second" not in [name for table in measure_tables([GOOD], "cuda") for name in table.columns]


def test_evidence_is_linked_only_where_it_moves_with_the_page(tmp_path: Path) -> None:
    """A link from one machine's page into another's folders leads nowhere."""
    folder = tmp_path / "part" / "hsdp_2x2"
    folder.mkdir(parents=True)
    (folder / "case.json").write_text("{}")
    assert build_shown(folder, tmp_path / "part" / "page.html").evidence == "hsdp_2x2"
    apart = build_shown(folder, tmp_path / "night" / "page.html")
    assert (apart.evidence, apart.place) == ("", f"{platform.node()}: {folder}")
    gone = build_shown(tmp_path / "tp_2", tmp_path / "page.html", "runner-7")
    assert (gone.evidence, gone.place) == ("", "runner-7, in a folder tp_2")
    assert gone.place in page_html(Page([BAD], [], shown={"hsdp_2x2": gone}))


def test_report_html_writes_one_file_and_exits_as_the_cases_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = verdicts.begin_record(
        [Case("fsdp_2", "a test"), Case("hsdp_2x2", "a test")], Options(tmp_path / "out"), ""
    )
    record.append_outcome(GOOD)
    file = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "out"), "--html", str(file)]) == 2
    assert "hsdp_2x2" in file.read_text()
    record.append_outcome(BAD)
    assert main(["report", str(tmp_path / "out"), "--html", str(file)]) == 1
    assert capsys.readouterr().out == f"{file}\n" * 2


@pytest.mark.skipif(CHROMIUM is None, reason="no browser here: install chromium to have the page opened")
@pytest.mark.parametrize(("width", "scheme", "paper"), [(400, 0, "rgb(20, 24, 29)"), (1200, 1, "rgb(255, 255, 255)")])
def test_a_browser_shows_it_no_wider_than_its_window_by_day_and_in_the_dark(
    tmp_path: Path, width: int, scheme: int, paper: str
) -> None:
    (tmp_path / "page.html").write_text(page_html(a_page()))
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
    page = page_html(a_page())
    assert page.count("<table") == page.count('<div class="wide"><table') > 0
