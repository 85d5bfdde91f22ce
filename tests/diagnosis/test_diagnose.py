"""What a person reads first when a law is broken: the cause in one line, then its evidence. Literal evidence, no ranks.

Whole texts are asserted; after a deliberate change of wording, EXPECTTEST_ACCEPT=1 pytest tests/diagnosis/test_diagnose.py
rewrites them, and git shows the difference.
"""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from expecttest import assert_expected_inline
from literal import (
    ADAMW,
    SGD,
    TINY,
    UNEVEN,
    cause_of,
    judged,
    microbatch_of,
    sum_of_samples,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_parameter,
    with_rank,
    with_step,
    with_step_1_gradients,
    with_updates_that_follow,
    with_value,
    without_rank,
    without_step,
)
from noisy import with_noise

from harness.checks import judge
from harness.diagnosis import RULES, diagnose
from harness.diagnosis.gradients import wrong_gradients
from harness.evidence.records import Exit
from harness.judge import attribution
from harness.judge.received_samples import received_samples
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.plan.slices import slices_of_rank
from harness.spec.dims import ParallelDims

WIDE = replace(TINY, dim=16, vocab_size=16, ffn_dim=16)
EMBEDDING, NORM = "tok_embeddings.weight", "norm.weight"


def dims(replicate: int = 1, shard: int = 1, tp: int = 1) -> ParallelDims:
    return ParallelDims(dp_replicate=replicate, dp_shard=shard, tp=tp)


def told(trial: Trial) -> str:
    """The first line, then the evidence."""
    found = diagnose(trial, judge(trial))
    assert cause_of(found) and found is not None
    return "\n".join([found.cause, *(f"  {label}: {text}" for label, text in found.evidence)])


def first_line(trial: Trial) -> str:
    return told(trial).splitlines()[0]


def expect(trial: Trial, text: str) -> None:
    assert_expected_inline(told(trial), text, skip=1)


def expect_first(trial: Trial, text: str) -> None:
    assert_expected_inline(first_line(trial), text, skip=1)


def test_a_correct_run_has_no_diagnosis() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    assert diagnose(trial, judge(trial)) is None


# ---- processes


def with_exits(trial: Trial, *exits: Exit) -> Trial:
    """These ranks left no evidence."""
    ended = {exit.rank: exit for exit in trial.run.exits} | {exit.rank: exit for exit in exits}
    for exit in exits:
        trial = without_rank(trial, exit.rank)
    return replace(trial, run=replace(trial.run, exits=tuple(ended[rank] for rank in sorted(ended))))


def waited(*ranks: int) -> list[Exit]:
    return [Exit(rank, "raised", 1, error="RuntimeError: Connection closed by peer") for rank in ranks]


def fsdp_4() -> Trial:
    return trial_of(tiny_case(dims(shard=4)))


def test_a_rank_that_died() -> None:
    last = "all_gather #7 of group [0-3] (step 2, forward, 1.9 kB)"
    dead = Exit(
        1,
        "signal",
        signal="SIGKILL",
        error="died by SIGKILL, not sent by the harness.",
        blamed=True,
        last_collective=last,
    )
    expect(
        with_exits(fsdp_4(), dead, *waited(0, 2, 3)),
        """\
rank 1 died by SIGKILL: not sent by the harness
  rank 1: last collective all_gather #7 of group [0-3] (step 2, forward, 1.9 kB)
  not to blame: ranks [0,2,3] only waited""",
    )


def test_a_rank_that_hung() -> None:
    why = "no answer for 30 s; ranks 0, 2 waited for it in all_reduce #3"
    hung = Exit(3, "killed", signal="SIGKILL", error=why, blamed=True, stack="data.py:12 in read\ntrain.py:7 in step\n")
    expect(
        with_exits(fsdp_4(), hung, *waited(0, 1, 2)),
        """\
rank 3 hung: no answer for 30 s; ranks 0, 2 waited for it in all_reduce #3
  stack: data.py:12 in read
  : train.py:7 in step
  not to blame: ranks [0-2] only waited""",
    )


def test_a_rank_that_raised() -> None:
    raised = Exit(0, "raised", 1, error="ValueError: no such token: 9", blamed=True, stack="train.py:7 in step\n")
    expect(
        with_exits(fsdp_4(), raised, *waited(1, 2, 3)),
        """\
rank 0 raised: ValueError: no such token: 9
  stack: train.py:7 in step
  not to blame: ranks [1-3] only waited""",
    )


def test_a_rank_that_left_early() -> None:
    left = Exit(2, "ok", 0, error="exited while others still waited for a collective", blamed=True)
    expect(
        with_exits(fsdp_4(), left, *waited(0, 1, 3)),
        """\
rank 2 left early: exited while others still waited for a collective
  not to blame: ranks [0,1,3] only waited""",
    )


def test_several_ranks_that_failed_alike_share_a_clause_and_others_have_their_own() -> None:
    blamed = [Exit(rank, "raised", 1, error="MemoryError: 8 GB", blamed=True) for rank in (0, 1)]
    blamed.append(Exit(3, "signal", signal="SIGSEGV", error="died by SIGSEGV, not sent by the harness", blamed=True))
    expect(
        with_exits(fsdp_4(), *blamed, *waited(2)),
        """\
ranks [0,1] raised: MemoryError: 8 GB; rank 3 died by SIGSEGV: not sent by the harness
  not to blame: rank 2 only waited""",
    )


def test_ranks_that_were_only_slow() -> None:
    slow = "killed by the harness at the time limit of 9 s, still at work: --timeout gives it more"
    expect(
        with_exits(fsdp_4(), *(Exit(rank, "killed", signal="SIGKILL", error=slow) for rank in range(4))),
        """\
too slow: ranks [0-3] killed by the harness at the time limit of 9 s, still at work: --timeout gives it more""",
    )


def test_ranks_of_which_none_can_be_blamed() -> None:
    killed = [Exit(rank, "killed", signal="SIGKILL", error="no answer for 30 s") for rank in range(4)]
    expect(
        with_exits(fsdp_4(), *killed),
        """\
ranks [0-3] did not finish, and nothing tells which of them is the cause
  rank 0: killed: no answer for 30 s
  rank 1: killed: no answer for 30 s
  rank 2: killed: no answer for 30 s
  rank 3: killed: no answer for 30 s""",
    )


def test_a_rank_that_left_nothing() -> None:
    expect(without_rank(fsdp_4(), 1), """rank 1 left no evidence: its process ended with code 0 and wrote no file""")


def test_a_rank_without_steps() -> None:
    expect(with_rank(fsdp_4(), 1, steps=()), """rank 1 trained no step, requested 3 steps""")


def test_a_rank_that_stopped_a_step_early() -> None:
    expect_first(without_step(fsdp_4(), 1, 3), """rank 1 trained steps 1, 2 only, requested 3 steps""")


def test_fewer_ranks_than_asked() -> None:
    expect_first(
        trial_of(tiny_case("hsdp_2x2"), tiny_case("fsdp_2")),
        """2 ranks were launched, requested 4 (dp_replicate 2 x dp_shard 2)""",
    )


def test_ranks_that_each_trained_alone() -> None:
    trial = with_every_rank(fsdp_4(), lambda t, rank: with_rank(t, rank, rank=0, world_size=1))
    expect_first(trial, """ranks did not find each other: ranks [0-3] ran as rank 0 of 1, requested 4 ranks""")


def test_a_parameter_that_a_rank_does_not_hold() -> None:
    trial = fsdp_4()
    kept = tuple(tensor for tensor in trial.ranks[1].parameters if tensor.fqn != EMBEDDING)
    expect_first(
        with_rank(trial, 1, parameters=kept), """rank 1 does not hold tok_embeddings.weight, requested 12 parameters"""
    )


