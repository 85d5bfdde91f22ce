"""The table of what is said today: what is taken from verdicts, how it is read again, and what counts as a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import safeguard
from tools.safeguard import Entry, Said, differences, main, places, ranges, table_of, text_of, without_varying

ENTRY = Entry(
    "FAIL",
    {"causes": "gradients scaled, learning rate", "tier": "nightly"},
    {
        "completed": Said("PASS", 2),
        "loss": Said("PASS", 3),
        "golden": Said("NOT APPLICABLE"),
        "resume": Said("NOT APPLICABLE", 4),
        "schedule": Said("UNKNOWN"),
        "gradients": Said("FAIL", 126, 3, "ranks 0-1; steps 2; parameters 1: norm.weight"),
        "memory": Said("FAIL", 6, 1),
    },
)


def finding(*ranks: int, step: int | None = None, name: str = "", **more: Any) -> dict[str, Any]:
    """As verdict.json has it: what is empty is left out."""
    found = {"ranks": [*ranks], "step": step, "name": name, "kind": "parameter" if name else "", **more}
    return {key: value for key, value in found.items() if value not in (None, "", [])}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], ""),
        ([finding(1, step=2, name="norm.weight")], "ranks 1; steps 2; parameters 1: norm.weight"),
        ([finding(0, 1, 2, 3, step=2), finding(5)], "ranks 0-3 5; steps 2"),
        ([finding(group=[0, 2], kind="group"), finding(4, 5)], "ranks 0 2 4-5"),
        ([finding(quantity="number of steps")], ""),
        ([finding(kind="setting", name="TF32")], ""),
    ],
)
def test_places_are_ranks_steps_and_parameters(found: list[dict[str, Any]], said: str) -> None:
    assert places(found) == said


def test_of_many_parameters_the_first_and_a_digest_of_all_are_kept() -> None:
    many = [finding(0, step=1, name=f"layers.{n}.ffn.w1.weight") for n in range(5)]
    text = places(many)
    assert text.startswith("ranks 0; steps 1; parameters 5: layers.0.ffn.w1.weight layers.1") and ".. " in text
    assert places(many[::-1]) == text != places([*many[:4], finding(0, step=1, name="layers.9.ffn.w1.weight")])


def test_ranges_name_runs_of_numbers() -> None:
    assert ranges([7, 0, 1, 2, 4]) == "0-2 4 7"


def test_a_table_is_read_as_it_was_written() -> None:
    varying = without_varying(ENTRY, {"gradients": "places examined: who died first", "memory": "findings: how many"})
    table = {"fsdp_2": replace(ENTRY, about={}), "a+b": ENTRY, "varying": varying}
    assert table_of(text_of(table)) == table


def failures(before: Entry, **checks: Said) -> list[bool]:
    return [bad for bad, _ in differences(before, replace(before, checks={**before.checks, **checks}))]


def test_a_verdict_a_place_and_fewer_examined_are_failures_and_more_is_none() -> None:
    assert failures(ENTRY) == []
    assert failures(ENTRY, loss=Said("UNKNOWN", 3)) == [True]
    assert failures(ENTRY, loss=Said("PASS", 2)) == [True]
    assert failures(ENTRY, loss=Said("PASS", 4)) == [False]
    assert failures(ENTRY, gradients=Said("FAIL", 126, 3, "ranks 0; steps 2; parameters 1: norm.weight")) == [True]
    assert failures(ENTRY, gradients=replace(ENTRY.checks["gradients"], findings=9)) == [False]
    assert failures(ENTRY, another=Said("PASS", 1)) == [False]
    assert [bad for bad, _ in differences(ENTRY, replace(ENTRY, about={"tier": "nightly"}))] == [True]
    assert [bad for bad, _ in differences(ENTRY, replace(ENTRY, checks={}))] == [True] * len(ENTRY.checks)


def test_what_varies_is_not_compared() -> None:
    varying = without_varying(ENTRY, {"gradients": "examined findings places: who died first"})
    now = replace(ENTRY, checks={**ENTRY.checks, "gradients": Said("FAIL", 1, 1, "ranks 7")})
    assert [*differences(varying, without_varying(now, varying.varies))] == []
    now = replace(ENTRY, checks={**ENTRY.checks, "gradients": Said("PASS", 1)})
    assert [bad for bad, _ in differences(varying, without_varying(now, varying.varies))] == [True]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of two cases and a fault, and of one that ran with another seed."""
    table = tmp_path / "table"
    table.mkdir()
    monkeypatch.setattr(safeguard, "TABLE", table)
    monkeypatch.setattr(safeguard, "digest_of_run", lambda options: f"sources of {options.fault}")
    out = tmp_path / "out"
    put(out, "fsdp_2", "default")
    put(out, "fsdp_4", "nightly")
    put(out, "fsdp_2+seed_7", "default", case="fsdp_2")
    put(
        out,
        "fsdp_2+halved",
        "default",
        case="fsdp_2",
        fault=f"{safeguard.CATALOGUE}/mesh.py:halved",
        verdict="FAIL",
        diagnosis={"causes": [{"kind": "scaled"}]},
    )
    yield out


