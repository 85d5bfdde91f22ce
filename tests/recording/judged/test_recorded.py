"""A recorded job and a layout: the checks of the matrix judge it as far as they need no more, on literal evidence."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checked import like, where
from literal import LAYOUTS, tiny_case, trial_of

from harness.core.case.dims import ParallelDims
from harness.core.case.measured import MeasuredTraits
from harness.core.case.traits import TrainerTraits
from harness.core.causes import diagnose
from harness.core.causes.request import neighbours
from harness.core.checks import all_checks, placements, run_check
from harness.core.evidence.recording import RankRecord, RecordedStep
from harness.core.evidence.records import RankEvidence, TensorEvidence
from harness.core.judge.finding import Finding
from harness.core.judge.measured import claimed_cut_dims
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.report.cause_text import diagnosis_line
from harness.recording.judged import recorded

FSDP_2 = LAYOUTS["fsdp_2"]
STRUCTURE = {"completed", "collective_order", "process_groups", "placements", "traffic", "memory", "reshard"}
DIGESTS = {"exchange", "replica_agreement", "samples", "finite"}
"""Checks of what literal records have not."""
ADAMW = "AdamW(betas (0.9, 0.999), weight_decay 0.01, amsgrad False)"


def record_of(evidence: RankEvidence, **changes: Any) -> RankRecord:
    steps = tuple(RecordedStep(step.step, {}) for step in evidence.steps)
    return RankRecord(evidence, steps, optimizers=(ADAMW,), ended="ok", steps_seen=len(steps), **changes)


def recorded_trial(ran: Trial, dims: ParallelDims) -> Trial:
    """What a run left, judged as a recording by this layout."""
    records = {rank: record_of(evidence) for rank, evidence in ran.ranks.items()}
    return recorded.trial_of(records, dims, "run", len(records))


def judged(trial: Trial) -> list[Result]:
    return [run_check(name, module.check, trial) for name, module in all_checks().items()]


def verdicts(trial: Trial) -> dict[str, Verdict]:
    return {
        result.check: result.verdict
        for result in judged(trial)
        if result.verdict != Verdict.NOT_APPLICABLE and result.check not in DIGESTS
    }


@pytest.mark.parametrize("name", ["ddp_2", "fsdp_2", "hsdp_2x2"])
def test_a_correct_job_passes_every_check_that_needs_no_reference(name: str) -> None:
    found = verdicts(recorded_trial(trial_of(tiny_case(name)), LAYOUTS[name]))
    wanted = STRUCTURE - ({"reshard"} if name == "ddp_2" else set())
    assert found == dict.fromkeys(wanted, Verdict.PASS)


@pytest.mark.parametrize("wrapped", [True, False])
def test_whole_parameters_on_ranks_of_cp_are_replicas_unless_something_claims_to_shard_them(wrapped: bool) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    ranks = {rank: e if wrapped else replace(e, structure={}) for rank, e in trial.ranks.items()}
    found = verdicts(recorded_trial(replace(trial, run=replace(trial.run, ranks=ranks)), ParallelDims(cp=2)))
    wanted = STRUCTURE - {"reshard"} - (set() if wrapped else {"placements", "traffic", "memory"})
    assert found == dict.fromkeys(wanted, Verdict.PASS)


def without_claims(ran: Trial, ranks: range) -> Trial:
    """Gradients are reduced by functions of its own there."""
    bare = {rank: replace(one, structure={}) if rank in ranks else one for rank, one in ran.ranks.items()}
    return replace(ran, run=replace(ran.run, ranks=bare))


def test_replicas_that_nothing_claims_fail_no_check() -> None:
    own = without_claims(trial_of(tiny_case("ddp_2")), range(2))
    found = verdicts(recorded_trial(own, LAYOUTS["ddp_2"]))
    assert set(found.values()) == {Verdict.PASS} and "placements" not in found


def test_a_wrapper_that_one_rank_alone_lacks_is_missing() -> None:
    own = without_claims(trial_of(tiny_case("ddp_2")), range(1))
    assert verdicts(recorded_trial(own, LAYOUTS["ddp_2"]))["placements"] == Verdict.FAIL


def test_checks_that_need_a_reference_are_not_applicable_and_say_so() -> None:
    results = {one.check: one for one in judged(recorded_trial(trial_of(tiny_case("fsdp_2")), LAYOUTS["fsdp_2"]))}
    for name in ("loss", "gradients", "update", "shard_contents"):
        assert results[name].verdict == Verdict.NOT_APPLICABLE
        assert results[name].note == "needs a reference: an adapter brings it"


def test_hsdp_that_ran_as_fsdp_has_the_first_line_of_the_matrix() -> None:
    requested = tiny_case("hsdp_2x2")
    ran = trial_of(requested, tiny_case(ParallelDims(dp_shard=4)))
    trial = recorded_trial(ran, requested.dims)
    told = diagnose(trial, judged(trial), (neighbours,), ())
    of_the_matrix = diagnose(ran, judged(ran))
    assert told is not None and of_the_matrix is not None
    assert diagnosis_line(told) == diagnosis_line(of_the_matrix)
    assert diagnosis_line(told).startswith(
        "HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times"
    )


@pytest.mark.parametrize(
    ("wrapper", "tp"), [("fsdp1", 1), ("fsdp2", 2)], ids=["by FSDP1's vectors", "beside tensor parallelism"]
)
def test_hsdp_that_ran_as_fsdp_is_named_by_its_wrappers_where_slices_are_not_derived(wrapper: str, tp: int) -> None:
    requested = tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, tp=tp), wrapper=wrapper)
    right = recorded_trial(trial_of(requested), requested.dims)
    assert verdicts(right)["placements"] == Verdict.PASS
    ran = trial_of(requested, tiny_case(ParallelDims(dp_shard=4, tp=tp), wrapper=wrapper))
    trial = recorded_trial(ran, requested.dims)
    assert verdicts(trial)["placements"] == Verdict.FAIL
    told = diagnose(trial, judged(trial), (neighbours,), ())
    assert told is not None and diagnosis_line(told).startswith(
        "HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times"
    )


def test_a_job_of_fewer_ranks_than_the_layout_is_told() -> None:
    trial = recorded_trial(trial_of(tiny_case("fsdp_2")), ParallelDims(dp_shard=4))
    (completed,) = [one for one in judged(trial) if one.check == "completed"]
    assert (4, 2) in [(finding.expected, finding.observed) for finding in completed.findings]


def test_what_ddp_was_told_to_ignore_is_not_summed_and_all_the_rest_is() -> None:
    ran, fqn = trial_of(tiny_case("ddp_2")), "layers.0.attention.wq.weight"
    size = 8 * next(math.prod(t.global_shape) for t in ran.ranks[0].parameters if t.fqn == fqn)
    found = []
    for ignored, fewer in (((fqn,), size), ((fqn,), size + 8), ((), size)):
        ranks = {rank: ignoring(evidence, ignored, fewer) for rank, evidence in ran.ranks.items()}
        found.append(verdicts(recorded_trial(replace(ran, run=replace(ran.run, ranks=ranks)), LAYOUTS["ddp_2"])))
    assert [one["traffic"] for one in found] == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
    assert [one["memory"] for one in found] == [Verdict.PASS] * 3


def ignoring(evidence: RankEvidence, fqns: tuple[str, ...], fewer: int) -> RankEvidence:
    """Gradients are summed in so many bytes fewer."""
    calls = tuple(
        replace(c, bytes=c.bytes - fewer) if c.phase == "backward" and c.bytes > fewer else c
        for c in evidence.collectives
    )
    structure = {name: replace(wrapper, ignored=fqns) for name, wrapper in evidence.structure.items()}
    return replace(evidence, structure=structure, collectives=calls)


def test_experts_that_have_names_of_their_own_on_each_rank_leave_slices_open() -> None:
    ran = trial_of(tiny_case("ddp_2"))
    fqn, held = ran.ranks[1].parameters[-1].fqn, ran.ranks[1].parameters[:-1]
    for ignored in ((fqn,), ()):
        ranks = {rank: ignoring(evidence, ignored, 0) for rank, evidence in ran.ranks.items()}
        ranks[1] = replace(ranks[1], parameters=held)
        results = judged(recorded_trial(replace(ran, run=replace(ran.run, ranks=ranks)), LAYOUTS["ddp_2"]))
        (memory,) = [one for one in results if one.check == "memory"]
        assert ("parameters of their own" in memory.note) == bool(ignored)


def test_where_a_second_model_is_not_on_record_what_looks_at_parameters_is_unknown_unless_it_is_wrong() -> None:
    ran, dims, left = trial_of(tiny_case("fsdp_2")), FSDP_2, ("Critic, which has a parameter 0.weight",)
    held = ran.ranks[0].steps[1].memory
    more = changed_steps(ran, 0, memory={kind: 2 * size for kind, size in held.items()})
    records = {rank: record_of(evidence, left_out=left) for rank, evidence in more.ranks.items()}
    results = {one.check: one for one in judged(recorded.trial_of(records, dims, "run", 2))}
    unknown = {name for name, one in results.items() if one.verdict == Verdict.UNKNOWN} - DIGESTS
    assert unknown == {"memory", "traffic", "placements", "reshard"}
    assert {results[name].note for name in unknown} == {"not recorded: Critic, which has a parameter 0.weight"}
    over = {rank: replace(one, evidence=with_shards(one.evidence, ())) for rank, one in records.items()}
    assert verdicts(recorded.trial_of(over, dims, "run", 2))["placements"] == Verdict.FAIL


def test_where_the_recorder_itself_raised_nothing_that_it_saw_proves_that_a_check_holds() -> None:
    ran, told = trial_of(tiny_case("fsdp_2")), ("the recorder itself raised KeyError() in pass_begins",)
    records = {rank: record_of(evidence) for rank, evidence in ran.ranks.items()}
    records[1] = replace(records[1], failed=told)
    results = [one for one in judged(recorded.trial_of(records, FSDP_2, "run", 2)) if one.check in STRUCTURE]
    assert {one.verdict for one in results} == {Verdict.UNKNOWN}
    assert {one.note for one in results} == {f"rank 1 is not recorded to its end: {told[0]}"}
    records[0] = replace(records[0], ended="raised", error="ValueError: no such file")
    assert verdicts(recorded.trial_of(records, FSDP_2, "run", 2))["completed"] == Verdict.FAIL


def with_shards(evidence: RankEvidence, ranks: tuple[int, ...]) -> RankEvidence:
    return replace(evidence, structure={name: replace(w, shard_ranks=ranks) for name, w in evidence.structure.items()})


def cut_along_the_last_dim(evidence: RankEvidence) -> RankEvidence:
    """As FSDP2's shard_placement_fn may have it."""

    def other(tensor: TensorEvidence) -> TensorEvidence:
        parts = tensor.global_shape[0] // tensor.value.shape[0]
        *first, last = tensor.global_shape
        placements = tuple(kind.replace("Shard(0)", f"Shard({len(first)})") for kind in tensor.placements)
        return replace(tensor, placements=placements, value=np.zeros((*first, last // parts)))

    return replace(evidence, parameters=tuple(map(other, evidence.parameters)))


def test_fsdp_may_cut_along_any_dim_but_only_over_the_ranks_of_the_layout() -> None:
    requested = tiny_case("hsdp_2x2")
    found = []
    for ran in (trial_of(requested), trial_of(requested, tiny_case(ParallelDims(dp_shard=4)))):
        ranks = {rank: cut_along_the_last_dim(evidence) for rank, evidence in ran.ranks.items()}
        trial = recorded_trial(replace(ran, run=replace(ran.run, ranks=ranks)), requested.dims)
        found.append((verdicts(trial), diagnose(trial, judged(trial), (neighbours,), ())))
    (right, no_cause), (wrong, cause) = found
    assert set(right.values()) == {Verdict.PASS} and no_cause is None
    assert wrong["placements"] == Verdict.FAIL
    assert cause is not None and diagnosis_line(cause).startswith(
        "HSDP ran as FSDP: parameters are sharded over 4 ranks"
    )


def test_the_dims_that_fsdp2_cuts_are_measured_of_parameters_that_a_unit_of_its_own_has() -> None:
    evidence = cut_along_the_last_dim(trial_of(tiny_case("fsdp_2")).ranks[0])
    other = replace(evidence, structure={name: replace(w, kind="fsdp1") for name, w in evidence.structure.items()})
    cut = claimed_cut_dims([evidence])
    assert cut == {t.fqn: 1 for t in evidence.parameters if len(t.global_shape) == 2}
    assert claimed_cut_dims([other]) == {}
    case = tiny_case("fsdp_2")
    held = make_plan(case, TrainerTraits(measured=MeasuredTraits(cut_dims=cut))).slices[1]
    assert held["layers.0.feed_forward.w1.weight"] == ((0, 8), (2, 4)) and held["norm.weight"] == ((2, 4),)


def test_what_another_type_gathers_in_the_first_step_alone_sets_a_wrapper_up_and_is_no_parameter() -> None:
    """torch's replicate() compares shapes in its first forward pass, FSDP2 in float8 gathers bytes in every one."""
    ran, dims = trial_of(tiny_case("ddp_2")), LAYOUTS["ddp_2"]
    for steps, judged in (((1,), True), ((1, 2), False)):
        records = {}
        for rank, evidence in ran.ranks.items():
            first = evidence.collectives[0]
            ints = (replace(first, step=n, op="all_gather", phase="forward", dtype="int64") for n in steps)
            records[rank] = record_of(replace(evidence, collectives=(*evidence.collectives, *ints)))
        assert ("traffic" in verdicts(recorded.trial_of(records, dims, "run", 2))) is judged


def test_an_optimizer_that_steps_on_no_parameter_of_the_model_leaves_open_whether_anything_is_cut() -> None:
    ran, dims = trial_of(tiny_case("ddp_2")), LAYOUTS["fsdp_2"]
    every = tuple(tensor.fqn for tensor in ran.ranks[0].parameters)
    for ungraded, verdict in ((every, Verdict.UNKNOWN), (every[1:], Verdict.FAIL)):
        step = RecordedStep(1, {}, ungraded=ungraded)
        records = {rank: replace(record_of(replace(e, structure={})), steps=(step,)) for rank, e in ran.ranks.items()}
        assert verdicts(recorded.trial_of(records, dims, "run", 2))["placements"] == verdict


@pytest.mark.parametrize("shape", [(), (8,)])
def test_a_parameter_may_have_fewer_dims_than_the_weight_of_that_name(shape: tuple[int, ...]) -> None:
    """A learned temperature has none."""
    ran = trial_of(tiny_case("ddp_2"))
    ranks = {rank: with_shape(one, "layers.0.attention.wo.weight", shape) for rank, one in ran.ranks.items()}
    found = verdicts(recorded_trial(replace(ran, run=replace(ran.run, ranks=ranks)), LAYOUTS["ddp_2"]))
    assert found["placements"] == Verdict.PASS and Verdict.UNKNOWN not in found.values()


def with_shape(evidence: RankEvidence, fqn: str, shape: tuple[int, ...]) -> RankEvidence:
    changes = {"global_shape": shape, "value": np.zeros(shape)}
    parameters = (replace(each, **changes) if each.fqn == fqn else each for each in evidence.parameters)
    return replace(evidence, parameters=tuple(parameters))


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2"])
def test_parameters_without_elements_prove_no_layout(layout: str) -> None:
    ran = without_claims(trial_of(tiny_case("ddp_2")), range(2))
    freed = dict(ran.ranks)
    for rank, fqn in itertools.product(freed, [tensor.fqn for tensor in ran.ranks[0].parameters]):
        freed[rank] = with_shape(freed[rank], fqn, (0,))
    results = judged(recorded_trial(replace(ran, run=replace(ran.run, ranks=freed)), LAYOUTS[layout]))
    (told,) = (result for result in results if result.check == "placements")
    assert told.verdict == Verdict.UNKNOWN
    assert told.note.startswith("parameters have no elements before the first pass, as under ZeRO-3")


def test_tensor_parallel_slices_are_not_derived_and_wrappers_are_judged_all_the_same() -> None:
    found = verdicts(recorded_trial(trial_of(tiny_case("fsdp_2_tp_2")), LAYOUTS["fsdp_2_tp_2"]))
    assert found == dict.fromkeys(("completed", "collective_order", "process_groups", "placements"), Verdict.PASS)


def test_stages_of_a_pipeline_have_units_of_their_own() -> None:
    trial = recorded_trial(trial_of(tiny_case("fsdp_2")), FSDP_2)
    assert trial.plan.measured_units is not None
    stages = dict(enumerate((trial.plan.measured_units[0][:1], trial.plan.measured_units[0][1:])))
    held = {rank: {fqn for unit in units for fqn in unit.parameters} for rank, units in stages.items()}
    ranks = {
        rank: replace(evidence, parameters=tuple(t for t in evidence.parameters if t.fqn in held[rank]))
        for rank, evidence in trial.ranks.items()
    }
    plan = replace(trial.plan, slices={0: {}, 1: {}}, traits=trial.traits.with_units(stages))
    assert placements.unit_disagreement_findings(replace(trial, plan=plan, run=replace(trial.run, ranks=ranks))) == []
    alike = {rank: trial.ranks[0] for rank in ranks}
    assert (
        len(placements.unit_disagreement_findings(replace(trial, plan=plan, run=replace(trial.run, ranks=alike)))) == 1
    )


def changed_steps(ran: Trial, rank: int, **changes: Any) -> Trial:
    """The same run, in which this rank left something else of its second step."""
    evidence = ran.ranks[rank]
    steps = tuple(replace(step, **changes) if step.step == 2 else step for step in evidence.steps)
    return replace(ran, run=replace(ran.run, ranks={**ran.ranks, rank: replace(evidence, steps=steps)}))


def broken(trial: Trial) -> dict[str, list[Finding]]:
    return {r.check: list(r.findings) for r in judged(trial) if r.findings}


def test_a_rank_that_holds_whole_parameters_between_steps_is_named() -> None:
    ran = trial_of(tiny_case("fsdp_2"))
    held = ran.ranks[1].steps[1].memory
    found = broken(recorded_trial(changed_steps(ran, 1, memory=held | {"parameters": 2 * held["parameters"]}), FSDP_2))
    assert found.pop("memory") == [like(1, 944, 1888, step=2, quantity="parameters", unit="bytes")]
    assert not found


def test_gradients_that_are_kept_whole_are_more_than_a_slice() -> None:
    ran = trial_of(tiny_case("fsdp_2"))
    held = ran.ranks[0].steps[1].memory
    trial = recorded_trial(changed_steps(ran, 0, memory=held | {"gradients": 2 * held["gradients"]}), FSDP_2)
    assert list(broken(trial)) == ["memory"]
    freed = recorded_trial(changed_steps(ran, 0, memory=held | {"gradients": 0}), FSDP_2)
    assert not broken(freed)


def test_a_unit_that_is_still_gathered_after_forward_is_named() -> None:
    ran = trial_of(tiny_case("fsdp_2"))
    (left,) = ran.ranks[1].steps[1].after_forward
    name = "layers.0.attention.wq.weight"
    more = replace(left, bytes=left.bytes | {name: 2 * left.bytes[name]}, storage=left.storage + left.bytes[name])
    found = broken(recorded_trial(changed_steps(ran, 1, after_forward=(more,)), FSDP_2))
    assert found.pop("reshard")[0] == like(
        1, "freed", "gathered", step=2, kind="parameter", name=name, quantity="memory after forward"
    )
    assert not found


def test_a_unit_that_is_freed_on_paper_only_is_in_memory() -> None:
    ran = trial_of(tiny_case("fsdp_2"))
    (left,) = ran.ranks[1].steps[1].after_forward
    found = broken(
        recorded_trial(changed_steps(ran, 1, after_forward=(replace(left, storage=2 * left.storage),)), FSDP_2)
    )
    assert [where(finding) for finding in found["reshard"]] == [(1, 2, "memory of all parameters after forward")]


def test_in_the_first_step_there_may_be_what_parameters_were_made_from() -> None:
    ran = trial_of(tiny_case("fsdp_2"))
    evidence = ran.ranks[1]
    first, *rest = evidence.steps
    (left,) = first.after_forward
    steps = (replace(first, after_forward=(replace(left, storage=2 * left.storage),)), *rest)
    more = replace(ran, run=replace(ran.run, ranks={**ran.ranks, 1: replace(evidence, steps=steps)}))
    assert not broken(recorded_trial(more, FSDP_2))


def test_a_parameter_that_is_cut_over_two_stages_is_no_pipeline() -> None:
    ran = without_claims(trial_of(tiny_case("fsdp_2")), range(2))
    trial = recorded_trial(ran, ParallelDims(pp=2))
    finding = run_check("placements", placements.check, trial).findings[0]
    assert (finding.rank, finding.expected, finding.observed) == (0, "on one pipeline stage", "dim 0 over [0,1]")
    whole = recorded_trial(ran, ParallelDims(tp=2))
    assert not run_check("placements", placements.check, whole).findings