def test_a_parameter_that_is_frozen() -> None:
    trial = fsdp_4()
    for rank in trial.ranks:
        for step in (1, 2, 3):
            rest = {f: g for f, g in trial.ranks[rank].steps[step - 1].gradients.items() if f != NORM}
            trial = with_step(trial, rank, step, gradients=rest)
    expect_first(trial, """rank 0 has no gradient of norm.weight in step 1: frozen, unused or not in the optimizer""")


# ---- layout


def ran_as(asked: ParallelDims, ran: ParallelDims) -> Trial:
    training = replace(ADAMW, global_batch=16)
    return trial_of(tiny_case(asked, training, model=WIDE), tiny_case(ran, training, model=WIDE))


def cut_as(asked: ParallelDims, ran: ParallelDims, rank_of: list[int]) -> Trial:
    """Rank r holds what rank_of[r] would hold under `ran`; tensors move as planned."""
    trial = trial_of(tiny_case(asked, model=WIDE))
    for rank, other in enumerate(rank_of):
        part = {f: cut(s) for f, s in slices_of_rank(ran, other, trial.plan.shapes).items()}
        tensors = [(t, trial.reference.weights[t.fqn][part[t.fqn]]) for t in trial.ranks[rank].parameters]
        tensors = tuple(replace(t, value=value, local_shape=value.shape) for t, value in tensors)
        trial = with_rank(trial, rank, parameters=tensors)
        for step in trial.reference.steps:
            gradients = {f: full[part[f]] for f, full in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=gradients)
    return with_updates_that_follow(trial)


def cut(part) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in part)


