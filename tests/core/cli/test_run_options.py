"""What `harness run` does without a case: it joins another node's launch, and shows or ends rank servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.core.cli import main
from harness.core.cli.run import FIRST_NODE_PATIENCE

SERVER = {"pid": 7, "commands": 0, "ends": 300.0, "idle": 1.0, "torch": "2.13", "root": "here"}


@pytest.mark.parametrize(("told", "seconds"), [([], FIRST_NODE_PATIENCE), (["--timeout", "3"], 3.0)])
@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 2)])
def test_a_node_joins_the_launch_of_a_folder(
    told: list[str], seconds: float, status: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[tuple[Path, float]] = []

    def join(folder: Path, seconds: float) -> int:
        joined.append((folder, seconds))
        return status

    monkeypatch.setattr("harness.core.cli.work.run.run_as_node", join)
    assert main(["run", "--join", "out/pair", *told]) == code
    assert joined == [(Path("out/pair/run"), seconds)]


@pytest.mark.parametrize(("what", "ended"), [("show", []), ("end", [False]), ("end-all", [True])])
def test_rank_servers_are_shown_or_ended(
    what: str, ended: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stopped: list[bool] = []

    def stop(*, every: bool) -> list[dict[str, Any]]:
        stopped.append(every)
        return [SERVER, SERVER | {"pid": 8, "stays": not every}]

    monkeypatch.setattr("harness.core.launch.resident_client.stop_servers", stop)
    monkeypatch.setattr("harness.core.launch.resident_client.status_of_all", lambda: [SERVER])
    assert main(["run", "--server", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert stopped == ended
    assert [line.split()[:2] for line in lines if line.startswith("pid")] == [["pid", "7"], ["pid", "8"]][
        : len(ended) + 1
    ]
    assert any("end-all" in line for line in lines) == (what == "end")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["single", "--join", "out"],
        ["single", "--server", "show"],
        ["--join", "out", "--json"],
        ["--server", "show", "--json"],
        ["--server", "own"],
    ],
)
def test_a_case_or_one_of_these_is_wanted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.core.cli.work.run.run_case", lambda *_: pytest.fail("a case is run"))
    assert main(["run", *words]) == 2


def test_only_run_shows_and_ends_servers() -> None:
    assert main(["matrix", "--server", "show"]) == 2
