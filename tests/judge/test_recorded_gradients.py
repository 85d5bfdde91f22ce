"""A recorded job in which parameters have no gradient: what its traffic should have been."""

from __future__ import annotations

from dataclasses import replace

from literal import LAYOUTS, tiny_case, trial_of
from test_recorded import record_of, verdicts

from harness.evidence.recording import RecordedStep
from harness.judge import recorded
from harness.judge.result import Verdict


def test_where_parameters_have_no_gradient_nothing_is_said_of_traffic() -> None:
    ran, dims = trial_of(tiny_case("fsdp_2")), LAYOUTS["fsdp_2"]
    frozen = RecordedStep(1, {}, ungraded=("norm.weight",))
    records = {rank: replace(record_of(e), steps=(frozen,)) for rank, e in ran.ranks.items()}
    assert "traffic" not in verdicts(recorded.trial_of(records, dims, "run", 2))


def test_where_optimizers_never_find_a_gradient_of_what_they_step_on_all_should_have_been_reduced() -> None:
    """As in a loop that never has FSDP2 reduce. One that is frozen may well have none, and no optimizer has it."""
    ran, dims = trial_of(tiny_case("fsdp_2")), LAYOUTS["fsdp_2"]
    every = tuple(tensor.fqn for tensor in ran.ranks[0].parameters)
    for stepped, judged in ((every, True), (every[1:], False)):
        records = {}
        for rank, evidence in ran.ranks.items():
            steps = tuple(RecordedStep(step.step, {}, ungraded=every) for step in evidence.steps)
            unreduced = tuple(call for call in evidence.collectives if call.op != "reduce_scatter")
            left = record_of(replace(evidence, collectives=unreduced), stepped=stepped)
            records[rank] = replace(left, steps=steps)
        found = verdicts(recorded.trial_of(records, dims, "run", 2))
        assert found.get("traffic") == (Verdict.FAIL if judged else None)
