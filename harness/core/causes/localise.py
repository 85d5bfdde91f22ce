"""The place where numbers first go wrong, for checks that nothing explains, and what wrong parameters share."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from harness.core.causes import declarable
from harness.core.causes.assume import input_mean_squares
from harness.core.causes.contributions import common_factor
from harness.core.causes.differences import (
    distance_to_reference,
    expected_gradient,
    loss_difference,
    observed_gradients,
    pairs_with_wrong_gradient,
)
from harness.core.causes.factors import times_text
from harness.core.causes.hypothesis import Broken, verdict_of
from harness.core.causes.words import (
    Pair,
    extent_text,
    finding_line,
    in_parameters_text,
    on_ranks_text,
    rank_text,
    sort_fqns,
    where_text,
)
from harness.core.evidence.text import number_text, ranks_text
from harness.core.judge.assembly import gradient_misfits
from harness.core.judge.contents import view_of_slice
from harness.core.judge.finding import Finding
from harness.core.judge.held_values import reference_order_arguments
from harness.core.judge.losses import global_loss, losses_of_rank
from harness.core.judge.received_samples import samples_of_step
from harness.core.judge.result import Cause, Line, Lines, Verdict
from harness.core.judge.tolerance import NoBound
from harness.core.judge.trial import Trial
from harness.core.plan.slices import tp_dim
from harness.core.plan.stages import layers_of_stage

UNEXPLAINED = "not explained"
WEIGHTS_DIFFER = "; the weights differ already when the step begins"
ORDER_CHECKS = {"loss", "reported_loss", "gradients", "grad_norm"}
"""The checks whose bounds depend on whether the trainer's model is the reference's."""
LOSS_FACTOR = 4
"""Times the bound of a loss that one rank's part of it may be off by."""
INPUT_FACTOR = 4
"""Times the bound of the first loss that a mean square may be off by: right runs were seen to be off by up to 1.6 times."""
ROUNDING = 1e-12
"""Of a mean square in float64, relative: right runs of 148 cases were seen to be off by up to 4.5e-16."""
ORDER_FACTOR = 30
"""Times the bound: with another order of operations gradients were seen to be off by up to 14 times what is measured without
(docs/adapters.md, "parts" to "shares")."""


class WeightsComparison(Enum):
    """How the weights with which a step begins compare with the reference's."""

    RIGHT = auto()
    WRONG = auto()
    UNKNOWN = auto()
    """Some weights were not seen, or there is noise."""


def localise(
    trial: Trial, broken: Broken, tried: int, passing: frozenset[str] = frozenset(), *, others_explained: bool = False
) -> tuple[Cause, Lines]:
    """Return (a cause that is only the place, its lines of evidence) for checks that nothing explains.

    The place is where loss or gradients are first wrong, otherwise the first finding of the first check. Precondition:
    every result in `broken` has findings. tried: how many hypotheses were tested. passing: checks that pass.
    others_explained: whether something else explains other checks.
    """
    cause = _cause_of_first_wrong_number(trial, broken, passing)
    first_findings = next(iter(broken.values())).findings
    lines: list[Line] = []
    if tried:
        noun = "hypothesis" if tried == 1 else "hypotheses"
        lines.append(("tried", f"{tried} {noun}, none explains {'the rest' if others_explained else 'this'}"))
    others = [*broken][1:]
    if cause is not None:
        shown = [*broken][:2]
        if "replica_agreement" in [*broken][2:]:
            shown.append("replica_agreement")
        lines += [finding_line(broken[name]) for name in shown]
        lines += _own_order_lines(trial, broken)
    if others:
        lines.append(("also failing", ", ".join(others)))
    if not cause:
        cause = Cause(UNEXPLAINED, "", finding=first_findings[0], hint=extent_text(trial, first_findings))
    return cause, tuple(lines)


