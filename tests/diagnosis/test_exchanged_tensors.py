"""Tensors that change places in the reduction over two replicas: which rank adds what, how often and since when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import diagnosis_text, first_line, reference_gradient
from literal import judged, sum_of_samples, tiny_case, trial_of, with_step_1_gradients, with_value
from noisy import with_noise

from harness.diagnosis import replicas
from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.replicas import exchanged_tensors
from harness.judge.trial import Trial

HSDP = trial_of(tiny_case("hsdp_2x2"))
W1, W2, W3 = (f"layers.0.feed_forward.w{number}.weight" for number in (1, 2, 3))
OWN = {replica: {i: float(i in ids) for i in range(8)} for replica, ids in enumerate((range(4), range(4, 8)))}


def exchanged(trial: Trial, added: dict[tuple[int, str], tuple[str, float]]) -> Trial:
    """What ranks add to their own share of a tensor, of the partner along dp_replicate, and how often."""

    def gradient(rank: int, fqn: str) -> np.ndarray:
        if (rank, fqn) not in added:
            return reference_gradient(trial, fqn)
        other, times = added[rank, fqn]
        own, partners = OWN[rank // 2], OWN[1 - rank // 2]
        theirs = sum_of_samples(trial, other, partners)
        half = len(theirs) // 2  # a slice changes places as it lies in memory
        parts = [part.reshape(-1, trial.plan.shapes[fqn][-1]) for part in (theirs[:half], theirs[half:])]
        return sum_of_samples(trial, fqn, own) + times * np.concatenate(parts)

    return with_step_1_gradients(trial, gradient)


def proposed(trial: Trial) -> list[Hypothesis]:
    return list(exchanged_tensors(trial, {"gradients": judged("gradients", trial)}))


@pytest.mark.parametrize(
    ("rank", "fqn", "other", "times", "told"),
    [
        (1, W1, W3, 1.0, f"on rank 1: rank 1 adds rank 3's {W3} to its {W1}"),
        (2, W3, W1, 1.0, f"on rank 2: rank 2 adds rank 0's {W1} to its {W3}"),
        (0, W1, W3, 0.5, f"on rank 0: rank 0 adds 0.5 times rank 2's {W3} to its {W1}"),
        (1, W1, W2, 1.0, f"on rank 1: rank 1 adds rank 3's {W2} to its {W1}"),
    ],
)
def test_a_tensor_that_a_rank_adds_to_another_one_is_named(
    rank: int, fqn: str, other: str, times: float, told: str
) -> None:
    wrong = exchanged(HSDP, {(rank, fqn): (other, times)})
    assert (
        first_line(wrong)
        == f"tensors are swapped in the reduction over dp_replicate in 1 of 12 parameters ({fqn}) {told}"
    )
    assert "no passing check fails" in diagnosis_text(wrong)
    assert [one.fitted for one in proposed(wrong)] == [2]


def test_each_way_to_count_them_is_a_number_that_is_fitted() -> None:
    once, half = (W3, 1.0), (W1, 0.5)
    assert [one.fitted for one in proposed(exchanged(HSDP, {(1, W1): once, (1, W3): (W1, 1.0)}))] == [2]
    wrong = exchanged(HSDP, {(1, W1): once, (1, W3): half})
    assert [one.fitted for one in proposed(wrong)] == [3]
    assert first_line(wrong).endswith(f"({W1}, {W3}) on rank 1: rank 1 adds rank 3's {W3} to its {W1}")


def test_where_one_gradient_is_no_such_sum_where_all_ranks_differ_and_in_noise_nothing_is_proposed() -> None:
    wrong = exchanged(HSDP, {(1, W1): (W3, 1.0)})
    assert len(proposed(wrong)) == 1 and proposed(with_noise(wrong)) == []
    assert proposed(with_value(wrong, 1, 1, "gradients", W2, np.cos)) == []
    assert proposed(exchanged(HSDP, {(rank, W1): (W3, 1.0) for rank in range(4)})) == []
    assert len(proposed(exchanged(HSDP, {(rank, W1): (W3, 1.0) for rank in range(3)}))) == 1
    other = replace(HSDP.case, dims=replace(HSDP.case.dims, dp_replicate=1, dp_shard=4))
    assert proposed(replace(wrong, case=other)) == []


def test_tensors_change_places_from_the_first_wrong_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "train_apart", lambda trial, axis, reduce: reduce)
    reduce: Any = replicas._assuming(HSDP, {(1, W1): (W3, 2.0)}, since=2)
    own = [{fqn: of + value for fqn, value in HSDP.reference.steps[0].gradients.items()} for of in (0.0, 1.0)]
    half = len(own[0][W1]) // 2
    usual = {fqn: value + own[1][fqn] for fqn, value in own[0].items()}
    for step in (1, 2, 3):
        first, second = reduce(step, own)
        assert all(np.array_equal(second[fqn], value) for fqn, value in usual.items()), "rank 1 is of the first replica"
        assert all(np.array_equal(first[fqn], value) for fqn, value in usual.items() if fqn != W1)
        np.testing.assert_array_equal(first[W1][:half], usual[W1][:half])
        added = usual[W1] if step == 1 else own[0][W1] + 2 * own[1][W3]
        np.testing.assert_array_equal(first[W1][half:], added[half:])
