"""The check `memory` between steps: whole parameters, optimizer state and copies that a rank retains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked import findings, like
from literal import (
    SGD,
    UNEVEN,
    judged,
    tiny_case,
    trial_of,
    with_rank,
    with_step,
    without_rank,
)

from harness.core.case.dims import ParallelDims
from harness.core.evidence.records import Exit, HeldTensor, Wrapper
from harness.core.judge.finding import Limit
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial


def test_a_rank_that_keeps_whole_parameters_after_the_last_step_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    memory = trial.ranks[1].steps[2].memory
    assert findings("memory", with_step(trial, 1, 3, memory=memory | {"parameters": 1888})) == (
        like(1, 944, 1888, step=3, unit="bytes", quantity="parameters"),
    )


def test_optimizer_state_in_half_the_precision_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    memory = trial.ranks[1].steps[0].memory
    assert findings("memory", with_step(trial, 1, 1, memory=memory | {"optimizer_state": 944})) == (
        like(1, 1888, 944, step=1, unit="bytes", quantity="optimizer_state"),
    )


def test_sgd_that_keeps_state_is_named_and_freed_gradients_are_not() -> None:
    trial = trial_of(tiny_case("single", SGD))
    memory = {"parameters": 1888, "gradients": 0, "optimizer_state": 1888}
    assert findings("memory", with_step(trial, 0, 1, memory=memory)) == (
        like(0, 0, 1888, step=1, unit="bytes", quantity="optimizer_state"),
    )


def test_the_padding_of_uneven_chunks_is_allowed_and_no_more() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=UNEVEN))
    least, most = trial.plan.parameter_bytes[1]
    # rank 1 holds 3 of 7 rows and 2 of 5, padded to 4 and 3: one row of 4 more in tok_embeddings, output, w1, w3
    assert (least, most) == (704, 704 + 4 * 4 * 8)
    memory = {"parameters": most, "gradients": most, "optimizer_state": 2 * most}
    assert judged("memory", with_step(trial, 1, 1, memory=memory)).verdict == Verdict.PASS
    assert findings("memory", with_step(trial, 1, 1, memory=memory | {"parameters": most + 8})) == (
        like(1, Limit(least=704, most=832), 840, step=1, unit="bytes", quantity="parameters"),
    )


@pytest.mark.parametrize("seen", [{}, {"gradients": 472}])
def test_memory_that_nobody_looked_at_is_neither_right_nor_zero(seen: dict[str, int]) -> None:
    result = judged("memory", with_step(trial_of(tiny_case("fsdp_2")), 1, 2, memory=seen))
    assert (result.verdict, result.findings) == (Verdict.UNKNOWN, ())
    assert "rank 1" in result.note and "step 2" in result.note


def test_a_rank_that_could_not_save_its_evidence_is_no_mistake_of_the_trainer() -> None:
    trial = without_rank(trial_of(tiny_case("fsdp_2")), 1)
    full = "EvidenceError: rank_01.npz: cannot be written: No space left on device"
    exits = (Exit(0, "ok"), Exit(1, "raised", code=1, blamed=True, error=full))
    result = judged("completed", replace(trial, run=replace(trial.run, exits=exits)))
    assert result == Result("completed", Verdict.UNKNOWN, 2, note=f"rank 1 could not leave its evidence: {full}")


def keeping(trial: Trial, rank: int, *held: HeldTensor) -> Trial:
    return with_rank(trial, rank, held=held)


def test_a_copy_of_weights_kept_anywhere_is_found() -> None:
    copies = (HeldTensor((8, 4), "float64", 256), HeldTensor((64,), "float32", 256))
    trial = keeping(trial_of(tiny_case("fsdp_2")), 1, *copies)
    most = trial.plan.spare_bytes[1]
    assert most == 2 * 4 * 2 * 8  # cosine and sine of 4 positions, for the 2 entries of a head
    expected = like(
        1,
        Limit(most=128),
        512,
        unit="bytes",
        quantity="unaccounted tensors after the last step",
        note="2 tensors: float64 [8, 4], float32 [64]",
    )
    assert findings("memory", trial) == (expected,)


def test_tables_of_positions_single_numbers_masks_and_activations_are_no_copies() -> None:
    table, number = HeldTensor((16,), "float64", 128), HeldTensor((1,), "float64", 8)
    mask, activation = HeldTensor((32, 32), "float64", 8192), HeldTensor((8, 4, 4), "float64", 1024)
    trial = keeping(trial_of(tiny_case("fsdp_2")), 0, activation, mask, table, number, number)
    assert judged("memory", trial).verdict == Verdict.PASS


def test_what_stages_hand_on_is_no_copy_though_it_has_a_parameters_shape_where_samples_lie_end_to_end() -> None:
    """Two samples of four tokens: [8, 4], as tok_embeddings.weight."""
    trial = keeping(trial_of(tiny_case("single")), 0, HeldTensor((8, 4), "float64", 256))
    assert judged("memory", trial).verdict == Verdict.FAIL
    assert judged("memory", replace(trial, case=tiny_case(ParallelDims(pp=2)))).verdict == Verdict.PASS


@pytest.mark.parametrize(("layout", "verdict"), [("ddp_2", Verdict.PASS), ("hsdp_2x2", Verdict.FAIL)])
def test_only_ddp_has_buckets_of_all_its_gradients(layout: str, verdict: Verdict) -> None:
    trial = trial_of(tiny_case(layout))
    held = sum(tensor.value.nbytes for tensor in trial.ranks[0].parameters)
    assert judged("memory", keeping(trial, 0, HeldTensor((held // 8,), "float64", held))).verdict == verdict
    twice = HeldTensor((held // 4,), "float64", 2 * held)
    assert judged("memory", keeping(trial, 0, twice)).verdict == Verdict.FAIL


def test_ddp_around_a_single_rank_has_its_buckets_too_and_is_no_feature_that_nobody_requested() -> None:
    plain = trial_of(tiny_case("single"))
    trial = with_rank(plain, 0, structure={"": Wrapper("ddp", replicate_ranks=(0,))})
    held = sum(tensor.value.nbytes for tensor in trial.ranks[0].parameters)
    bucket, twice = (HeldTensor((times * held // 8,), "float64", times * held) for times in (1, 2))
    assert judged("memory", keeping(trial, 0, bucket)).verdict == Verdict.PASS
    assert judged("memory", keeping(trial, 0, twice)).verdict == Verdict.FAIL
    assert judged("memory", keeping(plain, 0, bucket)).verdict == Verdict.FAIL
    assert judged("features", trial).verdict == judged("placements", trial).verdict == Verdict.PASS


def test_without_a_look_at_what_is_kept_memory_is_unknown() -> None:
    result = judged("memory", with_rank(trial_of(tiny_case("ddp_2")), 1, held=None))
    told = "what rank 1 keeps besides parameters, gradients and optimizer state was not observed"
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, told)
