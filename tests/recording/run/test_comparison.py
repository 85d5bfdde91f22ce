"""Two runs of a matrix compared: verdicts, checks, and what ranks did, in the words of recordings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from json_documents import valid
from literal import tiny_case, trial_of, with_collectives, with_step

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.cli import main
from harness.core.evidence.store import evidence_file, save_run, save_stored
from harness.core.judge.trial import Trial
from harness.core.report.outcome import Outcome
from harness.core.run import verdicts
from harness.core.run.options import Options
from harness.recording.judged.run_as_recording import recording_of_run
from harness.recording.judged.structure import differences, structure

FSDP = trial_of(tiny_case(ParallelDims(dp_shard=2)))
CHECKS = {"loss": "PASS", "traffic": "PASS"}


def in_bfloat16(trial: Trial, op: str) -> Trial:
    """Where every check may pass: who plans no dtype does not look at it."""
    for rank in trial.ranks:
        trial = with_collectives(
            trial,
            rank,
            lambda call: [
                dataclasses.replace(call, dtype="bfloat16", bytes=call.bytes // 4) if call.op == op else call
            ],
        )
    return trial


def stored(out: Path, trials: dict[str, Trial], **changes: Outcome) -> Path:
    """A run of these cases, all of which passed."""
    record = verdicts.begin_record([Case(name, "a test") for name in (*trials, *changes)], Options(out), "")
    for name, trial in trials.items():
        folder = out / name
        (folder / "run").mkdir(parents=True)
        (folder / "case.json").write_text("{}")
        save_run(dataclasses.replace(trial.run, directory=str(folder / "run")))
        for rank, evidence in trial.ranks.items():
            file = evidence_file(folder / "run", rank)
            file.parent.mkdir(exist_ok=True)
            save_stored(file, evidence)
        took = {"seconds of a step": 2.0, "bytes held": 100.0}
        record.append_outcome(Outcome(name, "PASS", 2, checks=CHECKS, folder=name, measures=took))
    for outcome in changes.values():
        record.append_outcome(outcome)
    return out


def compare(one: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(["compare", str(one), str(other)])
    return code, capsys.readouterr().out.splitlines()


def test_a_run_has_the_structure_that_a_recording_of_it_would_have() -> None:
    found = structure(recording_of_run(FSDP.run))
    assert found["ranks"] == 2 and found["ended"] == {"ok": 2}
    (axis,) = found["axes"].values()
    assert (axis["degree"], axis["groups"]) == (2, ["0,1"])
    assert set(axis["all_gather in forward"]) == {"dtype", "bytes", "calls"}
    assert found["fed"] == 2 and set(found["memory"]) >= {"parameters", "gradients", "optimizer_state"}


def test_hsdp_that_runs_as_fsdp_differs_in_degree_and_groups() -> None:
    hsdp = tiny_case(ParallelDims(dp_replicate=2, dp_shard=2))
    right, wrong = trial_of(hsdp), trial_of(hsdp, ran=tiny_case(ParallelDims(dp_shard=4)))
    told = {
        " ".join(each.where[2:]) for each in differences(*(structure(recording_of_run(t.run)) for t in (right, wrong)))
    }
    assert {"degree", "groups"} <= told


def timed(*seconds: float) -> Trial:
    trial = FSDP
    for rank in trial.ranks:
        for step, each in enumerate(seconds, start=1):
            trial = with_step(trial, rank, step, seconds=each)
    return trial


def test_two_runs_alike_have_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = compare(stored(tmp_path / "a", {"fsdp": FSDP}), stored(tmp_path / "b", {"fsdp": FSDP}), capsys)
    assert (code, said) == (0, [f"{tmp_path}/a -> {tmp_path}/b: 1 case, none of them differ"])


@pytest.mark.parametrize(("steps", "within"), [((1.0, 1.4), True), ((2.0, 2.2), None)])
def test_what_cases_take_is_told_though_every_check_holds_and_is_no_difference(
    steps: tuple[float, ...], within: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = stored(tmp_path / "a", {"fsdp": timed(9.0, 1.0, 1.2), "also": FSDP})
    assert (
        main(["compare", "--json", str(one), str(stored(tmp_path / "b", {"fsdp": timed(9.0, *steps), "also": FSDP}))])
        == 0
    )
    fsdp, also = valid(capsys.readouterr().out, "comparison")["cases"]
    (shift,) = fsdp["figures"]
    assert (shift["kind"], shift.get("within"), shift["spread"]) == ("step time", within, [[1.0, 1.2], [*steps]])
    assert (shift["one"], shift["other"]) == (1.1, pytest.approx(sum(steps) / 2))
    assert "figures" not in also


def test_another_dtype_is_told_with_its_bytes_though_every_check_holds_and_once_for_all_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = in_bfloat16(FSDP, "reduce_scatter")
    one = stored(tmp_path / "a", {"fsdp": FSDP, "also": FSDP})
    code, said = compare(one, stored(tmp_path / "b", {"fsdp": changed, "also": changed}), capsys)
    assert code == 1
    assert said[0].endswith("2 cases, 2 of them differ")
    assert said[2] == "fsdp, also: 2 differences in structure"
    assert said[3].endswith("reduce_scatter in backward")
    assert said[4] == "    dtype: float64 -> bfloat16" and said[5].startswith("    bytes: ")


def test_a_check_a_verdict_and_a_case_that_one_of_them_lacks_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Outcome("tp", "FAIL", 2, cause="the loss has no mean", checks=CHECKS | {"loss": "FAIL"})
    skipped = Outcome("pp", "SKIPPED", 2, reason="no GPU")
    held = dataclasses.replace(broken, verdict="PASS", cause="", checks=CHECKS)
    code, said = compare(
        stored(tmp_path / "a", {}, tp=held, pp=skipped, cp=dataclasses.replace(held, case="cp")),
        stored(tmp_path / "b", {}, tp=broken, pp=skipped),
        capsys,
    )
    assert code == 1
    assert said[0].endswith("2 cases, 2 of them differ")
    assert "  verdict: PASS -> FAIL: the loss has no mean" in said and "    loss: PASS -> FAIL" in said
    assert "  verdict: PASS -> none" in said
    assert "structure not compared: the evidence is not beside its verdict: tp" in said


def test_where_evidence_is_gone_sums_are_compared_and_equal_ones_are_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(folder: str, held: float) -> Path:
        done = Outcome("tp", "PASS", 2, checks=CHECKS, measures={"bytes held": held, "bytes moved": 8.0})
        return stored(tmp_path / folder, {}, tp=done)

    code, said = compare(one("a", 4.0), one("b", 4.0), capsys)
    assert code == 2 and "none of them differ" in said[0]
    code, said = compare(tmp_path / "a", one("c", 6.0), capsys)
    assert code == 1 and "    bytes held: 4 -> 6" in said


def test_a_run_is_not_compared_with_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(stored(tmp_path / "a", {"fsdp": FSDP})), str(tmp_path / "a" / "fsdp")]) == 2
    assert "is a matrix run and the other is not" in capsys.readouterr().err
    assert main(["compare", *[str(tmp_path / "a" / "fsdp")] * 2]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("the same structure")
