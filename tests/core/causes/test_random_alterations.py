"""Evidence altered at random: no solver raises, whatever is missing or odd, and random numbers are explained by nothing.

Deterministic: the same alterations in each run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.configuration
import numpy as np
import pytest
from diagnosed import dims, in_noise
from hypothesis import strategies as st
from literal import EIGHT, tiny_case, trial_of, with_every_rank, with_rank, with_step, without_rank, without_step
from resuming import resumed

from harness.core.case.dims import ParallelDims
from harness.core.causes import all_facts, all_suspects, costly_suspects
from harness.core.causes.engine import Explanation, explain
from harness.core.checks import judge
from harness.core.judge.trial import Trial

TRIALS = {
    "ddp": trial_of(tiny_case("ddp_2", accumulation=2)),
    "fsdp": trial_of(tiny_case(dims(shard=4), runs=2)),
    "hsdp": trial_of(tiny_case("hsdp_2x2")),
    "tp": trial_of(tiny_case("fsdp_2_tp_2")),
    "cp": trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2), EIGHT)),
    "resumed": resumed(),
    "noise": in_noise(trial_of(tiny_case("fsdp_2"))),
}
QUICK = hypothesis.settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)
Array = Callable[[np.ndarray], np.ndarray]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about NaN and infinity

KEPT = tempfile.TemporaryDirectory()
"""What the library keeps, else in the folder from which tests run; it goes when these end."""
hypothesis.configuration.set_hypothesis_home_dir(KEPT.name)


def explained(trial: Trial) -> Explanation:
    return explain(trial, judge(trial), all_suspects(), all_facts(), costly_suspects())


# ---- what may become of an array, and of what a rank left

ARRAYS: dict[str, Array] = {
    "nan": lambda value: np.where(np.arange(value.size).reshape(value.shape) == 0, np.nan, value),
    "infinite": lambda value: value * np.inf,
    "zero": lambda value: 0 * value,
    "constant": lambda value: 0 * value + 1,
    "random": lambda value: np.random.default_rng(value.size).standard_normal(value.shape),
    "negative": lambda value: -value,
    "flat": lambda value: value.ravel(),
    "transposed": lambda value: value.T,
    "shorter": lambda value: np.atleast_1d(value)[:-1],
    "empty": lambda value: np.atleast_1d(value)[:0],
    "one number": lambda value: np.array(1.0),
    "another dim": lambda value: value[None],
    "float32": lambda value: value.astype(np.float32),
    "rows": lambda value: np.atleast_1d(value)[::-1],
}
WHAT = ["gradients", "parameters", "optimizer_state", "changed", "resumed", "start"]


def altered(trial: Trial, rank: int, step: int, fqn: str, what: str, change: Array | None) -> Trial:
    """One tensor of a rank in a step; None: it is not there."""
    evidence = trial.ranks[rank]

    def of(held: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in held.items() if name != fqn or change is not None}
        if change is None or fqn not in rest:
            return rest
        value = rest[fqn]
        new = {k: change(v) for k, v in value.items()} if isinstance(value, dict) else change(value)
        return rest | {fqn: new}

    if what == "start":
        kept = [one for one in evidence.parameters if one.fqn != fqn or change is not None]
        new = [replace(one, value=change(one.value)) if one.fqn == fqn and change else one for one in kept]
        return with_rank(trial, rank, parameters=tuple(new))
    if what == "resumed":
        resumed = evidence.resumed and replace(evidence.resumed, parameters=of(dict(evidence.resumed.parameters)))
        return with_rank(trial, rank, resumed=resumed)
    record = next((one for one in evidence.steps if one.step == step), None)
    if record is None:
        return trial
    if what == "changed":
        return with_step(trial, rank, step, changed=of(dict(record.parameters)))
    return with_step(trial, rank, step, **{what: of(dict(getattr(record, what)))})


def fed(trial: Trial, rank: int, step: int, how: str) -> Trial:
    record = next((one for one in trial.ranks[rank].steps if one.step == step), None)
    if record is None or not record.microbatches:
        return trial
    first, *rest = record.microbatches
    tokens, labels = first.tokens, first.labels
    if tokens is None or labels is None or tokens.shape != labels.shape:
        return trial  # it was altered before
    changes: dict[str, dict[str, Any]] = {
        "tokens permuted": {"tokens": np.random.default_rng(step).permutation(tokens.ravel()).reshape(tokens.shape)},
        "rows permuted": {"tokens": tokens[::-1], "labels": labels[::-1]},
        "shorter": {"tokens": tokens[:, :-1], "labels": labels[:, :-1]},
        "no row": {"tokens": tokens[:0], "labels": labels[:0]},
        "no tokens": {"tokens": None},
        "no labels": {"labels": None, "loss_sum": None, "valid_tokens": None},
        "labels flat": {"labels": labels.ravel()[:-1]},
        "masked": {"labels": np.full_like(labels, -100)},
        "loss": {"loss_sum": float("nan")},
    }
    changed = [replace(first, **changes[how]), *rest] if how in changes else [first] * 2 if how == "twice" else []
    return with_step(trial, rank, step, microbatches=tuple(changed))


def lacking(trial: Trial, rank: int, step: int, what: str) -> Trial:
    evidence = trial.ranks[rank]
    ways: dict[str, Callable[[], Trial]] = {
        "rank": lambda: without_rank(trial, rank),
        "step": lambda: without_step(trial, rank, step),
        "all steps": lambda: with_rank(trial, rank, steps=()),
        "parameters": lambda: with_rank(trial, rank, parameters=()),
        "collectives": lambda: with_rank(trial, rank, collectives=evidence.collectives[::2]),
        "groups": lambda: with_rank(trial, rank, groups=()),
        "report": lambda: with_step(trial, rank, step, reported_loss=None, grad_norm=None, lr=None, reported_lr=None),
        "positions": lambda: with_step(trial, rank, step, positions=(np.arange(2),)),
        "another step": lambda: with_rank(
            trial, rank, steps=tuple(replace(one, step=one.step + 1) for one in evidence.steps)
        ),
        "checkpoint": lambda: replace(trial, run=replace(trial.run, checkpoint=None)),
        "memory": lambda: with_step(trial, rank, step, memory={}),
    }
    return ways[what]()


LACKING = ["rank", "step", "all steps", "parameters", "collectives", "groups", "report", "positions", "another step"]
LACKING += ["checkpoint", "memory"]
FED = ["tokens permuted", "rows permuted", "shorter", "no row", "no tokens", "no labels", "labels flat", "masked"]
FED += ["loss", "twice", "nothing"]
ALTERATIONS = st.one_of(
    st.tuples(st.just("array"), st.sampled_from(WHAT), st.sampled_from([*ARRAYS, "missing"])),
    st.tuples(st.just("fed"), st.sampled_from(FED), st.just("")),
    st.tuples(st.just("lacking"), st.sampled_from(LACKING), st.just("")),
)
PLACES = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 11), st.booleans())


def with_alteration(trial: Trial, place: tuple[int, int, int, bool], alteration: tuple[str, str, str]) -> Trial:
    """At this rank, step and parameter; or on every rank."""
    (first, step, number, everywhere), (kind, what, how) = place, alteration
    fqn, ranks = [*trial.plan.shapes][number], sorted(trial.ranks)
    for rank in ranks if everywhere else ranks[first % len(ranks) : first % len(ranks) + 1] if ranks else []:
        if kind == "array":
            trial = altered(trial, rank, step, fqn, what, ARRAYS.get(how))
        else:
            trial = (fed if kind == "fed" else lacking)(trial, rank, step, what)
    return trial


@pytest.mark.slow("random evidence, often; test_nothing_raises_on_evidence_that_makes_little_sense has chosen ones")
@QUICK
@hypothesis.given(
    st.sampled_from([*TRIALS]), st.lists(st.tuples(PLACES, ALTERATIONS), min_size=1, max_size=3), st.integers(0, 9)
)
def test_no_solver_raises(name: str, alterations: list[Any], seed: int) -> None:
    trial = TRIALS[name]
    for place, alteration in alterations:
        trial = with_alteration(trial, place, alteration)
    raised = [text for text in explained(trial).errors if " raised " in text]
    assert raised == []


# ---- noise


@pytest.mark.slow("random gradients, often; the first layout draws them as the others do", after=1)
@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2", "hsdp_2x2", "tp_2"])
@hypothesis.settings(QUICK, max_examples=6)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.sets(st.integers(0, 3), min_size=1),
    numbers=st.sets(st.integers(0, 11), min_size=1),
    step=st.integers(1, 3),
)
def test_random_gradients_are_explained_by_nothing(
    layout: str, seed: int, ranks: set[int], numbers: set[int], step: int
) -> None:
    trial, draw = trial_of(tiny_case(layout)), np.random.default_rng(seed)
    fqns = [fqn for number, fqn in enumerate(trial.plan.shapes) if number in numbers]
    whole = {fqn: draw.standard_normal(trial.plan.shapes[fqn]) for fqn in fqns}

    def change(t: Trial, rank: int) -> Trial:
        gradients = t.ranks[rank].steps[step - 1].gradients
        cut = {fqn: tuple(slice(*bounds) for bounds in t.plan.slices[rank][fqn]) for fqn in fqns}
        wrong = {fqn: 0.1 * whole[fqn][cut[fqn]] for fqn in fqns if not ranks.isdisjoint({rank, 3 - rank})}
        return with_step(t, rank, step, gradients=gradients | wrong)

    found = explained(with_every_rank(trial, change))
    assert found.errors == ()
    assert not [proof for proof in found.proofs if "gradients" in proof.explained]
