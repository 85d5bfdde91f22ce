"""The laws of processes and structure on literal evidence: completed, process_groups, placements, shard_contents,
traffic, collective_order, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from literal import (
    ADAMW,
    SGD,
    UNEVEN,
    cause_of,
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_parameter,
    with_rank,
    with_step,
    without_rank,
)

from harness.checks import completed, judge
from harness.diagnosis import diagnose
from harness.evidence.records import Collective, Exit, Group, HeldTensor
from harness.judge.contents import locate
from harness.judge.result import Finding, Result, Verdict
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims

EMBEDDING = "tok_embeddings.weight"


def findings(check: str, trial) -> tuple[Finding, ...]:
    """Those of a law that must be broken."""
    result = judged(check, trial)
    assert result.verdict == Verdict.FAIL, result
    return result.findings


def with_exit(trial, exit: Exit):
    exits = tuple(exit if old.rank == exit.rank else old for old in trial.run.exits)
    return replace(trial, run=replace(trial.run, exits=exits))


# ---- completed


def test_a_rank_that_died_is_shown_before_those_that_waited() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_exit(trial, Exit(0, "killed", error="time limit", last_collective="all_reduce over [0,1]"))
    trial = with_exit(trial, Exit(1, "signal", signal="SIGKILL", blamed=True, stack="train.py:7 in step\n"))
    assert findings("completed", without_rank(trial, 1)) == (
        Finding("rank 1", "exit code 0", "died by SIGKILL\ntrain.py:7 in step"),
        Finding("rank 0 (only waited)", "exit code 0", "killed: time limit; last collective all_reduce over [0,1]"),
    )


def test_a_rank_whose_file_was_damaged_is_no_verdict_on_the_trainer() -> None:
    trial = without_rank(trial_of(tiny_case("fsdp_2")), 1)
    trial = replace(trial, run=replace(trial.run, unreadable={1: "rank_01.npz: damaged"}))
    result = completed.check(trial)
    assert (result.verdict, result.note) == (
        Verdict.UNKNOWN,
        "the evidence of rank 1 cannot be read: rank_01.npz: damaged",
    )
    trial = with_exit(trial, Exit(0, "raised", error="ValueError", blamed=True))
    assert completed.check(trial).verdict is Verdict.FAIL


def test_a_rank_that_left_no_file_has_not_completed() -> None:
    trial = without_rank(trial_of(tiny_case("fsdp_2")), 1)
    assert findings("completed", trial) == (Finding("rank 1", "an evidence file", "none"),)


def test_ranks_lost_with_their_launcher_are_no_verdict_on_the_trainer() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in (0, 1):
        lost = Exit(rank, "lost", error="the rank server ended", blamed=rank == 1)
        trial = without_rank(with_exit(trial, lost), rank)
    result = completed.check(trial)
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "rank 0 was lost: the rank server ended")
    trial = with_exit(trial, Exit(1, "signal", signal="SIGSEGV", blamed=True))
    assert completed.check(trial).verdict is Verdict.FAIL


def test_a_rank_of_whose_end_nothing_is_known_has_not_completed() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = replace(trial, run=replace(trial.run, exits=trial.run.exits[:1]))
    assert findings("completed", trial) == (Finding("rank 1", "exit code 0", "nothing is known of its end"),)


def test_a_launch_of_fewer_ranks_than_asked_has_not_completed() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"), tiny_case("fsdp_2"))
    assert findings("completed", trial)[0] == Finding("launch", "4 ranks", "2 ranks")


def test_ranks_that_each_trained_in_a_world_of_their_own_are_named() -> None:
    trial = with_rank(trial_of(tiny_case("ddp_2")), 1, rank=0, world_size=1)
    assert findings("completed", trial) == (Finding("rank 1", "rank 1 of 2", "it says rank 0 of 1"),)


def test_a_parameter_that_a_rank_does_not_have_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    kept = tuple(t for t in trial.ranks[1].parameters if t.fqn != EMBEDDING)
    assert findings("completed", with_rank(trial, 1, parameters=kept)) == (
        Finding("rank 1, parameters", "12 parameters", "missing: tok_embeddings.weight"),
        *(
            Finding(f"rank 1, step {step}, {what}", "11 parameters", "unexpected: tok_embeddings.weight")
            for step in (1, 2, 3)
            for what in ("gradients", "updated parameters")
        ),
    )


def test_a_gradient_missing_in_the_last_step_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    rest = {fqn: g for fqn, g in trial.ranks[1].steps[2].gradients.items() if fqn != "norm.weight"}
    assert findings("completed", with_step(trial, 1, 3, gradients=rest)) == (
        Finding("rank 1, step 3, gradients", "12 parameters", "missing: norm.weight"),
    )


# ---- process_groups


def with_groups(trial, rank: int, *groups: tuple[int, ...]):
    return with_rank(trial, rank, groups=tuple(Group(str(ranks), ranks, "gloo") for ranks in groups))


def test_ranks_in_the_wrong_tp_groups_are_named() -> None:
    """tp strided over the world instead of innermost: [0,2] [1,3] where [0,1] [2,3] is asked."""
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    for rank, groups in enumerate([((0, 2), (0, 1)), ((1, 3), (0, 1)), ((0, 2), (2, 3)), ((1, 3), (2, 3))]):
        trial = with_groups(trial, rank, *groups)
    assert judged("process_groups", trial).verdict == Verdict.PASS  # the same set of groups: why this law is weak
    for rank, groups in enumerate([((0, 3),), ((1, 2),), ((1, 2),), ((0, 3),)]):
        trial = with_groups(trial, rank, *groups, (0, 2) if rank in (0, 2) else (1, 3))
    assert findings("process_groups", trial) == tuple(
        Finding(f"rank {rank}, axis tp", f"a group {wanted}", f"of that size: {near}")
        for rank, wanted, near in (
            (0, "[0,1]", "[0,2] [0,3]"),
            (1, "[0,1]", "[1,2] [1,3]"),
            (2, "[2,3]", "[0,2] [1,2]"),
            (3, "[2,3]", "[0,3] [1,3]"),
        )
    )


@pytest.mark.parametrize(("member", "other"), [(0, 1), (1, 0)])
def test_a_group_that_only_one_of_its_members_knows_is_named(member: int, other: int) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    odd = Group("odd", (0, 1), "gloo")
    trial = with_rank(trial, member, groups=(*trial.ranks[member].groups, odd))
    assert findings("process_groups", trial) == (
        Finding(f"group 'odd' of rank {member}", f"known to rank {other}", "[0,1] unknown there"),
    )


# ---- placements


def test_a_parameter_claimed_whole_on_one_rank_is_named() -> None:
    trial = with_parameter(trial_of(tiny_case("hsdp_2x2")), 3, EMBEDDING, placements=("Replicate", "Replicate"))
    assert findings("placements", trial) == (
        Finding(f"rank 3, {EMBEDDING}", "dim 0 over [2,3]", "whole on every rank"),
    )


def test_a_row_parallel_weight_cut_by_columns_is_named() -> None:
    fqn = "layers.0.attention.wo.weight"
    trial = with_parameter(trial_of(tiny_case("tp_2")), 1, fqn, placements=("Shard(0)",))
    assert findings("placements", trial) == (Finding(f"rank 1, {fqn}", "dim 1 over [0,1]", "dim 0 over [0,1]"),)


def test_swapped_mesh_axes_are_named_by_the_ranks_they_join() -> None:
    trial = with_parameter(trial_of(tiny_case("hsdp_2x2")), 0, EMBEDDING, mesh=[[0, 2], [1, 3]])
    assert findings("placements", trial) == (Finding(f"rank 0, {EMBEDDING}", "dim 0 over [0,1]", "dim 0 over [0,2]"),)


def test_a_mesh_axis_of_one_rank_claims_nothing() -> None:
    claim = {"mesh": [[[0], [1]]], "placements": ("Shard(0)", "Shard(0)", "Shard(1)")}
    trial = with_parameter(trial_of(tiny_case("fsdp_2")), 0, EMBEDDING, **claim)
    assert judged("placements", trial).verdict == Verdict.PASS


def test_a_wrapper_that_replicates_over_nothing_is_named() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    trial = with_rank(trial, 2, structure={"layers.0": {"kind": "fsdp2", "shard_ranks": [2, 3]}})
    assert findings("placements", trial) == (Finding("rank 2, fsdp2 on layers.0, replicate_ranks", "[0,2]", "[2]"),)


def test_a_replicate_axis_that_nothing_claims_is_named() -> None:
    trial = with_every_rank(trial_of(tiny_case("ddp_2")), lambda trial, rank: with_rank(trial, rank, structure={}))
    assert findings("placements", trial) == (
        Finding("rank 0, dp_replicate", "something replicated over [0,1]", "nothing claims it"),
        Finding("rank 1, dp_replicate", "something replicated over [0,1]", "nothing claims it"),
    )


# ---- shard_contents


def test_a_rank_that_holds_its_neighbours_slice_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    value = trial.ranks[0].parameters[0].value
    assert findings("shard_contents", with_parameter(trial, 1, EMBEDDING, value=value)) == (
        Finding(f"rank 1, {EMBEDDING}", "1/2 of dim 0 [4:8]", "1/2 of dim 0 [0:4]"),
    )


def test_a_rank_that_holds_the_whole_tensor_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=trial.reference.weights[EMBEDDING])
    assert findings("shard_contents", trial) == (Finding(f"rank 1, {EMBEDDING}", "1/2 of dim 0 [4:8]", "whole"),)


def test_one_element_in_the_place_of_another_is_named_and_a_parameter_that_is_not_held_hides_no_other() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=4)))  # norm weights have one element a rank
    value = next(t.value for t in trial.ranks[0].parameters if t.fqn == "norm.weight")
    trial = with_parameter(trial, 1, "norm.weight", value=value)
    assert findings("shard_contents", trial) == (
        Finding("rank 1, norm.weight", "1/4 of dim 0 [1:2]", "1/4 of dim 0 [0:1]"),
    )
    without_first = with_rank(trial, 1, parameters=trial.ranks[1].parameters[1:])
    assert findings("shard_contents", without_first) == findings("shard_contents", trial)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.astype(np.float32),
        lambda value: value.astype(np.float32).astype(np.float64),
        lambda value: value * (1 + 1e-15),
        lambda value: value[::-1],
        lambda value: value.reshape(-1),
        lambda value: np.full_like(value, np.nan),
    ],
    ids=["float32", "rounded to float32", "scaled", "reversed", "flat", "NaN"],
)
def test_other_bytes_than_the_seeds_are_found_nowhere(change) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=change(trial.ranks[1].parameters[0].value))
    assert findings("shard_contents", trial) == (
        Finding(f"rank 1, {EMBEDDING}", "1/2 of dim 0 [4:8]", "bytes that are nowhere in the seed weight"),
    )


def test_minus_zero_is_another_weight_than_zero() -> None:
    assert locate(np.array([-0.0, 2.0]), np.array([0.0, 2.0, 3.0])) is None
    assert locate(np.array([0.0, 2.0]), np.array([3.0, 0.0, 2.0])) == ((1, 3),)


def test_an_empty_slice_where_there_should_be_rows_is_named() -> None:
    trial = with_parameter(trial_of(tiny_case("fsdp_2")), 1, EMBEDDING, value=np.zeros((0, 4)))
    assert findings("shard_contents", trial) == (
        Finding(f"rank 1, {EMBEDDING}", "1/2 of dim 0 [4:8]", "nothing of dim 0 [0:0]"),
    )


def test_ranks_that_rightly_hold_nothing_pass() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=8), model=UNEVEN))  # 8 ranks, at most 7 rows
    assert trial.ranks[7].parameters[0].value.shape == (0, 4)
    for check in ("shard_contents", "initial_weights", "gradients", "update", "memory", "traffic"):
        assert judged(check, trial).verdict == Verdict.PASS, check


# ---- traffic


def test_an_even_step_that_moves_as_much_as_an_odd_one_is_named() -> None:
    asked, ran = (tiny_case("tp_2", replace(ADAMW, variable_length=half)) for half in (True, False))
    assert findings("traffic", trial_of(asked, ran))[0] == Finding(
        "rank 0, step 2, backward all_gather over tp [0,1]", "1.536 kB (1536)", "3.072 kB (3072)"
    )


def dropping(op: str, phase: str, step: int | None = None):
    def change(call: Collective):
        gone = (call.op, call.phase) == (op, phase) and step in (None, call.step)
        return [] if gone else [call]

    return change


def test_a_gradient_all_reduce_missing_on_every_rank_is_named_with_its_axis() -> None:
    drop = dropping("all_reduce", "backward", step=3)
    trial = with_every_rank(trial_of(tiny_case("hsdp_2x2")), lambda t, rank: with_collectives(t, rank, drop))
    assert findings("traffic", trial) == tuple(
        Finding(f"rank {rank}, step 3, backward all_reduce over dp_replicate {group}", "944 B (944)", "nothing")
        for rank, group in ((0, "[0,2]"), (1, "[1,3]"), (2, "[0,2]"), (3, "[1,3]"))
    )
    assert judged("collective_order", trial).verdict == Verdict.PASS  # everybody skips it: only traffic knows


def test_a_gradient_all_reduce_over_the_wrong_ranks_is_named() -> None:
    def over_all(call: Collective):
        return [replace(call, ranks=(0, 1, 2, 3)) if call.ranks == (0, 2) else call]

    assert findings("traffic", with_collectives(trial_of(tiny_case("hsdp_2x2")), 0, over_all))[:2] == (
        Finding("rank 0, step 1, backward all_reduce over [0-3] (no axis of the plan)", "nothing", "944 B (944)"),
        Finding("rank 0, step 1, backward all_reduce over dp_replicate [0,2]", "944 B (944)", "nothing"),
    )


def test_gradients_reduced_in_half_the_bytes_are_named() -> None:
    def narrow(call: Collective):
        return [replace(call, dtype="float32", bytes=call.bytes // 2) if call.op == "reduce_scatter" else call]

    assert findings("traffic", with_collectives(trial_of(tiny_case("fsdp_2")), 1, narrow))[0] == Finding(
        "rank 1, step 1, backward reduce_scatter over dp_shard [0,1]",
        "1.888 kB (1888)",
        "944 B (944): 236 elements of float32; as many of float64 are what was expected",
    )


def test_parameters_gathered_again_though_never_to_be_resharded_are_named() -> None:
    asked, ran = tiny_case("fsdp_2", reshard_after_forward="never"), tiny_case("fsdp_2")
    assert findings("traffic", trial_of(asked, ran))[0] == Finding(
        "rank 0, step 1, backward all_gather over dp_shard [0,1]", "nothing", "1.6 kB (1600)"
    )


def test_gradients_reduced_once_per_microbatch_are_named() -> None:
    def twice(call: Collective):
        return [call, call] if call.op == "all_reduce" and call.phase == "backward" else [call]

    assert findings("traffic", with_collectives(trial_of(tiny_case("ddp_2", accumulation=2)), 1, twice))[0] == Finding(
        "rank 1, step 1, backward all_reduce over dp_replicate [0,1]", "1.888 kB (1888)", "3.776 kB (3776)"
    )


def test_tensor_parallel_without_the_sequence_parallel_asked_for_is_named() -> None:
    asked, ran = tiny_case("tp_2"), tiny_case("tp_2", sequence_parallel=False)
    broken = [f for f in findings("traffic", trial_of(asked, ran)) if f.where.startswith("rank 0, step 1")]
    # 8 samples x 4 positions x 4 wide x 8 bytes = 1024 a crossing, 3 crossings; norms 3 x 4 x 8 = 96
    assert broken == [
        Finding("rank 0, step 1, backward all_gather over tp [0,1]", "3.072 kB (3072)", "nothing"),
        Finding("rank 0, step 1, backward all_reduce over tp [0,1]", "96 B (96)", "3.072 kB (3072)"),
        Finding("rank 0, step 1, backward reduce_scatter over tp [0,1]", "3.072 kB (3072)", "nothing"),
        Finding("rank 0, step 1, forward all_gather over tp [0,1]", "3.072 kB (3072)", "nothing"),
        Finding("rank 0, step 1, forward all_reduce over tp [0,1]", "nothing", "3.072 kB (3072)"),
        Finding("rank 0, step 1, forward reduce_scatter over tp [0,1]", "3.072 kB (3072)", "nothing"),
    ]


def test_norm_gradients_may_be_reduced_outside_of_backward() -> None:
    drop = dropping("all_reduce", "backward")
    trial = with_every_rank(trial_of(tiny_case("tp_2")), lambda t, rank: with_collectives(t, rank, drop))
    assert judged("traffic", trial).verdict == Verdict.PASS


# ---- collective_order


def test_a_collective_that_one_rank_skips_is_named_at_its_place() -> None:
    seen = []

    def skip_the_third(call: Collective):
        seen.append(call)
        return [] if len(seen) == 3 else [call]

    assert findings("collective_order", with_collectives(trial_of(tiny_case("ddp_2")), 1, skip_the_third)) == (
        Finding(
            "group [0,1], collective 2",
            "every rank: all_reduce of 8 B float64 (step 1, other)",
            "rank 1: all_reduce of 8 B float64 (step 2, backward)",
        ),
    )


def test_the_odd_rank_among_several_is_named_not_the_majority() -> None:
    def widen(call: Collective):
        return [replace(call, dtype="float32") if call.phase == "other" and call.step == 3 else call]

    assert findings("collective_order", with_collectives(trial_of(tiny_case("hsdp_2x2")), 3, widen)) == (
        Finding(
            "group [0-3], collective 2",
            "every rank: all_reduce of 8 B float64 (step 3, other)",
            "rank 3: all_reduce of 8 B float32 (step 3, other)",
        ),
    )


def test_the_last_collective_that_a_rank_never_issues_is_named() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    trial = with_rank(trial, 1, collectives=trial.ranks[1].collectives[:-1])
    assert findings("collective_order", trial) == (
        Finding(
            "group [0,1], collective 8", "every rank: all_reduce of 8 B float64 (step 3, other)", "rank 1: nothing"
        ),
    )


def test_a_send_that_nobody_receives_is_named() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    send = Collective("send", (0, 1), "p2p", "float64", 64, "forward", 1, 9, peer=1)
    sent = with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, send))
    assert findings("collective_order", sent) == (Finding("rank 0 to rank 1", "64 B received", "0 B"),)
    received = replace(send, op="recv", peer=0)
    both = with_rank(sent, 1, collectives=(*sent.ranks[1].collectives, received))
    assert judged("collective_order", both).verdict == Verdict.PASS


def test_several_ranks_without_a_single_collective_are_unknown() -> None:
    trial = with_every_rank(trial_of(tiny_case("ddp_2")), lambda t, rank: with_rank(t, rank, collectives=()))
    result = judged("collective_order", trial)
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "nothing was examined")


# ---- memory


def test_a_rank_that_keeps_whole_parameters_after_the_last_step_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    memory = trial.ranks[1].steps[2].memory
    assert findings("memory", with_step(trial, 1, 3, memory=memory | {"parameters": 1888})) == (
        Finding("rank 1, step 3, parameters", "944 B", "1.888 kB"),
    )


def test_optimizer_state_in_half_the_precision_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    memory = trial.ranks[1].steps[0].memory
    assert findings("memory", with_step(trial, 1, 1, memory=memory | {"optimizer_state": 944})) == (
        Finding("rank 1, step 1, optimizer_state", "1.888 kB", "944 B"),
    )


def test_sgd_that_keeps_state_is_named_and_freed_gradients_are_not() -> None:
    trial = trial_of(tiny_case("single", SGD))
    memory = {"parameters": 1888, "gradients": 0, "optimizer_state": 1888}
    assert findings("memory", with_step(trial, 0, 1, memory=memory)) == (
        Finding("rank 0, step 1, optimizer_state", "0 B", "1.888 kB"),
    )


def test_the_padding_of_uneven_chunks_is_allowed_and_no_more() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=UNEVEN))
    least, most = trial.plan.parameter_bytes[1]
    # rank 1 holds 3 of 7 rows and 2 of 5, padded to 4 and 3: one row of 4 more in tok_embeddings, output, w1, w3
    assert (least, most) == (704, 704 + 4 * 4 * 8)
    memory = {"parameters": most, "gradients": most, "optimizer_state": 2 * most}
    assert judged("memory", with_step(trial, 1, 1, memory=memory)).verdict == Verdict.PASS
    assert findings("memory", with_step(trial, 1, 1, memory=memory | {"parameters": most + 8})) == (
        Finding("rank 1, step 1, parameters", "704 B to 832 B", "840 B"),
    )


def test_memory_of_which_nothing_was_seen_does_not_pass() -> None:
    assert findings("memory", with_step(trial_of(tiny_case("fsdp_2")), 1, 2, memory={})) == (
        Finding("rank 1, step 2, parameters", "944 B", "0 B"),
        Finding("rank 1, step 2, optimizer_state", "1.888 kB", "0 B"),
    )


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
    observed = "512 B in 2 tensors: float64 [8, 4], float32 [64]"
    expected = Finding("rank 1, after the last step, beside them", "at most 128 B", observed)
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


def test_without_a_look_at_what_is_kept_memory_is_unknown() -> None:
    result = judged("memory", with_rank(trial_of(tiny_case("ddp_2")), 1, held=None))
    told = "nobody looked what rank 1 keeps besides parameters, gradients and optimizer state"
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, told)


# ---- FSDP units


def gathering(trial: Trial, rank: int, *units: tuple[str, ...]) -> Trial:
    claim = next(iter(trial.ranks[rank].structure.values()))
    return with_rank(trial, rank, structure={unit[0]: claim | {"parameters": list(unit)} for unit in units})


def test_units_that_are_finer_than_asked_for_are_found_and_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    first, block, last = trial.plan.units[1]
    finer = gathering(trial, 1, first, block[:1], block[1:], last)
    told = Finding(
        "rank 1, FSDP unit of layers.0.attention.wq.weight",
        "its 9 parameters gathered together, and no others",
        "in 2 units",
    )
    assert findings("placements", finer) == (told,)
    cause = "fsdp2 units are finer than requested: parameters are gathered in 4 pieces, requested 3 on rank 1"
    assert cause_of(diagnose(finer, judge(finer))) == cause


def test_units_of_other_parameters_are_found_wherever_they_are_claimed() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    first, block, last = trial.plan.units[0]
    coarser = gathering(trial, 0, first + block, last)
    assert [finding.observed for finding in findings("placements", coarser)] == [
        "in 1 units, together with 9 others",
        "in 1 units, together with 1 others",
    ]
    assert "units are others than requested" in cause_of(diagnose(coarser, judge(coarser)))
    assert judged("placements", gathering(trial, 0, last, first, tuple(reversed(block)))).verdict == Verdict.PASS


@pytest.mark.parametrize(
    ("op", "size", "phase", "wrong"),
    [
        ("barrier", 0, "forward", True),
        ("all_reduce", 0, "backward", True),
        ("barrier", 0, "optimizer", True),
        ("barrier", 0, "other", False),
    ],
)
def test_ranks_do_not_wait_for_each_other_inside_of_a_pass(op: str, size: int, phase: str, wrong: bool) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in trial.ranks:
        calls = trial.ranks[rank].collectives
        waiting = Collective(op, (0, 1), "(0, 1)", "uint8", size, phase, 2, len(calls))
        trial = with_rank(trial, rank, collectives=(*calls, waiting))
    result = judged("traffic", trial)
    expected = Finding(f"rank 0, step 2, {phase}", "no rank waits for others", f"1 x {op} of no bytes")
    assert (result.findings[:1] == (expected,)) is wrong
    told = diagnose(trial, [result])
    named = f"ranks wait for each other in {phase}: 1 x {op} of no bytes over [0,1] (rank 0, step 2)"
    assert (told.cause if told else None) == (named if wrong else None)


def test_fsdp_units_of_which_no_wrapper_tells_are_unknown() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    mute = {
        fqn: {k: v for k, v in claim.items() if k != "parameters"} for fqn, claim in trial.ranks[1].structure.items()
    }
    result = judged("placements", with_rank(trial, 1, structure=mute))
    told = "no wrapper of rank 1 tells which parameters it gathers"
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, told)


def test_a_disk_that_took_no_evidence_is_no_verdict_on_the_trainer_however_it_was_raised() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for error in ("EvidenceError: full", "OSError: [Errno 28] no space; raised again as EvidenceError: full"):
        full = with_exit(trial, Exit(1, "raised", error=error, blamed=True))
        assert completed.check(without_rank(full, 1)).verdict is Verdict.UNKNOWN
