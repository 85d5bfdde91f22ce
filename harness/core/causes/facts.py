"""Facts: causes that a check saw itself. Nothing is assumed, and nothing is proven beyond it.

A row of the table says which findings of a check are what kind of cause, and what other checks fail because of it. The
cause is the finding: the report makes the sentence of it. A few facts are put together from more than one finding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes import declarable
from harness.core.causes.assume import assume_case, assume_recipe, assume_reference
from harness.core.causes.contributions import accumulating_change
from harness.core.causes.differences import NUMBER_CHECKS, expected_gradient
from harness.core.causes.hypothesis import NOT_TESTED, Broken, Fact, Hypothesis
from harness.core.causes.words import (
    Arrays,
    elsewhere_text,
    finding_line,
    first_finding,
    layers_or_parameters,
    rank_text,
    shorten_names,
    sort_fqns,
    traffic_lines,
    where_text,
)
from harness.core.checks import memory, settings, traffic
from harness.core.checks.completed import ENDED_AFTER_LAST_STEP, VALUE_AT_START, early_exit_text, remedy_text
from harness.core.evidence.records import AT_WORK, IN_A_RING, Exit
from harness.core.evidence.text import number_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Line, Lines
from harness.core.judge.trial import Trial
from harness.reference.config import is_trainable
from harness.reference.distance import best_fitting_factor

FindingTest = Callable[[Trial, Finding], bool]
"""(trial, finding) -> whether the finding is meant."""
MoreLines = Callable[[Trial, Finding], Lines]
"""(trial, finding) -> lines of evidence beside the finding."""
STEP_CHECKS = ("completed", "initial_weights", "checkpoint", "features", "memory", "traffic", "schedule", "resume")
"""Checks of what a parameter or a step leaves, which breaks where there is none of it."""
COUNTED_STEP_CHECKS = (
    *STEP_CHECKS,
    "samples",
    "positions",
    "grad_norm",
    "reported_loss",
    "reported_rate",
    "reported_numbers",
)
"""Checks that compare by the number of a step what more steps than requested leave."""
ALL_FAILING = ("*",)
"""All checks that fail."""


def _accepts_any(trial: Trial, finding: Finding) -> bool:
    """Return True: every finding is meant."""
    return True


def _no_lines(trial: Trial, finding: Finding) -> Lines:
    """Return no lines: nothing else is reported."""
    return ()


@dataclass(frozen=True)
class FindingRow:
    """A row of the table: findings of a check that are a cause by themselves."""

    check: str
    kind: str
    """Its name in docs/causes.md."""
    quantity: str = ""
    """The beginning of the finding's quantity; empty: of any."""
    condition: FindingTest = _accepts_any
    """Whether a finding is meant."""
    consequences: tuple[str, ...] = ()
    """Other checks that fail because of it."""
    if_numbers_right: bool = False
    """Whether it is so only where numbers are right."""
    if_all_findings: bool = False
    """Whether it is so only where all findings of the check are of it."""
    is_symptom: bool = False
    """Whether it is a cause only where there is no other."""
    more_lines: MoreLines = _no_lines
    """The lines of evidence beside the finding."""


def _declare_memory(kind: str) -> MoreLines:
    """Return a function that returns the lines which declare bytes that ranks keep or copy beyond the plan.

    The function's lines are empty if no rank does. kind: "retained" or "copied".
    """

    def lines(trial: Trial, finding: Finding) -> Lines:
        """Return the declaring lines of the ranks that keep or copy too much; empty if none do."""
        too_much = {"retained": memory.has_unaccounted_tensors, "copied": memory.excessive_copies}[kind]
        ranks = [rank for rank in trial.ranks if too_much(trial, rank)]
        return (
            declarable.declaration_and_next_finding(
                trial, "memory", declarable.allow_kept_or_copied(trial, kind, ranks)
            )
            if ranks
            else ()
        )

    return lines