def test_hsdp_that_ran_as_fsdp() -> None:
    expect(
        ran_as(dims(2, 2), dims(1, 4)),
        """\
HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times
  shard groups: expected [0,1] [2,3]   observed [0-3]
  replicate groups: expected [0,2] [1,3]   observed none in use (the groups exist, no collective ran over them)
  contents: 12 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/2 of dim 0 [0:8], observed 1/4 of dim 0 [0:4]
  traffic: parameters: all_gather over dp_shard in forward: expected 18.82 kB per step, observed 0 B
  traffic: parameters: all_gather over dp_shard in backward: expected 16.64 kB per step, observed 0 B
  traffic: gradients: reduce_scatter over dp_shard in backward: expected 18.82 kB per step, observed 0 B
  traffic: gradients: all_reduce over dp_replicate in backward: expected 9.408 kB per step, observed 0 B
  loss, gradients: equal to the reference within 2.2e-16: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_hsdp_that_ran_as_fsdp_over_16_ranks() -> None:
    expect(
        ran_as(dims(2, 8), dims(1, 16)),
        """\
HSDP ran as FSDP: parameters are sharded over 16 ranks, requested 8, replicated 2 times
  shard groups: expected [0-7] [8-15]   observed [0-15]
  replicate groups: expected [0,8] [1,9] .. [7,15]   observed none in use (the groups exist, no collective ran over them)
  contents: 12 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/8 of dim 0 [0:2], observed 1/16 of dim 0 [0:1]
  traffic: parameters: all_gather over dp_shard in forward: expected 18.82 kB per step, observed 0 B
  traffic: parameters: all_gather over dp_shard in backward: expected 16.64 kB per step, observed 0 B
  traffic: gradients: reduce_scatter over dp_shard in backward: expected 18.82 kB per step, observed 0 B
  traffic: gradients: all_reduce over dp_replicate in backward: expected 2.352 kB per step, observed 0 B
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_hsdp_that_ran_as_ddp() -> None:
    expect_first(
        ran_as(dims(2, 2), dims(4, 1)),
        """HSDP ran as DDP: every dp rank holds whole parameters, requested 2, replicated 2 times""",
    )


def test_fsdp_that_ran_as_ddp() -> None:
    expect(
        ran_as(dims(1, 2), dims(2, 1)),
        """\
FSDP ran as DDP: every dp rank holds whole parameters, requested 2
  shard groups: expected [0,1]   observed none in use (the groups exist, no collective ran over them)
  contents: 12 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/2 of dim 0 [0:8], observed all
  traffic: parameters: all_gather over dp_shard in forward: expected 18.82 kB per step, observed 0 B
  traffic: parameters: all_gather over dp_shard in backward: expected 16.64 kB per step, observed 0 B
  traffic: gradients: reduce_scatter over dp_shard in backward: expected 18.82 kB per step, observed 0 B
  loss, gradients: equal to the reference within 2.2e-16: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_ddp_that_ran_as_fsdp() -> None:
    expect_first(
        ran_as(dims(4), dims(1, 4)),
        """DDP ran as FSDP: parameters are sharded over 4 ranks, requested whole parameters on each of 4 ranks""",
    )


def test_fsdp_that_ran_as_hsdp() -> None:
    expect_first(
        ran_as(dims(1, 4), dims(2, 2)),
        """FSDP ran as HSDP: parameters are sharded over 2 ranks and replicated 2 times, requested 4""",
    )


def test_degrees_of_replicate_and_shard_exchanged() -> None:
    expect_first(
        ran_as(dims(2, 4), dims(4, 2)),
        """dp_replicate and dp_shard exchanged: parameters are sharded over 2 ranks and replicated 4 times, requested 4, replicated 2 times""",
    )


def test_parameters_sharded_along_the_axis_that_should_replicate() -> None:
    expect_first(
        cut_as(dims(2, 4), dims(4, 2), [0, 0, 0, 0, 1, 1, 1, 1]),
        """dp_replicate and dp_shard exchanged: parameters are sharded over 2 ranks and replicated 4 times, requested 4, replicated 2 times""",
    )


def test_fsdp_over_tp_too() -> None:
    expect(
        cut_as(dims(1, 2, 2), dims(1, 4), [0, 1, 2, 3]),
        """\
TP not applied, FSDP over dp_shard x tp in its place: parameters are sharded over 4 ranks, requested 2 and tp 2
  shard groups: expected [0,2] [1,3]   observed none in use (the groups exist, no collective ran over them)
  tp groups: expected [0,1] [2,3]   observed [0,1] [2,3]
  contents: 12 of 12 parameters; layers.0.attention.wo.weight on rank 0: expected 1/2 of dim 0 [0:8], 1/2 of dim 1 [0:8], observed 1/4 of dim 0 [0:4]
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_tp_not_applied() -> None:
    expect_first(
        cut_as(dims(tp=2), dims(), [0, 0]),
        """TP not applied: every rank of a tp group holds whole weights, requested tp 2""",
    )


def test_tp_not_applied_under_fsdp() -> None:
    expect(
        cut_as(dims(1, 2, 2), dims(1, 2), [0, 0, 1, 1]),
        """\
TP not applied: every rank of a tp group holds whole weights, requested tp 2
  shard groups: expected [0,2] [1,3]   observed [0,2] [1,3]
  tp groups: expected [0,1] [2,3]   observed [0,1] [2,3]
  contents: 9 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/4 of dim 0 [0:4], observed 1/2 of dim 0 [0:8]
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_neither_tp_nor_fsdp_applied() -> None:
    expect_first(
        cut_as(dims(1, 2, 2), dims(), [0, 0, 0, 0]),
        """TP not applied: every rank of a tp group holds whole weights, requested tp 2; FSDP ran as DDP: every dp rank holds whole parameters, requested 2""",
    )


def test_fsdp_left_out_under_tp() -> None:
    expect_first(
        cut_as(dims(1, 2, 2), dims(tp=2), [0, 1, 0, 1]),
        """FSDP ran as DDP: every dp rank holds whole parameters, requested 2""",
    )


def place_in(order: tuple[str, ...], asked: ParallelDims) -> list[int]:
    """Which rank of the plan stands where each rank stands when axes are laid out in another order."""
    axes = ("dp_replicate", "dp_shard", "tp")
    degrees = [getattr(asked, axis) for axis in order]
    found = []
    for place in itertools.product(*map(range, degrees)):
        at = dict(zip(order, place, strict=True))
        found.append((at["dp_replicate"] * asked.dp_shard + at["dp_shard"]) * asked.tp + at["tp"])
    assert set(order) == set(axes)
    return found


@pytest.mark.parametrize("asked", [dims(2, 2, 2), dims(2, 1, 4), dims(1, 4, 2), dims(2, 4, 1)], ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(("dp_replicate", "dp_shard", "tp")))[1:], ids="-".join)
def test_axes_in_the_wrong_order(order: tuple[str, ...], asked: ParallelDims) -> None:
    shown = [axis for axis in order if getattr(asked, axis) > 1]
    wanted = [axis for axis in ("dp_replicate", "dp_shard", "tp") if axis in shown]
    if shown == wanted or "dp_shard" not in shown and "tp" not in shown:
        return
    trial = cut_as(asked, asked, place_in(order, asked))
    assert first_line(trial) == (
        f"axes in the wrong order: ranks are laid out as ({', '.join(shown)}), requested ({', '.join(wanted)})"
    )


def test_a_module_that_fsdp_left_out() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in (0, 1):
        trial = with_parameter(trial, rank, NORM, value=trial.reference.weights[NORM])
    expect_first(
        trial, """FSDP is not applied to 1 of 12 parameters (norm.weight): every rank of a group holds them whole"""
    )


def test_a_rank_that_holds_its_neighbours_slice() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=trial.ranks[0].parameters[0].value)
    expect_first(
        trial,
        """ranks along dp_shard start from the same shard: rank 1 holds the values of rank 0 in 1 of 12 parameters (tok_embeddings.weight)""",
    )


def test_uneven_shards_of_hsdp_that_ran_as_fsdp() -> None:
    training = replace(ADAMW, global_batch=16)
    asked, ran = (tiny_case(d, training, model=UNEVEN) for d in (dims(2, 8), dims(1, 16)))
    expect_first(
        trial_of(asked, ran),
        """HSDP ran as FSDP: parameters are sharded over 16 ranks, requested 8, replicated 2 times""",
    )


# ---- data


def test_tp_shards_that_are_equal() -> None:
    trial = trial_of(tiny_case("tp_2"))
    for fqn in trial.plan.shapes:
        value = next(t.value for t in trial.ranks[0].parameters if t.fqn == fqn)
        trial = with_parameter(trial, 1, fqn, value=value)
    expect_first(trial, """ranks along tp start from the same shard: rank 1 holds the values of rank 0""")


def with_weights(trial: Trial, change) -> Trial:
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            trial = with_parameter(trial, rank, tensor.fqn, value=change(tensor.value))
    return trial


def test_weights_that_are_not_the_seeds() -> None:
    expect(
        with_weights(fsdp_4(), lambda value: value + 1),
        """\
training does not start from the seed weights in every parameter
  weights: rank 0, tok_embeddings.weight: off by 1, the largest seed weight is 1.3
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_weights_that_each_run_draws_anew() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_weights(trial, lambda value: value + 2)
    trial = with_weights(trial, lambda value: value + 1)
    same = first_line(replace(trial, repeat=trial.run))
    assert same == "training does not start from the seed weights in every parameter"
    expect_first(
        replace(trial, repeat=other.run),
        """training does not start from the seed weights in every parameter: each run draws others, as without a seed""",
    )


def test_weights_that_were_rounded() -> None:
    expect(
        with_weights(fsdp_4(), lambda value: value.astype(np.float32).astype(np.float64)),
        """\
training does not start from the seed weights in every parameter
  weights: rank 0, tok_embeddings.weight: the seed weights rounded to float32
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_one_weight_of_one_rank_that_is_nan() -> None:
    trial = fsdp_4()
    expect(
        with_parameter(trial, 2, NORM, value=np.full(1, np.nan)),
        """\
training does not start from the seed weights in 1 of 12 parameters (norm.weight) on rank 2
  weights: rank 2, norm.weight: not finite
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def received(trial: Trial, rank: int, step: int, ids: list[int]) -> Trial:
    return with_step(trial, rank, step, microbatches=(microbatch_of(trial.reference, ids),))


def test_ranks_fed_the_same_samples_although_loss_and_gradients_are_wrong_too() -> None:
    trial = with_scaled_samples(fsdp_4(), {id_: 4.0 if id_ < 2 else 0.0 for id_ in range(8)})
    for rank in range(4):
        trial = received(trial, rank, 1, [0, 1])
    expect(
        trial,
        """\
ranks [0-3] received the same samples, dp ranks must partition the global batch
  samples: step 1: 2 received more than once (0, 1); 6 received by nobody (2, 3, 4, 5, ...); ranks [0, 1, 2, 3] received the same""",
    )


def test_two_of_four_ranks_fed_the_same_samples() -> None:
    expect_first(
        received(fsdp_4(), 3, 1, [4, 5]),
        """ranks [2,3] received the same samples, dp ranks must partition the global batch""",
    )


def test_overlapping_samples() -> None:
    expect(
        received(fsdp_4(), 3, 1, [5, 6]),
        """\
dp ranks draw overlapping samples: some are received twice and some by nobody
  samples: step 1: 1 received more than once (5); 1 received by nobody (7)
  gradients: equal to the reference exactly""",
    )


def test_samples_of_another_step() -> None:
    trial = fsdp_4()
    for rank in range(4):
        trial = received(trial, rank, 2, [2 * rank, 2 * rank + 1])
    expect_first(trial, """step 2 receives samples of step 1: the sampler is at another place of the data""")


def test_samples_fed_to_nobody() -> None:
    expect_first(received(fsdp_4(), 3, 1, [6]), """samples received by nobody: 1 of 8""")


def test_tokens_of_no_sample() -> None:
    trial = fsdp_4()
    batch = trial.ranks[2].steps[0].microbatches[0]
    trial = with_step(trial, 2, 1, microbatches=(replace(batch, tokens=batch.tokens + 50),))
    expect_first(trial, """received tokens of no sample of the recipe's 3 steps on rank 2""")


def test_ranks_that_each_shuffle_by_themselves() -> None:
    trial = fsdp_4()
    known, strange = trial.ranks[1].steps[0].microbatches[0], trial.ranks[2].steps[0].microbatches[0]
    trial = with_step(trial, 3, 2, microbatches=(known,))
    trial = with_step(trial, 3, 1, microbatches=(replace(strange, tokens=strange.tokens + 50),))
    expect_first(
        trial,
        """dp ranks draw overlapping samples, each by an order of its own: received tokens of no sample of the recipe's 3 steps on rank 3""",
    )


def test_tp_peers_fed_different_samples() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    expect_first(
        received(trial, 1, 1, [4, 5, 6, 7]), """tp peers receive different samples: rank 1 not what rank 0 receives"""
    )


def test_labels_of_another_sample() -> None:
    trial = fsdp_4()
    for rank in range(4):
        batch = trial.ranks[rank].steps[0].microbatches[0]
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, labels=batch.labels[::-1]),))
    expect_first(trial, """wrong labels: tokens are right, 14 labels of step 1 are not those of their sample""")


@pytest.mark.parametrize("masked", [True, False])
def test_a_mask_of_labels_that_is_too_wide_or_too_narrow(masked: bool) -> None:
    trial = fsdp_4()
    (batch,) = trial.ranks[2].steps[0].microbatches
    row, place = np.argwhere((batch.labels != -100) == masked)[0]
    labels = batch.labels.copy()
    labels[row, place] = -100 if masked else 3
    found = first_line(with_step(trial, 2, 1, microbatches=(replace(batch, labels=labels),)))
    how = "masked, where they should be trained on" if masked else "trained on, where they should be masked"
    told = "tokens are right, 1 labels of step 1 are not those of their sample"
    assert found == f"wrong labels on rank 2: {told}: {how}"


def test_accumulation_left_out() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            ids = trial.reference.samples[step.step - 1][4 * rank : 4 * rank + 4]
            trial = received(trial, rank, step.step, list(ids))
    expect_first(trial, """accumulation: rank 0 ran microbatches of [4] samples in step 1, requested [2, 2]""")


# ---- gradients


def scaled(layout: str | ParallelDims, factor: float, **features: int) -> Trial:
    trial = trial_of(tiny_case(layout, **features))
    return with_step_1_gradients(trial, lambda _, fqn: factor * reference_gradient(trial, fqn), later=factor)


def reference_gradient(trial: Trial, fqn: str) -> np.ndarray:
    return trial.reference.steps[0].gradients[fqn]


def with_scaled_samples(trial: Trial, weights: dict[int, float]) -> Trial:
    return with_step_1_gradients(trial, lambda _, fqn: sum_of_samples(trial, fqn, weights))


def with_own_samples(trial: Trial, ranks_of: dict[int, list[int]], dropped: tuple[str, ...]) -> Trial:
    """Each rank's gradient holds the samples of these ranks only; collectives of these ops in backward never ran."""
    ids = {rank: [i for other in others for i in samples_of(trial, other)] for rank, others in ranks_of.items()}
    weights = {rank: {i: float(i in own) for i in range(8)} for rank, own in ids.items()}
    trial = with_step_1_gradients(trial, lambda rank, fqn: sum_of_samples(trial, fqn, weights[rank]))
    return with_every_rank(trial, lambda t, rank: with_collectives(t, rank, lambda call: kept(call, dropped)))


def kept(call, dropped: tuple[str, ...]):
    return [] if call.op in dropped and call.phase == "backward" else [call]


def samples_of(trial: Trial, rank: int) -> list[int]:
    share = rank // trial.case.dims.tp
    size = 8 // trial.case.dims.dp
    return list(range(share * size, (share + 1) * size))


def test_gradient_reduction_missing_over_dp_replicate() -> None:
    heard = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    expect(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("all_reduce",)),
        """\
gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3]
  gradients: rank 0, step 1, tok_embeddings.weight: 3.24 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 2.528 times the reference's by best fit
  samples: rank 0's gradient holds those received by ranks [0,1], expected [0-3]
  samples: rank 1's gradient holds those received by ranks [0,1], expected [0-3]
  traffic: gradients: all_reduce over dp_replicate in backward: expected 944 B per step, observed 0 B
  loss: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_gradient_reduction_missing_over_dp_shard() -> None:
    heard = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    expect_first(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("reduce_scatter",)),
        """gradient reduction missing over dp_shard: no reduce_scatter ran over [0,1] [2,3]""",
    )


def test_gradient_reduction_missing_over_both_axes() -> None:
    heard = {rank: [rank] for rank in range(4)}
    trial = with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("reduce_scatter", "all_reduce"))
    expect_first(
        trial,
        """gradient reduction missing over dp_shard and dp_replicate: no reduce_scatter ran over [0,1] [2,3], no all_reduce ran over [0,2] [1,3]""",
    )


def test_a_reduction_whose_result_is_dropped() -> None:
    heard = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    expect(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ()),
        """\
gradient reduction without effect over dp_replicate: rank 0's gradient holds the samples of ranks [0,1] only, though collectives ran
  gradients: rank 0, step 1, tok_embeddings.weight: 3.24 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 2.528 times the reference's by best fit
  samples: rank 0's gradient holds those received by ranks [0,1], expected [0-3]
  samples: rank 1's gradient holds those received by ranks [0,1], expected [0-3]
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_norm_gradients_not_summed_over_tp() -> None:
    trial = trial_of(tiny_case("tp_2"))

    def share(rank: int, fqn: str) -> np.ndarray:
        whole = reference_gradient(trial, fqn)
        part = np.linspace(0.2, 0.7, whole.size).reshape(whole.shape)
        return whole if "norm" not in fqn else whole * (part if rank == 0 else 1 - part)

    expect(
        with_step_1_gradients(trial, share),
        """\
gradients of norm weights are not summed over tp: 3 parameters wrong, all others right
  why: with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing
  gradients: rank 0, step 1, layers.0.attention_norm.weight: 0.4725 times the reference's by best fit
  gradients: rank 1, step 1, layers.0.attention_norm.weight: 0.5275 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_norm_gradients_averaged_over_tp() -> None:
    trial = trial_of(tiny_case("tp_2"))
    trial = with_step_1_gradients(
        trial, lambda _, fqn: reference_gradient(trial, fqn) * (0.5 if "norm" in fqn else 1.0)
    )
    expect_first(
        trial,
        """gradients are 0.5 times what they should be in 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more): divided by tp (1/2) once too often""",
    )


ALL = "divided by the number of all tokens, not of the valid ones"  # half of the literal tokens are valid


@pytest.mark.parametrize(
    ("layout", "features", "factor", "name"),
    [
        (dims(shard=4), {}, 1 / 4, "divided by dp_shard (1/4) once too often"),
        (dims(shard=4), {}, 4, "not divided by dp_shard (4)"),
        (dims(replicate=2), {}, 1 / 2, f"divided by dp_replicate (1/2) once too often, or {ALL}"),
        (dims(replicate=2), {}, 2, "not divided by dp_replicate (2)"),
        (dims(2, 4), {}, 1 / 8, "divided by dp_replicate x dp_shard or the number of samples (1/8) once too often"),
        (dims(2, 4), {}, 8, "not divided by dp_replicate x dp_shard or the number of samples (8)"),
        (dims(2, 4), {}, 4, "not divided by dp_shard (4)"),
        (dims(2, 2), {}, 2, "not divided by dp_replicate or dp_shard (2)"),
        (dims(1, 2, 2), {}, 1 / 2, f"divided by dp_shard or tp (1/2) once too often, or {ALL}"),
        (dims(tp=2), {}, 2, "not divided by tp (2)"),
        (dims(1, 4), {"accumulation": 2}, 2, "not divided by accumulation (2)"),
        (dims(1, 4), {"accumulation": 2}, 1 / 8, "divided by dp_shard x accumulation or the number of samples (1/8) once too often"),
        (dims(1, 4), {}, "valid", "not divided by the number of valid tokens ({})"),
        (dims(1, 4), {}, "1/valid", "divided by the number of valid tokens (1/{}) once too often"),
        (dims(1, 4), {}, "valid/all", ALL),
        (dims(1, 4), {}, -1, "the sign is wrong"),
        (dims(1, 4), {}, 1.7, ""),
    ],
)  # fmt: skip
def test_a_factor_is_named_by_the_number_of_the_case_that_it_is(layout, features, factor, name) -> None:
    valid = trial_of(tiny_case(layout, **features)).reference.steps[0].valid_tokens
    factor = {"valid": valid, "1/valid": 1 / valid, "valid/all": valid / 32}.get(factor, factor)
    tail = f": {name.format(valid)}" if name else ""
    trial = scaled(layout, factor, **features)
    assert first_line(trial) == f"gradients are {factor:.6g} times what they should be in every parameter{tail}"


def test_gradients_twice_too_large_show_a_number_to_check() -> None:
    expect(
        scaled("fsdp_2", 2.0),
        """\
gradients are 2 times what they should be in every parameter: not divided by dp_shard (2)
  gradients: rank 0, step 1, tok_embeddings.weight: 2 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 2 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_gradients_that_are_zero() -> None:
    expect_first(scaled("fsdp_2", 0.0), """gradients are zero in every parameter""")


def test_one_parameter_scaled_on_one_rank() -> None:
    trial = fsdp_4()
    trial = with_updates_that_follow(with_value(trial, 2, 1, "gradients", NORM, lambda g: 3 * g))
    expect_first(trial, """gradients are 3 times what they should be in 1 of 12 parameters (norm.weight) on rank 2""")


def accumulating() -> Trial:
    return trial_of(tiny_case("ddp_2", accumulation=2))


def test_the_first_microbatch_lost() -> None:
    expect(
        with_scaled_samples(accumulating(), dict.fromkeys((0, 1, 4, 5), 0.0)),
        """\
microbatches 1 of 2 do not contribute to the gradient (weights 0, 1)
  gradients: rank 0, step 1, tok_embeddings.weight: -0.2895 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: -0.2895 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_the_last_microbatch_lost() -> None:
    expect_first(
        with_scaled_samples(accumulating(), dict.fromkeys((2, 3, 6, 7), 0.0)),
        """microbatches 2 of 2 do not contribute to the gradient (weights 1, 0)""",
    )


def test_a_microbatch_counted_twice() -> None:
    expect_first(
        with_scaled_samples(accumulating(), dict.fromkeys((2, 3, 6, 7), 2.0)),
        """microbatches contribute with weights 1, 2 to the gradient, each should have 1""",
    )


def test_a_reduction_that_is_dropped_in_every_microbatch_is_not_taken_for_one_that_lacks_some() -> None:
    trial = with_own_samples(accumulating(), {0: [0], 1: [1]}, ())
    expect_first(
        trial,
        """gradient reduction without effect over dp_replicate: rank 0's gradient holds the samples of rank 0 only, though collectives ran""",
    )


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


def test_a_microbatch_lost_in_bfloat16_is_named_within_its_noise() -> None:
    trial = in_noise(with_scaled_samples(accumulating(), dict.fromkeys((0, 1, 4, 5), 0.0)))
    found = wrong_gradients(trial, {"gradients": judged("gradients", trial)})
    assert found is not None
    assert found.cause == "microbatches 1 of 2 do not contribute to the gradient (weights 0, 1)"


def test_noise_alone_is_no_unequal_count_of_samples() -> None:
    trial = in_noise(accumulating())
    assert judged("gradients", trial).verdict is Verdict.PASS
    weights = attribution.sample_weights(trial, [0, 1])
    assert weights is not None and weights.explained and weights.uniform == pytest.approx(1, abs=0.02)


def averaged(trial: Trial, pieces: list[list[int]], factor: float = 1.0) -> Trial:
    """Each piece divides its loss by its own number of valid tokens, and the pieces' means are averaged."""
    tokens = (trial.reference.labels >= 0).sum(axis=1)
    own = {i: max(1, tokens[piece].sum()) for piece in pieces for i in piece}  # without tokens: no gradient either
    weights = {i: factor * tokens[:8].sum() / len(pieces) / count for i, count in own.items()}
    return with_scaled_samples(trial, weights)


def test_loss_averaged_per_rank() -> None:
    expect_first(
        averaged(accumulating(), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        """the loss is averaged per rank: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_rank_without_accumulation() -> None:
    expect_first(
        averaged(fsdp_4(), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        """the loss is averaged per rank: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_rank_where_a_rank_has_one_sample() -> None:
    expect_first(
        averaged(trial_of(tiny_case(dims(2, 4))), [[i] for i in range(8)]),
        """the loss is averaged per rank or sample: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_microbatch_of_each_rank() -> None:
    expect_first(
        averaged(accumulating(), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        """the loss is averaged per microbatch of each rank: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_microbatch_over_all_ranks() -> None:
    expect_first(
        averaged(accumulating(), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        """the loss is averaged per microbatch: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_sample() -> None:
    expect_first(
        averaged(accumulating(), [[i] for i in range(8)]),
        """the loss is averaged per sample: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_rank_and_summed_over_them() -> None:
    expect_first(
        averaged(fsdp_4(), [[0, 1], [2, 3], [4, 5], [6, 7]], factor=4.0),
        """the loss is averaged per rank: each divides by its own number of valid tokens, and gradients are 4 times that: not divided by dp_shard (4)""",
    )


def test_samples_that_count_unequally_for_no_known_reason() -> None:
    expect_first(
        with_scaled_samples(fsdp_4(), {0: 0.0, 1: 1.5, 7: 0.5}),
        """samples count unequally in the gradient: weights 0 to 1.5, 1 of 7 do not count at all, each should have 1""",
    )


def test_gradients_that_are_nan_on_one_rank() -> None:
    trial = fsdp_4()
    expect(
        with_value(trial, 2, 1, "gradients", NORM, lambda g: g * np.nan),
        """\
gradients are NaN or infinite in step 1 in 1 of 12 parameters (norm.weight) on rank 2, the losses are finite
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_losses_and_gradients_that_are_nan() -> None:
    trial = scaled(dims(1, 4), math.nan)
    for rank in trial.ranks:
        batch = trial.ranks[rank].steps[0].microbatches[0]
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, loss_sum=math.nan),))
    expect_first(trial, """loss and gradients are NaN or infinite in step 1 in every parameter""")


def jolted(trial: Trial, size: float, *fqns: str) -> Trial:
    """Gradients off by some noise, relative to the largest entry."""
    draw = np.random.default_rng(1)

    def noisy(_: int, fqn: str) -> np.ndarray:
        full = reference_gradient(trial, fqn)
        return full + (size * np.max(np.abs(full)) * noise[fqn] if not fqns or fqn in fqns else 0.0)

    noise = {fqn: draw.uniform(-1, 1, shape) for fqn, shape in trial.plan.shapes.items()}
    return with_step_1_gradients(trial, noisy)


def test_gradients_wrong_in_some_parameters_by_no_factor() -> None:
    expect(
        jolted(fsdp_4(), 0.3, NORM, EMBEDDING),
        """\
gradients are wrong in 2 of 12 parameters (tok_embeddings.weight, norm.weight): the loss of step 1 is right, so the mistake is in backward or after it
  gradients: rank 0, step 1, tok_embeddings.weight: 1.087 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 1.032 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_gradients_off_by_the_rounding_of_float32() -> None:
    expect_first(
        jolted(fsdp_4(), 3e-8),
        """gradients are off by 3e-08 in every parameter: as by arithmetic in float32, requested float64""",
    )


def test_a_wrong_forward_pass() -> None:
    trial = jolted(fsdp_4(), 0.3)
    for rank in trial.ranks:
        batch = trial.ranks[rank].steps[0].microbatches[0]
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, loss_sum=1.01 * batch.loss_sum),))
    expect_first(
        trial,
        """the forward pass is wrong: the loss of step 1 is off by 1.0e-02 though weights and samples are right""",
    )


def test_tp_peers_that_compute_different_losses() -> None:
    trial = trial_of(tiny_case("tp_2"))
    batch = trial.ranks[1].steps[0].microbatches[0]
    trial = with_step(trial, 1, 1, microbatches=(replace(batch, loss_sum=1.01 * batch.loss_sum),))
    expect_first(trial, """ranks compute different losses from the same tokens: rank 1, step 1""")


def test_gradients_that_are_not_zeroed() -> None:
    trial = fsdp_4()
    for rank, evidence in trial.ranks.items():
        total: dict[str, np.ndarray] = {}
        for step in evidence.steps:
            total = {fqn: total.get(fqn, 0.0) + gradient for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=total)
    expect_first(
        with_updates_that_follow(trial),
        """gradients are not zeroed between steps: those of step 2 hold step 1's as well""",
    )


def test_gradients_that_go_wrong_later() -> None:
    trial = fsdp_4()
    trial = with_updates_that_follow(with_value(trial, 0, 3, "gradients", NORM, lambda g: g * 1.1))
    expect_first(
        trial,
        """gradients are right in step 1 and from step 3 on 1.1 times what they should be in 1 of 12 parameters (norm.weight) on rank 0""",
    )


def test_gradients_that_go_wrong_later_by_no_factor() -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 0, 3, "gradients", NORM, lambda g: g + 0.1)
    expect_first(
        with_updates_that_follow(trial),
        """gradients are right in step 1 and wrong from step 3 on in 1 of 12 parameters (norm.weight) on rank 0""",
    )


def test_a_token_count_of_another_step() -> None:
    trial = fsdp_4()
    one, two = (step.valid_tokens for step in trial.reference.steps[:2])
    for rank, evidence in trial.ranks.items():
        wrong = {fqn: gradient * two / one for fqn, gradient in evidence.steps[1].gradients.items()}
        trial = with_step(trial, rank, 2, gradients=wrong)
    expect_first(
        with_updates_that_follow(trial),
        """gradients are right in step 1 and from step 2 on 1.375 times what they should be in every parameter: divided by the number of valid tokens of step 1 (16, not 22)""",
    )


def test_a_forward_pass_that_goes_wrong_later() -> None:
    trial = fsdp_4()
    for rank, evidence in trial.ranks.items():
        batches = tuple(replace(batch, loss_sum=1.01 * batch.loss_sum) for batch in evidence.steps[1].microbatches)
        wrong = {fqn: gradient**2 for fqn, gradient in evidence.steps[1].gradients.items()}
        trial = with_step(trial, rank, 2, gradients=wrong, microbatches=batches)
    expect_first(
        with_updates_that_follow(trial),
        """the forward pass is right in step 1 and wrong from step 2 on (loss off by 1.0e-02)""",
    )


def test_a_tied_weight_whose_gradient_is_added_twice() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, tied_embeddings=True)))
    gradients = trial.reference.steps[0].gradients
    twice = with_step_1_gradients(trial, lambda _, fqn: (1 + fqn.startswith("tok")) * gradients[fqn])
    assert first_line(twice) == (
        "gradients are 2 times what they should be in 1 of 11 parameters (tok_embeddings.weight): counted for the embedding"
        " and again for the output, which share it, or not divided by dp_shard (2)"
    )


