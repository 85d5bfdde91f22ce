"""What a check saw itself: nothing is assumed, and nothing is proven beyond it.

A row of the table says which findings of a check are what kind of cause, and what other checks fail because of it. The cause
is the finding: the report makes the sentence of it. A few facts are put together from more than one finding.
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
from harness.core.causes.assume import another_case, another_recipe, another_reference
from harness.core.causes.contributions import adding
from harness.core.causes.differences import NUMBERS, expected_gradient
from harness.core.causes.hypothesis import NOT_TESTED, Broken, Fact, Hypothesis
from harness.core.causes.words import (
    Arrays,
    elsewhere,
    finding_line,
    first_finding,
    in_order,
    modules,
    rank_words,
    some,
    traffic_lines,
    where_text,
)
from harness.core.checks import memory, settings, traffic
from harness.core.checks.completed import DONE, HELD, left_words, why
from harness.core.evidence.records import AT_WORK, IN_A_RING, Exit
from harness.core.evidence.text import number_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Line, Lines
from harness.core.judge.trial import Trial
from harness.reference.config import trains
from harness.reference.distance import best_fit

Test = Callable[[Trial, Finding], bool]
More = Callable[[Trial, Finding], Lines]
OF_STEPS = ("completed", "initial_weights", "checkpoint", "features", "memory", "traffic", "schedule", "resume")
"""Checks of what a parameter or a step leaves, which breaks where there is none of it."""
OF_COUNTED_STEPS = (
    *OF_STEPS,
    "samples",
    "positions",
    "grad_norm",
    "reported_loss",
    "reported_rate",
    "reported_numbers",
)
"""Checks that compare by the number of a step what more steps than requested leave."""
EVERYTHING = ("*",)
"""All checks that fail."""


def _any(trial: Trial, finding: Finding) -> bool:
    return True


def _nothing(trial: Trial, finding: Finding) -> Lines:
    return ()


@dataclass(frozen=True)
class Row:
    """Findings of a check that are a cause."""

    check: str
    kind: str
    """Its name in docs/causes.md."""
    quantity: str = ""
    """The beginning of the finding's quantity; empty: of any."""
    test: Test = _any
    """Whether a finding is meant."""
    follows: tuple[str, ...] = ()
    """Other checks that fail because of it."""
    alone: bool = False
    """Whether it is so only where numbers are right."""
    whole: bool = False
    """Whether it is so only where all findings of the check are of it."""
    symptom: bool = False
    """Whether it is a cause only where there is no other."""
    more: More = _nothing
    """What is also said."""


def _held(kind: str) -> More:
    def lines(trial: Trial, finding: Finding) -> Lines:
        too_much = {"retained": memory.kept_beside, "copied": memory.copied_too_much}[kind]
        ranks = [rank for rank in trial.ranks if too_much(trial, rank)]
        return declarable.lines(trial, "memory", declarable.held(trial, kind, ranks)) if ranks else ()

    return lines


def _moved(trial: Trial, finding: Finding) -> Lines:
    return (*traffic_lines(trial), *declarable.lines(trial, "traffic", declarable.moved(trial, finding)))


def _declared_setting(trial: Trial, finding: Finding) -> Lines:
    """Return the line of an adapter that declares a switch, if it has the same value in all steps of all ranks."""
    seen = {step.settings.get(finding.name) for _, step in trial.own_steps()}
    values = seen.pop() if len(seen) == 1 else None
    if values is None or len(values) != 1:
        return ()
    return (declarable.LABEL, f'settings = {{"{finding.name}": "{values[0]}"}}'), ("", "an attribute of the adapter")


def _of_numbers(trial: Trial, finding: Finding) -> bool:
    """Whether it is a switch that changes numbers, which is said first."""
    return finding.name in (*settings.FLOAT32, "default dtype")


def _more_steps(trial: Trial, finding: Finding) -> bool:
    """Return whether there were more steps than requested. A launch that read an older checkpoint has more, too: it says so."""
    more = isinstance(finding.observed, tuple) and len(finding.observed) > len(trial.case.steps)
    return more and not trial.case.resume


