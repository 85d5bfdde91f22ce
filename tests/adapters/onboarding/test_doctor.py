"""`harness doctor`: an adapter that `harness init` began, examined on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import literal
import numpy as np
import pytest
from noisy import noise_of, with_noise

from harness import ROOT
from harness.adapters.cli.work import doctor
from harness.adapters.onboarding import examination
from harness.core.case.case import Case
from harness.core.checks import judge
from harness.core.cli import main
from harness.core.cli.exit_codes import INTERRUPTED
from harness.core.judge.finding import Finding
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict, diagnosis_of_one_cause
from harness.core.run.options import Options

EVALUATES = """    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.int64))
    for step in"""


def test_what_an_adapter_has_wrong_is_said_with_the_line_and_then_two_ranks_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The script evaluates before its first step and has no main guard."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "tests" / "script_trainer.py").read_text().replace("    for step in", EVALUATES)
    Path("train.py").write_text(text.replace('if __name__ == "__main__":', "if True:"))
    assert main(["init", "train.py"]) == 0
    cases = Path("cases/first.yaml")
    cases.write_text(cases.read_text().replace("norm_eps: 1.0e-06", ""))  # which init has seen
    assert main(["doctor", "--trainer", "train_adapter.py", "-k", "single or fsdp_2"]) == 1
    said = capsys.readouterr().out
    assert "case: model: {norm_eps: 1.0e-06}" in said
    assert "case: training: {rates: [0.001, 0.002, 0.003]}" in said
    assert "3 of 3 failing checks: gradients, loss, update" in said
    assert "not run after this: fsdp_2" in said
    told = "{rates: [0.001, 0.002, 0.003], all_valid: true}\n  model: {norm_eps: 1.0e-06}"
    cases.write_text(cases.read_text().replace("{all_valid: true}\n  model: {}", told))
    assert main(["doctor", "--trainer", "train_adapter.py", "-k", "single or fsdp_2"]) == 0
    said = capsys.readouterr().out
    assert "fsdp_2          PASS: 3 steps on 2 ranks" in said and "all is well in single, fsdp_2; all cases:" in said
    assert "before that, for its check `golden`: harness golden --accept; review what it writes" in said


def test_names_that_are_none_of_the_references_stop_the_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text((ROOT / "tests" / "script_trainer.py").read_text())
    assert main(["init", "train.py"]) == 0
    adapter = Path("train_adapter.py")
    adapter.write_text(adapter.read_text().replace("q_proj=wq", ""))
    assert main(["doctor", "--trainer", "train_adapter.py", "-k", "single"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "blocks.0.attn.q_proj.weight [64, 64] is mapped to layers.0.attention.q_proj.weight, which there is not" in said
    )
    assert "of the reference's 21 parameters 2 have no match: layers.0.attention.wq.weight" in said


def test_a_script_that_trains_more_steps_than_requested_is_told_which_line_requests_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = literal.tiny_case("single")
    fewer = replace(case, training=replace(case.training, steps=1))
    monkeypatch.setattr(examination, "load_trial", lambda folder: literal.trial_of(case))
    finding = Finding.at(0, "steps [1]", "steps [1, 2, 3]")
    judgement = Judgement(fewer, tmp_path, (Result("completed", Verdict.FAIL, 1, (finding,)),), None, 0.0)
    said = examination.explanation(judgement, Options())
    assert said[0][1].startswith("it trained 3 steps, requested 1;")
    assert said[2] == ("", "case: training: {steps: 3}")


def test_an_average_of_averages_is_answered_with_the_line_for_who_means_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = literal.tiny_case("ddp_2")
    monkeypatch.setattr(examination, "load_trial", lambda folder: literal.trial_of(case))
    why = diagnosis_of_one_cause("the loss is averaged per rank: each divides", kind="averaged locally")
    passed = tuple(Result(check, Verdict.PASS, 1) for check in ("completed", "samples"))
    said = examination.explanation(Judgement(case, tmp_path, passed, why, 0.0), Options())
    assert said[0] == ("cause", "the loss is averaged per rank: each divides")
    assert "case: training: {all_valid: true}" in said[1][1]


GATHERS = """
from dataclasses import replace
from harness.core.trainers import llama3

class Gathers(llama3.Llama3):
    name = "gathers"

    def start(self, case, weights, device):
        return super().start(replace(case, features=replace(case.features, loss_parallel=False)), weights, device)

