"""Where things first go wrong, and what the wrong parameters have in common: all that is said of what nothing explains."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from harness.core.causes import declarable
from harness.core.causes.assume import inputs_of_first_step
from harness.core.causes.contributions import common_factor
from harness.core.causes.differences import distance, expected_gradient, loss_off, seen_gradients, wrong_pairs
from harness.core.causes.factors import times_text
from harness.core.causes.hypothesis import Broken, verdict_of
from harness.core.causes.words import (
    Pair,
    extent,
    finding_line,
    in_order,
    in_parameters,
    on_ranks,
    rank_words,
    where_text,
)
from harness.core.evidence.text import number_text, ranks_text
from harness.core.judge.assembly import misfits
from harness.core.judge.contents import take
from harness.core.judge.finding import Finding
from harness.core.judge.held_values import order_of_entries
from harness.core.judge.losses import global_loss, losses
from harness.core.judge.received_samples import received_samples
from harness.core.judge.result import Cause, Line, Lines, Verdict
from harness.core.judge.tolerance import NoBound
from harness.core.judge.trial import Trial
from harness.core.plan.slices import tp_dim
from harness.core.plan.stages import layers_of_stage

KIND = "not explained"
DIFFER = "; the weights differ already when the step begins"
BY_ORDER = {"loss", "reported_loss", "gradients", "grad_norm"}
"""The checks whose bounds depend on whether the trainer's model is the reference's."""
SHARE = 4
"""Times the bound of a loss that one rank's part of it may be off by."""
OF_INPUTS = 4
"""Times the bound of the first loss that a mean square may be off by: right runs were seen to be off by up to 1.6 times."""
ROUNDING = 1e-12
"""Of a mean square in float64, relative: right runs of 148 cases were seen to be off by up to 4.5e-16."""
OTHER_ORDER = 30
"""Times the bound: with another order of operations gradients were seen to be off by up to 14 times what is measured without
(docs/adapters.md, "parts" to "shares")."""


class Weights(Enum):
    """Those with which a step begins, compared with the reference's. UNKNOWN: some were not seen, or there is noise."""

    RIGHT = auto()
    WRONG = auto()
    UNKNOWN = auto()


def localise(
    trial: Trial, broken: Broken, tried: int, held: frozenset[str] = frozenset(), *, rest: bool = False
) -> tuple[Cause, Lines]:
    """Return the place for checks that nothing explains. tried: how many hypotheses were tested. held: checks that pass. rest:
    something else explains other checks."""
    cause = _first_wrong_number(trial, broken, held)
    first = next(iter(broken.values())).findings[0]
    none = f"none explains {'the rest' if rest else 'this'}"
    lines: list[Line] = [("tried", f"{tried} {'hypothesis' if tried == 1 else 'hypotheses'}, {none}")] * bool(tried)
    others = [*broken][1:]
    if cause is not None:
        shown = [*broken][:2] + ["replica_agreement"] * ("replica_agreement" in [*broken][2:])
        lines += [finding_line(broken[name]) for name in shown]
        lines += _another_order(trial, broken)
    if others:
        lines.append(("also failing", ", ".join(others)))
    return cause or Cause(KIND, "", finding=first, hint=extent(trial, next(iter(broken.values())).findings)), tuple(
        lines
    )


def _another_order(trial: Trial, broken: Broken) -> Lines:
    """What a model of the trainer's own may leave by its order of operations, which was not measured for the reference's."""
    if trial.traits.own_model or not {*broken} <= BY_ORDER:
        return ()
    try:
        excess = max((one.excess for step in trial.case.steps for one in misfits(trial, step)[0]), default=math.inf)
    except NoBound:
        return ()
    text = "whether a model of the trainer's own, which rounds at other places than the reference's, explains it"
    line = ("not tested", f"{text}: `harness doctor` with these options tests it")
    declared = declarable.declared_lines(trial.case, [("own_model", True)])
    return (line, *declared) if excess <= OTHER_ORDER else ()


