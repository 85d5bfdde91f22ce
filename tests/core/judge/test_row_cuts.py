"""Samples that context parallelism cuts as one row are judged as if each were cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import EIGHT, judged, tiny_case, trial_of

from harness.core.case.dims import ParallelDims
from harness.core.judge.result import Verdict
from harness.core.judge.stored_trial import recut_by_sample
from harness.core.judge.trial import Trial
from harness.core.plan.stages import token_positions_of_rank


def cut_as_rows(trial: Trial) -> Trial:
    """The same training by a trainer that cuts a microbatch's samples laid end to end."""
    case, line = trial.case, sorted(trial.ranks)
    length = case.seq_len(1)

    def recut(rank: int, held: dict[int, np.ndarray]) -> np.ndarray:
        whole = np.empty((len(held[rank]), length), dtype=np.int64)
        for peer in line:
            whole[:, token_positions_of_rank(case, peer, length)] = held[peer]
        return whole.reshape(-1)[token_positions_of_rank(case, rank, whole.size)].reshape(held[rank].shape)

    def step_of(rank: int, index: int) -> Any:
        steps = {peer: trial.ranks[peer].steps[index] for peer in line}
        parts = []
        for number, part in enumerate(steps[rank].microbatches):
            others = {peer: steps[peer].microbatches[number] for peer in line}
            tokens: Any = {peer: each.tokens for peer, each in others.items()}
            labels: Any = {peer: each.labels for peer, each in others.items()}
            parts.append(replace(part, tokens=recut(rank, tokens), labels=recut(rank, labels)))
        rows = len(parts[0].tokens)
        at = {peer: np.tile(token_positions_of_rank(case, peer, length), (rows, 1)) for peer in line}
        whole = tuple(parts)  # and again in passes that train nothing
        return replace(steps[rank], microbatches=whole, evaluated=whole, positions=(recut(rank, at),))

    ranks = {
        rank: replace(trial.ranks[rank], steps=tuple(step_of(rank, index) for index in range(len(case.steps))))
        for rank in line
    }
    plan = replace(trial.plan, traits=replace(trial.traits, cp_cuts_rows=True))
    return replace(trial, plan=plan, run=replace(trial.run, ranks=ranks))


@pytest.fixture(params=[True, False])
def rows(request: pytest.FixtureRequest) -> Trial:
    return cut_as_rows(trial_of(tiny_case(ParallelDims(cp=2), EIGHT, cp_load_balance=request.param)))


def test_rows_that_are_cut_rightly_pass_the_checks_of_data(rows: Trial) -> None:
    assert {str(judged(check, rows).verdict) for check in ("samples", "positions")} == {"FAIL"}
    cut = recut_by_sample(rows)
    assert {check: judged(check, cut).verdict for check in ("samples", "positions")} == {
        "samples": Verdict.PASS,
        "positions": Verdict.PASS,
    }


def test_passes_that_train_nothing_are_recut_like_those_that_train(rows: Trial) -> None:
    for evidence in recut_by_sample(rows).ranks.values():
        for step in evidence.steps:
            for trained, evaluated in zip(step.microbatches, step.evaluated, strict=True):
                assert trained.tokens is not None and evaluated.tokens is not None
                assert trained.tokens.tolist() == evaluated.tokens.tolist()


def test_the_repeat_of_a_case_is_recut_as_its_run_is(rows: Trial) -> None:
    twice = recut_by_sample(replace(rows, case=replace(rows.case, runs=2), repeat=rows.run))
    assert judged("determinism", twice).verdict == Verdict.PASS


def test_what_is_wrong_stays_wrong(rows: Trial) -> None:
    first = rows.ranks[0]
    step = first.steps[0]
    part = step.microbatches[0]
    assert part.tokens is not None
    tokens, at = part.tokens.copy(), step.positions[0].copy()
    tokens[0, 0] = (tokens[0, 0] + 1) % 8
    at[0, 0] += 1
    altered = replace(step, microbatches=(replace(part, tokens=tokens), *step.microbatches[1:]), positions=(at,))
    ranks = {**rows.ranks, 0: replace(first, steps=(altered, *first.steps[1:]))}
    cut = recut_by_sample(replace(rows, run=replace(rows.run, ranks=ranks)))
    assert {str(judged(check, cut).verdict) for check in ("samples", "positions")} == {"FAIL"}


def test_a_rank_that_received_less_is_left_as_it_is(rows: Trial) -> None:
    first = rows.ranks[0]
    steps = tuple(replace(step, microbatches=step.microbatches[:0]) for step in first.steps)
    cut = recut_by_sample(replace(rows, run=replace(rows.run, ranks={**rows.ranks, 0: replace(first, steps=steps)})))
    assert cut.ranks[1].steps[0].microbatches == rows.ranks[1].steps[0].microbatches
