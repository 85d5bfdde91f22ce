"""Other norms than the global one: what they are of, and in which precision. Literal evidence, no ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import dims, reference_gradient
from literal import TINY, tiny_case, trial_of, with_step

from harness.diagnosis.norms import AXES, axes_left_out, other_norms
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims


def with_gradients_in(dtype: Any, trial: Trial) -> Trial:
    """Of numbers that float32 holds and whose squares it does not."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            seen = {fqn: gradient.astype(np.float32).astype(dtype) for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=seen)
    return trial


@pytest.mark.parametrize("layout", [dims(2, 2), dims(shard=2, tp=2)])
def test_norms_of_gradients_in_float32_are_summed_in_float64(layout: ParallelDims) -> None:
    trial = trial_of(tiny_case(layout))
    narrow, wide = (other_norms(with_gradients_in(dtype, trial)) for dtype in (np.float32, np.float64))
    for (text, one), (_, other) in zip(narrow, wide, strict=True):
        for rank in trial.ranks:
            assert math.isclose(one(rank, 1), other(rank, 1), rel_tol=1e-12), text


KINDS = ("norm weights", "matrices", "embedding and output")
OF_ENTRIES = (
    "the largest absolute entry (infinity norm)",
    "the sum of all absolute entries (norm type 1)",
)
OF_PARAMETERS = (
    "the sum of the norms of all parameters",
    *(text for kind in KINDS for text in (f"the norm of {kind} only", f"a norm without {kind}")),
    "the square of the global norm",
)


@pytest.mark.parametrize(
    ("layout", "texts"),
    [
        (dims(), ()),
        (dims(2), ("the norm of its own gradients", "a norm that counts every replica along dp_replicate")),
        (dims(shard=2), ("the norm of its own shards (not summed over dp_shard)",)),
        (
            dims(2, 2),
            (
                "the norm of its own shards (not summed over dp_shard)",
                "a norm that counts every replica along dp_replicate",
            ),
        ),
        (
            dims(shard=2, tp=2),
            (
                "a norm not summed over dp_shard",
                "a norm not summed over tp",
                "the norm of its own shards (not summed over dp_shard and tp)",
                "a norm that counts every replica along tp",
            ),
        ),
    ],
)
def test_which_norms_there_are_follows_from_the_layout(layout: ParallelDims, texts: tuple[str, ...]) -> None:
    trial = trial_of(tiny_case(layout))
    assert [text for text, _ in other_norms(trial)] == [*texts, *OF_ENTRIES, *OF_PARAMETERS]


def test_axes_are_left_out_alone_and_together() -> None:
    def left_out(**degrees: int) -> list[object]:
        return list(axes_left_out(trial_of(tiny_case(dims(**degrees))), AXES[1:]))

    assert left_out(replicate=2) == left_out() == []
    assert left_out(replicate=2, shard=2) == [(("dp_shard",), ("dp_replicate",))]
    assert left_out(shard=2, tp=2) == [(("dp_shard",), ("tp",)), (("tp",), ("dp_shard",)), (("dp_shard", "tp"), ())]


def length(*gradients: np.ndarray) -> float:
    return math.sqrt(math.fsum(float(entry) ** 2 for gradient in gradients for entry in gradient.ravel()))


def test_norms_are_of_the_gradients_that_their_words_say() -> None:
    trial = trial_of(tiny_case(dims(shard=2, tp=2)))
    of = {fqn: reference_gradient(trial, fqn) for fqn in trial.plan.shapes}
    ends = {"tok_embeddings.weight", "output.weight"}
    norms = {fqn for fqn in of if "norm" in fqn}
    entries = [abs(float(entry)) for gradient in of.values() for entry in gradient.ravel()]
    wanted = {
        "a norm that counts every replica along tp": length(*of.values(), *(of[fqn] for fqn in norms)),
        OF_ENTRIES[0]: max(entries),
        OF_ENTRIES[1]: math.fsum(entries),
        OF_PARAMETERS[0]: math.fsum(length(gradient) for gradient in of.values()),
        "the norm of norm weights only": length(*(of[fqn] for fqn in norms)),
        "a norm without norm weights": length(*(of[fqn] for fqn in of if fqn not in norms)),
        "the norm of matrices only": length(*(of[fqn] for fqn in of if fqn not in norms)),
        "the norm of embedding and output only": length(*(of[fqn] for fqn in ends)),
        "a norm without embedding and output": length(*(of[fqn] for fqn in of if fqn not in ends)),
        "the square of the global norm": length(*of.values()) ** 2,
    }
    found = dict(other_norms(trial))
    for text, value in wanted.items():
        assert [found[text](rank, 1) for rank in trial.ranks] == pytest.approx([value] * 4, rel=1e-12), text


def test_a_rank_whose_gradients_are_its_own_has_their_norm() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    seen = trial.ranks[1].steps[0].gradients
    trial = with_step(trial, 1, 1, gradients={fqn: 3 * gradient for fqn, gradient in seen.items()})
    own = dict(other_norms(trial))["the norm of its own gradients"]
    whole = length(*seen.values())
    assert [own(rank, 1) for rank in (0, 1)] == pytest.approx([whole, 3 * whole], rel=1e-12)


def test_the_norms_of_stages_are_added_up() -> None:
    trial = trial_of(tiny_case("ddp_2", model=replace(TINY, n_layers=2)))
    piped = replace(trial, case=tiny_case(ParallelDims(pp=2), model=replace(TINY, n_layers=2)))
    of = {fqn: reference_gradient(trial, fqn) for fqn in trial.plan.shapes}
    first = {fqn for fqn in of if fqn.startswith(("tok_embeddings", "layers.0."))}
    wanted = length(*(of[f] for f in first)) + length(*(of[f] for f in of if f not in first))
    text = "the sum of the norms of all stages"
    assert dict(other_norms(piped))[text](0, 1) == pytest.approx(wanted, rel=1e-12)
    assert text not in dict(other_norms(trial))