def test_a_tied_weight_that_only_the_embedding_trains() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, tied_embeddings=True)))
    read = np.isin(np.arange(8), trial.reference.tokens)[:, None]
    assert 0 < read.sum() < 8

    def lost(rank: int, fqn: str) -> np.ndarray:
        gradient = trial.reference.steps[0].gradients[fqn]
        return read * gradient**2 if fqn == "tok_embeddings.weight" else gradient

    expect_first(
        with_step_1_gradients(trial, lost),
        """the output's part of the gradient of the tied weight is missing: tok_embeddings.weight has the embedding's only""",
    )


# ---- documents, ranks without a valid token


def with_losses_of_step_1(trial: Trial, ranks: tuple[int, ...], by_id: dict[int, float]) -> Trial:
    """These ranks computed these losses of samples; gradients are wrong everywhere."""
    for rank in ranks:
        (batch,) = trial.ranks[rank].steps[0].microbatches
        ids = [id_ for id_ in received_samples(trial, 1)[rank] if id_ is not None]
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, loss_sum=sum(by_id[i] for i in ids)),))
    return with_step_1_gradients(trial, lambda rank, fqn: trial.reference.steps[0].gradients[fqn] ** 2)


@pytest.mark.parametrize("ranks, where", [((0, 1), ""), ((1,), " on rank 1")])
def test_a_document_mask_that_is_lost(ranks: tuple[int, ...], where: str) -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, document_mask=True)))
    unmasked = {id_: 3.0 + id_ / 7 for id_ in trial.reference.samples[0]}
    trial = replace(trial, reference=replace(trial.reference, unmasked_losses=np.array(list(unmasked.values()))))
    assert first_line(with_losses_of_step_1(trial, ranks, unmasked)) == (
        f"documents see each other{where}: the losses of step 1 are those without a document mask, which is requested"
    )


