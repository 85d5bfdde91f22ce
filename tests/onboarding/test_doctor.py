"""`harness doctor`: an adapter that `harness init` began, examined on real ranks; and what is supposed of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import literal
import numpy as np
import pytest
from expecttest import assert_expected_inline
from noisy import noise_of, with_noise

from harness import ROOT
from harness.checks import judge
from harness.cli import doctor, main
from harness.cli.exit_codes import INTERRUPTED
from harness.diagnosis import suppositions
from harness.diagnosis.assume import retrain
from harness.diagnosis.suppositions import Supposition, altered_by, suppose
from harness.evidence.records import Microbatch, RankEvidence, Run, StepEvidence, TensorEvidence
from harness.judge.judgement import Judgement
from harness.judge.order import reordered_reference
from harness.judge.result import Finding, Result, Verdict, one_cause
from harness.judge.trial import Trial
from harness.onboarding import examination
from harness.plan.make_plan import make_plan
from harness.reference.altered import given
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun
from harness.reference.train import train
from harness.run.options import Options
from harness.spec.case import Case
from harness.spec.dims import ParallelDims
from harness.spec.traits import USUAL

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=32, ffn_dim=24)
CASE = Case("any", "a test", ParallelDims(), model=MODEL, training=TrainingConfig(steps=2, global_batch=4, seq_len=8))


def trial_of(run: ReferenceRun, reference: ReferenceRun, rates: tuple[float, ...]) -> Trial:
    """One rank that computed what `run` did, with the seed weights of the reference."""
    labels, tokens = reference.labels, reference.tokens
    rows = [[reference.sample_ids.index(id_) for id_ in ids] for ids in reference.samples]
    steps = tuple(
        StepEvidence(
            step=step.step,
            microbatches=(Microbatch(tokens[at], labels[at], step.loss * step.valid_tokens, step.valid_tokens),),
            reported_loss=None,
            grad_norm=None,
            lr=rate,
            gradients=step.gradients,
            parameters=step.parameters,
            optimizer_state=step.optimizer_state,
            memory={},
        )
        for step, at, rate in zip(run.steps, rows, rates, strict=True)
    )
    held = tuple(TensorEvidence(f, v.shape, "float64", None, (), v) for f, v in reference.weights.items())
    evidence = RankEvidence(0, 1, held, (), (), steps, reports=())
    return Trial(CASE, make_plan(CASE, USUAL), Run("", 1, (), {0: evidence}), reference)


def trained_as(*together: Supposition, rates: tuple[float, ...] | None = None) -> Trial:
    """By a trainer of which these are so, given the seed weights as they are."""
    reference = train(MODEL, CASE.training)
    training, altered = replace(CASE.training, rates=rates), altered_by(together)
    run = retrain(MODEL, training, reference, altered=altered)
    return trial_of(run, reference, tuple(step.lr for step in run.steps))


def all_of() -> list[Supposition]:
    reference = train(MODEL, CASE.training)
    return list(suppositions.suppositions(trial_of(reference, reference, (0.1, 0.1))))


@pytest.mark.parametrize("number", range(len(all_of())))
def test_what_is_so_of_a_model_is_said_and_the_numbers_are_right_under_it(number: int) -> None:
    which = all_of()[number]
    trial = trained_as(which)
    found = suppose(trial)
    assert [[each.says for each in one.suppositions] for one in found] == [[which.says]]
    verdicts = {result.check: str(result.verdict) for result in found[0].results}
    assert (verdicts["gradients"], verdicts["loss"]) == ("PASS", "PASS")


def test_each_thing_that_may_be_so_has_a_line_to_write_and_where() -> None:
    lines = [one.line for one in all_of()]
    assert_expected_inline(
        "\n".join(lines),
        """\