def put(out: Path, name: str, tier: str, examined: int = 2, **said: Any) -> None:
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    results = [{"check": "completed", "verdict": "PASS", "examined": examined, "findings": [], "note": ""}]
    made = {"sources": f"sources of {said.get('fault')}"}
    verdict: Mapping[str, Any] = {"case": name, "verdict": "PASS", "fault": None, "results": results, "made": made}
    (folder / "verdict.json").write_text(json.dumps({**verdict, **said}))
    (folder / "case.json").write_text(json.dumps({"tier": tier}))


def test_accepted_verdicts_are_equal_to_themselves_and_fewer_examined_are_not(out: Path, capsys: Any) -> None:
    words = ["--out", str(out)]
    assert main(["--accept", "--stored", *words]) == 0
    assert main(words) == 0 and "2 entries compared, 0 differences" in capsys.readouterr().out
    assert main(["--all", *words]) == 0 and "3 entries compared" in capsys.readouterr().out
    put(out, "fsdp_4", "nightly", examined=1)
    assert main(words) == 0 and main(["--all", *words]) == 1
    put(out, "fsdp_2", "default", examined=3)
    assert main(words) == 0
    put(out, "fsdp_2", "default", examined=1)
    assert main(words) == 1


def test_an_entry_that_is_not_there_is_not_compared_and_that_is_no_pass(out: Path, tmp_path: Path) -> None:
    assert main(["--accept", "--stored", "--out", str(out)]) == 0
    assert main(["--out", str(tmp_path / "nowhere")]) == 2
    (out / "fsdp_4" / "verdict.json").unlink()
    assert main(["--out", str(out)]) == 0
    (out / "fsdp_2+halved" / "verdict.json").unlink()
    assert main(["--out", str(out)]) == 2


def test_a_table_is_made_of_all_entries_and_of_one_state_of_the_sources(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(safeguard, "_still_there", lambda file, name: True)
    words = ["--accept", "--stored", "--out", str(out)]
    assert main(words) == 0
    put(out, "fsdp_4", "nightly", made={"sources": "of yesterday"})
    assert main(words) == 2 and "fsdp_4 was run with other sources" in capsys.readouterr().out
    (out / "fsdp_4" / "verdict.json").unlink()
    assert main(words) == 2 and "fsdp_4 was not run" in capsys.readouterr().out
    monkeypatch.setattr(safeguard, "_still_there", lambda file, name: name != "fsdp_4")
    assert main(words) == 0


def test_of_faults_that_were_drawn_all_are_compared_and_no_other_is_missed(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--accept", "--stored", "--out", str(out)]) == 0
    (out / "fsdp_2+halved" / "verdict.json").unlink()
    for drawn, code in (([], 0), ([SimpleNamespace(name="halved")], 2)):
        monkeypatch.setattr(safeguard.drawn_faults, "draw_faults", lambda base, drawn=drawn: drawn)
        assert main(["--drawn", "--out", str(out)]) == code