def test_other_losses_are_not_blamed_on_the_document_mask() -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, document_mask=True)))
    trial = replace(trial, reference=replace(trial.reference, unmasked_losses=np.full(8, 3.0)))
    wrong = with_losses_of_step_1(trial, (0, 1), dict.fromkeys(trial.reference.samples[0], 3.1))
    assert first_line(wrong).startswith("the forward pass is wrong")


def test_a_mean_over_no_valid_token() -> None:
    trial = fsdp_4()
    labels, received = trial.reference.labels.copy(), received_samples(trial, 1)[3]
    labels[[trial.reference.sample_ids.index(i) for i in received if i is not None]] = -100
    trial = replace(trial, reference=replace(trial.reference, labels=labels))
    (batch,) = trial.ranks[3].steps[0].microbatches
    silent = replace(batch, labels=np.full_like(batch.labels, -100), loss_sum=0.0, valid_tokens=0)
    trial = with_step(trial, 3, 1, microbatches=(silent,))
    trial = with_step_1_gradients(trial, lambda rank, fqn: trial.reference.steps[0].gradients[fqn] * np.nan)
    assert first_line(trial).endswith("rank 3 has no valid token, and a mean over none is 0/0"), first_line(trial)


# ---- updates


def test_norm_weights_that_decay_although_only_matrices_should() -> None:
    expect_first(
        trained_as(ADAMW, asked=replace(ADAMW, decay="matrices")),
        """weight decay is applied to norm weights as well, requested matrices only""",
    )


