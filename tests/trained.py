"""Evidence of runs that were really trained otherwise: a tiny model, literal ranks, the reference trained for real."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import literal
import literal_ranks
import pytest
import torch
from literal import ADAMW, TINY, tiny_case, trial_of, with_step

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.causes import assume, diagnose
from harness.core.checks import judge
from harness.core.judge.result import Diagnosis
from harness.core.judge.trial import Trial
from harness.core.report.cause_text import evidence_rows
from harness.reference.counterfactual import Changes, loss_sums_of_rows, retrain
from harness.reference.model import llama_from
from harness.reference.record import ReferenceRun
from harness.reference.spellings import Alter
from harness.reference.train import mean_squares, train

MODEL = replace(TINY, dim=16, n_heads=4, n_kv_heads=2, vocab_size=32, ffn_dim=16)
RECIPE = replace(ADAMW, seq_len=8)
IN_EARNEST, APART_IN_EARNEST = assume.retrain, assume.retrain_separately

Ran = Callable[..., Trial]


def case_of(layout: str | ParallelDims = "fsdp_2", **changes: Any) -> Case:
    training = changes.pop("training", RECIPE)
    return tiny_case(layout, training, model=changes.pop("model", MODEL), **changes)


@functools.cache
def reference(case: Case) -> ReferenceRun:
    return train(case.model, case.training)


@pytest.fixture(name="ran")
def _ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """Evidence of ranks that trained as this reference did, judged by the right one."""
    monkeypatch.setattr(assume, "retrain", IN_EARNEST)
    monkeypatch.setattr(assume, "retrain_separately", APART_IN_EARNEST)

    def ran(case: Case, trained: ReferenceRun | None = None, **otherwise: Any) -> Trial:
        trained = trained or retrain(case.model, case.training, reference(case), Changes(**otherwise))
        totals = {
            id_: total
            for step, ids in enumerate(trained.samples, start=1)
            for id_, total in zip(ids, losses_of_step(case, trained, step, otherwise), strict=True)
        }
        rows = dict(zip(trained.sample_ids, range(len(trained.sample_ids)), strict=True))
        by_row = {rows[id_]: total for id_, total in totals.items()}
        samples = tuple(tuple(rows[id_] for id_ in ids) for ids in trained.samples)
        monkeypatch.setattr(literal, "reference_of", lambda case: replace(trained, samples=samples))
        monkeypatch.setattr(literal_ranks, "sample_loss", by_row.__getitem__)
        return replace(trial_of(case), reference=reference(case))

    yield ran


def losses_of_step(case: Case, trained: ReferenceRun, step: int, otherwise: dict[str, Any]) -> list[float]:
    """Of the samples of a step, altered in all that begins in it or before."""
    weights = trained.weights if step == 1 else trained.steps[step - 2].parameters
    alter = otherwise.get("altered")

    def altered(model: Any, _: int) -> None:
        for earlier in range(1, step + 1) if alter else ():
            alter(model, earlier)

    return loss_sums_of_rows(
        case.model, case.training, trained, step, Changes(weights=weights, altered=altered)
    ).tolist()


def diagnosed(trial: Trial) -> Diagnosis:
    found = diagnose(trial, judge(trial))
    assert found is not None
    return found


def proven(trial: Trial) -> tuple[str, str]:
    """The kinds of causes, and how many checks pass under them."""
    found = diagnosed(trial)
    return ", ".join(found.kinds), dict(evidence_rows(found.evidence)).get("explains", "")


def with_inputs(trial: Trial, alter: Alter) -> Trial:
    """What went into each module in step 1, as the probe sees it."""
    reference = trial.reference
    model = llama_from(reference.weights, config=trial.case.model, dtype=torch.float64, device="cpu")
    alter(model, 1)
    tokens = reference.tokens[[reference.sample_ids.index(id_) for id_ in reference.samples[0]]]
    seen = {fqn: (mean, 1) for fqn, mean in mean_squares(model, torch.from_numpy(tokens)).items()}
    for rank, evidence in trial.ranks.items():
        trial = with_step(trial, rank, 1, activity=replace(evidence.steps[0].activity, inputs=seen))
    return trial