case: model: {norm_eps: 1.0e-06}
case: model: {norm_eps: 1.0e-08}
case: model: {norm_eps: 1.0e-12}
case: model: {norm_eps: 2.220446049250313e-16}
case: model: {norm_eps: 1.1920928955078125e-07}
case: model: {rope_theta: 10000.0}
case: model: {rope_theta: 1000000.0}
case: model: {n_heads: 4, n_kv_heads: 2}
adapter: def rows(self, case): return halves(case)
adapter: exchange w1 and w3 in NAMES
adapter: exchange wq and wo in NAMES
adapter: exchange wk and wv in NAMES
adapter: exchange attention_norm and ffn_norm in NAMES
adapter: exchange tok_embeddings and output in NAMES
adapter: copy them transposed, and judge with DDP only: no law knows transposed slices
adapter: copy them transposed, and judge with DDP only: no law knows transposed slices
adapter: copy them transposed, and judge with DDP only: no law knows transposed slices""",
    )


def test_of_a_model_that_is_right_nothing_is_supposed_but_its_own_schedule() -> None:
    trial = trained_as(rates=(0.001, 0.002))
    found = suppose(trial)
    assert [one.suppositions for one in found] == [()]
    assert found[0].trial.case.training.rates == (0.001, 0.002)
    verdicts = {result.check: str(result.verdict) for result in found[0].results}
    assert (verdicts["gradients"], verdicts["loss"]) == ("PASS", "PASS")


def test_two_things_that_are_so_at_once_are_both_said() -> None:
    every = all_of()
    halves, eps = next(s for s in every if "head_dim / 2" in s.says), next(s for s in every if "1e-08" in s.says)
    trial = trained_as(halves, eps)
    assert {each.says for each in suppose(trial)[0].suppositions} == {halves.says, eps.says}


def test_rows_that_are_not_in_the_order_that_the_adapter_says_are_said() -> None:
    names = [fqn for fqn in MODEL.parameter_shapes() if fqn.endswith(("wq.weight", "wk.weight"))]
    rows = {fqn: np.roll(np.arange(MODEL.parameter_shapes()[fqn][0]), 1) for fqn in names}
    reference = reordered_reference(train(MODEL, CASE.training), rows)
    run = retrain(MODEL, CASE.training, reference)
    trial = trial_of(run, reference, tuple(step.lr for step in run.steps))
    evidence = replace(trial.ranks[0], rows=rows)
    found = suppose(replace(trial, run=replace(trial.run, ranks={0: evidence})))
    assert [[each.line for each in one.suppositions] for one in found] == [["adapter: leave out `rows`"]]
    assert {result.check: str(result.verdict) for result in found[0].results}["gradients"] == "PASS"


def test_a_loss_that_none_of_them_gives_supposes_nothing() -> None:
    trial = trained_as(Supposition("", "", "embedding", given(lambda x: 1.01 * x)))
    assert suppose(trial) == []


EVALUATES = """    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.int64))
    for step in"""


def test_what_an_adapter_has_wrong_is_said_with_the_line_and_then_two_ranks_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of a script that evaluates before its first step and has no main guard."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "tests" / "script_trainer.py").read_text().replace("    for step in", EVALUATES)
    Path("train.py").write_text(text.replace('if __name__ == "__main__":', "if True:"))
    assert main(["init", "train.py"]) == 0
    assert main(["doctor", "--trainer", "train_adapter.py", "-k", "single or fsdp_2"]) == 1
    said = capsys.readouterr().out
    assert "its norms add 1e-06 to the mean square, requested norm_eps 1e-05" in said
    assert "case: model: {norm_eps: 1.0e-06}" in said
    assert "case: training: {rates: [0.001, 0.002, 0.003]}" in said
    assert "3 of 3 broken laws hold: gradients, loss, update" in said
    assert "not run after this: fsdp_2" in said
    cases = Path("cases/first.yaml")
    told = "{rates: [0.001, 0.002, 0.003], all_valid: true}\n  model: {norm_eps: 1.0e-06}"
    cases.write_text(cases.read_text().replace("{all_valid: true}", told))
    assert main(["doctor", "--trainer", "train_adapter.py", "-k", "single or fsdp_2"]) == 0
    said = capsys.readouterr().out
    assert "fsdp_2          PASS: 3 steps on 2 ranks" in said and "all is well in single, fsdp_2; all cases:" in said
    assert "before that, for its law `golden`: harness golden --accept; review what it writes" in said


def test_names_that_are_none_of_the_references_stop_the_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text((ROOT / "tests" / "script_trainer.py").read_text())
    assert main(["init", "train.py"]) == 0
    adapter = Path("train_adapter.py")
    adapter.write_text(adapter.read_text().replace("q_proj=wq ", ""))
    assert main(["doctor", "--trainer", "train_adapter.py", "-k", "single"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "blocks.0.attn.q_proj.weight [64, 64] is mapped to layers.0.attention.q_proj.weight, which there is not" in said
    )
    assert "of the reference's 21 parameters 2 are nobody's: layers.0.attention.wq.weight" in said


def test_a_script_that_trains_more_steps_than_requested_is_told_which_line_requests_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, said = trained_as(), list[tuple[str, str]]()
    fewer = replace(CASE, training=replace(CASE.training, steps=1))
    monkeypatch.setattr(examination, "load_trial", lambda folder: trial)
    finding = Finding.at(0, "steps [1]", "steps [1, 2]")
    judgement = Judgement(fewer, tmp_path, (Result("completed", Verdict.FAIL, 1, (finding,)),), None, 0.0)
    assert not examination._died(judgement, Options(), lambda label, text: said.append((label, text)))
    assert said[0][1].startswith("it trained 2 steps, requested 1;")
    assert said[2] == ("", "case: training: {steps: 2}")


def test_an_average_of_averages_is_answered_with_the_line_for_who_means_it(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    judgement = Judgement(
        CASE, tmp_path, (), one_cause("the loss is averaged per rank: each divides", kind="averaged locally"), 0.0
    )
    assert examination._diagnosed(judgement, lambda label, text: said.append((label, text)))
    assert said[0] == ("cause", "the loss is averaged per rank: each divides")
    assert said[1][1].startswith("if that is meant: case: training: {all_valid: true}")


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
    assert (
        "this folder has no *_adapter.py, nor adapter.py; `harness init train.py` begins one" in capsys.readouterr().err
    )
    own = (ROOT / "tests" / "own_trainer.py").read_text()
    Path("mine_adapter.py").write_text(own)
    assert main(["doctor", "--cases", "builtin", "-k", "single"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"adapter {tmp_path / 'mine_adapter.py'} loads, the only one of this folder")
    assert said.endswith("all cases: harness matrix --trainer mine_adapter.py --cases builtin")
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


def test_who_judges_the_harness_own_trainer_beside_an_adapter_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_adapter.py").touch()
    line = "judged was llama3, which comes with the harness, not my_adapter.py: --trainer my_adapter.py\n"
    assert main(["run", "single", "--cases", "builtin"]) == 0
    assert capsys.readouterr().out.endswith(line)


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

    monkeypatch.setattr(examination, "load_trial", lambda folder: trial)
    monkeypatch.setattr(examination, "reference_folder", measured)
    monkeypatch.setattr(
        examination, "load", lambda *_: replace(trial.reference, noise={trial.case.golden_noise_key: noise})
    )
    lines: list[tuple[str, str]] = []
    judgement = Judgement(trial.case, Path(), results, None, 0.0)
    assert examination._another_order(judgement, Options(), lambda *line: lines.append(line)) is told
    assert asked == ([] if own_model else [(trial.case.golden_noise_key,)])
    assert [text for _, text in lines if "own_model=True" in text] == [
        "adapter: def traits(self, case): return TrainerTraits(own_model=True)"
    ] * told