def _first_wrong_number(trial: Trial, broken: Broken, held: frozenset[str]) -> Cause | None:
    """Return the first step in which loss or gradients are wrong, and what is wrong there."""
    if not {"loss", "gradients"} & set(broken):
        return None
    findings = broken["update"].findings if "update" in broken else ()
    moved = {finding.step: finding for finding in reversed(findings) if finding.step}
    apart = min((one.step or math.inf for one in _copies(broken)), default=math.inf)
    for step in trial.case.steps:
        if moved and min(moved) < step:
            text = "the update is wrong" + ", gradients before clipping are right" * _saw_gradients(trial, min(moved))
            hint = extent(trial, broken["update"].findings)
            return Cause(
                KIND, text, finding=moved[min(moved)], hint=hint, details=(("place", "update"), ("step", min(moved)))
            )
        off, wrong = loss_off(trial, step), wrong_pairs(trial, step)
        if apart < step and (off or wrong):
            return _copies_apart(trial, broken, apart)
        if off and wrong:
            return _forward(trial, step, off, held)
        if wrong:
            return _wrong_gradients(trial, step, wrong)
        as_a_whole = _off_as_a_whole(trial, step)
        if off:
            text, more, details = _where_in_forward(trial, step, off)
            if as_a_whole is not None:
                details = (*details, *as_a_whole.details)
                return replace(as_a_whole, observed=f"{text}{more}; {as_a_whole.observed}", details=details)
            close = f", its gradients match within the bound of {trial.bounds.gradient[step]:.1e}"
            return Cause(KIND, text + close * _saw_gradients(trial, step) + more, details=details)
        if as_a_whole is not None:
            return as_a_whole
    return None


def _copies(broken: Broken) -> list[Finding]:
    found = broken["replica_agreement"].findings if "replica_agreement" in broken else ()
    return [one for one in found if one.quantity == "value"]


def _copies_apart(trial: Trial, broken: Broken, step: float) -> Cause:
    """Say where copies of a parameter first differ after a step. No reference has such, so what follows is not judged."""
    where = in_parameters(trial, {one.name for one in _copies(broken) if one.step == step})
    text = f"copies differ after step {step} {where}"
    text += ", and wrong numbers of later steps may follow from that"
    return Cause(KIND, text, details=(("place", "replicas"), ("step", step)))


def _in_step(trial: Trial, step: int) -> str:
    """In which step; nothing of the first. What is wrong in later steps may follow from it: it is not said of them."""
    return "" if step == trial.first_step else f" in step {step}"


def _weights(trial: Trial, step: int) -> Weights:
    """Return whether ranks begin a step with the reference's weights, as close as its gradients may be. Noise moves weights by
    what is not known."""
    if step == trial.first_step:
        return Weights.RIGHT
    right = trial.reference_step(step - 1).parameters
    unknown = not trial.case.exact
    for rank, record in trial.own_steps():
        for fqn, seen in record.parameters.items() if record.step == step - 1 else ():
            part = trial.slice_of(rank, fqn)
            if part is None or fqn not in right:
                unknown = True
                continue
            wanted = take(right[fqn].reshape(trial.plan.shapes[fqn]), part)
            close = trial.bounds.gradient[step] * float(np.max(np.abs(right[fqn]), initial=0))
            if wanted.size == seen.size and not np.allclose(seen.ravel(), wanted.ravel(), rtol=0, atol=close):
                return Weights.WRONG
    return Weights.UNKNOWN if unknown else Weights.RIGHT


def _saw_gradients(trial: Trial, step: int) -> bool:
    """Whether each rank's gradient of each parameter that it holds was seen, and could be compared."""
    held = ((rank, one.fqn) for rank, e in trial.ranks.items() for one in e.parameters if one.value.size)
    seen = {rank: seen_gradients(trial, rank, step) for rank in trial.ranks}
    return all(fqn in seen[rank] and expected_gradient(trial, rank, fqn, step) is not None for rank, fqn in held)