ROWS = (
    Row("completed", "incomplete", "launch", follows=EVERYTHING),
    Row("completed", "incomplete", "its own place", follows=EVERYTHING),
    Row("completed", "incomplete", test=lambda trial, one: one.expected == "an evidence file", follows=EVERYTHING),
    Row("completed", "incomplete", "optimizer steps", test=_more_steps, follows=OF_COUNTED_STEPS),
    Row("completed", "incomplete", test=lambda trial, one: one.quantity != "", follows=OF_STEPS),
    Row("checkpoint", "checkpoint"),
    Row("settings", "another setting", test=_of_numbers, more=_declared_setting),
    Row("settings", "another setting", more=_declared_setting),
    Row("memory", "growing", "retained more"),
    Row("memory", "retained", memory.UNACCOUNTED, more=_held("retained")),
    Row("memory", "retained graph", "autograd graphs"),
    Row("memory", "copied", "copies of weights", more=_held("copied")),
    Row("collective_order", "collectives out of order"),
    Row("replica_agreement", "replicas drift", alone=True),
    Row("determinism", "not deterministic"),
    Row("traffic", "ranks wait", traffic.WITHOUT_DATA, whole=True),
    Row("process_groups", "process_groups of no plan", alone=True, symptom=True),
    Row("traffic", "traffic of no plan", alone=True, symptom=True, more=_moved),
    Row("placements", "placements of no plan", alone=True, symptom=True),
    Row("memory", "memory of no plan", alone=True, symptom=True),
)


def observed(trial: Trial, broken: Broken, rows: tuple[Row, ...] = ROWS) -> Iterator[Fact]:
    """The facts of the table, in its order. A golden that fails alone says that the reference moved."""
    for row in rows:
        findings = broken[row.check].findings if row.check in broken else ()
        found = [one for one in findings if one.quantity.startswith(row.quantity) and row.test(trial, one)]
        if not found or (row.alone and NUMBERS & {*broken}) or (row.whole and len(found) < len(findings)):
            continue
        follows = tuple(broken) if row.follows == EVERYTHING else (row.check, *row.follows)
        finding = first_finding(found)
        cause = Cause(row.kind, "", hint=elsewhere(found), finding=finding, details=(("count", len(found)),))
        yield Fact(cause, follows, row.more(trial, found[0]), symptom=row.symptom)
    if {*broken} == {"golden"}:
        text = (
            "the reference moved, not the trainer: model, data, recipe or torch changed since the golden was accepted"
        )
        yield Fact(Cause("reference moved", text), ("golden",), (finding_line(broken["golden"]),))


# ---- processes


ENDED = {"raised": "raised", "killed": "hung", "lost": "was lost"}


