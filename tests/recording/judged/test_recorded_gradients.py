"""The traffic of a recorded job: of gradients that are there, and where parameters have none."""

from __future__ import annotations

from dataclasses import replace

from literal import LAYOUTS, tiny_case, trial_of
from test_recorded import judged, record_of, recorded_trial, verdicts

from harness.core.evidence.recording import RecordedStep
from harness.core.judge.result import Verdict
from harness.recording.judged import recorded


def test_where_parameters_have_no_gradient_nothing_is_said_of_traffic() -> None:
    ran, dims = trial_of(tiny_case("fsdp_2")), LAYOUTS["fsdp_2"]
    frozen = RecordedStep(1, {}, ungraded=("norm.weight",))
    records = {rank: replace(record_of(e), steps=(frozen,)) for rank, e in ran.ranks.items()}
    assert "traffic" not in verdicts(recorded.trial_of(records, dims, "run", 2))


def test_where_optimizers_never_find_a_gradient_of_what_they_step_on_all_should_have_been_reduced() -> None:
    """As in a loop that never has FSDP2 reduce. One that is frozen may well have none, and no optimizer has it."""
    ran, dims = trial_of(tiny_case("fsdp_2")), LAYOUTS["fsdp_2"]
    every = tuple(tensor.fqn for tensor in ran.ranks[0].parameters)
    for stepped, wanted in ((every, Verdict.FAIL), (every[1:], None)):
        records = {}
        for rank, evidence in ran.ranks.items():
            steps = tuple(RecordedStep(step.step, {}, ungraded=every) for step in evidence.steps)
            unreduced = tuple(call for call in evidence.collectives if call.op != "reduce_scatter")
            left = record_of(replace(evidence, collectives=unreduced), stepped=stepped)
            records[rank] = replace(left, steps=steps)
        found = verdicts(recorded.trial_of(records, dims, "run", 2))
        assert found.get("traffic") == wanted


def test_a_gradient_that_is_not_reduced_is_missed() -> None:
    ran = trial_of(tiny_case("hsdp_2x2"))
    less = {
        rank: replace(e, collectives=tuple(c for c in e.collectives if c.op != "all_reduce" or c.phase != "backward"))
        for rank, e in ran.ranks.items()
    }
    ran = replace(ran, run=replace(ran.run, ranks=less))
    found = verdicts(recorded_trial(ran, LAYOUTS["hsdp_2x2"]))
    assert {name for name, verdict in found.items() if verdict != Verdict.PASS} == {"traffic"}


def test_gradients_that_a_communication_hook_reduces_in_fewer_bytes_are_the_trainers_choice() -> None:
    ran = trial_of(tiny_case("ddp_2"))
    results = {}
    for hook in ("", "powerSGD_hook"):
        fewer = {
            rank: replace(
                e,
                structure={name: replace(one, comm_hook=hook) for name, one in e.structure.items()},
                collectives=tuple(replace(c, bytes=c.bytes // 2) for c in e.collectives),
            )
            for rank, e in ran.ranks.items()
        }
        trial = recorded_trial(replace(ran, run=replace(ran.run, ranks=fewer)), LAYOUTS["ddp_2"])
        results[hook] = {one.check: one for one in judged(trial)}["traffic"]
    assert results[""].verdict == Verdict.FAIL
    assert results["powerSGD_hook"].verdict == Verdict.NOT_APPLICABLE
    assert "communication hook powerSGD_hook" in results["powerSGD_hook"].note


def test_collectives_beside_those_of_parameters_are_the_trainers_own() -> None:
    ran = trial_of(tiny_case("ddp_2"))
    more = {
        rank: replace(e, collectives=(*e.collectives, replace(e.collectives[0], op="all_gather", phase="forward")))
        for rank, e in ran.ranks.items()
    }
    ran = replace(ran, run=replace(ran.run, ranks=more))
    assert verdicts(recorded_trial(ran, LAYOUTS["ddp_2"]))["traffic"] == Verdict.PASS
