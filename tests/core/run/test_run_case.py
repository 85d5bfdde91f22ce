"""The whole line on real ranks where the matrix does not go: torchrun, files of tokens, two harnesses at once."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.core.case.case import Case
from harness.core.case.loading import from_json
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.store import EvidenceError, load_run
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Firing, Verdict
from harness.core.report.cause_text import diagnosis_line
from harness.core.report.text import case_report
from harness.core.run import run_case as module
from harness.core.run.commit import commit_of
from harness.core.run.folders import folder_of
from harness.core.run.judging import judge_folder
from harness.core.run.options import Options
from harness.core.run.reference_cache import reference_key
from harness.core.run.run_case import run_case
from harness.core.run.supported import reason_unsupported


def case_of(name: str, **parts: Any) -> Case:
    return from_json({"name": name, "why": "a test", **parts})


def verdicts(judgement: Judgement) -> dict[str, Verdict]:
    return {result.check: result.verdict for result in judgement.results}


@pytest.mark.slow("two torchruns; tests/core/launch/test_torchrun_ranks.py reads what each leaves")
def test_a_rank_killed_under_torchrun_is_blamed(tmp_path: Path) -> None:
    case = case_of("killed", dims={"dp_shard": 2})
    judgement = run_case(case, Options(out=tmp_path, launcher="torchrun", fault="rank_killed_in_step_2"))
    assert judgement.diagnosis is not None
    assert diagnosis_line(judgement.diagnosis).startswith("rank 1 died by SIGKILL")


def test_a_file_of_real_tokens_takes_the_place_of_the_made_ones(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 256, 32 * 64 + 1).astype(np.uint16))
    case = case_of("from_file", dims={"dp_shard": 2}, training={"data": str(tokens)})
    judgement = run_case(case, Options(out=tmp_path / "out"))
    assert judgement.verdict is Verdict.PASS, case_report(judgement)


def test_a_missing_file_of_tokens_is_named(tmp_path: Path) -> None:
    case = case_of("no_file", training={"data": str(tmp_path / "nowhere.npy")})
    with pytest.raises(EvidenceError, match="the reference run of case 'no_file' failed.*nowhere.npy"):
        run_case(case, Options(out=tmp_path / "out"))


def test_cases_that_share_a_recipe_share_one_reference(tmp_path: Path) -> None:
    cases = [case_of(name, dims={"dp_shard": 2}) for name in ("first", "second")]
    judged: list[Judgement] = []
    threads = [
        threading.Thread(target=lambda c=case: judged.append(run_case(c, Options(out=tmp_path)))) for case in cases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [judgement.verdict for judgement in judged] == [Verdict.PASS] * 2
    assert len([path for path in (tmp_path / ".reference").iterdir() if path.is_dir()]) == 1


def test_a_recipe_whose_noise_no_golden_holds_is_unknown_and_not_green(tmp_path: Path) -> None:
    training = {"dtype": "float32", "compute_dtype": "bfloat16"}
    case = case_of("bf16", dims={"dp_shard": 2}, training=training, file="cases/new.yaml")
    judgement = run_case(case, Options(out=tmp_path))
    assert judgement.verdict is Verdict.UNKNOWN
    assert {name for name, verdict in verdicts(judgement).items() if verdict is Verdict.FAIL} == set()
    assert verdicts(judgement)["traffic"] is Verdict.PASS  # gathered and reduced in bfloat16
    unknown = next(result for result in judgement.results if result.check == "gradients")
    assert (unknown.verdict, unknown.note) == (
        Verdict.UNKNOWN,
        "no bound: the noise of this recipe's reference was never measured;"
        " `harness golden --accept -k bf16` measures it",
    )


def test_a_folder_that_is_not_ours_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(EvidenceError, match="holds thesis.tex, which this harness did not write"):
        run_case(case_of("mine"), Options(out=tmp_path))
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_evidence_lies_where_it_is_looked_for_though_the_trainer_keeps_its_own_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case_of("own_rates", training={"dtype": "float32"}), file="cases/any.yaml")
    own = TrainerTraits(rates=(1e-3,) * case.training.steps)
    monkeypatch.setattr(module.trainers, "traits_by_launch", lambda *_: {"run": own})
    monkeypatch.setattr(module, "reference_folder", lambda *_: tmp_path)
    monkeypatch.setattr(module, "link_or_copy", lambda *_: None)
    monkeypatch.setattr(module, "launch_all", lambda *_: None)
    monkeypatch.setattr(module, "write_measured_traits", lambda *_: None)
    options = Options(out=tmp_path / "out")
    assert module.make_evidence(case, options) == folder_of(case, options)


@pytest.mark.slow("two torchruns; tests/core/launch/test_torchrun_ranks.py reads what each leaves")
def test_two_nodes_make_one_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id {port}"
    harness = [sys.executable, "-m", "harness"]
    other = subprocess.Popen([*harness, "run", "--join", str(tmp_path / "fsdp_2"), "--timeout", "60"])
    first = subprocess.run(
        [*harness, "run", "fsdp_2", "--out", str(tmp_path), "--launcher", "torchrun", "--torchrun-args", torchrun],
        capture_output=True,
        text=True,
    )
    assert (first.returncode, first.stdout.splitlines()[0], other.wait(timeout=60)) == (0, "PASS fsdp_2", 0), first


RESUMED: dict[str, Any] = {"dims": {"dp_shard": 2}, "resume": [{"after": 2, "dims": {"tp": 2}}]}


@pytest.mark.slow("real ranks that resume, twice; the case fsdp_4_to_hsdp_2x2 of tests/short_cases.txt resumes")
def test_a_checkpoint_is_kept_only_where_the_case_does_not_pass(tmp_path: Path) -> None:
    case = case_of("resumed", **RESUMED)
    passed = run_case(case, Options(out=tmp_path))
    assert passed.verdict is Verdict.PASS, case_report(passed)
    assert not (passed.folder / "checkpoint").exists()
    failed = run_case(case, Options(out=tmp_path, fault="data_position_starts_anew"))
    assert [path.name for path in (failed.folder / "checkpoint").iterdir()] == ["step_000002"]


@pytest.mark.slow("four launches; the case fsdp_4_to_hsdp_2x2 of tests/short_cases.txt resumes")
def test_launches_that_resume_give_the_same_verdicts_and_cause_locally_through_torchrun_and_judged_again(
    tmp_path: Path,
) -> None:
    """A fault that lets all ranks end well: each check that passes or is broken does so under either launcher."""
    options = Options(out=tmp_path / "local", fault="optimizer_state_not_restored")
    local = run_case(case_of("resumed", **RESUMED), options)
    again = judge_folder(local.folder)
    assert (again.results, again.diagnosis, again.firing) == (local.results, local.diagnosis, Firing.FIRED)
    torchrun = run_case(case_of("resumed", **RESUMED), replace(options, out=tmp_path / "torchrun", launcher="torchrun"))
    assert verdicts(torchrun) == verdicts(local), case_report(torchrun)
    assert (
        torchrun.diagnosis and local.diagnosis and diagnosis_line(torchrun.diagnosis) == diagnosis_line(local.diagnosis)
    )


def test_after_a_launch_that_fails_none_is_started_and_it_is_the_one_that_is_named(tmp_path: Path) -> None:
    case = case_of("resumed", dims={"dp_shard": 2}, resume=[{"after": 2, "dims": {"dp_shard": 2}}])
    judgement = run_case(case, Options(out=tmp_path, fault="rank_killed_in_step_2"))
    assert judgement.diagnosis is not None
    assert diagnosis_line(judgement.diagnosis).startswith("saved_1: rank 1 died by SIGKILL")
    assert load_run(judgement.folder / "run").exits[0].error == "not started: saved_1 failed"


def test_resume_on_several_nodes_is_refused_with_the_reason() -> None:
    reason = reason_unsupported(
        case_of("resumed", **RESUMED), Options(launcher="torchrun", torchrun_args=("--nnodes", "2"))
    )
    assert reason == "resume means several launches, and other nodes join one (--torchrun-args); run it on one node"


def test_a_repeat_on_several_nodes_is_refused_with_the_reason() -> None:
    twice = case_of("twice", dims={"dp_shard": 2}, runs=2)
    reason = reason_unsupported(twice, Options(launcher="torchrun", torchrun_args=("--nnodes", "2")))
    assert reason == "runs 2 means two launches, and other nodes join one (--torchrun-args); run it on one node"


def test_evidence_names_the_commit_that_its_sources_are_of_now(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    for number in range(2):
        git("commit", "--allow-empty", "--quiet", "-m", f"commit {number}")
        assert git("rev-parse", "HEAD").startswith(commit_of(str(tmp_path)))


@pytest.mark.parametrize("package", ["torch", "numpy", "torchao"])
def test_a_stored_reference_is_that_of_the_versions_at_hand(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    case, installed = case_of("any"), importlib.metadata.version
    before = reference_key(case)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == package else installed(name))
    assert reference_key(case) != before


def test_without_torchao_there_is_a_reference_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torchao":
            raise importlib.metadata.PackageNotFoundError
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert len(reference_key(case_of("any"))) == 8
