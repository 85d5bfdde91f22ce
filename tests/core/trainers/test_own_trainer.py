"""Trainers brought by others: a file from outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import ROOT
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import find_case, load_all
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.report.cause_text import diagnosis_line
from harness.core.report.text import rerun_command
from harness.core.run.options import Options
from harness.core.run.run_case import run_case

OWN = ROOT / "tests" / "own_trainer.py"
HABITUAL = OWN.with_name("habitual_trainer.py")
CHUNKED = OWN.with_name("chunked_trainer.py")


def case(dims: ParallelDims, **parts: object) -> Case:
    return Case("any", "a test", dims, **parts)  # type: ignore[arg-type]


def test_a_trainer_from_a_file_passes_all_checks_without_knowing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = run_case(
        find_case("ddp_2", load_all()), Options(out=tmp_path, trainer=trainers.absolute_spec(str(OWN), None))
    )
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis
    assert judgement.folder == tmp_path / "ddp_2+own_trainer"
    monkeypatch.chdir(ROOT)
    assert rerun_command(judgement) == f"harness run ddp_2 --trainer {OWN.relative_to(ROOT)}"


def test_plain_attention_a_look_between_steps_and_declared_switches_fail_no_check(tmp_path: Path) -> None:
    mine = str(OWN.with_name("plain_trainer.py"))
    judgement = run_case(find_case("ddp_2", load_all()), Options(out=tmp_path, trainer=mine))
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis


NEAR_THE_FIRST = pytest.mark.slow("real ranks; the first of these judges them in the same way")


def judged(name: str, habits: str, folder: Path) -> Judgement:
    """A case run by own_trainer.py with habits of real trainers."""
    return run_case(
        find_case(name, load_all()), Options(out=folder, trainer=trainers.absolute_spec(str(HABITUAL), habits))
    )


@pytest.mark.parametrize(
    "habits",
    [
        "shows_by_all_reduce+reuses_a_buffer+loss_by_positions+validates",
        pytest.param("loss_by_rows+validates_in_inference_mode", marks=NEAR_THE_FIRST),
        pytest.param("loss_of_valid_tokens+logs_the_loss+clips_by_name+scales_the_loss", marks=NEAR_THE_FIRST),
        pytest.param("loss_by_nll+clips_itself", marks=NEAR_THE_FIRST),
        pytest.param("measures_each_microbatch", marks=NEAR_THE_FIRST),
    ],
)
def test_a_habit_of_real_trainers_fails_no_check(tmp_path: Path, habits: str) -> None:
    judgement = judged("ddp_2_accum", habits, tmp_path)
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("fsdp_2", "freed"),
        pytest.param("fsdp_2", "checkpointed_kept", marks=NEAR_THE_FIRST),
        pytest.param("fsdp_2", "behind", marks=NEAR_THE_FIRST),
        pytest.param("fsdp_2_accum_valid", "held", marks=NEAR_THE_FIRST),
        pytest.param("fsdp_2_accum_valid", "behind_kept", marks=NEAR_THE_FIRST),
        pytest.param("fsdp_4_valid", "halved", marks=NEAR_THE_FIRST),
    ],
)
def test_a_loss_in_chunks_whose_output_is_a_unit_of_its_own_fails_no_check(tmp_path: Path, name: str, way: str) -> None:
    judgement = run_case(
        find_case(name, load_all()), Options(out=tmp_path, trainer=trainers.absolute_spec(str(CHUNKED), way))
    )
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis


def test_a_loss_that_nobody_can_see_is_unknown_and_says_what_to_write(tmp_path: Path) -> None:
    judgement = judged("ddp_2", "loss_by_hand+validates_with_gradients", tmp_path)
    assert {r.check: r.note for r in judgement.results if r.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)} == {
        "loss": "step 1: no rank's loss was seen; let"
        f' {HABITUAL} call `harness.adapter.note_loss(labels, loss, reduction="sum")`'
        " where it is computed, if not by torch's cross_entropy or nll_loss in plain Python"
    }


def test_gradients_that_a_trainer_divides_and_clips_itself_are_unknown_and_says_what_to_call(tmp_path: Path) -> None:
    judgement = judged("ddp_2", "clips_itself+scales_the_loss", tmp_path)
    notes = {r.check: r.note for r in judgement.results if r.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)}
    assert list(notes) == ["gradients"] and "note_gradients()" in notes["gradients"]


def test_two_names_mapped_for_each_other_are_named(tmp_path: Path) -> None:
    mine = tmp_path / "swapped.py"
    told = f"import sys\nsys.path.append({str(OWN.parent)!r})\nfrom own_trainer import NAMES, adapter\n"
    mine.write_text(told + "NAMES.update(w1='w3', w3='w1')\n")
    judgement = run_case(find_case("ddp_2", load_all()), Options(out=tmp_path, trainer=str(mine)))
    broken = {result.check for result in judgement.results if result.verdict is Verdict.FAIL}
    assert {"shard_contents", "initial_weights"} <= broken
    assert judgement.diagnosis is not None and "feed_forward.w1.weight" in diagnosis_line(judgement.diagnosis)


def test_a_file_that_is_no_trainer_is_refused_with_the_reason(tmp_path: Path) -> None:
    empty, three, own, broken = (tmp_path / name for name in ("empty.py", "three.py", "own.py", "broken.py"))
    empty.touch()
    three.write_text("adapter = 3")
    broken.write_text("import nonsense")
    with pytest.raises(ValueError, match=r"empty.py: no `adapter` is defined there; `harness init TRAINER.py`"):
        trainers.load_adapter(str(empty))
    with pytest.raises(
        ValueError, match=r"three.py: its `adapter` has no name, unsupported, start, stop, fqn, rows; `harness init"
    ):
        trainers.load_adapter(str(three))
    own.write_text("from harness.core.trainers import Adapter\nclass Old(Adapter):\n    allow = ()\nadapter = Old()")
    with pytest.raises(ValueError, match=r"own.py: its `adapter` has `own` or `allow`, which are no longer read"):
        trainers.load_adapter(str(own))
    with pytest.raises(ValueError) as unknown:
        trainers.load_adapter(str(broken))
    line = "line 1, `import nonsense`: ModuleNotFoundError: No module named 'nonsense'"
    assert str(unknown.value) == f"{broken}: cannot be loaded: {line}"
    broken.write_text("\nadapter = Adapter(\n")
    trainers.adapter_of_file.cache_clear()
    with pytest.raises(ValueError) as unread:
        trainers.load_adapter(str(broken))
    line = "line 2, `adapter = Adapter(`: SyntaxError: '(' was never closed"
    assert str(unread.value) == f"{broken}: cannot be loaded: {line}"
    with pytest.raises(ValueError, match=r"missing.py: no such file; an adapter is given as FILE.py"):
        trainers.load_adapter(str(tmp_path / "missing.py"))
