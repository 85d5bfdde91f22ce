"""Somebody's command, one rank of it alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.clusters.commands import CommandRun, exit_of_rank, judge_command, log_file, run_command_alone
from harness.clusters.launches import TIMEOUT_REASON
from harness.core.case.dims import ParallelDims
from harness.core.cli import make_parser
from harness.core.evidence.records import Exit
from harness.core.report.cause_text import diagnosis_line

SCRIPT = str(Path(__file__).parents[1] / "recorded_script.py")


@pytest.mark.slow("a real rank; tests/clusters/test_lone_ranks.py names it under an adapter")
def test_a_script_without_an_adapter_that_runs_hsdp_as_fsdp_is_named_on_one_of_64_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICATE", "2")
    monkeypatch.setenv("WRONG", "1")
    forever = tmp_path / "forever.py"  # each rank ends with the steps that are looked at
    text = Path(SCRIPT).read_text(encoding="utf-8").replace("range(1, 5)", "range(1, 1_000_000)")
    joins = 'dist.init_process_group("gloo")\n'
    forever.write_text(
        text.replace(joins, f'{joins}    dist.new_group(backend="gloo")\n')
    )  # one of objects, as many have
    run = run_command_alone([sys.executable, str(forever)], (3,), 64, tmp_path / "command")
    assert (run.exit_codes, run.unable_reasons) == ({3: 0}, {}), log_file(run.directory, 3).read_text()
    assert (run.records[3].ended, run.records[3].steps_seen) == ("ok", 3)
    verdicts = judge_command(run, ParallelDims(dp_replicate=2, dp_shard=32))
    assert verdicts.diagnosis is not None
    assert diagnosis_line(verdicts.diagnosis) == (
        "HSDP ran as FSDP: parameters are sharded over 64 ranks, requested 32, replicated 2 times"
    )


def test_a_rank_in_which_the_recorder_cannot_be_installed_ends_and_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.clusters.commands.LISTENER_MODULE", "harness.no_such_module")
    run = run_command_alone(
        [sys.executable, "-c", "import torch, time; time.sleep(600)"], (3,), 64, tmp_path / "command", 1
    )
    assert run.exit_codes == {3: 1} and "could not be installed" in run.unable_reasons[3]
    assert "no_such_module" in run.unable_reasons[3] and "no_such_module" in log_file(run.directory, 3).read_text()


def test_a_rank_that_trains_nothing_within_the_limit_is_killed_and_unknown(tmp_path: Path) -> None:
    idle = [sys.executable, "-c", "import time; time.sleep(600)"]
    run = run_command_alone(idle, (3,), 64, tmp_path / "idle", timeout=0.5)
    assert (run.exit_codes, run.unable_reasons) == ({3: -9}, {3: TIMEOUT_REASON.format(0.5)})


def ended(tmp_path: Path, code: int, log: str) -> Exit:
    """Of a rank that left no record."""
    log_file(tmp_path, 3).write_text(log)
    return exit_of_rank(CommandRun(tmp_path, {3: code}, {}, {}, 1.0), Exit(3, "lost", error="it left no evidence"))


def test_a_rank_that_trained_nothing_is_known_by_its_last_words(tmp_path: Path) -> None:
    found = ended(tmp_path, 2, "usage: train.py\ntrain.py: error: --config is missing\n")
    assert (found.how, found.code, found.blamed) == ("raised", 2, True)
    assert found.error == "train.py: error: --config is missing"


def test_a_rank_that_ended_well_and_trained_nothing_has_left_no_evidence(tmp_path: Path) -> None:
    assert ended(tmp_path, 0, "nothing to do") == Exit(3, "ok", 0)


def test_options_behind_a_case_are_options_and_behind_two_dashes_they_are_the_commands() -> None:
    of_case = make_parser("preflight").parse_args(["preflight", "llama3_8b_512", "--ranks", "3"])
    assert (of_case.case, of_case.ranks) == (["llama3_8b_512"], "3")
    told = ["--world", "512", "--layout", "dp_shard=512", "--", "python", "train.py", "--ranks", "7"]
    of_command = make_parser("preflight").parse_args(["preflight", *told])
    assert (of_command.case, of_command.ranks) == (["python", "train.py", "--ranks", "7"], "auto")
