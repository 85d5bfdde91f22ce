"""Modules that FSDP or TP left out, and rows dealt out in strides: what is said, and what is assumed. Literal evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import EMBEDDING, NORM, broken, dims
from literal import TINY, judged, tiny_case, trial_of, with_parameter

from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.layout import other_layouts
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.plan.memory import parameter_bytes
from harness.plan.plan import Kept
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims
from harness.spec.measured import Measured

WIDE = replace(TINY, dim=16, vocab_size=16, ffn_dim=32)
LAST = "output.weight"
UP = "layers.0.feed_forward.w1.weight"
DOWN = "layers.0.feed_forward.w2.weight"  # which TP cuts into columns


def right(of: ParallelDims, **changes: Any) -> Trial:
    return trial_of(tiny_case(of, model=WIDE, **changes))


def with_rows(trial: Trial, fqn: str, rows: Mapping[int, tuple[int, int]]) -> Trial:
    """By rank, from which row of a parameter to which it holds."""
    for rank, (start, stop) in rows.items():
        trial = with_parameter(trial, rank, fqn, value=trial.reference.weights[fqn][start:stop])
    return trial


def proposed(trial: Trial) -> list[Hypothesis]:
    return list(other_layouts(trial, broken("shard_contents")))


def told(trial: Trial) -> list[tuple[str, str, int, bool, tuple[tuple[str, str], ...]]]:
    return [(one.cause.kind, cause_line(one.cause), one.fitted, one.renumbers, one.lines) for one in proposed(trial)]


def in_stages(trial: Trial, first: Iterable[int], fqns: set[str]) -> Trial:
    """As if these ranks were a stage of a pipeline that has all but these parameters, and all others the one that has them."""
    plan, first = trial.plan, {*first}
    own = {rank: {f for f in held if (f in fqns) != (rank in first)} for rank, held in plan.slices.items()}
    ranks = {
        rank: replace(evidence, parameters=tuple(t for t in evidence.parameters if t.fqn in own[rank]))
        for rank, evidence in trial.ranks.items()
    }
    changes = {
        key: {rank: {f: v for f, v in held.items() if f in own[rank]} for rank, held in getattr(plan, key).items()}
        for key in ("slices", "after_forward")
    }
    return replace(trial, run=replace(trial.run, ranks=ranks), plan=replace(plan, **changes))


# ---- left out


def without_fsdp(fqns: tuple[str, ...] = (NORM,)) -> Trial:
    trial = right(dims(shard=2))
    for fqn in fqns:
        trial = with_rows(trial, fqn, dict.fromkeys((0, 1), (0, 16)))
    return trial


def test_what_fsdp_left_out_is_told_with_its_number_and_the_first_of_it() -> None:
    whole = "every rank of a group holds them whole"
    contents = "norm.weight on rank 0: expected 1/2 of dim 0 [0:8], observed all"
    text = f"FSDP is not applied to 1 of 12 parameters (norm.weight): {whole}"
    assert told(without_fsdp()) == [
        ("left out of a wrapper", text, 2, False, (("contents", f"1 of 12 parameters; {contents}"),))
    ]
    ((_, several, *_),) = told(without_fsdp((NORM, LAST)))
    assert several == f"FSDP is not applied to 2 of 12 parameters (norm.weight, output.weight): {whole}"


def test_what_fsdp_left_out_is_gathered_by_nobody_and_kept_whole_by_each() -> None:
    trial = without_fsdp()
    trial = replace(trial, plan=replace(trial.plan, traits=replace(trial.traits, measured=Measured({}, torch="2.9.0"))))
    (one,) = proposed(trial)
    assert one.assume is not None
    plan, before = one.assume(trial).plan, trial.plan
    assert (plan.torch, plan.observed, plan.traits) == ("2.9.0", {}, before.traits)
    for rank in (0, 1):
        assert plan.slices[rank] == before.slices[rank] | {NORM: ((0, 16),)}
        assert plan.after_forward[rank] == before.after_forward[rank] | {NORM: Kept(2, 16 * 8)}
        assert plan.parameter_bytes[rank] == tuple(size + 8 * 8 for size in before.parameter_bytes[rank])
        assert [fqn for unit in plan.units[rank] for fqn in unit] == [
            fqn for unit in before.units[rank] for fqn in unit if fqn != NORM
        ]
        gathered = [
            sum(flow.bytes for flow in of.flows[rank] if (flow.op, flow.phase) == ("all_gather", "forward"))
            for of in (before, plan)
        ]
        assert gathered[0] - gathered[1] == 16 * 8
    assert judged("shard_contents", one.assume(trial)).verdict is Verdict.PASS


def test_under_another_wrapper_than_fsdp2_what_fsdp_left_out_stays_in_its_unit() -> None:
    trial = right(dims(shard=2), wrapper="fsdp1")
    trial = with_rows(trial, NORM, dict.fromkeys((0, 1), (0, 16)))
    (one,) = proposed(trial)
    assert one.assume is not None and cause_line(one.cause).startswith(
        "FSDP is not applied to 1 of 12 parameters (norm.weight)"
    )
    plan = one.assume(trial).plan
    assert plan.units == trial.plan.units and plan.flows == trial.plan.flows
    for rank, held in trial.plan.slices.items():
        assert plan.slices[rank] == held | {NORM: ((0, 16),)}
        whole = parameter_bytes(trial.case, trial.traits, rank, plan.slices[rank], trial.plan.flat)
        assert (
            plan.parameter_bytes[rank]
            == whole
            != parameter_bytes(trial.case, trial.traits, rank, plan.slices[rank], ())
        )


@pytest.mark.parametrize("staged", [True, False])
def test_what_tp_left_out_is_held_whole_by_the_ranks_of_its_stage(staged: bool) -> None:
    trial = with_rows(right(dims(2, tp=2)), LAST, dict.fromkeys(range(4), (0, 16)))
    if staged:
        trial = in_stages(trial, (0, 1), {LAST})
    (one,) = proposed(trial)
    whole = "every rank of a group holds them whole"
    assert cause_line(one.cause) == f"TP is not applied to 1 of 12 parameters (output.weight): {whole}"
    assert (one.cause.kind, one.fitted) == ("left out of a wrapper", 2) and one.assume is not None
    plan = one.assume(trial).plan
    of_last = {LAST: ((0, 16), (0, 16))}
    for rank, held in trial.plan.slices.items():
        assert plan.slices[rank] == (held | of_last if LAST in held else held)
        more = 16 * 8 * 8 * (LAST in held)
        assert (
            plan.parameter_bytes[rank][0] == sum(8 * int(np.prod([b - a for a, b in s])) for s in held.values()) + more
        )
    assert plan.units == trial.plan.units


def test_another_layout_of_some_parameters_only_is_told_by_what_differs() -> None:
    trial, quarters = right(dims(2, 2)), {rank: (4 * rank, 4 * rank + 4) for rank in range(4)}
    trial = with_rows(with_rows(trial, LAST, quarters), EMBEDDING, quarters)
    differs = "HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times"
    where = "2 of 12 parameters (tok_embeddings.weight, output.weight)"
    contents = "tok_embeddings.weight on rank 0: expected 1/2 of dim 0 [0:8], observed 1/4 of dim 0 [0:4]"
    text = f"another layout is applied to {where} than to all others: {differs}"
    assert told(trial) == [
        ("left out of a wrapper", text, 2, False, (("contents", f"2 of 12 parameters; {contents}"),))
    ]
    (one,) = proposed(trial)
    assert one.assume is not None
    plan, before = one.assume(trial).plan, trial.plan
    assert plan.units == before.units and plan.flows == before.flows
    for rank, (start, stop) in quarters.items():
        cut = ((start, stop), (0, 16))
        assert plan.slices[rank] == before.slices[rank] | {EMBEDDING: cut, LAST: cut}
        assert before.after_forward[rank][LAST].degree == 1  # it stays whole
        assert plan.after_forward[rank] == before.after_forward[rank] | {EMBEDDING: Kept(2, 4 * 16 * 8)}


# ---- strided shards

STRIDED = {rank: (4 * rank, 4 * rank + 4) for rank in range(4)}  # rank = 2 * dp_shard + tp


@pytest.mark.parametrize("staged", [True, False])
def test_rows_dealt_out_in_strides_are_told_and_what_tp_ranks_gather_is_assumed_to_be_the_weights(staged: bool) -> None:
    trial = right(dims(2, 2, 2) if staged else dims(1, 2, 2))
    trial = with_rows(trial, LAST, STRIDED | {rank + 4: rows for rank, rows in STRIDED.items() if staged})
    if staged:
        trial = in_stages(trial, range(4), {LAST})
    one = proposed(trial)[0]
    text = "1 of 12 parameters (output.weight) are cut by dp_shard first and by tp inside, requested tp first (strided shards)"
    contents = f"output.weight on rank {5 if staged else 1}: expected 1/4 of dim 0 [8:12], observed 1/4 of dim 0 [4:8]"
    assert (one.cause.kind, cause_line(one.cause), one.fitted) == ("strided shards", text, 1)
    assert one.lines == (("contents", f"1 of 12 parameters; {contents}"),) and one.assume is not None
    before, after = trial.reference.weights, one.assume(trial).reference.weights
    assert np.array_equal(after[LAST], before[LAST][[*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]])
    assert all(np.array_equal(after[fqn], before[fqn]) for fqn in before if fqn != LAST)
    assert judged("shard_contents", one.assume(trial)).verdict is Verdict.PASS


def test_rows_are_not_in_strides_where_one_rank_holds_others_or_none_or_a_matrix_is_cut_into_columns() -> None:
    strided = with_rows(right(dims(1, 2, 2)), LAST, STRIDED)
    kinds = [one.cause.kind for one in proposed(strided)]
    assert kinds == ["strided shards", "left out of a wrapper"]
    assert "strided shards" not in [one.cause.kind for one in proposed(with_rows(strided, LAST, {3: (11, 15)}))]
    nowhere = with_parameter(strided, 3, LAST, value=np.full((4, 16), 7.0))
    assert proposed(nowhere) == []
    both = with_rows(strided, UP, {rank: (8 * rank, 8 * rank + 8) for rank in range(4)})
    assert [cause_line(one.cause).partition(" are cut")[0] for one in proposed(both)][:1] == [
        f"2 of 12 parameters ({UP}, output.weight)"
    ]
    columns = {rank: strided.reference.weights[DOWN][4 * rank : 4 * rank + 4] for rank in range(4)}
    for rank, value in columns.items():
        both = with_parameter(both, rank, DOWN, value=value)
    assert "strided shards" not in [one.cause.kind for one in proposed(both)]


def test_over_cp_a_layout_that_cuts_some_parameters_is_not_told_as_none() -> None:
    trial = right(ParallelDims(dp_replicate=2, cp=2))
    trial = with_rows(trial, LAST, {rank: (4 * rank, 4 * rank + 4) for rank in range(4)})
    differs = (
        "HSDP ran as FSDP: parameters are sharded over 4 ranks along dp_shard x cp, requested 2, replicated 2 times"
    )
    text = f"another layout is applied to 1 of 12 parameters (output.weight) than to all others: {differs}"
    assert [cause_line(one.cause) for one in proposed(trial)] == [text]


def test_there_are_no_strides_over_one_axis_or_of_flattened_parameters() -> None:
    alone = with_rows(right(dims(1, 4)), LAST, {0: (0, 4), 1: (8, 12), 2: (4, 8), 3: (12, 16)})
    assert proposed(alone) == []
    flat = right(dims(1, 2, 2), wrapper="fsdp1")
    flat = with_rows(flat, LAST, {rank: (64 * rank, 64 * rank + 64) for rank in range(4)})
    assert flat.plan.flat and "strided shards" not in [one.cause.kind for one in proposed(flat)]