def _own_order_lines(trial: Trial, broken: Broken) -> Lines:
    """Return the lines that a model of the trainer's own may be the reason, with the trait that declares it.

    Empty if it cannot be. It cannot if it is declared already, if other checks fail, or if differences exceed
    ORDER_FACTOR times their bounds, or cannot be compared with any. What such a model leaves by its order of operations
    was not measured for the reference's.
    """
    if trial.traits.own_model or not {*broken} <= ORDER_CHECKS:
        return ()
    try:
        ratios = []
        for step in trial.case.steps:
            ratios += [misfit.ratio_to_bound for misfit in gradient_misfits(trial, step)[0]]
        excess = max(ratios, default=math.inf)
    except NoBound:
        return ()
    text = "whether a model of the trainer's own, which rounds at other places than the reference's, explains it"
    line = ("not tested", f"{text}: `harness doctor` with these options tests it")
    declared = declarable.declaration_lines(trial.case, [("own_model", True)])
    return (line, *declared) if excess <= ORDER_FACTOR else ()


def _cause_of_first_wrong_number(trial: Trial, broken: Broken, passing: frozenset[str]) -> Cause | None:
    """Return a cause with the first step in which loss, gradients or an update are wrong, and what is wrong there.

    None if all are right, and unless `loss` or `gradients` fails.
    """
    if not {"loss", "gradients"} & set(broken):
        return None
    findings = broken["update"].findings if "update" in broken else ()
    updates = {finding.step: finding for finding in reversed(findings) if finding.step}
    replicas_differ_from = min((finding.step or math.inf for finding in _replica_findings(broken)), default=math.inf)
    for step in trial.case.steps:
        if updates and min(updates) < step:
            return _wrong_update(trial, broken, updates[min(updates)], min(updates))
        off = loss_difference(trial, step)
        wrong = pairs_with_wrong_gradient(trial, step)
        if replicas_differ_from < step and (off or wrong):
            return _diverged_replicas(trial, broken, replicas_differ_from)
        if off and wrong:
            return _cause_of_wrong_forward(trial, step, off, passing)
        if wrong:
            return _cause_of_wrong_gradients(trial, step, wrong)
        as_a_whole = _gradients_off_as_a_whole(trial, step)
        if off:
            text, where, details = _forward_texts(trial, step, off)
            if as_a_whole is not None:
                details = (*details, *as_a_whole.details)
                return replace(as_a_whole, observed=f"{text}{where}; {as_a_whole.observed}", details=details)
            matches = f", its gradients match within the bound of {trial.bounds.gradient[step]:.1e}"
            if _are_gradients_seen(trial, step):
                text += matches
            return Cause(UNEXPLAINED, text + where, details=details)
        if as_a_whole is not None:
            return as_a_whole
    return None


def _wrong_update(trial: Trial, broken: Broken, finding: Finding, step: int) -> Cause:
    """Return the cause for a step whose update is the first wrong number. finding: the check's first of that step."""
    text = "the update is wrong"
    if _are_gradients_seen(trial, step):
        text += ", gradients before clipping are right"
    hint = extent_text(trial, broken["update"].findings)
    return Cause(UNEXPLAINED, text, finding=finding, hint=hint, details=(("place", "update"), ("step", step)))


def _replica_findings(broken: Broken) -> list[Finding]:
    """Return the findings of replicas whose parameters differ. Empty if `replica_agreement` does not fail."""
    findings = broken["replica_agreement"].findings if "replica_agreement" in broken else ()
    return [finding for finding in findings if finding.quantity == "value"]


def _diverged_replicas(trial: Trial, broken: Broken, step: float) -> Cause:
    """Return the cause for a step after which copies of parameters first differ.

    No reference has such copies, so wrong numbers that follow are not judged.
    """
    where = in_parameters_text(trial, {finding.name for finding in _replica_findings(broken) if finding.step == step})
    text = f"copies differ after step {step} {where}"
    text += ", and wrong numbers of later steps may follow from that"
    return Cause(UNEXPLAINED, text, details=(("place", "replicas"), ("step", step)))


