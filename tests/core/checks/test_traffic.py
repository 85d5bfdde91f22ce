"""The checks of communication: traffic and collective_order. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checked import findings, like
from literal import (
    ADAMW,
    judged,
    of_layout_alone,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
)

from harness.core.case.dims import ParallelDims
from harness.core.evidence.records import BACKGROUND, Collective
from harness.core.evidence.summary import issued_sequences
from harness.core.judge.result import Verdict
from harness.core.judge.traffic import observed_bytes_by_collective, observed_bytes_outside
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan

# ---- traffic


def test_an_even_step_that_moves_as_much_as_an_odd_one_is_named() -> None:
    requested, ran = (tiny_case("tp_2", replace(ADAMW, variable_length=half)) for half in (True, False))
    assert findings("traffic", trial_of(requested, ran))[0] == like(
        0, 1536, 3072, step=2, name="all_gather", unit="bytes", phase="backward", axis="tp", group=(0, 1)
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
        like(rank, 944, 0, step=3, name="all_reduce", phase="backward", axis="dp_replicate", group=group, unit="bytes")
        for rank, group in ((0, (0, 2)), (1, (1, 3)), (2, (0, 2)), (3, (1, 3)))
    )
    assert judged("collective_order", trial).verdict == Verdict.PASS  # everybody skips it: only traffic knows


def test_a_gradient_all_reduce_over_the_wrong_ranks_is_named() -> None:
    def over_all(call: Collective):
        return [replace(call, ranks=(0, 1, 2, 3)) if call.ranks == (0, 2) else call]

    assert findings("traffic", with_collectives(trial_of(tiny_case("hsdp_2x2")), 0, over_all))[:2] == (
        like(0, 0, 944, step=1, name="all_reduce", unit="bytes", phase="backward", group=(0, 1, 2, 3)),
        like(0, 944, 0, step=1, name="all_reduce", unit="bytes", phase="backward", axis="dp_replicate", group=(0, 2)),
    )


def test_gradients_reduced_in_half_the_bytes_are_named() -> None:
    def narrow(call: Collective):
        return [replace(call, dtype="float32", bytes=call.bytes // 2) if call.op == "reduce_scatter" else call]

    assert findings("traffic", with_collectives(trial_of(tiny_case("fsdp_2")), 1, narrow))[0] == like(
        1,
        1888,
        944,
        step=1,
        name="reduce_scatter",
        unit="bytes",
        phase="backward",
        axis="dp_shard",
        group=(0, 1),
        note="236 elements of float32; expected as many of float64",
    )


def test_one_of_several_gradients_reduced_in_half_the_bytes_is_named() -> None:
    reduced = [call for call in trial_of(tiny_case("fsdp_2")).ranks[1].collectives if call.op == "reduce_scatter"]

    def narrow(call: Collective):
        return [replace(call, dtype="float32", bytes=call.bytes // 2) if call == reduced[0] else call]

    (one, *_) = findings("traffic", with_collectives(trial_of(tiny_case("fsdp_2")), 1, narrow))
    half, rest = reduced[0].bytes // 8, (1888 - reduced[0].bytes) // 8
    seen = f"{half} elements of float32 and {rest} elements of float64; expected all of float64"
    assert (one.quantity, one.note) == ("in another dtype", seen)


def test_parameters_gathered_again_though_never_to_be_resharded_are_named() -> None:
    requested, ran = tiny_case("fsdp_2", reshard_after_forward="never"), tiny_case("fsdp_2")
    assert findings("traffic", trial_of(requested, ran))[0] == like(
        0, 0, 1600, step=1, name="all_gather", unit="bytes", phase="backward", axis="dp_shard", group=(0, 1)
    )


def test_gradients_reduced_once_per_microbatch_are_named() -> None:
    def twice(call: Collective):
        return [call, call] if call.op == "all_reduce" and call.phase == "backward" else [call]

    assert findings("traffic", with_collectives(trial_of(tiny_case("ddp_2", accumulation=2)), 1, twice))[0] == like(
        1, 1888, 3776, step=1, name="all_reduce", unit="bytes", phase="backward", axis="dp_replicate", group=(0, 1)
    )


def test_tensor_parallel_without_the_sequence_parallel_requested_is_named() -> None:
    requested, ran = tiny_case("tp_2"), tiny_case("tp_2", sequence_parallel=False)
    broken = [f for f in findings("traffic", trial_of(requested, ran)) if (f.rank, f.step) == (0, 1)]
    # 8 samples x 4 positions x 4 wide x 8 bytes = 1024 a crossing, 3 crossings; norms 3 x 4 x 8 = 96
    assert broken == [
        like(0, 3072, 0, step=1, name="all_gather", phase="backward", axis="tp", group=(0, 1), unit="bytes"),
        like(0, 96, 3072, step=1, name="all_reduce", phase="backward", axis="tp", group=(0, 1), unit="bytes"),
        like(0, 3072, 0, step=1, name="reduce_scatter", phase="backward", axis="tp", group=(0, 1), unit="bytes"),
        like(0, 3072, 0, step=1, name="all_gather", phase="forward", axis="tp", group=(0, 1), unit="bytes"),
        like(0, 0, 3072, step=1, name="all_reduce", phase="forward", axis="tp", group=(0, 1), unit="bytes"),
        like(0, 3072, 0, step=1, name="reduce_scatter", phase="forward", axis="tp", group=(0, 1), unit="bytes"),
    ]


def test_norm_gradients_may_be_reduced_outside_of_backward() -> None:
    drop = dropping("all_reduce", "backward")
    trial = with_every_rank(trial_of(tiny_case("tp_2")), lambda t, rank: with_collectives(t, rank, drop))
    assert judged("traffic", trial).verdict == Verdict.PASS


def test_norm_gradients_are_reduced_in_backward_or_outside_of_it_and_not_twice() -> None:
    plain = trial_of(tiny_case("tp_2"))
    others = sum(observed_bytes_outside(plain.ranks[0], 1).values())
    rest = Collective("all_reduce", (0, 1), "tp", "float64", plain.plan.outside_bytes[0] - others, "other", 1, 99)
    twice = with_rank(plain, 0, collectives=(*plain.ranks[0].collectives, rest))
    (finding,) = findings("traffic", twice)
    assert (finding.rank, finding.step, finding.phase, finding.axis) == (0, 1, "outside", "")
    assert finding.observed == finding.expected.most + 3 * 4 * 8  # the sums of three norms
    assert judged("traffic", with_collectives(twice, 0, dropping("all_reduce", "backward"))).verdict == Verdict.PASS


def broadcasting(trial: Trial, sizes: list[int], step: int = 3, **changes: Any) -> Verdict:
    """The verdict on this trial where rank 0 broadcast these besides, over its replicas in forward."""
    call = replace(Collective("broadcast", (0, 1), "g", "float64", 0, "forward", step, 99), **changes)
    calls = (*trial.ranks[0].collectives, *(replace(call, bytes=size) for size in sizes))
    return judged("traffic", with_rank(trial, 0, collectives=calls)).verdict


def with_buffers(trial: Trial, **sizes: int) -> Trial:
    claimed = {module: replace(one, **sizes) for module, one in trial.ranks[0].structure.items()}
    return with_rank(trial, 0, structure=claimed)


def test_ddp_may_broadcast_its_buffers_before_every_pass_and_nothing_else() -> None:
    plain = trial_of(tiny_case("ddp_2", accumulation=2))
    trial = with_buffers(plain, float_buffers=64)
    for sizes in ([], [64], [64, 64], [40, 24]):  # reductions that wait leave some out; several buckets may be sent
        assert broadcasting(trial, sizes) is Verdict.PASS, sizes
    for sizes in ([64] * 3, [63], [65], [128, 1]):
        assert broadcasting(trial, sizes) is Verdict.FAIL, sizes
    assert broadcasting(plain, [64]) is Verdict.FAIL
    for changes in ({"phase": "backward"}, {"op": "all_reduce"}):
        assert broadcasting(trial, [64], **changes) is Verdict.FAIL, changes
    weights = trial.plan.parameter_bytes[0][0]
    assert weights % 64 == 32 and broadcasting(trial, [weights]) is Verdict.FAIL


def test_buffers_that_are_no_floating_point_numbers_have_the_same_bound() -> None:
    plain = trial_of(tiny_case("ddp_2", accumulation=2))
    for dtype in ("int64", "bool", "complex64"):
        trial = with_buffers(plain, other_buffers=16)
        assert broadcasting(trial, [16, 16], dtype=dtype) is Verdict.PASS
        assert broadcasting(trial, [16, 16, 1], dtype=dtype) is Verdict.FAIL
        assert broadcasting(plain, [16], dtype=dtype) is Verdict.FAIL


# ---- collective_order


def test_a_collective_that_one_rank_skips_is_named_at_its_place() -> None:
    seen = []

    def skip_the_third(call: Collective):
        seen.append(call)
        return [] if len(seen) == 3 else [call]

    assert findings("collective_order", with_collectives(trial_of(tiny_case("ddp_2")), 1, skip_the_third)) == (
        like(
            (0, 1),
            "all_reduce of 8 B float64 (step 1, other) on every rank",
            "all_reduce of 8 B float64 (step 2, backward) on rank 1",
            quantity="collective 2",
        ),
    )


def test_the_odd_rank_among_several_is_named_not_the_majority() -> None:
    def widen(call: Collective):
        return [replace(call, dtype="float32") if call.phase == "other" and call.step == 3 else call]

    assert findings("collective_order", with_collectives(trial_of(tiny_case("hsdp_2x2")), 3, widen)) == (
        like(
            (0, 1, 2, 3),
            "all_reduce of 8 B float64 (step 3, other) on every rank",
            "all_reduce of 8 B float32 (step 3, other) on rank 3",
            quantity="collective 2",
        ),
    )


def test_the_last_collective_that_a_rank_never_issues_is_named() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    trial = with_rank(trial, 1, collectives=trial.ranks[1].collectives[:-1])
    assert findings("collective_order", trial) == (
        like(
            (0, 1),
            "all_reduce of 8 B float64 (step 3, other) on every rank",
            "nothing on rank 1",
            quantity="collective 8",
        ),
    )


def test_buffers_that_a_rank_broadcasts_in_an_evaluation_of_its_own_are_in_order() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    for rank, place in ((0, ("other", 0)), (1, ("forward", 1))):
        buffers = Collective("broadcast", (0, 1), "0", "float32", 64, *place, 0, root=0)
        trial = with_rank(trial, rank, collectives=(buffers, *trial.ranks[rank].collectives))
    assert judged("collective_order", trial).verdict is Verdict.PASS
    first, second = (issued_sequences(trial.ranks[rank]) for rank in (0, 1))
    assert [one.digest for one in first] == [one.digest for one in second]
    assert judged("collective_order", with_collectives(trial, 1, lambda call: [replace(call, bytes=8)])).findings


BESIDE = Collective("all_reduce", (0, 1), "checkpoints", "float32", 16, BACKGROUND, 0, 0)


def test_what_another_thread_issues_over_a_group_of_its_own_may_come_at_any_time_and_in_one_order_alone() -> None:
    trial = trial_of(tiny_case("ddp_2"))

    def beside(rank: int, at: int, sizes: tuple[int, int]) -> Trial:
        calls = trial.ranks[rank].collectives
        its = tuple(replace(BESIDE, bytes=size, seq=seq) for seq, size in enumerate(sizes))
        return with_rank(trial, rank, collectives=(*calls[:at], *its, *calls[at:]))

    trial = beside(0, 1, (16, 32))
    for at in (1, 6):
        assert judged("collective_order", beside(1, at, (16, 32))).verdict == Verdict.PASS
    assert findings("collective_order", beside(1, 6, (32, 16))) == (
        like(
            (0, 1),
            "all_reduce of 16 B float32 (step 0, background) on every rank",
            "all_reduce of 32 B float32 (step 0, background) on rank 1",
            quantity="collective 0",
        ),
    )


def test_a_send_that_nobody_receives_is_named() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    send = Collective("send", (0, 1), "p2p", "float64", 64, "forward", 1, 9, peer=1)
    sent = with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, send))
    assert findings("collective_order", sent) == (
        like((0, 1), 64, 0, unit="bytes", quantity="sent by rank 0, received by rank 1"),
    )
    received = replace(send, op="recv", peer=0)
    both = with_rank(sent, 1, collectives=(*sent.ranks[1].collectives, received))
    assert judged("collective_order", both).verdict == Verdict.PASS
    from_any = with_rank(sent, 1, collectives=(*sent.ranks[1].collectives, replace(received, peer=None)))
    assert judged("collective_order", from_any).verdict == Verdict.PASS, "from whom it received is not on record"


def test_a_send_belongs_to_the_pipeline_of_its_two_ends_whatever_group_carries_it() -> None:
    trial = replace(trial_of(tiny_case("fsdp_2")), plan=make_plan(tiny_case(ParallelDims(pp=2, tp=2))))
    send = Collective("send", (0, 1, 2, 3), "world", "float64", 64, "pipeline", 1, 0, peer=2)
    assert observed_bytes_by_collective(trial, with_rank(trial, 0, collectives=(send,)).ranks[0], 1) == {
        ((0, 2), "send", "pipeline"): 64
    }
    beside = replace(send, peer=1)  # of its tp group, and of no pipeline of its own
    assert observed_bytes_by_collective(trial, with_rank(trial, 0, collectives=(beside,)).ranks[0], 1) == {
        ((0, 1, 2, 3), "send", "pipeline"): 64
    }


def test_several_ranks_without_a_single_collective_are_unknown() -> None:
    trial = with_every_rank(trial_of(tiny_case("ddp_2")), lambda t, rank: with_rank(t, rank, collectives=()))
    result = judged("collective_order", trial)
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "nothing was examined")


def test_a_rank_that_had_no_more_inputs_under_join_is_compared_until_then() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    calls = [call for call in trial.ranks[1].collectives if call.step <= 1]
    joined = with_rank(trial, 1, collectives=tuple(calls), joined=1)
    assert judged("collective_order", joined).verdict == Verdict.PASS
    assert judged("collective_order", with_rank(joined, 1, joined=None)).verdict == Verdict.FAIL
    assert judged("collective_order", with_rank(joined, 1, collectives=tuple(calls[:-1]))).verdict == Verdict.FAIL


def test_by_a_layout_alone_less_than_the_plan_fails_and_more_is_not_judged() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    twice = with_every_rank(trial, lambda t, rank: with_collectives(t, rank, lambda call: [call, call]))
    less = with_every_rank(trial, lambda t, rank: with_collectives(t, rank, dropping("all_gather", "backward")))
    verdicts = [judged("traffic", each).verdict for each in (trial, twice, less)]
    by_layout = [judged("traffic", of_layout_alone(each)).verdict for each in (trial, twice, less)]
    assert verdicts == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
    assert by_layout == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]
