"""`harness report` decides by what lies in a place; what it cannot decide is one message and exit code 2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.core.cli import RENAMED_COMMANDS, all_commands, main
from harness.core.evidence.store import EvidenceError
from harness.nights.stored_kind import StoredKind, stored_kind_of

COMMANDS = tuple(all_commands())

BEGINS = {"cases": {"a": ""}, "began": "2026-01-01 00:00:00 UTC", "machine": "m", "trainer": "llama3", "torch": "2.13"}
PLACES = {
    "case": ["case/case.json"],
    "cases": ["cases/one/case.json", "cases/other/case.json"],
    "run": ["run/verdicts.jsonl", "run/one/case.json", "run/earlier/verdicts.jsonl"],
    "recording": ["recording/recording.json"],
    "ranks": ["ranks/ranks/rank_00000.record"],
    "job": ["job/recording.json", "job/jobs/2/processes/1.started"],
    "nights": ["nights/2026-01-01/verdicts.jsonl", "nights/2026-01-02/verdicts.jsonl"],
    "two": ["two/verdicts.jsonl", "two/recording.json"],
    "below": ["below/one/case.json", "below/night/verdicts.jsonl"],
    "around": ["around/recording/recording.json"],
    "none": ["none/notes.txt"],
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for file in (Path(name) for files in PLACES.values() for name in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(run(file) if file.suffix == ".jsonl" else "{}")
    return tmp_path


def run(file: Path) -> str:
    rows = [{"run": str(file), "begins": BEGINS}, {"run": str(file), "ended": {"case": "a", "verdict": "PASS"}}]
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("case", StoredKind.CASES),
        ("cases", StoredKind.CASES),
        ("run", StoredKind.RUN),
        ("run/verdicts.jsonl", StoredKind.RUN),
        ("recording", StoredKind.RECORDING),
        ("ranks", StoredKind.RECORDING),
        ("job/jobs/2", StoredKind.RECORDING),
        ("nights", StoredKind.HISTORY),
    ],
)
def test_a_place_is_what_lies_in_it(places: Path, place: str, kind: StoredKind) -> None:
    assert stored_kind_of(places / place) is kind


@pytest.mark.parametrize("place", ["two", "below", "around", "none", "none/notes.txt", "nowhere"])
def test_a_place_of_two_kinds_or_of_none_is_refused(places: Path, place: str) -> None:
    with pytest.raises(EvidenceError):
        stored_kind_of(places / place)


@pytest.mark.parametrize("named", ["two/verdicts.jsonl", "around/recording"])
def test_the_message_names_what_can_be_shown(places: Path, named: str, capsys: Any) -> None:
    assert main(["report", named.split("/")[0]]) == 2
    assert named in capsys.readouterr().err
    assert stored_kind_of(Path(named)) in (StoredKind.RUN, StoredKind.RECORDING)


@pytest.mark.parametrize(
    ("words", "document"),
    [
        (["run"], "matrix"),
        (["run", "run/earlier"], "matrix"),
        (["nights"], "history"),
        (["--history", "run"], "history"),
        (["run", "--history", "nights"], "history"),
        (["nights/2026-01-01", "nights/2026-01-02"], "matrix"),
    ],
)
def test_runs_are_shown_and_compared_with_earlier_ones(
    places: Path, words: Sequence[str], document: str, capsys: Any
) -> None:
    assert main(["report", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["document"] == document


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nowhere"],
        ["none"],
        ["recording", "ranks"],
        ["run", "recording"],
        ["run", "nights"],
        ["case", "nights"],
        ["case", "--history", "nights"],
        ["run", "--layout", "dp_shard=2"],
        ["run", "--all"],
        ["run", "--quarantine", "none/notes.txt"],
        ["recording", "--html", "page.html"],
        ["nights", "--html", "page.html"],
        ["case", "--as", "markdown"],
        ["run", "--as", "markdown", "--html", "page.html"],
    ],
)
def test_what_does_not_belong_together_is_one_message(places: Path, words: Sequence[str], capsys: Any) -> None:
    assert main(["report", *words]) == 2
    told = capsys.readouterr()
    assert (told.out, len(told.err.splitlines()), told.err[:9]) == ("", 1, "harness: ")
    assert not Path("page.html").exists()


@pytest.mark.parametrize("name", RENAMED_COMMANDS)
@pytest.mark.parametrize("more", [[], ["x", "--all"], ["--help"]])
def test_a_name_of_before_prints_the_new_one_and_is_no_command(name: str, more: list[str], capsys: Any) -> None:
    assert name not in COMMANDS
    assert main([name, *more]) == 2
    told = capsys.readouterr()
    assert told.out == "" and RENAMED_COMMANDS[name] in told.err
    assert RENAMED_COMMANDS[name].split()[1] in COMMANDS


def test_there_are_fourteen_commands() -> None:
    assert len(set(COMMANDS)) == len(COMMANDS) == 14