def _moved_lines(trial: Trial, finding: Finding) -> Lines:
    """Return the lines of flows that were not as planned, and of the allowance for bytes moved outside of passes."""
    return (
        *traffic_lines(trial),
        *declarable.declaration_and_next_finding(trial, "traffic", declarable.allow_moved(trial, finding)),
    )


def _setting_lines(trial: Trial, finding: Finding) -> Lines:
    """Return the line of an adapter that declares a switch's value.

    Empty unless all ranks have one and the same in all steps.
    """
    observed_values = {step.settings.get(finding.name) for _, step in trial.own_steps()}
    values = observed_values.pop() if len(observed_values) == 1 else None
    if values is None or len(values) != 1:
        return ()
    return (declarable.IF_INTENDED, f'settings = {{"{finding.name}": "{values[0]}"}}'), (
        "",
        "an attribute of the adapter",
    )


def _changes_numbers(trial: Trial, finding: Finding) -> bool:
    """Return whether the finding is of a switch that changes numbers. Such a switch is reported first."""
    return finding.name in (*settings.FLOAT32, "default dtype")


def _has_more_steps(trial: Trial, finding: Finding) -> bool:
    """Return whether a rank made more steps than requested.

    False for a launch that resumes, because one that read an older checkpoint makes more, too, and `resume` reports
    that.
    """
    is_longer = isinstance(finding.observed, tuple) and len(finding.observed) > len(trial.case.steps)
    return is_longer and not trial.case.resume


FINDING_ROWS = (
    FindingRow("completed", "incomplete", "launch", consequences=ALL_FAILING),
    FindingRow("completed", "incomplete", "its own place", consequences=ALL_FAILING),
    FindingRow(
        "completed",
        "incomplete",
        condition=lambda trial, finding: finding.expected == "an evidence file",
        consequences=ALL_FAILING,
    ),
    FindingRow(
        "completed", "incomplete", "optimizer steps", condition=_has_more_steps, consequences=COUNTED_STEP_CHECKS
    ),
    FindingRow(
        "completed", "incomplete", condition=lambda trial, finding: finding.quantity != "", consequences=STEP_CHECKS
    ),
    FindingRow("checkpoint", "checkpoint"),
    FindingRow("settings", "another setting", condition=_changes_numbers, more_lines=_setting_lines),
    FindingRow("settings", "another setting", more_lines=_setting_lines),
    FindingRow("memory", "growing", "retained more"),
    FindingRow("memory", "retained", memory.UNACCOUNTED, more_lines=_declare_memory("retained")),
    FindingRow("memory", "retained graph", "autograd graphs"),
    FindingRow("memory", "copied", "copies of weights", more_lines=_declare_memory("copied")),
    FindingRow("collective_order", "collectives out of order"),
    FindingRow("replica_agreement", "replicas drift", if_numbers_right=True),
    FindingRow("determinism", "not deterministic"),
    FindingRow("traffic", "ranks wait", traffic.WITHOUT_DATA, if_all_findings=True),
    FindingRow("process_groups", "process_groups of no plan", if_numbers_right=True, is_symptom=True),
    FindingRow("traffic", "traffic of no plan", if_numbers_right=True, is_symptom=True, more_lines=_moved_lines),
    FindingRow("placements", "placements of no plan", if_numbers_right=True, is_symptom=True),
    FindingRow("memory", "memory of no plan", if_numbers_right=True, is_symptom=True),
)


def facts_of_table(trial: Trial, broken: Broken, rows: tuple[FindingRow, ...] = FINDING_ROWS) -> Iterator[Fact]:
    """Yield one fact for each row of the table that has a finding, in the table's order.

    Rows that need right numbers are left out if a check of numbers fails. A golden that fails alone gives the fact that
    the reference moved.
    """
    for row in rows:
        findings = broken[row.check].findings if row.check in broken else ()
        matching = []
        for finding in findings:
            if finding.quantity.startswith(row.quantity) and row.condition(trial, finding):
                matching.append(finding)
        if (
            not matching
            or (row.if_numbers_right and NUMBER_CHECKS & {*broken})
            or (row.if_all_findings and len(matching) < len(findings))
        ):
            continue
        follows = tuple(broken) if row.consequences == ALL_FAILING else (row.check, *row.consequences)
        cause = Cause(
            row.kind,
            "",
            hint=elsewhere_text(matching),
            finding=first_finding(matching),
            details=(("count", len(matching)),),
        )
        yield Fact(cause, follows, row.more_lines(trial, matching[0]), is_symptom=row.is_symptom)
    if {*broken} == {"golden"}:
        text = (
            "the reference moved, not the trainer: model, data, recipe or torch changed since the golden was accepted"
        )
        yield Fact(Cause("reference moved", text), ("golden",), (finding_line(broken["golden"]),))