def test_norm_weights_that_do_not_decay_although_all_should() -> None:
    expect_first(
        trained_as(replace(ADAMW, decay="matrices")),
        """weight decay is applied to matrices only, requested all parameters""",
    )


@pytest.mark.parametrize("factor, hint", [(2.0, ", the peak's, as without a schedule"), (1.5, "")])
def test_a_group_with_a_learning_rate_of_its_own(factor: float, hint: str) -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(SGD, decay="matrices")))
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            if "norm" in tensor.fqn:

                def scaled(after: np.ndarray, before: np.ndarray = tensor.value) -> np.ndarray:
                    return before + factor * (after - before)

                trial = with_value(trial, rank, 1, "parameters", tensor.fqn, scaled)
    assert first_line(trial) == (
        "the learning rate of 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more)"
        f" is {factor * 0.025:.6g} in step 1{hint}, requested 0.025"
    )


def trained_as(training, layout: str | ParallelDims = "fsdp_2", asked=ADAMW) -> Trial:
    """What a run leaves whose optimizer had another recipe; gradients are those of the recipe requested."""
    trial = trial_of(tiny_case(layout, asked))
    other = replace(trial, case=replace(trial.case, training=training))
    return replace(with_updates_that_follow(other), case=trial.case)


LOW_CLIP = replace(ADAMW, max_norm=0.25)