adapter = Gathers()
"""


def test_a_loss_on_gathered_logits_is_answered_with_the_case_that_requests_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gathers_adapter.py").write_text(GATHERS)
    Path("cases").mkdir()
    Path("cases/first.yaml").write_text("cases: {tp_2: {dims: {tp: 2}, why: a test}}")
    assert main(["doctor"]) == 1
    assert "if intended features: {loss_parallel: false}" in " ".join(capsys.readouterr().out.split())


def test_the_one_adapter_of_the_folder_is_examined_and_never_the_harness_own_trainer_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    examined: list[str] = []

    def examine(cases: Any, options: Options, *_: Any) -> examination.Examination:
        examined.append(options.trainer)
        return examination.Examination({"single": Verdict.PASS})

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor", "--cases", "builtin", "-k", "single"]) == 2
    assert "no *_adapter.py or adapter.py in this folder; `harness init train.py` writes one" in capsys.readouterr().err
    own = (ROOT / "tests" / "own_trainer.py").read_text()
    Path("mine_adapter.py").write_text(own)
    assert main(["doctor", "--cases", "builtin", "-k", "single"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"adapter {tmp_path / 'mine_adapter.py'} loads, the only adapter of this folder")
    assert said.endswith("all cases: harness matrix --cases builtin")
    Path("adapter.py").write_text(own)
    assert main(["doctor", "--cases", "builtin", "-k", "single"]) == 2
    assert "name one of the adapters of this folder: adapter.py, mine_adapter.py" in capsys.readouterr().err
    assert main(["doctor", "--cases", "builtin", "-k", "single", "--trainer", "adapter.py"]) == 0
    assert examined == [str(tmp_path / "mine_adapter.py"), str(tmp_path / "adapter.py")]


def test_where_no_case_has_one_or_two_ranks_the_smallest_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adapter.py").write_text((ROOT / "tests" / "own_trainer.py").read_text())
    examined: list[str] = []

    def examine(cases: Any, *_: Any) -> examination.Examination:
        examined.extend(case.name for case in cases)
        return examination.Examination({"any": Verdict.PASS})

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor", "--cases", "builtin", "-k", "hsdp_2x8 or hsdp_2x2_valid"]) == 0
    assert len(examined) == 1 and examined[0].startswith("hsdp_2x2_valid")
    assert f"cases           none of one or two ranks; the smallest has 4: {examined[0]}\n" in capsys.readouterr().out
    assert main(["doctor", "--cases", "builtin", "-k", "no_such_case"]) == 2


def test_ctrl_c_after_a_case_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adapter.py").write_text((ROOT / "tests" / "own_trainer.py").read_text())
    ended: dict[str, Verdict] = {}

    def examine(cases: Any, options: Any, tell: Any, judged: dict[str, Verdict]) -> None:
        judged |= ended
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", examine)
    arguments = ["doctor", "--cases", "builtin", "-k", "single or ddp_2"]
    assert main(arguments) == INTERRUPTED
    assert capsys.readouterr().err == "harness: interrupted; nothing was judged, the ranks are killed\n"
    ended["single"] = Verdict.PASS
    assert main(arguments) == INTERRUPTED
    assert (
        "harness: interrupted after 1 of " in (said := capsys.readouterr().err)
        and "cases (single PASS); the ranks" in said
    )


@pytest.mark.parametrize(
    ("left", "own_model", "told"), [(1e-2, False, True), (1e-9, False, False), (1e-2, True, False)]
)
def test_an_own_model_is_said_to_round_at_other_places_after_it_was_judged_as_one(
    left: float, own_model: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """left: what another order of operations leaves of the reference's gradients."""
    sizes = {"loss": 1e-4, "grad_norm": 1e-2, "gradient": 0.1, "distance": 1e-3, "fit": 1e-3}
    trial = with_noise(literal.trial_of(literal.tiny_case("single")), **sizes)
    assert trial.golden is not None
    both = dict.fromkeys((trial.case.noise_key, trial.case.golden_noise_key), trial.golden.noise[trial.case.noise_key])
    plan = replace(trial.plan, traits=replace(trial.traits, own_model=own_model))
    trial, draw = replace(trial, plan=plan, golden=replace(trial.golden, noise=both)), np.random.default_rng(1)

    def rounded(gradient: np.ndarray) -> np.ndarray:
        return gradient * (1 + 1e-2 * draw.choice([-1, 1], gradient.shape))

    trial = literal.with_value(trial, 0, 1, "gradients", "layers.0.attention.wq.weight", rounded)
    trial = literal.with_updates_that_follow(trial)
    results = judge(trial)
    assert {result.check for result in results if result.verdict is Verdict.FAIL} == {"gradients"}
    asked, noise = list[tuple[str, ...]](), noise_of(trial.case, **sizes | {"distance": left, "fit": left})

    def measured(case: Case, options: Options, keys: tuple[str, ...]) -> Path:
        asked.append(keys)
        return Path()

    monkeypatch.setattr(examination, "reference_folder", measured)
    monkeypatch.setattr(
        examination, "load_stored", lambda *_: replace(trial.reference, noise={trial.case.golden_noise_key: noise})
    )
    lines = list(examination.explain_order(trial, Judgement(trial.case, Path(), results, None, 0.0), Options()))
    assert bool(lines) is told
    assert asked == ([] if own_model else [(trial.case.golden_noise_key,)])
    assert [text for _, text in lines if "own_model=True" in text] == [
        "adapter: def traits(self, case): return TrainerTraits(own_model=True)"
    ] * told