# ---- processes


END_WORDS = {"raised": "raised", "killed": "hung", "lost": "was lost"}


def process_failed(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on the ranks that died, hung, raised or left early, with those that only waited in its lines.

    Nothing if all ranks ended well. If no rank is to blame, the fact says that the job was too slow, or that nothing
    shows a cause.
    """
    blamed = [exit for exit in trial.run.exits if exit.blamed]
    others = [exit for exit in trial.run.exits if exit.how != "ok" and not exit.blamed]
    if not blamed:
        if others:
            yield from _unblamed_facts(trial, others)
        return
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    ring = next((exit.reason for exit in blamed if exit.reason.startswith(IN_A_RING)), "")
    for exit in blamed:
        exit_without_ring = replace(exit, reason="") if ring == exit.reason else exit
        ranks_by_text[_exit_text(trial, exit_without_ring)].append(exit.rank)
    texts = []
    for how, ranks in ranks_by_text.items():
        text = how.replace("for it in", "for them in") if len(ranks) > 1 else how
        texts.append(f"{rank_text(ranks)} {text}")
    if ring:  # it is said once, first
        texts[0] = f"{ring}, then {texts[0]}"
    lines: list[Line] = []
    reason = remedy_text(blamed[0].error)
    if reason:
        lines.append(("why", reason))
    for exit in blamed[:2]:
        if exit.last_collective:
            lines.append((f"rank {exit.rank}", f"last collective {exit.last_collective}"))
    lines += _stack_lines_of_blamed(blamed)
    if others:
        lines += _waiting_lines(trial, blamed, others)
    details = (("ranks", tuple(exit.rank for exit in blamed)), ("how", blamed[0].how))
    yield Fact(Cause("a process failed", "; ".join(texts[:3]), details=details), ("completed",), tuple(lines))


def _waiting_lines(trial: Trial, blamed: list[Exit], others: list[Exit]) -> Lines:
    """Return the lines on ranks that only waited for the blamed ones.

    Where the blamed ranks ended after their last step, no record shows whether a collective was left out or is one too
    many.
    """
    waited = rank_text([exit.rank for exit in others])
    gone = rank_text([exit.rank for exit in blamed])
    line = ("not to blame", f"{waited} only waited")
    if any(exit.how != "ok" for exit in blamed):
        return (line,)
    if all(early_exit_text(trial, exit.rank) == ENDED_AFTER_LAST_STEP for exit in blamed):
        line = ("either", f"{waited} should not wait there after the last step, or {gone} left that collective out")
    return (*_stack_lines(others[0], f"rank {others[0].rank} in"), line)


def _exit_text(trial: Trial, exit: Exit) -> str:
    """Return a text of how a rank ended: by a signal, an exception, or where it left, and why."""
    ended = f"died by {exit.signal}" if exit.how == "signal" else END_WORDS.get(exit.how, exit.how)
    ended = early_exit_text(trial, exit.rank) if exit.how == "ok" else ended
    text = exit.error.removeprefix(ended).lstrip(",; ").rstrip(".")
    if exit.diverged:  # says more than what came of it
        return f"{exit.reason}, then {ended}: {text}"
    text = "; ".join(filter(None, [text, exit.reason]))
    return f"{ended}: {text}" if text else ended


def _stack_lines_of_blamed(blamed: list[Exit]) -> Lines:
    """Return the lines of the first blamed rank's stack; if two are blamed, in different places, of both."""
    pair = blamed if len(blamed) == 2 and all(exit.stack for exit in blamed) else []
    if len({exit.stack for exit in pair}) < 2:
        return _stack_lines(blamed[0])
    lines: list[Line] = []
    for exit in pair:
        lines += _stack_lines(exit, f"rank {exit.rank} in")
    return tuple(lines)


def _stack_lines(exit: Exit, label: str = "stack") -> Lines:
    """Return the first four lines of a rank's stack, the first of them with the label. Empty without a stack."""
    return tuple(("" if i else label, line.strip()) for i, line in enumerate(exit.stack.splitlines()[:4]))


def _unblamed_facts(trial: Trial, failed: list[Exit]) -> Iterator[Fact]:
    """Yield one fact on ranks that did not finish, where no rank is to blame.

    The job was too slow, messages were not delivered, or nothing shows the cause.
    """
    first = failed[0]
    ranks = rank_text([exit.rank for exit in failed])
    if AT_WORK in first.error:
        yield Fact(Cause("too slow", f"too slow: {ranks} {first.error}"), ("completed",))
        return
    text = f"{ranks} did not finish, and nothing shows which of them is the cause"
    if first.undelivered:
        text = f"{ranks} did not finish: {first.undelivered}"
    lines = [(f"rank {exit.rank}", _exit_text(trial, exit).replace("hung", "killed")) for exit in failed[:4]]
    yield Fact(Cause("a process failed", text), ("completed",), (*lines, *_stack_lines(first)))


# ---- parameters of other stages


def facts_of_other_stages(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield one fact if ranks of a pipeline hold parameters that the plan gives to others, or lack their own.

    Nothing without a pipeline, or if `completed` found no such parameter.
    """
    findings = broken["completed"].findings if "completed" in broken and trial.case.dims.pp > 1 else ()
    fqns_by_rank: dict[tuple[str, int], list[str]] = defaultdict(list)
    for finding in findings:
        if finding.quantity == VALUE_AT_START and finding.name in trial.plan.shapes:
            verb = "lack" if finding.observed is None else "hold"
            fqns_by_rank[verb, finding.ranks[0]].append(finding.name)
    ranks_by_fqns: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for (verb, rank), names in fqns_by_rank.items():
        ranks_by_fqns[verb, tuple(sort_fqns(trial, names))].append(rank)
    texts = []
    details: list[tuple[str, object]] = []
    for (verb, fqns), ranks in sorted(ranks_by_fqns.items()):
        texts.append(_holding_text(trial, verb, fqns, ranks))
        details.append((verb, (*ranks, *fqns)))
    if texts:
        numbers = NOT_TESTED if NUMBER_CHECKS & {*broken} else ()
        cause = Cause("incomplete", "; ".join(texts[:3]), details=tuple(details))
        yield Fact(cause, tuple(broken), (finding_line(broken["completed"]), *numbers))


def _holding_text(trial: Trial, verb: str, fqns: tuple[str, ...], ranks: list[int]) -> str:
    """Return a sentence that these ranks hold or lack these parameters, and which ranks the plan gives them to.

    verb: "hold" or "lack".
    """
    owners = [rank for rank, slices in trial.plan.slices.items() if fqns[0] in slices]
    ending = "s" if len(ranks) == 1 else ""
    text = f"{rank_text(ranks)} {verb}{ending} {shorten_names(layers_or_parameters(trial, fqns))}"
    if verb == "lack":
        return text
    owners_hold_it = False
    for rank in owners:
        if rank in trial.ranks and any(tensor.fqn == fqns[0] for tensor in trial.ranks[rank].parameters):
            owners_hold_it = True
    if owners_hold_it:
        return f"{text} as well, which the plan gives to {rank_text(owners)} alone"
    return f"{text}, which the plan gives to {rank_text(owners)}"


# ---- parameters that are not trained


def not_trained(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypotheses that parameters have no gradient, or that no optimizer has them, so that they do not change.

    Parameters without a gradient are in no norm. If only updates are lacking, it is also tried that their gradients add
    up, because nothing sets them to zero. Nothing unless `completed` fails.
    """
    steps = [step for _, step in trial.own_steps()]
    held_fqns = set[str]()
    for evidence in trial.ranks.values():
        held_fqns.update(tensor.fqn for tensor in evidence.parameters)
    trained = {fqn for fqn in held_fqns if is_trainable(trial.case.training, fqn)}
    in_gradients = set[str]()
    in_updates = set[str]()
    for step in steps:
        in_gradients.update(step.gradients)
        in_updates.update(step.parameters)
    without_gradient = trained - in_gradients
    untrained = (trained - in_updates) | without_gradient
    if "completed" not in broken or not steps or not untrained or trained - set(trial.plan.shapes):
        return

    def assume(trial: Trial, gradients: Callable[[int, Arrays], Arrays]) -> Trial:
        as_they_were = {fqn: trial.reference.weights[fqn] for fqn in untrained}
        return assume_reference(trial, gradients=gradients, left=lambda step, parameters: parameters | as_they_were)

    def zero_gradients(step: int, gradients: Arrays) -> Arrays:
        return gradients | {fqn: np.zeros_like(gradients[fqn]) for fqn in without_gradient}

    names = tuple(sort_fqns(trial, untrained))
    text = shorten_names(names) + (
        " without a gradient in every step" if without_gradient else " without an update in every step"
    )
    details = (("parameters", names), ("gradient", not without_gradient))
    yield Hypothesis(Cause("incomplete", text, details=details), partial(assume, gradients=zero_gradients))
    if not without_gradient:
        text += "; nothing sets the gradients to zero either, so no optimizer has them"
        accumulated = accumulating_change([*trial.case.steps][1:], sorted(untrained), trial.case.training.max_norm)
        yield Hypothesis(Cause("incomplete", text, details=details), partial(assume, gradients=accumulated))


def layers_lost(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the last layers are on no rank: a shallower model trains without complaint.

    Nothing unless `completed` fails and exactly the last layers are missing, not all.
    """
    held_modules = set()
    for evidence in trial.ranks.values():
        for tensor in evidence.parameters:
            held_modules.add(".".join(tensor.fqn.split(".")[:2]))
    layers = [f"layers.{layer}" for layer in range(trial.case.model.n_layers)]
    gone = [layer for layer in layers if layer not in held_modules]
    count = len(layers) - len(gone)
    if "completed" not in broken or not gone or not count or gone != layers[count:]:
        return

    def assume(trial: Trial) -> Trial:
        """Return the trial as if the model had only the layers that ranks hold."""
        case = replace(trial.case, model=replace(trial.case.model, n_layers=count))
        prefixes = tuple(f"{layer}." for layer in gone)
        weights = {fqn: value for fqn, value in trial.reference.weights.items() if not fqn.startswith(prefixes)}
        reference = replace(trial.reference, weights=weights)
        return assume_reference(replace(assume_case(trial, case), reference=reference))

    text = (
        f"{shorten_names(gone)} {'is' if len(gone) == 1 else 'are'} on no rank: {count} of {len(layers)} layers train"
    )
    yield Hypothesis(Cause("layers lost", text, details=(("layers", tuple(gone)),)), assume)


# ---- numbers that are not finite


def not_finite(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on the first number that is NaN or infinite: the loss, gradients, or parameters of a step.

    The checks of all numbers after it follow. Nothing if all numbers are finite, or if none of these checks fails.
    """
    for step in trial.case.steps:
        losses = []
        for _, record in trial.own_steps():
            for microbatch in record.microbatches:
                if record.step == step and microbatch.loss_sum is not None:
                    losses.append(microbatch.loss_sum)
        stages = {
            "the loss": [] if all(map(math.isfinite, losses)) else [(-1, "")],
            "gradients": _pairs_not_finite(trial, step, "gradients"),
            "parameters": _pairs_not_finite(trial, step, "parameters"),
        }
        first = next((name for name, pairs in stages.items() if pairs), None)
        if first is None:
            continue
        text = f"{first} of step {step} {'is' if first == 'the loss' else 'are'} NaN or infinite"
        text += "" if first == "the loss" else f" {where_text(trial, stages[first])}"
        finite = [name for name, pairs in stages.items() if not pairs]
        if finite:
            text += f", {' and '.join(finite)} of it finite"
        checks = {
            "the loss": (*NUMBER_CHECKS,),
            "gradients": (*NUMBER_CHECKS - {"loss"},),
            "parameters": ("update", "finite"),
        }
        later: tuple[str, ...] = ("finite", "reported_loss", "replica_agreement")
        if step < trial.case.steps[-1]:
            later += (*NUMBER_CHECKS,)
        follows = tuple(check for check in broken if check in {*checks[first], *later})
        if follows:
            cause = Cause("not finite", text, details=(("first", first), ("step", step)))
            yield Fact(cause, follows, is_symptom=bool({"resume", "initial_weights"} & {*broken}))
        return


def _pairs_not_finite(trial: Trial, step: int, kind: str) -> list[tuple[int, str]]:
    """Return (rank, fqn) of each tensor of a step with a NaN or infinity. kind: "gradients" or "parameters"."""
    pairs = []
    for rank, record in trial.own_steps():
        if record.step == step:
            for fqn, value in getattr(record, kind).items():
                if not np.isfinite(value).all():
                    pairs.append((rank, fqn))
    return pairs


# ---- frozen parameters that are trained, and adapters that count more or less than they should


def not_frozen(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypothesis that frozen parameters which have a gradient are trained as all others are.

    Nothing if there are none, or unless `completed` fails.
    """
    training = trial.case.training
    in_gradients = set[str]()
    for _, step in trial.own_steps():
        in_gradients.update(step.gradients)
    planned = in_gradients & set(trial.plan.shapes)
    names = tuple(sort_fqns(trial, {fqn for fqn in planned if not is_trainable(training, fqn)}))
    if "completed" in broken and names:
        text = f"{shorten_names(names)} {'has a gradient' if len(names) == 1 else 'have gradients'}, though frozen"
        thawed = replace(training, trainable=(*training.trainable, *names))
        cause = Cause("not frozen", text, details=(("parameters", names),))
        yield Hypothesis(cause, partial(assume_recipe, training=thawed))


def adapters_scaled(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypothesis that LoRA adapters are multiplied by another number than alpha / rank.

    While B is zero, its gradient is proportional to that number, and nothing else depends on it. So only step 1 shows
    it. Nothing without LoRA, or if the gradients of B have no common factor.
    """
    lora = trial.case.model.lora
    step = trial.first_step
    if lora is None or step > 1 or "gradients" not in broken:
        return
    factors = []
    for rank, record in trial.own_steps():
        if record.step != step:
            continue
        for fqn, gradient in record.gradients.items():
            expected = expected_gradient(trial, rank, fqn, step) if ".lora_b." in fqn else None
            if expected is not None and expected.shape == gradient.shape and expected.any():
                factors.append(best_fitting_factor(gradient, expected))
    factor = float(np.median(factors)) if factors else 1.0
    if factors and abs(factor - 1) > 1e-6 and np.allclose(factors, factor, rtol=1e-6):
        text = f"adapters are added {number_text(factor * lora.scale)} times"
        cause = Cause(
            "adapters scaled",
            text,
            "",
            f"alpha / rank = {number_text(lora.scale)} times",
            details=(("factor", factor),),
        )
        yield Hypothesis(cause, partial(assume_reference, altered=partial(_set_adapter_scale, factor * lora.scale)))


def _set_adapter_scale(scale: float, model: Any, step: int) -> None:
    """Set the number by which every adapter of a model is multiplied, in place. The step does not matter."""
    for module in model.modules():
        if hasattr(module, "lora_b"):
            module.scale = scale