def test_clipping_left_out_everywhere() -> None:
    expect(
        trained_as(replace(LOW_CLIP, max_norm=None), asked=LOW_CLIP),
        """\
gradients are not clipped (coefficient 0.1537)
  update: rank 0, step 1, tok_embeddings.weight: expected entry (2, 3) moved by -0.00502066, observed moved by -0.00502066 (ratio 1.000000367); 16 of 16 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_clipping_left_out_with_sgd() -> None:
    asked = replace(SGD, max_norm=0.25)
    expect_first(
        trained_as(replace(asked, max_norm=None), asked=asked), """gradients are not clipped (coefficient 0.1537)"""
    )


def test_clipping_left_out_on_some_ranks() -> None:
    trial = trial_of(tiny_case("hsdp_2x2", LOW_CLIP))
    wrong = trained_as(replace(LOW_CLIP, max_norm=None), "hsdp_2x2", LOW_CLIP)
    for rank in (1, 3):
        trial = with_rank(trial, rank, steps=wrong.ranks[rank].steps)
    expect_first(
        trial,
        """clipping is not applied to tok_embeddings.weight, layers.0.attention.wq.weight and 10 more on ranks [1,3] (coefficient 0.1537)""",
    )


def test_clipping_left_out_for_one_parameter() -> None:
    trial, wrong = trial_of(tiny_case("fsdp_2", LOW_CLIP)), trained_as(replace(LOW_CLIP, max_norm=None), asked=LOW_CLIP)
    for rank, step in itertools.product((0, 1), (1, 2, 3)):
        record = wrong.ranks[rank].steps[step - 1]
        trial = with_value(trial, rank, step, "parameters", NORM, lambda _, record=record: record.parameters[NORM])
    expect_first(trial, """clipping is not applied to norm.weight (coefficient 0.1537)""")


def test_each_rank_clips_by_the_norm_of_its_own_shards() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    alone = [
        with_updates_that_follow(replace(trial, run=replace(trial.run, ranks={rank: trial.ranks[rank]})))
        for rank in (0, 1)
    ]
    for rank, other in enumerate(alone):
        steps = [replace(s, grad_norm=trial.reference.steps[0].grad_norm) for s in other.ranks[rank].steps]
        trial = with_rank(trial, rank, steps=tuple(steps))
    expect_first(
        trial,
        """each rank clips by the norm of its own shards, not by the global norm: 1.14235 on rank 0, expected 1.62647""",
    )


def test_weight_decay_left_out() -> None:
    expect_first(trained_as(replace(ADAMW, weight_decay=0.0)), """weight decay is not applied, requested 0.1""")


def test_weight_decay_left_out_of_sgd() -> None:
    expect_first(
        trained_as(replace(SGD, weight_decay=0.0), asked=SGD), """weight decay is not applied, requested 0.1"""
    )


def test_the_librarys_default_of_weight_decay() -> None:
    expect_first(
        trained_as(replace(ADAMW, weight_decay=0.01)), """weight decay is 0.01 in the optimizer, requested 0.1"""
    )


def test_the_librarys_default_of_beta2() -> None:
    expect(
        trained_as(replace(ADAMW, beta2=0.999)),
        """\
beta2 is 0.999 in the optimizer, requested 0.95
  update: rank 0, step 2, tok_embeddings.weight: expected entry (2, 3) moved by -0.00336019, observed moved by -0.0033308 (ratio 0.9912529854); 16 of 16 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_another_beta1() -> None:
    expect_first(trained_as(replace(ADAMW, beta1=0.95)), """beta1 is 0.95 in the optimizer, requested 0.9""")


def test_another_beta1_that_nobody_uses() -> None:
    expect(
        trained_as(replace(ADAMW, beta1=0.876)),
        """\
the optimizer step is wrong, the gradients are right: first at rank 0, step 2, tok_embeddings.weight
  why: step 1 is right everywhere: look at what is carried from step to step (beta1, beta2, state, schedule)
  update: rank 0, step 2, tok_embeddings.weight: expected entry (2, 3) moved by -0.00336019, observed moved by -0.00323439 (ratio 0.9625612237); 16 of 16 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_another_eps() -> None:
    expect_first(trained_as(replace(ADAMW, eps=1e-5)), """eps is 1e-05 in the optimizer, requested 1e-08""")


def test_another_limit_of_the_norm() -> None:
    expect_first(
        trained_as(replace(LOW_CLIP, max_norm=0.5), asked=LOW_CLIP),
        """the gradient norm's limit is 0.5 in the optimizer, requested 0.25""",
    )


def test_another_learning_rate_than_the_optimizer_shows() -> None:
    expect_first(
        trained_as(replace(ADAMW, lr=0.02)),
        """every optimizer step is 2 times what it should be, as by 2 times the learning rate""",
    )


def with_rates(trial: Trial, *rates: float) -> Trial:
    for rank, (step, lr) in itertools.product(trial.ranks, enumerate(rates, start=1)):
        trial = with_step(trial, rank, step, lr=lr)
    return trial


def test_a_schedule_that_is_a_step_early() -> None:
    expect_first(
        with_rates(trained_as(replace(ADAMW, lr=0.02)), 0.01, 0.0075, 0.0075),
        """learning rate of step 1 is 0.01, the schedule's of step 2, requested 0.005""",
    )


def test_a_learning_rate_of_no_schedule() -> None:
    expect_first(
        with_rates(trained_as(replace(ADAMW, lr=0.02)), 0.01234, 0.02, 0.015),
        """learning rate of step 1 is 0.01234, requested 0.005""",
    )


def test_parameters_that_the_optimizer_does_not_know() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, step in itertools.product((0, 1), (1, 2, 3)):
        start = next(t.value for t in trial.ranks[rank].parameters if t.fqn == NORM)
        trial = with_value(trial, rank, step, "parameters", NORM, lambda _, start=start: start)
    expect_first(trial, """the optimizer does not move 1 of 12 parameters (norm.weight) in step 1""")


def test_parameters_that_become_nan() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expect_first(
        with_value(trial, 1, 1, "parameters", NORM, lambda value: value * np.nan),
        """parameters are NaN or infinite after step 1 in 1 of 12 parameters (norm.weight) on rank 1, gradients were finite""",
    )


def test_an_optimizer_that_is_wrong_otherwise() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expect(
        with_value(trial, 1, 2, "parameters", NORM, lambda value: value + 1e-3),
        """\
the optimizer step is wrong, the gradients are right: first at rank 1, step 2, norm.weight
  why: step 1 is right everywhere: look at what is carried from step to step (beta1, beta2, state, schedule)
  update: rank 1, step 2, norm.weight: expected entry (1,) moved by -0.000751533, observed moved by 0.000248467 (ratio -0.3306137538); 2 of 2 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


# ---- the rest


def test_replicas_that_drift_by_a_last_bit() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    expect(
        with_value(trial, 2, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0)),
        """\
replicas drift apart: step 2, gradients of norm.weight, ranks [0,2]: rank 2 differs by 2.05e-16 of the largest entry
  why: within rounding of the reference, but replicas that differ in one bit drift on: they must be equal
  loss, gradients: equal to the reference within 2.1e-16: a loss-curve test passes here""",
    )


def shows(trial: Trial, what: str, value) -> Trial:
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            trial = with_step(trial, rank, step.step, **{what: value(step)})
    return trial


def test_a_displayed_loss_that_is_each_ranks_own() -> None:
    def own(step) -> float:
        return step.microbatches[0].loss_sum / step.microbatches[0].valid_tokens

    expect(
        shows(fsdp_4(), "reported_loss", own),
        """\
the reported loss is wrong, the training itself is right: each rank shows the loss of its own samples
  reported_loss: rank 0, step 1: expected 2.53460829689014, observed 2.1682941969615794 (off by 1.45e-01)
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_a_displayed_loss_that_is_a_sum_over_ranks() -> None:
    expect_first(
        shows(fsdp_4(), "reported_loss", lambda step: 4 * step.reported_loss),
        """the reported loss is wrong, the training itself is right: each rank shows 4 times the right one: not divided by dp_shard (4)""",
    )


def test_a_displayed_norm_that_is_each_ranks_own() -> None:
    def own(step) -> float:
        return math.sqrt(sum(float(np.sum(g * g)) for g in step.gradients.values()))

    expect_first(
        shows(fsdp_4(), "grad_norm", own),
        """the reported gradient norm is wrong, the training itself is right: each rank shows the norm of its own shards""",
    )


def test_displays_that_are_wrong_on_one_rank() -> None:
    expect_first(
        with_step(fsdp_4(), 3, 2, reported_loss=1.0, grad_norm=math.nan),
        """the reported loss and gradient norm are wrong, the training itself is right: loss: rank 3 shows 1 once, where 1.881 is right; gradient norm: rank 3 shows nan once, where 1.59477 is right""",
    )


def test_the_reference_moved() -> None:
    trial = fsdp_4()
    accepted = replace(trial.golden, losses=[loss * 1.001 for loss in trial.golden.losses])
    expect(
        replace(trial, golden=accepted),
        """\
the reference moved, not the trainer: model, data, recipe or torch changed since the golden was accepted
  golden: step 1, loss: 2.53714290518703 (golden) -> 2.53460829689014 (reference), bound 1.4e-14""",
    )


def test_a_repeat_that_is_fed_its_samples_in_another_order() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_value(received(trial, 1, 2, [12, 13, 15, 14]), 1, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0))
    expect_first(
        replace(trial, repeat=other.run),
        """the same case run twice gives different bytes, for the repeat receives the same samples in another order (rank 1, step 2), first on rank 1, step 2: 1 differ: gradients of norm.weight""",
    )


def test_a_repeat_that_is_fed_other_samples() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    expect_first(
        replace(trial, repeat=received(trial, 0, 3, [16, 17, 18, 18]).run),
        """the same case run twice gives different bytes, for the repeat receives other samples (rank 0, step 3), first on rank 0, step 3: 1 differ: loss of microbatch 0""",
    )


def test_a_repeat_that_differs() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_value(trial, 1, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0))
    expect_first(
        replace(trial, repeat=other.run),
        """the same case run twice gives different bytes, first on rank 1, step 2: 1 differ: gradients of norm.weight""",
    )