def _wrong_gradients(trial: Trial, step: int, wrong: list[Pair]) -> Cause:
    """Return the cause for a step whose loss is right, or was not seen."""
    since = _in_step(trial, step)
    before = f"right in step {trial.first_step} and " * (bool(since) and _saw_gradients(trial, trial.first_step))
    largest = max(distance(trial, rank, fqn, step) for rank, fqn in wrong)
    by = f" by up to {largest:.1e} of the largest entry in step 1" * (step == 1 and largest < math.inf)
    factor = common_factor(trial, step)
    times = "" if factor is None else f": {times_text(factor)} what they should be"
    ranks = sorted({rank for rank, _ in wrong})
    fqns = in_order(trial, (fqn for _, fqn in wrong))
    matches = f"; the loss of step {step} matches within {trial.bounds.loss[step]:.0e}"
    matches *= global_loss(trial, step) is not None
    where = where_text(trial, wrong) + one_group(trial, {*ranks}) + in_common(trial, fqns) + matches
    where += DIFFER * (_weights(trial, step) is Weights.WRONG)
    details = (
        ("place", "gradients"),
        ("step", step),
        ("off", largest),
        ("factor", factor),
        ("ranks", tuple(ranks)),
        ("parameters", tuple(fqns)),
    )
    return Cause(KIND, f"gradients are {before}wrong{by}{since}{times}", where, details=details)


BEFORE_FORWARD = ("samples", "positions", "initial_weights", "resume")
"""The checks of what goes into the forward pass, but for the update: where that is wrong earlier, it is reported instead."""


def _forward(trial: Trial, step: int, off: float, held: frozenset[str]) -> Cause:
    """Blamed where all that goes into it is right, weights as well: what is broken and what is not judged (`held`) may be the
    reason as well."""
    text, more, details = _where_in_forward(trial, step, off)
    wrong = [check for check in BEFORE_FORWARD if check not in held and verdict_of(trial, check) is Verdict.FAIL]
    if wrong:
        return Cause(KIND, f"{text}; broken before the forward pass: {', '.join(wrong)}", details=details[:3])
    weights = _weights(trial, step)
    if weights is not Weights.RIGHT:
        return Cause(KIND, text + DIFFER * (weights is Weights.WRONG), details=(("place", "loss"), *details[1:3]))
    since = _in_step(trial, step) or " after resuming" * bool(trial.saved)
    before = f"right in step {trial.first_step} and " * (
        step > trial.first_step and bool(since) and global_loss(trial, trial.first_step) is not None
    )
    ranks = ranks_whose_losses_are_off(trial, step)
    on = on_ranks(trial, ranks) if ranks else ""
    begun = "resume" if trial.saved else "initial_weights"
    right = [what for check, what in ((begun, "weights"), ("samples", "samples")) if check in held]
    though = f" though {' and '.join(right)} are right" * (step == trial.first_step and bool(right))
    text = f"the forward pass is {before}wrong{on}{since}: {text}{though}{more}"
    return Cause(KIND, text, details=(*details, ("ranks", tuple(ranks))))


def _where_in_forward(trial: Trial, step: int, off: float) -> tuple[str, str, tuple[tuple[str, object], ...]]:
    """Return by how much the loss is off, at which module it first goes wrong, and both as data. What goes into modules is on
    record of a launch's first step alone."""
    details: tuple[tuple[str, object], ...] = (("place", "forward"), ("step", step), ("off", off))
    text = f"the loss of step {step} is off by {off:.1e}"
    if step > trial.first_step:
        return text, "", details
    place = first_wrong_input(trial)
    words = place_words(trial, place)
    return text, f": {words}" * bool(words), (*details, ("right", place.right), ("module", place.wrong))


