"""From night to night: what broke and since when, what is flaky, what grew, and what a person has set aside until a day."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal_nights import nights, run

from harness.core.case.case import CaseError
from harness.core.cli import main
from harness.core.report import outcome as outcomes
from harness.core.report.outcome import Outcome
from harness.core.report.page import page_html
from harness.core.run.verdicts import RecordedRun
from harness.nights import quarantine
from harness.nights.changes import (
    State,
    changing_curves,
    find_changes,
    find_grown_measures,
    find_shrunk_measures,
    night_differences,
)
from harness.nights.history import group_nights, read_runs
from harness.nights.history_text import (
    bisect_command,
    build_series_changes,
    lapsed_entries,
    series_document,
    series_lines,
)
from harness.nights.merged import merge_outcomes
from harness.nights.page import build_page
from harness.nights.quarantine import QuarantineEntry

DAY = datetime.date(2026, 3, 5)
BROKEN = "HSDP ran as FSDP"


def case(verdict: str, name: str = "hsdp", **more: Any) -> Outcome:
    cause = BROKEN if verdict == "FAIL" else ""
    return Outcome(name, verdict, **({"cause": cause, "checks": {"loss": "PASS"}} | more))


def said(*runs: RecordedRun) -> list[tuple[str, str, bool, str, str]]:
    return [
        (
            one.case,
            str(one.state),
            one.new,
            one.now.recorded_value("began"),
            one.before.recorded_value("began") if one.before else "",
        )
        for one in find_changes(nights(*runs))
    ]


def test_what_broke_last_night_is_new_and_the_last_good_night_is_named() -> None:
    found = nights(run(1, case("PASS")), run(2, case("PASS")), run(3, case("FAIL")))
    (one,) = find_changes(found)
    assert (one.state, one.new, one.text, one.now, one.before) == (State.BROKEN, True, BROKEN, found[2], found[1])
    assert bisect_command(one) == "harness bisect --trainer torchtitan --repo /titan --good c2 --bad c3 -k hsdp"
    (other,) = find_changes(nights(run(1, case("PASS")), run(2, case("FAIL"), commit="c1", torch="2.14.1")))
    assert (
        bisect_command(other)
        == "harness bisect --over torch==2.13.0,2.14.1 --trainer torchtitan --source /titan -k hsdp"
    )


def test_what_broke_earlier_is_not_new_and_the_night_it_broke_in_is_named() -> None:
    runs = [run(1, case("PASS")), run(2, case("FAIL")), run(3, case("FAIL"))]
    assert said(*runs) == [("hsdp", "broken", False, "night 2", "night 1")]
    assert said(run(1, case("FAIL")), run(2, case("FAIL"))) == [("hsdp", "broken", False, "night 1", "")]


def test_what_holds_again_is_fixed_once() -> None:
    runs = [run(1, case("FAIL")), run(2, case("PASS"))]
    assert said(*runs) == [("hsdp", "fixed", True, "night 2", "night 1")]
    assert said(*runs, run(3, case("PASS"))) == []


@pytest.mark.parametrize("verdict", ["UNKNOWN", "ERROR", "SKIPPED"])
def test_what_was_judged_and_no_longer_is_is_told(verdict: str) -> None:
    runs = [run(1, case("PASS")), run(2, case(verdict, reason="no GPU"), case("PASS", "other"))]
    assert said(*runs) == [("hsdp", "not judged", True, "night 2", "night 1")]


def test_a_case_that_the_last_night_lost_is_told_and_one_that_was_always_skipped_is_not() -> None:
    assert said(run(1, case("PASS"), case("PASS", "a")), run(2, case("PASS", "a"))) == [
        ("hsdp", "not judged", True, "night 2", "night 1")
    ]
    assert said(run(1, case("SKIPPED")), run(2, case("SKIPPED"))) == []


def test_both_verdicts_of_the_same_sources_are_flaky_and_of_others_are_not() -> None:
    same = {"commit": "c1"}
    assert ("hsdp", "flaky", True, "night 2", "night 1") in said(run(1, case("PASS")), run(2, case("FAIL"), **same))
    for other in ({}, {"commit": "c1", "torch": "2.14"}, {"commit": "c1", "sources": "bb"}):
        assert [one[1] for one in said(run(1, case("PASS")), run(2, case("FAIL"), **other))] == ["broken"]
    changed = {"commit": "c1-dirty"}  # nobody knows what these were
    assert [one[1] for one in said(run(1, case("PASS"), **changed), run(2, case("FAIL"), **changed))] == ["broken"]
    other_gpu = case("FAIL", gpu="H200")
    assert [one[1] for one in said(run(1, case("PASS", gpu="H100")), run(2, other_gpu, **same))] == ["broken"]


def test_shards_of_a_night_are_one_night_and_trainers_stand_apart() -> None:
    first, second = run(1, case("PASS", "a"), shard="1/2"), run(2, case("PASS", "b"), shard="2/2", commit="c1")
    (night,) = nights(first, second)
    assert (list(night.outcomes), night.lacking_verdicts) == (["a", "b"], [])
    assert len(nights(first, run(2, case("PASS", "a"), shard="1/2", commit="c1"))) == 2
    assert nights(first)[0].lacking_verdicts == ["shard 2/2 is not among these"]
    assert len(group_nights([first, run(2, case("PASS"), trainer="mine.py")])) == 2


def test_nights_of_one_trainer_are_one_series_wherever_its_adapter_and_its_source_lie(monkeypatch: Any) -> None:
    def night(number: int, trainer: str, verdict: str = "PASS", **more: str) -> RecordedRun:
        return run(number, case(verdict), trainer=trainer, **more)

    cloned = night(2, "/work/tonight/.trainer/adapters/mine.py", "FAIL", name="mine")
    found = nights(night(1, "/work/last/.trainer/adapters/mine.py", name="mine"), cloned)
    (one,) = find_changes(found)
    assert (one.state, one.before) == (State.BROKEN, found[0])
    assert "trainer" not in night_differences(*found)
    assert bisect_command(one) == "harness bisect --trainer adapters/mine.py --repo . --good c1 --bad c2 -k hsdp"
    assert len(group_nights([cloned, night(3, "/work/adapters/mine.py", name="other")])) == 2
    assert len(group_nights([cloned, night(3, "/a/mine.py")])) == 1  # recorded by a version that wrote no name
    parts = [run(1, case("PASS", "a"), trainer="/a/mine.py", shard="1/2", commit="c1")]
    parts += [run(2, case("PASS", "b"), trainer="/b/mine.py", shard="2/2", commit="c1")]
    assert sorted(one.case for one in merge_outcomes(parts)) == ["a", "b"] and len(nights(*parts)) == 1
    with pytest.raises(ValueError, match="another trainer"):
        merge_outcomes([parts[0], run(2, case("PASS", "b"), trainer="/b/other.py", shard="2/2")])


def test_bytes_that_grew_are_told_and_seconds_only_on_gpus_beyond_those_of_several_nights() -> None:
    def night(number: int, seconds: float, held: float, gpu: str = "") -> RecordedRun:
        return run(number, case("PASS", gpu=gpu, measures={"seconds of a step": seconds, "bytes held": held}))

    def more(*runs: RecordedRun) -> list[str]:
        return [str(one) for one in find_grown_measures(nights(*runs))]

    assert more(night(1, 1.0, 100), night(2, 9.0, 104)) == ["hsdp: bytes held 100 B, now 4 B more"]
    assert more(night(1, 1.0, 100), night(2, 9.0, 90)) == []
    three = [night(number, 1.0 + number / 100, 100, "H200") for number in (1, 2, 3)]
    assert more(*three, night(4, 1.2, 100, "H200")) == ["hsdp: seconds of a step 1.03 s, now 1.2 s"]
    assert more(*three, night(4, 1.1, 100, "H200")) == more(*three, night(4, 1.2, 100, "H100")) == []


def test_what_shrank_is_told_and_an_axis_where_the_sum_hides_it() -> None:
    def night(number: int, **moved: float) -> RecordedRun:
        over = {f"bytes moved over {axis}": size for axis, size in moved.items()}
        return run(number, case("PASS", measures={"bytes moved": sum(moved.values()), **over}))

    def changed(*runs: RecordedRun) -> list[list[tuple[str, float, float]]]:
        found = nights(*runs)
        return [
            [(one.measure, one.was, one.now) for one in of(found)] for of in (find_grown_measures, find_shrunk_measures)
        ]

    first = night(1, tp=10, dp=30)
    assert changed(first, night(2, tp=10, dp=20)) == [[], [("bytes moved", 40, 30)]]
    assert changed(first, night(2, tp=20, dp=20)) == [
        [("bytes moved over tp", 10, 20)],
        [("bytes moved over dp", 30, 20)],
    ]
    assert changed(first, first) == [[], []]


def test_measures_that_vary_are_curves_the_largest_change_of_the_last_night_first() -> None:
    def night(number: int, seconds: float, held: float, verdict: str = "PASS") -> RecordedRun:
        taken = {"seconds blocked over tp": seconds, "bytes held": held, "bytes moved": 8.0}
        return run(number, case(verdict, measures=taken))

    found = nights(night(1, 1.0, 100), night(2, 9.0, 300, "FAIL"), night(3, 1.1, 100), night(4, 1.2, 200))
    assert [(one.measure, one.values) for one in changing_curves(found)] == [
        ("bytes held", (100, None, 100, 200)),
        ("seconds blocked over tp", (1.0, None, 1.1, 1.2)),
    ]
    assert series_document(build_series_changes(found, [], DAY))["curves"] == changing_curves(found)
    assert [one.measure for one in find_shrunk_measures(found)] == [] and [
        one.measure for one in find_grown_measures(found)
    ] == ["bytes held"]


def test_a_page_shows_earlier_runs_of_the_same_trainer_and_device_alone(tmp_path: Path) -> None:
    now, before, other = run(3, case("PASS")), run(1, case("FAIL")), run(2, case("PASS"), trainer="mine.py")
    page = build_page([now], [], [before, other, now], tmp_path / "page.html")
    assert {name: [one.letter for one in past] for name, past in page.past.items()} == {"hsdp": ["F"]}


def test_a_page_has_the_measures_that_changed_from_night_to_night(tmp_path: Path) -> None:
    held = [run(number, case("PASS", measures={"bytes held": size})) for number, size in enumerate((8e6, 8e6, 4e6))]
    other = run(3, case("PASS", measures={"bytes held": 1e6}), trainer="mine.py")
    page = build_page(held[-1:], [], [*held, other], tmp_path / "page.html")
    assert [(one.case, one.measure, one.cells) for one in page.trends] == [
        ("hsdp", "bytes held", ("8 MB", "8 MB", "4 MB"))
    ]
    assert build_page(held[:1], [], [], tmp_path / "page.html").trends == []
    assert '<svg class="spark"' in page_html(page) and 'spark"' not in page_html(replace(page, trends=[]))


# ---- quarantine


def entry(**changes: Any) -> QuarantineEntry:
    return QuarantineEntry(
        **({"case": "hsdp", "cause": "HSDP", "reason": "r", "person": "Ada", "until": DAY} | changes)
    )


def test_what_is_set_aside_is_told_apart_until_its_day_and_for_its_cause_only() -> None:
    row = nights(run(1, case("PASS")), run(2, case("FAIL")))
    assert [*build_series_changes(row, [entry()], DAY).quarantined] == ["hsdp"]
    assert "SET ASIDE, broken and expected to be" in series_lines(build_series_changes(row, [entry()], DAY))
    for other, day in ((entry(), DAY + datetime.timedelta(1)), (entry(cause="a hang"), DAY)):
        assert "NEWLY BROKEN" in series_lines(build_series_changes(row, [other], day))


@pytest.mark.parametrize(
    ("one", "verdict", "day", "line"),
    [
        (entry(), "FAIL", 6, "hsdp: ended on 2026-03-05; Ada takes it out or dates it anew"),
        (entry(), "PASS", 5, "hsdp: not broken in the last night; Ada takes it out"),
        (entry(cause="a hang"), "FAIL", 5, f"hsdp: set aside for 'a hang', broken by another cause: {BROKEN}"),
        (entry(case="hspd"), "PASS", 5, "hspd: no case of that name is in these nights; take it out"),
    ],
)
def test_an_entry_that_does_nothing_is_told_with_its_reason(
    one: QuarantineEntry, verdict: str, day: int, line: str
) -> None:
    today = DAY.replace(day=day)
    assert lapsed_entries([one], [build_series_changes(nights(run(1, case(verdict))), [one], today)], today) == [line]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- {case: a, cause: b, reason: c, until: 2026-03-05}", "entry 1: 'person' must be some text"),
        ("- {case: a, cause: b, reason: c, person: d, until: soon}", "entry 1: 'until' must be a day, 2026-04-01"),
        ("- {case: a, raeson: b}", "entry 1: unknown key 'raeson' (did you mean 'reason'?)"),
        ("case: a", "expected a list of entries"),
    ],
)
def test_a_wrong_entry_is_refused_by_file_and_key(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "quarantine.yaml"
    file.write_text(text)
    with pytest.raises(CaseError) as refused:
        quarantine.load_quarantine(file)
    assert problem in str(refused.value)


# ---- the command


def test_history_says_what_broke_with_both_nights_and_the_command_that_finds_the_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(1, case("PASS")), run(2, case("FAIL", again="harness run hsdp"), torch="2.14.1")]
    for one in runs:
        rows = [{"run": one.run, "begins": one.begins}]
        rows += [{"run": one.run, "ended": outcomes.outcome_to_json(done)} for done in one.outcomes.values()]
        (tmp_path / one.run).mkdir()
        (tmp_path / one.run / "verdicts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{cut")
    assert main(["report", str(tmp_path)]) == 1
    shown, complained = capsys.readouterr()
    assert shown.splitlines() == [
        "torchtitan@titan on cpu by local: 2 nights",
        "  first  night 1, commit c1, torch 2.13.0",
        "  last   night 2, commit c2, torch 2.14.1",
        "",
        "NEWLY BROKEN",
        "  hsdp",
        "    HSDP ran as FSDP",
        "    now     night 2, commit c2, torch 2.14.1",
        "    before  night 1, commit c1, torch 2.13.0",
        "    changed between: commit c1, now c2; torch 2.13.0, now 2.14.1",
        "    again   harness run hsdp",
        "    bisect  harness bisect --trainer torchtitan --repo /titan --good c1 --bad c2 -k hsdp",
        "",
        "seconds are compared on GPUs only",
    ]
    assert complained.count("not a whole line of a run") == 2
    assert main(["report", "--history", str(tmp_path / "001")]) == 0
    assert main(["report", str(tmp_path / "002"), "--history", str(tmp_path / "001")]) == 1
    assert main(["report", "--history", str(tmp_path / "nowhere")]) == 2


def test_a_run_that_lies_in_two_folders_is_one_night(tmp_path: Path) -> None:
    rows = [{"run": "1", "begins": {"cases": {"a": ""}}}, {"run": "1", "ended": {"case": "a", "verdict": "PASS"}}]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "verdicts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(read_runs([tmp_path])[0]) == 1
