"""Trials with one mistake each and what is said of them: what several tests of diagnoses use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from literal import (
    ADAMW,
    cause_of,
    sum_of_samples,
    tiny_case,
    trial_of,
    with_step,
    with_step_1_gradients,
    with_updates_that_follow,
)
from literal_ranks import microbatch_of
from noisy import with_noise

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.hypothesis import Fact, Facts, Suspects
from harness.core.checks import judge
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.report.cause_text import cause_line, diagnosis_line, evidence_rows
from harness.reference.config import TrainingConfig

PAGE = (Path(__file__).parents[1] / "docs" / "causes.md").read_text(encoding="utf-8")
ROWS_OF_KINDS = re.findall(r"^\| [\w ]+ \| (.+) \|$", PAGE[PAGE.index("\n## Kinds\n") :], re.MULTILINE)[1:]
LISTED = [kind for row in ROWS_OF_KINDS for kind in row.split(", ")]
"""The kinds on the page of causes."""
EMBEDDING, NORM, LAST = "tok_embeddings.weight", "norm.weight", "output.weight"
LOW_CLIP = replace(ADAMW, max_norm=0.25)
DDP_2 = trial_of(tiny_case("ddp_2"))


def dims(replicate: int = 1, shard: int = 1, tp: int = 1) -> ParallelDims:
    return ParallelDims(dp_replicate=replicate, dp_shard=shard, tp=tp)


def diagnosis_text(trial: Trial) -> str:
    """The first line, then the evidence."""
    found = diagnose(trial, judge(trial))
    assert cause_of(found) and found is not None
    assert all(is_listed(kind) for kind in found.kinds), found.kinds
    return "\n".join([diagnosis_line(found), *(f"  {label}: {text}" for label, text in evidence_rows(found.evidence))])


def proven(trial: Trial) -> tuple[str, dict[str, object]]:
    """The kind and the details of the one cause that explains all that fails."""
    results = judge(trial)
    found = diagnose(trial, results)
    assert found is not None and len(found.causes) == 1, found
    assert not {"or else", "still failing", "not tried"} & {label for label, _ in found.evidence}, found
    assert {*found.causes[0].explains} == {result.check for result in results if result.verdict is Verdict.FAIL}
    assert is_listed(found.kinds[0])
    return found.kinds[0], dict(found.causes[0].details)


def kinds(trial: Trial) -> tuple[str, ...]:
    found = diagnose(trial, judge(trial))
    return found.kinds if found else ()


def first_line(trial: Trial) -> str:
    return diagnosis_text(trial).splitlines()[0]


def trained_as(
    training: TrainingConfig,
    layout: str | ParallelDims = "fsdp_2",
    requested: TrainingConfig = ADAMW,
    wrapper: str | None = None,
) -> Trial:
    """What a run leaves whose optimizer had another recipe; gradients are those of the recipe requested."""
    trial = trial_of(tiny_case(layout, requested, **({"wrapper": wrapper} if wrapper else {})))
    other = replace(trial, case=replace(trial.case, training=training))
    return replace(with_updates_that_follow(other), case=trial.case)


def fsdp_4() -> Trial:
    return trial_of(tiny_case(dims(shard=4)))


def received(trial: Trial, rank: int, step: int, ids: list[int]) -> Trial:
    return with_step(trial, rank, step, microbatches=(microbatch_of(trial.reference, ids),))


def scaled(layout: str | ParallelDims, factor: float, **features: int) -> Trial:
    trial = trial_of(tiny_case(layout, **features))
    return with_step_1_gradients(trial, lambda _, fqn: factor * reference_gradient(trial, fqn), later=factor)


def with_factors(trial: Trial, factor: Callable[[int, int, str], float]) -> Trial:
    """factor(rank, step, fqn), in every step."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            wrong = {fqn: factor(rank, step.step, fqn) * gradient for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=wrong)
    return with_updates_that_follow(trial)


def reference_gradient(trial: Trial, fqn: str) -> np.ndarray:
    return trial.reference.steps[0].gradients[fqn]


def with_scaled_samples(trial: Trial, weights: dict[int, float]) -> Trial:
    return with_step_1_gradients(trial, lambda _, fqn: sum_of_samples(trial, fqn, weights))


def accumulating() -> Trial:
    return trial_of(tiny_case("ddp_2", accumulation=2))


def in_noise(trial: Trial) -> Trial:
    """The same in a recipe that is judged by the noise of its reference: gradients a little off everywhere."""
    trial = with_noise(trial, loss=1e-4, grad_norm=1e-3, gradient=1e-2, distance=1e-2, fit=1e-2)
    draw = np.random.default_rng(2)
    for rank in trial.ranks:
        blurred = {
            f: g * (1 + 3e-3 * draw.uniform(-1, 1, g.shape)) for f, g in trial.ranks[rank].steps[0].gradients.items()
        }
        trial = with_step(trial, rank, 1, gradients=blurred)
    return trial


def here(check: str) -> tuple[str, Finding]:
    """The first finding of a broken check, as a line of evidence."""
    return check, Finding(check=check, name="here", expected="this", observed="that")


def broken(*checks: str) -> dict[str, Result]:
    return {check: Result(check, Verdict.FAIL, 1, (here(check)[1],)) for check in checks}


def seen(facts: Facts, trial: Trial, *checks: str) -> Fact | None:
    """The first fact of these, where these checks fail."""
    found = next(facts(trial, broken(*checks)), None)
    assert found is None or is_listed(found.cause.kind), found
    return found


def is_listed(kind: str) -> bool:
    """On the page of causes, or a number of the recipe."""
    return kind in LISTED or hasattr(ADAMW, kind)


def proposed(suspects: Suspects, trial: Trial, *checks: str) -> list[str]:
    """What hypotheses say that are put to the test where these checks fail."""
    found = list(suspects(trial, broken(*checks)))
    assert all(is_listed(one.cause.kind) for one in found), found
    return [cause_line(one.cause) for one in found]


def gradients_of(trial: Trial) -> dict[str, np.ndarray]:
    return {fqn: reference_gradient(trial, fqn) for fqn in trial.plan.shapes}