def _step_text(trial: Trial, step: int) -> str:
    """Return " in step 2"; nothing for the first step.

    No later step is named: what is wrong there may follow from this step.
    """
    return "" if step == trial.first_step else f" in step {step}"


def _compare_weights(trial: Trial, step: int) -> WeightsComparison:
    """Return whether ranks begin a step with the reference's weights, as close as its gradients may be. Raises NoBound.

    RIGHT for the launch's first step. UNKNOWN with noise, which moves weights by an unknown amount, unless they are
    clearly wrong.
    """
    if step == trial.first_step:
        return WeightsComparison.RIGHT
    right = trial.reference_step(step - 1).parameters
    unknown = not trial.case.has_derived_bounds
    for rank, record in trial.own_steps():
        if record.step != step - 1:
            continue
        for fqn, observed in record.parameters.items():
            part = trial.slice_of(rank, fqn)
            if part is None or fqn not in right:
                unknown = True
                continue
            expected = view_of_slice(right[fqn].reshape(trial.plan.shapes[fqn]), part)
            close = trial.bounds.gradient[step] * float(np.max(np.abs(right[fqn]), initial=0))
            if expected.size == observed.size and not np.allclose(
                observed.ravel(), expected.ravel(), rtol=0, atol=close
            ):
                return WeightsComparison.WRONG
    return WeightsComparison.UNKNOWN if unknown else WeightsComparison.RIGHT


def _are_gradients_seen(trial: Trial, step: int) -> bool:
    """Return whether each rank's gradient of each parameter that it holds was observed, and has an expected one."""
    gradients = {rank: observed_gradients(trial, rank, step) for rank in trial.ranks}
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            if not tensor.value.size:
                continue
            if tensor.fqn not in gradients[rank] or expected_gradient(trial, rank, tensor.fqn, step) is None:
                return False
    return True


def _cause_of_wrong_gradients(trial: Trial, step: int, wrong: list[Pair]) -> Cause:
    """Return the cause for a step whose gradients are the first wrong numbers; its loss is right, or was not observed.

    wrong: (rank, fqn) of these gradients.
    """
    since = _step_text(trial, step)
    before = ""
    if since and _are_gradients_seen(trial, trial.first_step):
        before = f"right in step {trial.first_step} and "
    largest = max(distance_to_reference(trial, rank, fqn, step) for rank, fqn in wrong)
    how_much = ""
    if step == 1 and largest < math.inf:
        how_much = f" by up to {largest:.1e} of the largest entry in step 1"
    factor = common_factor(trial, step)
    times = "" if factor is None else f": {times_text(factor)} what they should be"
    ranks = sorted({rank for rank, _ in wrong})
    fqns = sort_fqns(trial, (fqn for _, fqn in wrong))
    where = where_text(trial, wrong) + common_group_text(trial, {*ranks}) + common_property_text(trial, fqns)
    matches = f"; the loss of step {step} matches within {trial.bounds.loss[step]:.0e}"
    if global_loss(trial, step) is not None:
        where += matches
    if _compare_weights(trial, step) is WeightsComparison.WRONG:
        where += WEIGHTS_DIFFER
    details = (
        ("place", "gradients"),
        ("step", step),
        ("off", largest),
        ("factor", factor),
        ("ranks", tuple(ranks)),
        ("parameters", tuple(fqns)),
    )
    return Cause(UNEXPLAINED, f"gradients are {before}wrong{how_much}{since}{times}", where, details=details)


CHECKS_BEFORE_FORWARD = ("samples", "positions", "initial_weights", "resume")
"""The checks of what goes into the forward pass, but for the update: where that is wrong earlier, it is reported instead."""