def process_failed(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """State which ranks died, hung, raised or left early, and which only waited."""
    blamed = [exit for exit in trial.run.exits if exit.blamed]
    others = [exit for exit in trial.run.exits if exit.how != "ok" and not exit.blamed]
    if not blamed:
        yield from _nobody_to_blame(trial, others) if others else ()
        return
    alike: dict[str, list[int]] = defaultdict(list)
    ring = next((exit.reason for exit in blamed if exit.reason.startswith(IN_A_RING)), "")
    for exit in blamed:
        alike[_how_it_ended(trial, replace(exit, reason="") if ring == exit.reason else exit)].append(exit.rank)
    texts = [
        f"{rank_words(ranks)} {how.replace('for it in', 'for them in') if len(ranks) > 1 else how}"
        for how, ranks in alike.items()
    ]
    if ring:  # it is said once, first
        texts[0] = f"{ring}, then {texts[0]}"
    last = ((f"rank {exit.rank}", exit.last_collective) for exit in blamed[:2])
    reason = why(blamed[0].error)
    lines: list[Line] = [("why", reason)] * bool(reason)
    lines += [*((who, f"last collective {call}") for who, call in last if call), *_stacks(blamed)]
    lines += _who_waited(trial, blamed, others) if others else ()
    details = (("ranks", tuple(exit.rank for exit in blamed)), ("how", blamed[0].how))
    yield Fact(Cause("a process failed", "; ".join(texts[:3]), details=details), ("completed",), tuple(lines))


def _who_waited(trial: Trial, blamed: list[Exit], others: list[Exit]) -> Lines:
    """Of ranks that ended, and had done all, nobody knows whether a collective was left out or is one too many."""
    waited, gone = (rank_words([exit.rank for exit in exits]) for exits in (others, blamed))
    line = ("not to blame", f"{waited} only waited")
    if any(exit.how != "ok" for exit in blamed):
        return (line,)
    if all(left_words(trial, exit.rank) == DONE for exit in blamed):
        line = ("either", f"{waited} should not wait there after the last step, or {gone} left that collective out")
    return (*_stack(others[0], f"rank {others[0].rank} in"), line)


def _how_it_ended(trial: Trial, exit: Exit) -> str:
    ended = f"died by {exit.signal}" if exit.how == "signal" else ENDED.get(exit.how, exit.how)
    ended = left_words(trial, exit.rank) if exit.how == "ok" else ended
    text = exit.error.removeprefix(ended).lstrip(",; ").rstrip(".")
    if exit.diverged:  # says more than what came of it
        return f"{exit.reason}, then {ended}: {text}"
    text = "; ".join(filter(None, [text, exit.reason]))
    return f"{ended}: {text}" if text else ended


def _stacks(blamed: list[Exit]) -> Lines:
    """Return where the first rank was; of two ranks that were in different places, where each was."""
    pair = blamed if len(blamed) == 2 and all(exit.stack for exit in blamed) else []
    if len({exit.stack for exit in pair}) < 2:
        return _stack(blamed[0])
    return tuple(line for exit in pair for line in _stack(exit, f"rank {exit.rank} in"))


def _stack(exit: Exit, label: str = "stack") -> Lines:
    return tuple(("" if i else label, line.strip()) for i, line in enumerate(exit.stack.splitlines()[:4]))


def _nobody_to_blame(trial: Trial, failed: list[Exit]) -> Iterator[Fact]:
    first, ranks = failed[0], rank_words([exit.rank for exit in failed])
    if AT_WORK in first.error:
        yield Fact(Cause("too slow", f"too slow: {ranks} {first.error}"), ("completed",))
        return
    text = f"{ranks} did not finish, and nothing shows which of them is the cause"
    if first.undelivered:
        text = f"{ranks} did not finish: {first.undelivered}"
    lines = [(f"rank {exit.rank}", _how_it_ended(trial, exit).replace("hung", "killed")) for exit in failed[:4]]
    yield Fact(Cause("a process failed", text), ("completed",), (*lines, *_stack(first)))


# ---- parameters of other stages


def of_other_stages(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Ranks of a pipeline hold what the plan gives to others, or lack what it gives to them."""
    findings = broken["completed"].findings if "completed" in broken and trial.case.dims.pp > 1 else ()
    names: dict[tuple[str, int], list[str]] = defaultdict(list)
    for one in findings:
        if one.quantity == HELD and one.name in trial.plan.shapes:
            names["lack" if one.observed is None else "hold", one.ranks[0]].append(one.name)
    alike: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for (verb, rank), fqns in names.items():
        alike[verb, tuple(in_order(trial, fqns))].append(rank)
    texts = [_held_text(trial, verb, fqns, ranks) for (verb, fqns), ranks in sorted(alike.items())]
    if texts:
        numbers = NOT_TESTED if NUMBERS & {*broken} else ()
        details = tuple((verb, (*ranks, *fqns)) for (verb, fqns), ranks in sorted(alike.items()))
        cause = Cause("incomplete", "; ".join(texts[:3]), details=details)
        yield Fact(cause, tuple(broken), (finding_line(broken["completed"]), *numbers))


def _held_text(trial: Trial, verb: str, fqns: tuple[str, ...], ranks: list[int]) -> str:
    owners = [rank for rank, held in trial.plan.slices.items() if fqns[0] in held]
    text = f"{rank_words(ranks)} {verb}{'s' * (len(ranks) == 1)} {some(modules(trial, fqns))}"
    if verb == "lack":
        return text
    still = any(one.fqn == fqns[0] for rank in owners if rank in trial.ranks for one in trial.ranks[rank].parameters)
    return f"{text}{' as well' * still}, which the plan gives to {rank_words(owners)}{' alone' * still}"


# ---- parameters that are not trained


def not_trained(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Parameters without a gradient, or out of the optimizer's reach: they stay, and without a gradient they are in no norm."""
    steps = [step for evidence in trial.ranks.values() for step in evidence.steps]
    held = {tensor.fqn for evidence in trial.ranks.values() for tensor in evidence.parameters}
    held = {fqn for fqn in held if trains(trial.case.training, fqn)}
    without = {fqn for fqn in held if not any(fqn in step.gradients for step in steps)}
    left = {fqn for fqn in held if not any(fqn in step.parameters for step in steps)} | without
    if "completed" not in broken or not steps or not left or held - set(trial.plan.shapes):
        return

    def assume(trial: Trial, gradients: Callable[[int, Arrays], Arrays]) -> Trial:
        as_they_were = {fqn: trial.reference.weights[fqn] for fqn in left}
        return another_reference(trial, gradients=gradients, left=lambda step, seen: seen | as_they_were)

    def none(step: int, seen: Arrays) -> Arrays:
        return seen | {fqn: np.zeros_like(seen[fqn]) for fqn in without}

    names = tuple(in_order(trial, left))
    text = some(names) + (" without a gradient in every step" if without else " without an update in every step")
    details = (("parameters", names), ("gradient", not without))
    yield Hypothesis(Cause("incomplete", text, details=details), partial(assume, gradients=none))
    if not without:
        text += "; nothing sets the gradients to zero either, so no optimizer has them"
        added = adding([*trial.case.steps][1:], sorted(left), trial.case.training.max_norm)
        yield Hypothesis(Cause("incomplete", text, details=details), partial(assume, gradients=added))


def layers_lost(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The last layers are on no rank: a shallower model trains without complaint."""
    held = {".".join(tensor.fqn.split(".")[:2]) for evidence in trial.ranks.values() for tensor in evidence.parameters}
    layers = [f"layers.{layer}" for layer in range(trial.case.model.n_layers)]
    gone = [layer for layer in layers if layer not in held]
    count = len(layers) - len(gone)
    if "completed" not in broken or not gone or not count or gone != layers[count:]:
        return

    def assume(trial: Trial) -> Trial:
        case, lost = replace(trial.case, model=replace(trial.case.model, n_layers=count)), tuple(f"{x}." for x in gone)
        weights = {fqn: value for fqn, value in trial.reference.weights.items() if not fqn.startswith(lost)}
        reference = replace(trial.reference, weights=weights)
        return another_reference(replace(another_case(trial, case), reference=reference))

    text = f"{some(gone)} {'is' if len(gone) == 1 else 'are'} on no rank: {count} of {len(layers)} layers train"
    yield Hypothesis(Cause("layers lost", text, details=(("layers", tuple(gone)),)), assume)


# ---- numbers that are not finite


def not_finite(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What is NaN or infinite first: the loss, gradients, or what the optimizer left. All numbers after that follow."""
    for step in trial.case.steps:
        records = [record for _, record in trial.own_steps() if record.step == step]
        losses = [part.loss_sum for record in records for part in record.microbatches if part.loss_sum is not None]
        stages = {
            "the loss": [] if all(map(math.isfinite, losses)) else [(-1, "")],
            "gradients": _not_finite(trial, step, "gradients"),
            "parameters": _not_finite(trial, step, "parameters"),
        }
        if (first := next((name for name, places in stages.items() if places), None)) is None:
            continue
        text = f"{first} of step {step} {'is' if first == 'the loss' else 'are'} NaN or infinite"
        text += "" if first == "the loss" else f" {where_text(trial, stages[first])}"
        before = [name for name, places in stages.items() if not places]
        text += f", {' and '.join(before)} of it finite" * bool(before)
        checks = {"the loss": (*NUMBERS,), "gradients": (*NUMBERS - {"loss"},), "parameters": ("update", "finite")}
        later = ("finite", "reported_loss", "replica_agreement") + (*NUMBERS,) * (step < trial.case.steps[-1])
        follows = tuple(check for check in broken if check in {*checks[first], *later})
        if follows:
            cause = Cause("not finite", text, details=(("first", first), ("step", step)))
            yield Fact(cause, follows, symptom=bool({"resume", "initial_weights"} & {*broken}))
        return


def _not_finite(trial: Trial, step: int, kind: str) -> list[tuple[int, str]]:
    """Ranks and parameters whose gradients, or which, hold a number that is not finite."""
    records = ((rank, record) for rank, record in trial.own_steps() if record.step == step)
    tensors = ((rank, fqn, value) for rank, record in records for fqn, value in getattr(record, kind).items())
    return [(rank, fqn) for rank, fqn, value in tensors if not np.isfinite(value).all()]


# ---- frozen parameters that are trained, and adapters that count more or less than they should


def not_frozen(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Frozen parameters with a gradient: they are trained as all others are."""
    training, seen = trial.case.training, {fqn for _, step in trial.own_steps() for fqn in step.gradients}
    names = tuple(in_order(trial, {fqn for fqn in seen & set(trial.plan.shapes) if not trains(training, fqn)}))
    if "completed" in broken and names:
        text = f"{some(names)} {'has a gradient' if len(names) == 1 else 'have gradients'}, though frozen"
        other = replace(training, trainable=(*training.trainable, *names))
        cause = Cause("not frozen", text, details=(("parameters", names),))
        yield Hypothesis(cause, partial(another_recipe, training=other))


def adapters_scaled(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """While B is zero, its gradient is proportional to what the adapter is multiplied by, and nothing else depends on that."""
    lora, step = trial.case.model.lora, trial.first_step
    if lora is None or step > 1 or "gradients" not in broken:
        return
    factors = []
    for rank, record in trial.own_steps():
        for fqn, gradient in record.gradients.items() if record.step == step else ():
            expected = expected_gradient(trial, rank, fqn, step) if ".lora_b." in fqn else None
            if expected is not None and expected.shape == gradient.shape and expected.any():
                factors.append(best_fit(gradient, expected))
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
        yield Hypothesis(cause, partial(another_reference, altered=partial(_scaled, factor * lora.scale)))


def _scaled(scale: float, model: Any, step: int) -> None:
    for module in model.modules():
        if hasattr(module, "lora_b"):
            module.scale = scale