def ranks_whose_losses_are_off(trial: Trial, step: int) -> list[int]:
    """Return those whose samples have other losses than the reference.

    With noise, dropout, cp or pp, or where samples or losses are not known, a rank's expected loss is unknown."""
    case, received = trial.case, received_samples(trial, step)
    seen = {rank: losses(trial, rank, step) for rank in received}
    known = {id_ for ids in received.values() for id_ in ids} <= {*trial.reference.samples[step - 1]}
    if not case.exact or case.model.dropout or case.dims.cp * case.n_stages > 1 or not known or not all(seen.values()):
        return []
    from harness.reference.counterfactual import Otherwise, losses_of_rows

    before = {} if step == 1 else {"weights": trial.reference.steps[step - 2].parameters}
    otherwise = Otherwise(**(order_of_entries(trial) | before))
    rows = losses_of_rows(case.model, case.training, trial.reference, step, otherwise)
    of_sample = dict(zip(trial.reference.samples[step - 1], rows, strict=True))

    def is_off(rank: int) -> bool:
        wanted = math.fsum(of_sample[id_] for id_ in received[rank] if id_ is not None)
        return not abs(math.fsum(total for total, _ in seen[rank]) - wanted) <= SHARE * trial.bounds.loss[step] * wanted

    return list(filter(is_off, received))


def _off_as_a_whole(trial: Trial, step: int) -> Cause | None:
    """In recipes with noise: which gradients are off, though no entry is beyond its own bound."""
    try:
        wrong = [one for one in misfits(trial, step)[0] if not one.within]
    except NoBound:
        return None
    if not wrong:
        return None
    worst = max(wrong, key=lambda one: one.excess)
    text = f"by {worst.distance:.1e} of its norm in {worst.fqn}, noise explains {worst.distance_bound:.1e}"
    if worst.scaled:
        text = (
            f"{number_text(worst.fit, 4)} times the reference's by best fit in {worst.fqn} on {rank_words(worst.ranks)}"
        )
    fqns = in_order(trial, (one.fqn for one in wrong))
    when = f" in step {step}" * (step > trial.first_step)
    details = (("place", "gradients"), ("step", step), ("off", worst.distance), ("parameters", tuple(fqns)))
    return Cause(KIND, f"gradients are off{when}", in_parameters(trial, fqns), hint=text, details=details)


# ---- the first module


class Place(NamedTuple):
    """right: the last module in forward's order whose input has the reference's mean square; wrong: the next, and by how much
    it is off. Empty: none."""

    right: str
    wrong: str
    off: float


def first_wrong_input(trial: Trial) -> Place:
    """Compare mean squares of all ranks together, in the first step. Where A of an adapter is cut by columns, what B receives
    on a tp rank is a part of a sum: that is left out."""
    parts = ".lora_b" if trial.case.dims.tp > 1 else None
    right, close = "", ROUNDING if trial.case.exact else OF_INPUTS * trial.bounds.loss[1]
    for fqn, mean in inputs_of_first_step(trial).items():
        if parts and fqn.endswith(parts) and tp_dim(f"{fqn.removesuffix(parts)}.lora_a.weight") == 1:
            continue
        seen = [step.activity.inputs[fqn] for _, step, _ in trial.steps() if fqn in step.activity.inputs]
        found, expected = sum(squares for squares, _ in seen), mean * sum(count for _, count in seen)
        if seen and not math.isclose(found, expected, rel_tol=close):
            return Place(right, fqn, abs(found / expected - 1) if expected else math.inf)
        right = fqn if seen else right
    return Place(right, "", 0.0)