def _cause_of_wrong_forward(trial: Trial, step: int, off: float, passing: frozenset[str]) -> Cause:
    """Return the cause for a step whose loss and gradients are first wrong. off: the loss' relative difference.

    The forward pass is blamed only if its inputs are right: samples, positions and weights. Otherwise these are named.
    passing: checks that pass; one of the inputs that is not in it is judged again.
    """
    text, where, details = _forward_texts(trial, step, off)
    wrong = [
        check for check in CHECKS_BEFORE_FORWARD if check not in passing and verdict_of(trial, check) is Verdict.FAIL
    ]
    if wrong:
        return Cause(UNEXPLAINED, f"{text}; broken before the forward pass: {', '.join(wrong)}", details=details[:3])
    weights = _compare_weights(trial, step)
    if weights is not WeightsComparison.RIGHT:
        if weights is WeightsComparison.WRONG:
            text += WEIGHTS_DIFFER
        return Cause(UNEXPLAINED, text, details=(("place", "loss"), *details[1:3]))
    since = _step_text(trial, step)
    if not since and trial.saved:
        since = " after resuming"
    before = ""
    if step > trial.first_step and since and global_loss(trial, trial.first_step) is not None:
        before = f"right in step {trial.first_step} and "
    ranks = ranks_whose_losses_are_off(trial, step)
    on = on_ranks_text(trial, ranks) if ranks else ""
    begun = "resume" if trial.saved else "initial_weights"
    right = [noun for check, noun in ((begun, "weights"), ("samples", "samples")) if check in passing]
    though = ""
    if step == trial.first_step and right:
        though = f" though {' and '.join(right)} are right"
    text = f"the forward pass is {before}wrong{on}{since}: {text}{though}{where}"
    return Cause(UNEXPLAINED, text, details=(*details, ("ranks", tuple(ranks))))


def _forward_texts(trial: Trial, step: int, off: float) -> tuple[str, str, tuple[tuple[str, object], ...]]:
    """Return (how far the loss is off, at which module it first goes wrong, both as details of a cause).

    The second is empty after a launch's first step, because inputs of modules are on record of that step alone.
    """
    details: tuple[tuple[str, object], ...] = (("place", "forward"), ("step", step), ("off", off))
    text = f"the loss of step {step} is off by {off:.1e}"
    if step > trial.first_step:
        return text, "", details
    first_wrong = first_wrong_input(trial)
    words = first_wrong_input_text(trial, first_wrong)
    where = f": {words}" if words else ""
    return text, where, (*details, ("right", first_wrong.last_right), ("module", first_wrong.first_wrong))


def ranks_whose_losses_are_off(trial: Trial, step: int) -> list[int]:
    """Return the ranks whose samples have other losses than in the reference. Imports torch.

    Empty if a rank's expected loss is unknown: with noise, dropout, cp or pp, or where samples or losses are not known.
    """
    case = trial.case
    samples = samples_of_step(trial, step)
    received = samples.by_rank
    observed = {rank: losses_of_rank(trial, rank, step) for rank in received}
    are_samples_known = not samples.ranks_with_others
    if not case.has_derived_bounds or case.model.dropout or case.dims.cp * case.n_stages > 1:
        return []
    if not are_samples_known or not all(observed.values()):
        return []
    from harness.reference.counterfactual import Changes, loss_sums_of_rows

    before = {} if step == 1 else {"weights": trial.reference.steps[step - 2].parameters}
    otherwise = Changes(**(reference_order_arguments(trial) | before))
    rows = loss_sums_of_rows(case.model, case.training, trial.reference, step, otherwise)
    of_sample = dict(zip(trial.reference.samples[step - 1], rows, strict=True))

    def is_off(rank: int) -> bool:
        """Return whether the sum of a rank's losses differs from that of its samples in the reference."""
        expected = math.fsum(of_sample[sample_id] for sample_id in received[rank] if sample_id is not None)
        difference = abs(math.fsum(total for total, _ in observed[rank]) - expected)
        return not difference <= LOSS_FACTOR * trial.bounds.loss[step] * expected

    return list(filter(is_off, received))


