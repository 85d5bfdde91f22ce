"""The check reshard on literal evidence, what it is planned by, and FSDP1's flattened parameters under all checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked import like, where
from literal import (
    UNEVEN,
    cause_of,
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
)

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.checks import all_checks, judge
from harness.core.evidence.step import AfterEvaluation, AfterForward
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Kept
from harness.core.plan.slices import FlatUnit, flat_slices

FSDP_4 = ParallelDims(dp_shard=4)
LAST = {"norm.weight", "output.weight"}


def after_forward(trial, rank: int, **changes):
    """Every forward pass of a rank, altered."""
    for step in trial.ranks[rank].steps:
        records = tuple(replace(record, **changes) for record in step.after_forward)
        trial = with_step(trial, rank, step.step, after_forward=records)
    return trial


def first_finding(trial) -> Finding:
    result = judged("reshard", trial)
    assert result.verdict == Verdict.FAIL, result
    return result.findings[0]


# ---- the plan


def after_evaluation(held: dict[str, int], left: int = 0) -> Trial:
    """On rank 0 evaluation after step 1 left so much of parameters; the next forward gathered so many bytes less."""
    trial = trial_of(tiny_case("fsdp_2"))
    evidence = trial.ranks[0]
    key = next(c for c in evidence.collectives if (c.step, c.op, c.phase) == (2, "all_gather", "forward"))
    less = replace(key, bytes=key.bytes - left)
    collectives = tuple(less if call is key else call for call in evidence.collectives)
    return with_rank(
        trial, 0, after_evaluation=(AfterEvaluation(1, held, sum(held.values()), tuple(held)),), collectives=collectives
    )


def test_evaluation_may_leave_gathered_what_the_policy_keeps_and_nothing_else() -> None:
    last = {"norm.weight": 8 * 4, "output.weight": 8 * 8 * 4}
    whole = sum(last.values())
    kept = after_evaluation(last, left=whole)
    assert {judged(check, kept).verdict for check in ("reshard", "traffic")} == {Verdict.PASS}
    note = "evaluation leaves norm.weight, output.weight gathered until the next step, as the policy keeps it"
    assert judged("reshard", kept).note == note
    assert judged("traffic", after_evaluation(last, left=whole - 8)).verdict is Verdict.FAIL
    (finding,) = judged("reshard", after_evaluation({"tok_embeddings.weight": 8 * 8 * 4})).findings
    assert finding == like(
        0,
        "freed",
        "gathered",
        step=1,
        name="tok_embeddings.weight",
        quantity="memory after evaluation",
        note="between steps 1 and 2",
    )


def test_nothing_is_gathered_when_backward_is_over() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert judged("reshard", with_step(trial, 1, 2, gathered=())).verdict is Verdict.PASS
    left = with_step(trial, 1, 2, gathered=("output.weight", "not.sharded"))
    (finding,) = judged("reshard", left).findings
    assert (*where(finding), finding.quantity) == (1, 2, "output.weight", "memory after backward")
    found = diagnose(left, judge(left))
    assert found is not None and found.kinds == ("left gathered by backward",)


def kept_ways(dims: ParallelDims, **features) -> dict[str, int]:
    return {fqn: kept.degree for fqn, kept in make_plan(tiny_case(dims, **features)).after_forward[0].items()}


def test_by_default_only_the_last_unit_stays_gathered() -> None:
    assert {fqn for fqn, ways in kept_ways(FSDP_4).items() if ways == 1} == LAST
    assert set(kept_ways(FSDP_4).values()) == {1, 4}


def test_always_frees_all_and_never_frees_nothing() -> None:
    assert set(kept_ways(FSDP_4, reshard_after_forward="always").values()) == {4}
    assert set(kept_ways(FSDP_4, reshard_after_forward="never").values()) == {1}


def test_under_pp_nothing_is_freed_by_default() -> None:
    two_layers = replace(tiny_case("single").model, n_layers=2)
    assert set(kept_ways(ParallelDims(pp=2, dp_shard=2), model=two_layers).values()) == {1}


def test_fsdp1_keeps_the_units_of_the_root() -> None:
    ways = kept_ways(FSDP_4, wrapper="fsdp1")
    assert {fqn for fqn, count in ways.items() if count == 1} == LAST | {"tok_embeddings.weight"}


def test_without_shards_nothing_is_gathered() -> None:
    for layout in ("single", "ddp_2", "tp_2"):
        assert not any(make_plan(tiny_case(layout)).after_forward.values())


def test_a_number_of_ranks_makes_groups_of_neighbours_that_gather_again() -> None:
    plan = make_plan(tiny_case(ParallelDims(dp_replicate=2, dp_shard=4), reshard_after_forward=2))
    assert plan.groups["post_forward"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    again = [flow for flow in plan.flows[0] if flow.axis == "post_forward"]
    assert [(flow.op, flow.phase, flow.bytes) for flow in again] == [("all_gather", "backward", 8 * 236)]
    assert plan.after_forward[5]["tok_embeddings.weight"] == Kept(2, 8 * 4 * 8 // 2)


def test_flat_units_are_cut_in_equal_parts_wherever_parameters_end() -> None:
    unit, shapes = FlatUnit({"a": (0,), "b": (6,)}, 8), {"a": (6,), "b": (2,)}
    cut = [flat_slices([unit], shapes, 4, index) for index in range(4)]
    assert [part["a"] for part in cut] == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 6),)]
    assert [part["b"] for part in cut] == [((0, 0),), ((0, 0),), ((0, 0),), ((0, 2),)]


def test_flat_units_begin_parameters_at_16_bytes() -> None:
    odd = replace(tiny_case("single").model, vocab_size=7, dim=4)
    float32 = replace(tiny_case("single").training, dtype="float32")
    root = make_plan(tiny_case("fsdp_2", float32, model=odd, wrapper="fsdp1")).flat[0]
    assert root.starts == {"tok_embeddings.weight": (0,), "norm.weight": (28,), "output.weight": (32,)}
    root = make_plan(tiny_case("fsdp_2", model=replace(odd, dim=2, n_heads=1, n_kv_heads=1), wrapper="fsdp1")).flat[0]
    assert root.starts == {"tok_embeddings.weight": (0,), "norm.weight": (14,), "output.weight": (16,)}


# ---- correct runs


@pytest.mark.parametrize("features", [{}, {"reshard_after_forward": "never"}, {"accumulation": 2}], ids=str)
@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2", "hsdp_2x2"])
@pytest.mark.parametrize("model", [tiny_case("single").model, UNEVEN], ids=["even", "uneven"])
def test_a_correct_fsdp1_run_passes_every_check(layout: str, features, model) -> None:
    if layout == "ddp_2" and "reshard_after_forward" in features:
        return
    results = judge(trial_of(tiny_case(layout, model=model, wrapper="fsdp1", **features)))
    assert {r.verdict for r in results} <= {Verdict.PASS, Verdict.NOT_APPLICABLE}, results
    assert len(results) == len(all_checks())


def test_a_correct_run_with_a_number_of_ranks_passes_every_check() -> None:
    results = judge(trial_of(tiny_case(FSDP_4, reshard_after_forward=2)))
    assert {result.verdict for result in results} <= {Verdict.PASS, Verdict.NOT_APPLICABLE}, results


def test_what_nobody_gathers_cannot_be_resharded() -> None:
    result = judged("reshard", trial_of(tiny_case("ddp_2")))
    assert (result.verdict, result.note) == (
        Verdict.NOT_APPLICABLE,
        "nothing is gathered: wrapper ddp shards nothing",
    )


# ---- mistakes


def details(trial: Trial) -> dict[str, object]:
    """What of the request is another."""
    found = diagnose(trial, judge(trial))
    assert found is not None and len(found.causes) == 1 and cause_of(found)
    return dict(found.causes[0].details)


def test_a_unit_that_stays_gathered_is_named() -> None:
    requested, ran = tiny_case("fsdp_2"), tiny_case("fsdp_2", reshard_after_forward="never")
    trial = trial_of(requested, ran)
    assert first_finding(trial) == like(
        0, "freed", "gathered", step=1, name="tok_embeddings.weight", quantity="memory after forward"
    )
    assert details(trial) == {"reshard_after_forward": "never"}


def test_a_last_unit_that_is_freed_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"), tiny_case("fsdp_2", reshard_after_forward="always"))
    assert first_finding(trial) == like(
        0, "gathered", "freed", step=1, name="norm.weight", quantity="memory after forward"
    )


def test_a_number_that_is_ignored_is_named() -> None:
    trial = trial_of(tiny_case(FSDP_4, reshard_after_forward=2), tiny_case(FSDP_4, reshard_after_forward="always"))
    assert first_finding(trial) == like(
        0, "sharded over 2 ranks", "freed", step=1, name="tok_embeddings.weight", quantity="memory after forward"
    )
    assert details(trial) == {"reshard_after_forward": "always"}


def test_memory_that_no_parameter_shows_is_a_finding() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    record = trial.ranks[1].steps[0].after_forward[0]
    trial = after_forward(trial, 1, storage=record.storage + 8)
    assert first_finding(trial) == like(
        1, record.storage, record.storage + 8, step=1, quantity="memory of all parameters after forward", unit="bytes"
    )


def test_padding_may_be_kept_and_no_more() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=UNEVEN))
    record, padding = trial.ranks[0].steps[0].after_forward[0], trial.plan.padding_after_forward[0]
    assert padding > 0
    assert judged("reshard", after_forward(trial, 0, storage=record.storage + padding)).verdict == Verdict.PASS
    assert judged("reshard", after_forward(trial, 0, storage=record.storage + padding + 8)).verdict == Verdict.FAIL


def test_what_is_freed_on_one_rank_only_is_named_with_the_rank() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    other = trial_of(tiny_case("fsdp_2", reshard_after_forward="always"))
    record: AfterForward = other.ranks[1].steps[0].after_forward[0]
    trial = after_forward(trial, 1, bytes=record.bytes, storage=record.storage)
    assert first_finding(trial) == like(
        1, "gathered", "freed", step=1, name="norm.weight", quantity="memory after forward"
    )
    found = diagnose(trial, judge(trial))
    assert found is not None and found.causes[0].finding == first_finding(trial)


def test_a_gathering_that_is_missing_in_backward_is_a_finding() -> None:
    def without(trial, rank: int):
        return with_collectives(trial, rank, lambda c: () if (c.op, c.phase) == ("all_gather", "backward") else (c,))

    trial = with_every_rank(trial_of(tiny_case("fsdp_2")), without)
    assert first_finding(trial) == like(
        0,
        1600,
        0,
        step=1,
        name="all_gather",
        unit="bytes",
        quantity="again",
        phase="backward",
        axis="dp_shard",
        group=(0, 1),
    )


def test_a_rank_that_says_nothing_does_not_pass() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_step(trial, 1, 2, after_forward=())
    assert first_finding(trial) == like(
        1, "a record of it", None, step=2, name="tok_embeddings.weight", quantity="memory after forward"
    )


def test_fsdp1_that_ran_over_all_ranks_is_named() -> None:
    requested, ran = tiny_case("hsdp_2x2", wrapper="fsdp1"), tiny_case(FSDP_4, wrapper="fsdp1")
    trial = trial_of(requested, ran)
    assert cause_of(diagnose(trial, judge(trial))).startswith("HSDP ran as FSDP: parameters are sharded over 4 ranks")


def test_another_wrapper_than_requested_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"), tiny_case("fsdp_2", wrapper="fsdp1"))
    assert details(trial) == {"wrapper": "fsdp1"}


def test_offloading_that_no_wrapper_knows_of_is_a_finding() -> None:
    trial = trial_of(tiny_case("fsdp_2", cpu_offload=True), tiny_case("fsdp_2"))
    assert judged("features", trial).findings[0] == like(0, ("on",), ("off",), quantity="CPU offload")


def in_buckets(trial, rank: int, size: int):
    """A rank's reductions over the replicas, in pieces of at most `size` bytes."""

    def pieces(call):
        if (call.op, call.phase) != ("all_reduce", "backward"):
            return (call,)
        return [replace(call, bytes=min(size, call.bytes - start)) for start in range(0, call.bytes, size)]

    return with_collectives(trial, rank, pieces)


def test_buckets_are_smaller_than_their_size_and_one_parameter_more() -> None:
    trial = trial_of(tiny_case("ddp_2", bucket_mb=128 / 2**20))  # and the largest parameter has 256 bytes
    whole = like(0, Limit(least=1, most=383), 1880, quantity="largest bucket reduced", unit="bytes")
    assert judged("features", trial).findings[0] == whole
    found = diagnose(trial, judge(trial))
    assert found is not None
    told = found.causes[0].finding
    assert told is not None and (told.ranks, told.observed, told.quantity) == ((0, 1), 1880, "largest bucket reduced")
    for size, verdict in ((376, Verdict.PASS), (384, Verdict.FAIL)):
        pieces = with_every_rank(trial, lambda trial, rank, size=size: in_buckets(trial, rank, size))
        assert judged("features", pieces).verdict == verdict