def place_words(trial: Trial, place: Place) -> str:
    if not place.wrong:
        known = "the input of every module matches the reference in mean square"
        return f"{known}; the output, the loss, or what keeps the mean square may be otherwise" * bool(place.right)
    text = f"{_input_words(trial, place.wrong)} does not match the reference in mean square"
    text += f" (off by {place.off:.1e})" + _apart_over_tp(trial, place.wrong)
    hidden = (
        ", where a wrong rotation of queries and keys would not show; scale and mask come behind it"
        * place.right.endswith("inner_attention")
    )
    sent = [_stage_of(trial, fqn) for fqn in (place.right, place.wrong) if fqn]
    hidden += f", and stage {sent[0]} sends it to stage {sent[-1]}" * (sent[-1] != sent[0])
    return f"{text}; {_input_words(trial, place.right)}, before it, does{hidden}" if place.right else text


def _stage_of(trial: Trial, fqn: str) -> int:
    """The stage of the pipeline that has a module's layer; what is in no layer is at the first or last one's end."""
    layer = int(fqn.split(".")[1]) if fqn.startswith("layers.") else 0 if fqn == "tok_embeddings" else math.inf
    stages = range(trial.case.n_stages)
    return next((stage for stage in stages if layer in layers_of_stage(trial.case, stage)), stages[-1] if layer else 0)


def _input_words(trial: Trial, fqn: str) -> str:
    """Without dropout there is no such module: what would go into it is what the part of the block before it gives."""
    block, _, name = fqn.rpartition(".")
    part = {"attention_dropout": "attention", "ffn_dropout": "feed_forward"}.get(name)
    return f"the output of {block}.{part}" if part and not trial.case.model.dropout else f"the input of {fqn}"


def _apart_over_tp(trial: Trial, fqn: str) -> str:
    """Without sequence parallel the ranks of a tp group have one sum of what each computes of attention and feed-forward."""
    whole = fqn.endswith(("_dropout", "norm")) and not trial.case.features.sequence_parallel
    for group in trial.plan.groups.get("tp", ()) if whole else ():
        seen = [one[fqn][0] for rank in group if fqn in (one := trial.ranks[rank].steps[0].activity.inputs)]
        if not all(math.isclose(squares, seen[0], rel_tol=1e-6) for squares in seen):
            return f", and differs among tp ranks {ranks_text(group)}, which should have the same sum"
    return ""


# ---- what wrong parameters have in common


def one_group(trial: Trial, ranks: set[int]) -> str:
    """ ", one group of dp_replicate": what these ranks have in common."""
    for axis, groups in trial.plan.groups.items():
        if len(ranks) < len(trial.ranks) and ranks in [set(group) for group in groups]:
            return f", one group of {axis}"
    return ""


def in_common(trial: Trial, fqns: list[str]) -> str:
    """ ", all norm weights": the one property that these parameters have and no other has."""
    for text, members in _properties(trial).items():
        if fqns == members and len(fqns) > 1:
            return f"; all {text} are wrong, no others"
    return ""


def _properties(trial: Trial) -> dict[str, list[str]]:
    """Return parameters by name of what they share: a kind of modules, a layer, all before or behind one."""
    order, shapes = list(trial.plan.shapes), trial.case.model.parameter_shapes()
    found = {
        "norm weights": [fqn for fqn in order if fqn.endswith("norm.weight")],
        "matrices": [fqn for fqn in order if len(shapes[fqn]) == 2],
        "K/V projections": [fqn for fqn in order if fqn.endswith((".wk.weight", ".wv.weight"))],
    }
    for fqn in order:
        if (parts := fqn.split("."))[0] == "layers":
            layer, module, name = ".".join(parts[:2]), ".".join(parts[:3]), ".".join(parts[2:])
            found[f"weights of {layer}"] = [other for other in order if other.startswith(f"{layer}.")]
            found[f"weights of {module}"] = [other for other in order if other.startswith(f"{module}.")]
            found[f"{name} of every layer"] = [other for other in order if other.endswith(f".{name}")]
            found[f"{parts[2]} weights of every layer"] = [other for other in order if f".{parts[2]}." in other]
    for place, fqn in enumerate(order[1:], start=1):
        found |= {f"parameters before {fqn}": order[:place], f"parameters from {fqn} on": order[place:]}
    return found