def _gradients_off_as_a_whole(trial: Trial, step: int) -> Cause | None:
    """Return a cause with the whole gradients of a step that are off, in recipes with noise. None if there are none.

    None as well if no noise was measured for each parameter.
    """
    try:
        wrong = [misfit for misfit in gradient_misfits(trial, step)[0] if not misfit.is_within_bound]
    except NoBound:
        return None
    if not wrong:
        return None
    worst = max(wrong, key=lambda misfit: misfit.ratio_to_bound)
    text = f"by {worst.distance:.1e} of its norm in {worst.fqn}, noise explains {worst.distance_bound:.1e}"
    if worst.is_only_scaled:
        text = f"{number_text(worst.scale, 4)} times the reference's by best fit in {worst.fqn} on {rank_text(worst.ranks)}"
    fqns = sort_fqns(trial, (misfit.fqn for misfit in wrong))
    when = f" in step {step}" if step > trial.first_step else ""
    details = (("place", "gradients"), ("step", step), ("off", worst.distance), ("parameters", tuple(fqns)))
    return Cause(UNEXPLAINED, f"gradients are off{when}", in_parameters_text(trial, fqns), hint=text, details=details)


# ---- the first module


class FirstWrongInput(NamedTuple):
    """The first module in forward's order whose input does not have the reference's mean square."""

    last_right: str
    """The last module before it whose input has it; empty if there is none."""
    first_wrong: str
    """The module itself; empty if there is none."""
    difference: float
    """How far its mean square is off, relative to the reference's; 0 if none is."""


def first_wrong_input(trial: Trial) -> FirstWrongInput:
    """Return the first module whose input has another mean square than the reference's, over all ranks, in step 1.

    It is the launch's first step. `first_wrong` is empty if all are right, or if none were observed. Where A of an
    adapter is cut by columns, B receives a part of a sum on each tp rank. This input is left out.
    """
    adapter_half = ".lora_b" if trial.case.dims.tp > 1 else None
    right = ""
    close = ROUNDING if trial.case.has_derived_bounds else INPUT_FACTOR * trial.bounds.loss[1]
    for fqn, mean in input_mean_squares(trial).items():
        if adapter_half and fqn.endswith(adapter_half):
            matrix = fqn.removesuffix(adapter_half)
            if tp_dim(f"{matrix}.lora_a.weight") == 1:
                continue
        inputs = [
            step.activity.inputs[fqn] for _, step, _ in trial.steps_with_reference() if fqn in step.activity.inputs
        ]
        observed = sum(squares for squares, _ in inputs)
        expected = mean * sum(count for _, count in inputs)
        if inputs and not math.isclose(observed, expected, rel_tol=close):
            return FirstWrongInput(right, fqn, abs(observed / expected - 1) if expected else math.inf)
        right = fqn if inputs else right
    return FirstWrongInput(right, "", 0.0)


def first_wrong_input_text(trial: Trial, first_wrong: FirstWrongInput) -> str:
    """Return the sentence on the first wrong input; empty if no input was seen."""
    if not first_wrong.first_wrong:
        if not first_wrong.last_right:
            return ""
        text_of_inputs = "the input of every module matches the reference in mean square"
        return f"{text_of_inputs}; the output, the loss, or what keeps the mean square may be otherwise"
    text = f"{_input_text(trial, first_wrong.first_wrong)} does not match the reference in mean square"
    text += f" (off by {first_wrong.difference:.1e})" + _tp_difference_text(trial, first_wrong.first_wrong)
    if not first_wrong.last_right:
        return text
    hidden = ""
    if first_wrong.last_right.endswith("inner_attention"):
        hidden = ", where a wrong rotation of queries and keys would not show; scale and mask come behind it"
    sender = _stage_of(trial, first_wrong.last_right)
    receiver = _stage_of(trial, first_wrong.first_wrong)
    if receiver != sender:
        hidden += f", and stage {sender} sends it to stage {receiver}"
    return f"{text}; {_input_text(trial, first_wrong.last_right)}, before it, does{hidden}"


