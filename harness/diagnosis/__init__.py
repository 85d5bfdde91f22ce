"""Broken laws -> causes that are proven, in the field's words, and the evidence for them in a few lines.

Each file knows one subject. It proposes hypotheses, which the engine puts to the test: under the assumption the stored evidence
is judged again, the laws that are broken hold, and none that held breaks. And it states facts, of which a law has seen all
there is to know. What neither explains is said as that, with the place where things first go wrong.

A diagnosis is a service, the verdict is the laws'. So what raises is skipped, and the evidence says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.checks import all_checks, judge, run_check
from harness.diagnosis.backward import wrong_backward
from harness.diagnosis.checkpoint import wrong_checkpoint
from harness.diagnosis.clipping import wrong_clipping
from harness.diagnosis.contributions import unequal_contributions
from harness.diagnosis.costs import (
    keys_stay,
    memory_kept,
    not_deterministic,
    of_no_plan,
    other_settings,
    out_of_order,
    ranks_wait,
    reference_moved,
    replicas_drift,
)
from harness.diagnosis.data import other_samples, seen_samples
from harness.diagnosis.engine import Explanation, explain
from harness.diagnosis.exchanged import exchanged_tensors
from harness.diagnosis.features import odd_traces, other_actions, other_features, other_masks
from harness.diagnosis.forward import different_losses, masks_drawn_again, other_forward, rounding
from harness.diagnosis.gradient_flow import other_gradient_flows
from harness.diagnosis.hypothesis import Facts, Suspects
from harness.diagnosis.layout import other_layouts, other_slices, reduction_missing
from harness.diagnosis.localise import KIND, localise
from harness.diagnosis.not_zeroed import gradients_not_zeroed
from harness.diagnosis.optimizer import not_finite, wrong_optimizer
from harness.diagnosis.positions import other_positions, seen_positions
from harness.diagnosis.processes import incomplete, not_trained, process_failed
from harness.diagnosis.reports import odd_reports, wrong_reports
from harness.diagnosis.resume import resumed_otherwise, seen_resumed
from harness.diagnosis.scaled import scaled_gradients
from harness.diagnosis.units import kept_otherwise, left_by_evaluation, other_units, units_disagree
from harness.diagnosis.updates import changed_weights, seen_changed
from harness.diagnosis.weights import other_weights, seen_weights
from harness.diagnosis.words import Broken, finding_line
from harness.judge.result import Cause, Diagnosis, Lines, Result, Verdict, one_cause
from harness.judge.trial import Trial, launch_label

SUSPECTS: tuple[Suspects, ...] = (
    not_trained,
    other_layouts,
    other_features,
    other_units,
    resumed_otherwise,
    changed_weights,
    wrong_optimizer,
    wrong_clipping,
    wrong_reports,
    other_weights,
    other_samples,
    other_positions,
    scaled_gradients,
    gradients_not_zeroed,
    unequal_contributions,
    exchanged_tensors,
    other_gradient_flows,
    masks_drawn_again,
    other_forward,
)
FACTS: tuple[Facts, ...] = (
    seen_resumed,
    process_failed,
    incomplete,
    wrong_checkpoint,
    not_finite,
    seen_weights,
    seen_samples,
    seen_positions,
    seen_changed,
    rounding,
    different_losses,
    other_slices,
    reduction_missing,
    wrong_backward,
    odd_reports,
    left_by_evaluation,
    kept_otherwise,
    units_disagree,
    keys_stay,
    odd_traces,
    other_actions,
    other_masks,
    other_settings,
    out_of_order,
    memory_kept,
    ranks_wait,
    of_no_plan,
    replicas_drift,
    not_deterministic,
    reference_moved,
)


def diagnose(
    trial: Trial, results: Sequence[Result], suspects: Sequence[Suspects] = SUSPECTS, facts: Sequence[Facts] = FACTS
) -> Diagnosis | None:
    """None if no law is broken. Never raises. Of a case that resumes the first launch that breaks a law is diagnosed, unless
    that one only keeps too much, which does not explain what is resumed wrongly."""
    failed = [result for result in results if result.verdict is Verdict.FAIL]
    if (
        failed
        and trial.saved
        and (earlier := diagnose(trial.saved[-1], before := judge(trial.saved[-1]), suspects, facts))
    ):
        only_keeps = {result.check for result in before if result.verdict is Verdict.FAIL} == {"memory"}
        if not (only_keeps and "resume" in {result.check for result in failed}):
            return dataclasses.replace(earlier, evidence=(*earlier.evidence, *_broken_later(trial, failed, before)))
    broken = {result.check: result for result in failed if result.findings}
    if not broken:
        return one_cause(f"{failed[0].check} is broken and does not say where") if failed else None
    found = _told(trial, results, explain(trial, results, suspects, facts))
    if trial.case.last_step is not None:
        found = dataclasses.replace(found, launch=launch_label(trial))
    return dataclasses.replace(found, evidence=(*found.evidence, *_what_weaker_tests_say(results)))


def _broken_later(trial: Trial, failed: Sequence[Result], before: Sequence[Result]) -> Lines:
    """Laws that the launch after the one that is diagnosed breaks, and that one does not: maybe another mistake."""
    earlier = {result.check for result in before if result.verdict is Verdict.FAIL}
    others = [result for result in failed if result.check not in earlier and result.findings]
    lines = [finding_line(result.check, result) for result in others]
    where = launch_label(trial) or "the last launch: "
    return tuple(("also broken", f"{where}{law}: {text}") for law, text in lines)


def _told(trial: Trial, results: Sequence[Result], found: Explanation) -> Diagnosis:
    """What is proven and what was seen; and of what neither explains, where it first goes wrong."""
    seen = {fact.cause for fact in found.facts}
    first = sorted(found.proofs[0].hypotheses if found.proofs else (), key=lambda one: one.cause not in seen)
    facts = sorted(found.facts, key=lambda fact: "completed" not in fact.laws)
    before = {
        fact.cause: fact.lines for fact in facts if "completed" in fact.laws
    }  # what did not run explains the most
    said = before | {one.cause: one.lines for one in first} | {fact.cause: fact.lines for fact in facts}
    lines = [line for of_one in said.values() for line in of_one]
    lines += [("or as well", "; ".join(one.cause.text for one in proof.hypotheses)) for proof in found.proofs[1:]]
    left = {result.check: result for result in results if result.check in found.left and result.findings}
    if left:
        assumed = found.proofs[0].assumed if found.proofs else trial
        if found.proofs:
            again = {name: run_check(name, all_checks()[name].check, assumed) for name in left}
            left = {name: result for name, result in again.items() if result.findings} or left
        held = frozenset(result.check for result in results if result.verdict is Verdict.PASS)
        place, more = _located(assumed, left, found.tried, held)
        lines += [("not explained", place.text), *more] if said else more
        said = said or {place: ()}
    lines += [("not tried", text) for text in found.raised]
    return Diagnosis(tuple(said), (*_assuming(found, results), *lines))


def _located(trial: Trial, left: Broken, tried: int, held: frozenset[str]) -> tuple[Cause, Lines]:
    """The first finding as it is, where even that raises."""
    try:
        return localise(trial, left, tried, held)
    except Exception as error:
        return Cause(KIND, ": ".join(finding_line(*next(iter(left.items()))))), (("not located", repr(error)),)


def _assuming(found: Explanation, results: Sequence[Result]) -> Lines:
    if not found.proofs:
        return ()
    broken, proven = sum(result.verdict is Verdict.FAIL for result in results), found.proofs[0].explained
    failed = {result.check for result in results if result.verdict is Verdict.FAIL} - set(proven)
    seen = dict.fromkeys(law for fact in found.facts for law in fact.laws if law in failed)
    rest = f"; {', '.join(seen)} saw it" * bool(seen)
    return (("assuming this", f"{len(proven)} of {broken} broken laws hold, and none that held breaks{rest}"),)


def _what_weaker_tests_say(results: Sequence[Result]) -> Lines:
    """The laws that pass although the trainer is wrong: what weaker tests would have said."""
    passing = {result.check: result for result in results if result.verdict is Verdict.PASS}
    broken = {result.check for result in results if result.verdict is Verdict.FAIL}
    lines = []
    numbers = [name for name in ("loss", "gradients") if name in passing]
    if numbers and broken != {"golden"}:
        worst = max((passing[name].note.removeprefix("largest difference ") for name in numbers), key=float)
        blind = ": a loss-curve test passes here" if "loss" in passing else ""
        close = f"within {worst}" if float(worst) else "exactly"
        lines.append((", ".join(numbers), f"equal to the reference {close}{blind}"))
    if "process_groups" in passing and broken & {"shard_contents", "placements", "traffic"}:
        lines.append(("groups", "every group of the plan exists: a listing of process groups passes here"))
    if "golden" in broken and len(broken) > 1:
        lines.append(("golden", "the reference moved as well: model, data, recipe or torch changed"))
    return tuple(lines)


__all__ = ["FACTS", "SUSPECTS", "Diagnosis", "diagnose"]