@pytest.mark.parametrize(
    ("layout", "key", "asked", "ran"),
    [
        ("tp_2", "sequence_parallel", True, False),
        ("tp_2", "sequence_parallel", False, True),
        ("fsdp_2_tp_2", "loss_parallel", True, False),
        ("fsdp_2_tp_2", "loss_parallel", False, True),
    ],
)
def test_a_feature_that_is_not_in_force(layout, key, asked, ran) -> None:
    trial = trial_of(tiny_case(layout, **{key: asked}), tiny_case(layout, **{key: ran}))
    assert first_line(trial) == f"{key} {asked} is requested, {ran} is observed: its traffic is what was seen"


@pytest.mark.parametrize(
    ("asked", "ran", "units"),
    [
        ("always", "never", "tok_embeddings, layers.0, norm and 1 more still gathered, should be freed"),
        ("never", "default", "tok_embeddings, layers.0 freed, should be gathered"),
    ],
)
def test_what_stays_gathered_is_named_with_the_policy_in_force(asked: str, ran: str, units: str) -> None:
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=policy) for policy in (asked, ran)))
    told = f"after forward: {units}; reshard_after_forward {asked} is requested, {ran} is observed"
    assert first_line(trial) == told


def test_a_reduction_after_every_microbatch() -> None:
    def twice(call):
        return [call, call] if call.op == "all_reduce" and call.phase == "backward" else [call]

    trial = with_every_rank(accumulating(), lambda t, rank: with_collectives(t, rank, twice))
    expect_first(trial, """gradients are reduced after every microbatch (2 times a step), once a step is requested""")


def test_a_collective_that_one_rank_skips() -> None:
    trial = fsdp_4()
    expect(
        with_rank(trial, 1, collectives=trial.ranks[1].collectives[:-1]),
        """\
ranks of a group do not issue the same collectives: group [0-3], collective 20: expected every rank: all_reduce of 8 B float64 (step 3, other), observed rank 1: nothing
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_parameters_kept_gathered_after_the_step() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    memory = trial.ranks[1].steps[2].memory | {"parameters": 1888}
    expect_first(
        with_step(trial, 1, 3, memory=memory),
        """memory held between steps is not the plan's: rank 1, step 3, parameters: expected 944 B, observed 1.888 kB""",
    )


# ---- a diagnosis never costs the verdict


def explode(trial, broken):
    raise KeyError("layers.7")


def test_a_rule_that_raises_is_skipped_and_said_so() -> None:
    trial = scaled("fsdp_2", 2.0)
    whole, found = diagnose(trial, judge(trial)), diagnose(trial, judge(trial), (explode, *RULES))
    assert whole is not None and found is not None
    assert found.cause == whole.cause
    assert found.evidence[:-1] == whole.evidence
    label, text = found.evidence[-1]
    assert label == "not diagnosed"
    assert text.startswith("the rule explode raised KeyError('layers.7') at explode:")


def test_where_every_rule_raises_the_first_broken_law_is_told() -> None:
    trial = with_step(fsdp_4(), 1, 3, memory={"parameters": 1888, "optimizer_state": 944})
    found = diagnose(trial, judge(trial), (explode,))
    assert found is not None
    assert found.cause == "memory: rank 1, step 3, parameters: expected 472 B, observed 1.888 kB"


@pytest.mark.parametrize("layout", ["hsdp_2x2", "fsdp_2_tp_2", dims(shard=8)], ids=str)
@pytest.mark.parametrize(
    "mess", ["no gradients", "NaN", "one number", "no collectives", "no microbatches", "no samples"]
)
def test_no_rule_raises_on_evidence_that_makes_little_sense(layout, mess) -> None:
    trial = with_every_rank(trial_of(tiny_case(layout, model=UNEVEN)), lambda t, rank: spoiled(t, rank, mess))
    found = diagnose(trial, judge(trial))
    assert found is None or "not diagnosed" not in dict(found.evidence), found


def spoiled(trial: Trial, rank: int, mess: str) -> Trial:
    if mess == "no collectives":
        return with_rank(trial, rank, collectives=())
    if mess == "no samples":
        reference = replace(trial.reference, sample_gradients={}, sample_positions={})
        trial = replace(trial, reference=reference)
    for step in trial.ranks[rank].steps:
        changes = {
            "no gradients": {"gradients": {}},
            "NaN": {"gradients": {f: g * np.nan for f, g in step.gradients.items()}, "grad_norm": math.nan},
            "one number": {"gradients": {f: np.ones(()) for f in step.gradients}},
            "no microbatches": {"microbatches": ()},
            "no samples": {"gradients": {f: g + 1 for f, g in step.gradients.items()}},
        }[mess]
        trial = with_step(trial, rank, step.step, **changes)
    return trial
