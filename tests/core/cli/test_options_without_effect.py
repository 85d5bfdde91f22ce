"""An option that would change nothing is refused: the command ends with 2, and its message names the option."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.core.case.case import Case
from harness.core.cli import main
from harness.core.report.outcome import Outcome
from harness.core.run import verdicts
from harness.core.run.options import Options
from harness.recording.sketches import BUCKETS, WEIGHTS, RankSketches, Sketch, save_sketches, sketch_file

CASES = "cases: {one: {why: a test}}"

ROWS: list[tuple[str, str]] = [
    ("record --noise-of N -- true", "--noise-of"),
    ("record --after 2 -- true", "--after"),
    ("record --same-as recording --rows 4 -- true", "--rows"),
    ("record --sharded *.w1.weight=tp:0 -- true", "--sharded"),
    ("compare --steps 1-2 recording recording", "--steps"),
    ("compare --every 2 recording recording", "--every"),
    ("compare -o new recording recording", "--out"),
    ("compare --numbers run run", "--numbers"),
    ("compare --after 2 run run", "--after"),
    ("compare --noise-of N --structure recording recording", "--noise-of"),
    ("compare --after 2 snapshot.yaml recording", "--after"),
    ("compare --accept --numbers snapshot.yaml recording", "--numbers"),
    ("compare --accept --steps 1-2 snapshot.yaml recording", "--steps"),
    ("report --nodes-of 4 recording", "--nodes-of"),
    ("report --all --json recording", "--all"),
    ("report --html page.html --history run recording", "--history"),
    ("report --gpu H100 recording", "--gpu"),
    ("report --layout dp_shard=2 run", "--layout"),
    ("report --quarantine set_aside.yaml run", "--quarantine"),
    ("run --join out --device cpu", "--device"),
    ("run --join out --fault loss_times_two", "--fault"),
    ("run --server show --timeout 3", "--timeout"),
    ("run --server end --cases builtin", "--cases"),
    ("run one --ranks-per-gpu 2", "--ranks-per-gpu"),
    ("run one --torchrun-args=--nnodes=2", "--torchrun-args"),
    ("matrix --all -k one", "-k"),
    ("matrix --all --source PATH", "--source"),
    ("matrix --list -j 2", "--jobs"),
    ("matrix --list --again 0", "--again"),
    ("matrix --list --max-failures 1", "--max-failures"),
    ("matrix --list --timeout 9", "--timeout"),
    ("matrix --random 2 -k one", "-k"),
    ("matrix --random 2 --tier all", "--tier"),
    ("matrix --random 2 --cases builtin", "--cases"),
    ("matrix --resume --last-failed", "--last-failed"),
    ("matrix --resume --shard 1/2 --durations verdicts.jsonl", "--durations"),
    ("matrix --durations verdicts.jsonl", "--durations"),
    ("plan one --seq 128", "--seq"),
    ("plan one --gpu-memory 80", "--gpu-memory"),
    ("plan --dims dp_shard=8 --cases cases", "--cases"),
    ("plan --model 8B --world 8 --cases cases", "--cases"),
    ("plan --model 8B --world 8 --schedule GPipe", "--schedule"),
    ("preflight --world 4 --layout dp_shard=4 --model 8B -- true", "--model"),
    ("preflight --world 4 --layout dp_shard=4 --steps 2 -- true", "--steps"),
    ("preflight --world 4 --layout dp_shard=4 --seed 2 -- true", "--seed"),
    ("preflight one --ranks 0 --seed 2", "--seed"),
    ("preflight one --steps 90", "--steps"),
    ("preflight --config train.toml --world 4 --seq 128", "--seq"),
    ("golden --accept --plot", "--plot"),
    ("faults --list -j 2", "--jobs"),
    ("faults --list --checks-only", "--checks-only"),
    ("bisect --repo . --good a --bad b --source PATH", "--source"),
    ("nightly nights --of run --jobs 2", "--jobs"),
    ("nightly nights --of run --again 0", "--again"),
    ("nightly nights --of run --map maps", "--map"),
    ("nightly nights --commit abc", "--commit"),
]
"""What is typed, and the option in it that has no effect there."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a case, a recording of one rank's numbers, and a run of a matrix; is the current folder."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "one.yaml").write_text(CASES)
    weights = Sketch(0, WEIGHTS, "w", "0:2|0:2", 4, 1.0, np.arange(BUCKETS, dtype=float))
    sketches = RankSketches(0, 1, shapes={"w": (2, 2)}, dtypes={"w": "float32"}, sketches=(weights,))
    save_sketches(sketch_file(tmp_path / "recording", 0), sketches)
    (tmp_path / "recording" / "recording.json").write_text(json.dumps({"code": 0}))
    (tmp_path / "snapshot.yaml").write_text("ranks: 1\n")
    (tmp_path / "set_aside.yaml").write_text("")
    record = verdicts.begin_record([Case("one", "a test")], Options(tmp_path / "run"), "")
    record.append_outcome(Outcome("one", "PASS", 2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "option"), ROWS, ids=[typed for typed, _ in ROWS])
def test_an_option_without_effect_is_refused(
    typed: str, option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert main(typed.split()) == 2
    assert option in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before
