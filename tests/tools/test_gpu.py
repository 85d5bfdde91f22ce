"""`make gpu` where there is no GPU: on CPU it runs, goes on where it stopped, and says what it leaves out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.core.case.loading import load_all
from harness.faults import all_faults
from tools import gpu, gpu_machine, gpu_programs

MACHINE = {
    **{"device": "cuda", "gpus": ["NVIDIA H200, 143771 MiB, 580.159.04"], "cores": 16, "python": "3.12.3"},
    **{
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "cudnn": 91900,
        "nccl": "2.28.9",
        "packages": {},
        "missing": ["torchao"],
    },
}


def record(stage: str, case: str, verdict: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "case": case, "verdict": verdict, "backend": "nccl", "cause": "", "reason": "", **more}


def run(tmp_path: Path, *more: str) -> int:
    where = ["--folder", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    return gpu.main(
        [
            "--device",
            "cpu",
            "--stage",
            "float64",
            "-k",
            "single and not accum and not sgd and not muon and not lora",
            *where,
            *more,
        ]
    )


def test_on_cpu_it_runs_and_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (run(tmp_path, "--minutes", "0"), "1 left, the same command runs them" in capsys.readouterr().out) == (
        2,
        True,
    )
    assert (run(tmp_path), "1 of 1  PASS     float64: single" in capsys.readouterr().out) == (0, True)
    assert (run(tmp_path), "of 1" in capsys.readouterr().out) == (0, False)
    (kept,) = gpu.records(tmp_path / "results")
    assert (kept["stage"], kept["case"], kept["verdict"], kept["backend"]) == ("float64", "single", "PASS", "gloo")
    assert kept["step"] > 0
    assert "peak allocated" not in kept  # the host has no such books
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        *("cannot_run.txt", "machine.json", "summary.md", "verdicts.jsonl"),
    ]


def test_without_a_gpu_nothing_is_run_and_that_is_not_green(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_machine, "DRIVER", ("no-such-tool",))
    assert gpu.main([]) == 2
    assert "no GPU is here: nothing was run" in capsys.readouterr().out


def test_it_says_how_ranks_share_a_gpu_and_what_is_done_without() -> None:
    assert gpu_machine.lines(MACHINE)[0] == "GPU          NVIDIA H200, 143771 MiB, 580.159.04"
    assert gpu_machine.lines(MACHINE)[-2:] == [
        "several ranks on one GPU: by gloo, for NCCL is 2.28.9 and not 2.30",
        "without torchao: no recipes in float8 and MXFP8",
    ]
    assert gpu_machine.sharing({"nccl": "2.30.7"}) == "by NCCL 2.30.7"
    assert gpu_machine.label(MACHINE) == "NVIDIA-H200-torch2.11.0"


def test_every_stage_has_cases_and_only_shared_ones_have_several_ranks() -> None:
    cases = load_all()
    found = {stage.name: stage.cases(cases) for stage in gpu.STAGES}
    assert all(found.values())
    ranks = {stage.name: {case.dims.world_size > 1 for case in found[stage.name]} for stage in gpu.STAGES}
    assert {name for name, several in ranks.items() if True in several} <= {s.name for s in gpu.STAGES if s.shares}
    dtypes = {name: {case.training.dtype for case in chosen} for name, chosen in found.items()}
    assert (dtypes["float32"], dtypes["bfloat16"], dtypes["shared float32"]) == ({"float32"}, {"bfloat16"}, {"float32"})


def test_what_is_left_is_told_by_stage_and_by_reason() -> None:
    found = [
        record("float64", "single", "PASS", step=0.01, **{"peak allocated": 2**21}),
        record("shared", "pp_2", "SKIPPED", backend="gloo", reason="gloo sends no tensor"),
        record("shared", "ddp_2", "FAIL", backend="gloo", cause="gradients are halved"),
    ]
    assert gpu.table(found)[2] == "| float64 | 1 | 1 PASS | 10.0 ms | 2 MiB | nccl |"
    assert gpu.table(found)[8] == "| shared | 2 | 1 SKIPPED, 1 FAIL | - | 0 MiB | gloo |"
    assert gpu.cannot_run(found, MACHINE) == [
        *("without torchao: no recipes in float8 and MXFP8", "", "gloo sends no tensor", "    pp_2 (shared)"),
    ]
    assert (gpu.code(found, 0), gpu.code(found[:2], 0), gpu.code(found[:2], 3), gpu.code(found[1:2], 0)) == (1, 0, 2, 2)


def test_the_last_line_of_a_case_counts(tmp_path: Path) -> None:
    lines = [record("float64", "single", "FAIL"), record("float64", "single", "PASS")]
    (tmp_path / "verdicts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [kept["verdict"] for kept in gpu.records(tmp_path)] == ["PASS"]


def test_a_program_that_time_cut_short_is_begun_anew_and_one_that_ended_is_not(tmp_path: Path) -> None:
    ends = gpu_programs.Program("says 3", ("-c", "print('three'); raise SystemExit(3)"))
    lasts = gpu_programs.Program("lasts", ("-c", "import time; time.sleep(60)"))
    lacks = gpu_programs.Program("lacks", (), "there is none")
    assert gpu_programs.run(tmp_path, [ends, lacks, lasts], time.monotonic() + 1.5) == 1
    assert [(each["program"], each["code"]) for each in gpu_programs.records(tmp_path)] == [
        ("says 3", 3),
        ("lacks", None),
    ]
    assert (tmp_path / "says_3.txt").read_text() == "three\n"
    assert gpu_programs.run(tmp_path, [ends, lacks], time.monotonic()) == 0


def test_every_fault_is_in_one_program(tmp_path: Path) -> None:
    words = [" ".join(each.words) for each in gpu_programs.catalogue("cuda", tmp_path)]
    assert [sum(f" {fault.name} " in text for text in words) for fault in all_faults()] == [1] * len(all_faults())