def _stage_of(trial: Trial, fqn: str) -> int:
    """Return the pipeline stage of a module: its layer's, the first for the embedding, the last for any other."""
    stages = range(trial.case.n_stages)
    if fqn == "tok_embeddings":
        layer = 0
    elif fqn.startswith("layers."):
        layer = int(fqn.split(".")[1])
    else:
        return stages[-1]
    for stage in stages:
        if layer in layers_of_stage(trial.case, stage):
            return stage
    return stages[-1] if layer else 0


def _input_text(trial: Trial, fqn: str) -> str:
    """Return a text of the input of a module: "the input of layers.0.attention".

    A model without dropout has no dropout modules. Their input is named as the output of the part of the block before
    them.
    """
    block, _, name = fqn.rpartition(".")
    part = {"attention_dropout": "attention", "ffn_dropout": "feed_forward"}.get(name)
    return f"the output of {block}.{part}" if part and not trial.case.model.dropout else f"the input of {fqn}"


def _tp_difference_text(trial: Trial, fqn: str) -> str:
    """Return a text that a module's input differs among tp ranks where it should be equal. Empty if it does not.

    Without sequence parallel the ranks of a tp group have one sum of what each computes of attention and feed-forward.
    """
    if not fqn.endswith(("_dropout", "norm")) or trial.case.features.sequence_parallel:
        return ""
    for group in trial.plan.groups.get("tp", ()):
        squares_of_ranks = []
        for rank in group:
            inputs = trial.ranks[rank].steps[0].activity.inputs
            if fqn in inputs:
                squares_of_ranks.append(inputs[fqn][0])
        if not all(math.isclose(squares, squares_of_ranks[0], rel_tol=1e-6) for squares in squares_of_ranks):
            return f", and differs among tp ranks {ranks_text(group)}, which should have the same sum"
    return ""


# ---- what wrong parameters have in common


def common_group_text(trial: Trial, ranks: set[int]) -> str:
    """Return ", one group of dp_replicate" if these ranks are exactly one group of an axis, but not all ranks.

    Otherwise empty.
    """
    for axis, groups in trial.plan.groups.items():
        if len(ranks) < len(trial.ranks) and ranks in [set(group) for group in groups]:
            return f", one group of {axis}"
    return ""


def common_property_text(trial: Trial, fqns: list[str]) -> str:
    """Return "; all norm weights are wrong, no others" if exactly the parameters with one property are wrong.

    Otherwise empty. Empty for a single parameter. fqns: in the model's order.
    """
    for text, members in _parameters_by_property(trial).items():
        if fqns == members and len(fqns) > 1:
            return f"; all {text} are wrong, no others"
    return ""


def _parameters_by_property(trial: Trial) -> dict[str, list[str]]:
    """Return the fqns that share a property, in the model's order, by its name.

    Properties are a kind of parameter, a layer, a module, one name in all layers, and the place before or behind a
    parameter.
    """
    order = list(trial.plan.shapes)
    shapes = trial.case.model.parameter_shapes()
    members = {
        "norm weights": [fqn for fqn in order if fqn.endswith("norm.weight")],
        "matrices": [fqn for fqn in order if len(shapes[fqn]) == 2],
        "K/V projections": [fqn for fqn in order if fqn.endswith((".wk.weight", ".wv.weight"))],
    }
    for fqn in order:
        parts = fqn.split(".")
        if parts[0] == "layers":
            layer = ".".join(parts[:2])
            module = ".".join(parts[:3])
            name = ".".join(parts[2:])
            members[f"weights of {layer}"] = [other for other in order if other.startswith(f"{layer}.")]
            members[f"weights of {module}"] = [other for other in order if other.startswith(f"{module}.")]
            members[f"{name} of every layer"] = [other for other in order if other.endswith(f".{name}")]
            members[f"{parts[2]} weights of every layer"] = [other for other in order if f".{parts[2]}." in other]
    for index, fqn in enumerate(order[1:], start=1):
        members[f"parameters before {fqn}"] = order[:index]
        members[f"parameters from {fqn} on"] = order[index:]
    return members
