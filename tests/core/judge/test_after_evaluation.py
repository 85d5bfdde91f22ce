"""What a step may move otherwise after a pass that trains nothing: the bytes of one unit, and of no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from literal import judged, tiny_case, trial_of, with_rank

from harness.core.case.dims import ParallelDims
from harness.core.checks.reshard import left_by_evaluation
from harness.core.evidence.step import AfterEvaluation
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.reference.config import TrainingConfig

LAST, EMBEDDING = 8 * (4 + 8 * 4), 8 * 8 * 4
UNEVEN = ParallelDims(dp_shard=8)  # of a norm's 4 numbers each rank gathers 8


def evaluated(trial: Trial, held: dict[str, int]) -> Trial:
    """On rank 0, after step 1."""
    return with_rank(trial, 0, after_evaluation=(AfterEvaluation(1, held, sum(held.values()), tuple(held)),))


def moving(trial: Trial, phase: str, more: int) -> Trial:
    """So many bytes more are gathered on rank 0 in step 2."""
    collectives = list(trial.ranks[0].collectives)
    at = next(i for i, c in enumerate(collectives) if (c.step, c.op, c.phase) == (2, "all_gather", phase))
    collectives[at] = replace(collectives[at], bytes=collectives[at].bytes + more)
    return with_rank(trial, 0, collectives=tuple(collectives))


def verdicts(trial: Trial) -> set[Verdict]:
    return {judged(check, trial).verdict for check in ("traffic", "reshard")}


@pytest.mark.parametrize(
    ("more", "right"), [(0, True), (LAST, True), (EMBEDDING, False), (8, False), (2 * LAST, False)]
)
def test_backward_gathers_the_unit_that_ended_evaluation_once_more_and_no_other(more: int, right: bool) -> None:
    trial = moving(evaluated(trial_of(tiny_case("fsdp_2")), {}), "backward", more)
    assert verdicts(trial) == {Verdict.PASS if right else Verdict.FAIL}


def test_without_evaluation_nothing_is_gathered_once_more() -> None:
    assert verdicts(moving(trial_of(tiny_case("fsdp_2")), "backward", LAST)) == {Verdict.FAIL}


def test_the_roots_unit_is_freed_too_late_to_be_gathered_once_more() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    structure = trial.ranks[0].structure
    last = next(module for module in structure if "output.weight" in module)
    structure = {"" if module == last else module: wrapper for module, wrapper in structure.items()}
    trial = with_rank(trial, 0, structure=structure)
    assert verdicts(moving(evaluated(trial, {}), "backward", LAST)) == {Verdict.FAIL}


@pytest.mark.parametrize(("dims", "padded"), [(ParallelDims(dp_shard=2), LAST), (UNEVEN, 8 * (8 + 8 * 4))])
def test_what_evaluation_leaves_is_gathered_no_more_with_its_padding(dims: ParallelDims, padded: int) -> None:
    left = {"norm.weight": 8 * 4, "output.weight": EMBEDDING}
    for more, verdict in ((-padded, Verdict.PASS), (8 - padded, Verdict.FAIL), (-8, Verdict.FAIL)):
        trial = moving(evaluated(trial_of(tiny_case(dims)), left), "forward", more)
        assert judged("traffic", trial).verdict is verdict, more


def test_what_evaluation_leaves_over_some_ranks_is_gathered_over_these() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=4), reshard_after_forward=2))
    left = {"norm.weight": 8 * 4 // 2, "output.weight": EMBEDDING // 2}
    trial = moving(evaluated(trial, left), "forward", -LAST)
    assert judged("traffic", trial).verdict is Verdict.FAIL
    call = next(c for c in trial.ranks[0].collectives if (c.step, c.op, c.phase) == (2, "all_gather", "forward"))
    over = replace(call, ranks=(0, 1), bytes=LAST)
    trial = with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, over))
    assert judged("traffic", trial).verdict is Verdict.PASS


def test_what_is_gathered_in_a_narrower_type_is_as_large_as_a_slice_and_gathered_all_the_same() -> None:
    trial = trial_of(tiny_case("fsdp_2", training=TrainingConfig(dtype="float32", compute_dtype="bfloat16")))
    left = {"norm.weight": 2 * 4, "output.weight": 2 * 8 * 4}
    assert judged("traffic", moving(evaluated(trial, left), "forward", -LAST // 4)).verdict is Verdict.PASS
    found = left_by_evaluation(evaluated(trial, left | {"tok_embeddings.weight": EMBEDDING // 4}), 0)
    assert found == [(1, "tok_embeddings.weight", EMBEDDING // 4)]


def test_the_roots_vector_that_fsdp1_leaves_is_gathered_no_more_with_its_padding() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=3), wrapper="fsdp1"))
    root = trial.plan.flat[0]
    left = {fqn: trial.plan.after_forward[0][fqn].bytes for fqn in root.starts}
    padded = 8 * 3 * 23  # 68 numbers
    for more, verdict in ((-padded, Verdict.PASS), (-8 * 68, Verdict.FAIL)):
        assert judged("traffic", moving(evaluated(trial, left), "forward", more)).verdict is verdict
