"""`harness doctor`: the lines to write if samples come in another order, or a case is skipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.adapters.onboarding import examination, sample_orders
from harness.adapters.onboarding.observed import Facts
from harness.adapters.onboarding.skeleton import adapter_text as begun
from harness.adapters.support.requests import NOT_PASSED_ON
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.traits import USUAL_TRAITS
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.step import Microbatch, StepEvidence
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.run.options import Options, Unsupported
from harness.core.trainers import Adapter
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.data import build_dataset, epoch_order, sample_order
from harness.reference.train import train

MODEL = ModelConfig(dim=8, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=32, ffn_dim=8)
TRAINING = TrainingConfig(steps=1, global_batch=4, seq_len=16)
CASE = Case("any", "a test", ParallelDims(), model=MODEL, training=TRAINING)


class Refusing(Adapter):
    """refused: why it runs no case of another seed."""

    def __init__(self, refused: str | None) -> None:
        self.refused = refused

    def unsupported(self, case: Case) -> str | None:
        return self.refused if case.training.seed != TRAINING.seed else None


def advice(trial: Trial, refused: str | None, text: str) -> list[str]:
    return list(sample_orders.advice_lines(trial, Refusing(refused), text, "a.py"))


def test_a_case_that_is_skipped_is_answered_with_what_the_adapter_must_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(case: Case, options: Options) -> Any:
        raise Unsupported(f"seed 0: train {NOT_PASSED_ON}")

    monkeypatch.setattr(examination, "run_case", skip)
    said: list[tuple[str, str]] = []
    case = replace(CASE, training=replace(CASE.training, seed=0))
    with pytest.raises(Unsupported):
        examination.examine([case], Options(trainer="a.py"), lambda label, text: said.append((label, text)), {})
    assert said[0][1].startswith('adapter: add seed to KNOWN in a.py: "seed": (0,);')


def received(places: list[int], *, shifted: int = 0) -> Trial:
    """Return the trial of a rank that received these of the whole data set in step 1."""
    data = build_dataset(TRAINING, MODEL)
    rows = np.stack([data[place][0].numpy() for place in places]) + shifted
    step = StepEvidence(1, (Microbatch(rows, rows, 1.0, rows.size),), None, None, None, {}, {}, {}, {})
    evidence = RankEvidence(0, 1, (), (), (), (step,))
    return Trial(CASE, make_plan(CASE, USUAL_TRAITS), Run("", 1, (), {0: evidence}), train(MODEL, TRAINING))


def drawn_by(seed: int | None, *, declared: bool) -> list[int]:
    """Return what a sampler draws first of RecipeSamples, shuffled or not."""
    n_samples = len(build_dataset(TRAINING, MODEL))
    places = range(n_samples) if seed is None else [int(place) for place in epoch_order(n_samples, seed)]
    order = range(n_samples) if declared else sample_order(TRAINING, n_samples, epoch=0)
    return [order[place] for place in places][: TRAINING.global_batch]


SHUFFLED = "RecipeSamples(case, shuffled=True)"


@pytest.mark.parametrize(
    ("seed", "declared", "lines"),
    [
        (0, False, ["with seed 0", f"adapter: {SHUFFLED}", "case: training: {seed: 0}", "KNOWN"]),
        (7, True, ["with seed 7", "case: training: {seed: 7}", "KNOWN"]),
        (None, True, ["leave shuffled=True out"]),
        (None, False, []),
    ],
)
def test_samples_in_another_order_are_answered_with_the_seed_and_only_what_is_not_so_yet(
    seed: int | None, declared: bool, lines: list[str]
) -> None:
    said = advice(received(drawn_by(seed, declared=declared)), f"seed 1: train {NOT_PASSED_ON}", "RecipeSamples(case)")
    assert len(said) == len(lines)
    assert all(line in sentence for line, sentence in zip(lines, said, strict=True))


@pytest.mark.parametrize("first", [1, 3])
def test_a_sampler_whose_epochs_do_not_begin_at_0_is_given_a_seed_as_much_smaller(first: int) -> None:
    trial, seed = received(drawn_by(TRAINING.seed + first, declared=True)), TRAINING.seed + first
    said = advice(trial, None, f"{SHUFFLED} {{case.training.seed}}")
    assert f"with seed {seed} " in said[0] and f"case.training.seed - {first} as its seed" in said[1] and len(said) == 2
    written = advice(trial, f"seed 1: train {NOT_PASSED_ON}", "RecipeSamples(case)")
    assert written[1].startswith(f"case: training: {{seed: {seed}}}, requested {TRAINING.seed};")


def test_samples_that_are_not_the_recipes_are_not_answered_with_what_the_adapter_has_already() -> None:
    trial = received(drawn_by(None, declared=False), shifted=1)
    alone, handed = advice(trial, None, "# RecipeSamples(case)"), advice(trial, None, "RecipeSamples(case)")
    assert alone[0].startswith("adapter: script.replace(NAME, ..) puts RecipeSamples")
    assert handed[0].startswith("none of the rows that the adapter hands over reached the model")


def test_an_adapter_whose_todo_is_not_done_is_told_that_and_not_what_its_comment_names(tmp_path: Any) -> None:
    trial = received(drawn_by(None, declared=False), shifted=1)
    text = begun(tmp_path / "train.py", Facts(model="Net"), tmp_path / "a.py")
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "# TODO nothing that makes samples" in row)
    said = advice(trial, None, text)
    assert said[0] == f"the TODO in line {line} of a.py is not done: nothing hands the recipe's samples over"
    assert said[1].startswith("adapter: script.replace(NAME, ..) puts RecipeSamples")
