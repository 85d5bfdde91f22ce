"""Diagnosis of two recordings that are not the same training: what is proven, what is seen, or where they first differ.

The engine of causes is asked, as for cases. A suspect's hypothesis is proven if the first wrong check passes under it,
and no other check fails. A fact is what was seen directly. What neither explains is located.
"""

from __future__ import annotations

from dataclasses import replace

from harness.core.causes.engine import Explanation, explain
from harness.core.causes.hypothesis import FactsOf, Proof, SuspectsOf, facts_of_unproven
from harness.core.judge.result import EXPLAINS, Cause, Diagnosis, Line, Lines, Verdict
from harness.recording.judged.judge_same_training import Comparison
from harness.recording.judged.judge_sketched import Numbers
from harness.recording.judged.sketched_gradients import (
    changed_between_steps,
    gradients_of_other_parameters,
    gradients_of_step_before,
    located_gradients,
    no_gradients,
    not_finite,
    random_state,
    rounded_gradients,
    scaled_gradients,
    separate_factors,
    unequally_counted_passes,
    unreduced_gradients,
    zero_gradients,
)
from harness.recording.judged.sketched_inputs import (
    microbatches_repeated,
    other_initial_weights,
    other_samples,
    other_scale,
    other_setting,
    parameters_lost,
    parameters_never_stepped,
    parameters_trained_besides,
    peers_differ,
    same_samples,
    samples_lost,
    samples_of_another_step,
    samples_overlap,
)
from harness.recording.judged.sketched_resumed import other_weights, restarted_schedule, state_lost
from harness.recording.judged.sketched_steps import (
    located_step,
    not_stepped,
    other_clipping,
    other_norm,
    other_weight_decay,
)
from harness.recording.judged.two_recordings import TwoRecordings

SUSPECTS: tuple[SuspectsOf[TwoRecordings], ...] = (
    unreduced_gradients,
    scaled_gradients,
    gradients_of_step_before,
    unequally_counted_passes,
    separate_factors,
    gradients_of_other_parameters,
    state_lost,
    other_clipping,
    other_weight_decay,
)
"""Functions that propose causes, which are judged again."""
FACTS: tuple[FactsOf[TwoRecordings], ...] = (
    parameters_lost,
    parameters_never_stepped,
    other_weights,
    other_initial_weights,
    peers_differ,
    microbatches_repeated,
    same_samples,
    samples_of_another_step,
    samples_lost,
    samples_overlap,
    other_samples,
    restarted_schedule,
    other_scale,
    other_setting,
    not_finite,
    no_gradients,
    zero_gradients,
    rounded_gradients,
    changed_between_steps,
    random_state,
    other_norm,
    not_stepped,
    facts_of_unproven(state_lost),
    parameters_trained_besides,
)
"""Functions that say what was seen directly. Of those that say as much, the first one is the cause."""


def diagnose(baseline: Numbers, candidate: Numbers, comparison: Comparison) -> Diagnosis | None:
    """Return why the second recording is not the training of the first. None if no check fails.

    Hypotheses are tried only if the first failing check also fails on what both recordings have up to it; else facts
    alone count.
    """
    evidence = TwoRecordings.at_first_failure(baseline, candidate, comparison)
    if evidence is None:
        return None
    can_be_judged = evidence.result_of(evidence.first.check).verdict is Verdict.FAIL
    explanation = explain(evidence, evidence.results(), SUSPECTS if can_be_judged else (), FACTS)
    causes = _causes(evidence, explanation)
    lines = [*_lines_of_proofs(evidence, explanation), *(("not tried", text) for text in explanation.errors)]
    if explanation.end_reason:
        lines.append(("not searched further", explanation.end_reason))
    return Diagnosis(tuple(replace(cause, explains=(evidence.first.check,)) for cause in causes), tuple(lines))


def _causes(evidence: TwoRecordings, explanation: Explanation) -> list[Cause]:
    """Return the causes of the first proof, else the first fact about the first wrong check, else the place.

    Never empty.
    """
    if explanation.proofs:
        return _causes_of(explanation.proofs[0])
    facts = [fact for fact in explanation.facts if evidence.first.check in fact.checks]
    return [facts[0].cause] if facts else [_place_of(evidence)]


def _causes_of(proof: Proof[TwoRecordings]) -> list[Cause]:
    return [hypothesis.cause for hypothesis in proof.hypotheses]


def _place_of(evidence: TwoRecordings) -> Cause:
    """Return the cause "not explained" with the place: wrong gradients, else the optimizer's step."""
    return located_gradients(evidence) if evidence.first.check == "gradients" else located_step(evidence)


def _lines_of_proofs(evidence: TwoRecordings, explanation: Explanation) -> Lines:
    """Return the lines below a proven cause: what was judged under the assumption, and other causes that explain as
    much.

    Empty if nothing is proven.
    """
    if not explanation.proofs:
        return ()
    first, *others = explanation.proofs
    text = f"the failing check {evidence.first.check}: if that is assumed, it passes up to step {evidence.step}"
    lines: list[Line] = [
        (EXPLAINS, f"{text}, and no passing check fails; later checks and steps may follow, and are not judged")
    ]
    for hypothesis in first.hypotheses:
        lines += hypothesis.lines
    for proof in others:
        label = "or else"
        for cause in _causes_of(proof):
            lines.append((label, cause))
            label = "and"
    return tuple(lines)
