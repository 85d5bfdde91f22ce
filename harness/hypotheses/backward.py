"""Facts about gradients in the first step that is wrong, where no single reference shows what follows from them.

Subjects are collectives of backward that did not run, shares of norm weights that were not added, and rounding. Where
less was moved than planned, the place is given down to which gradients are right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from harness.core.causes.differences import (
    NUMBER_CHECKS,
    checks_failing_with_gradients,
    distance_to_reference,
    expected_gradient,
    first_wrong_step,
    loss_difference,
    observed_gradients,
    pairs_with_wrong_gradient,
)
from harness.core.causes.hypothesis import NOT_TESTED, Broken, Fact
from harness.core.causes.layouts import wrong_slices
from harness.core.causes.localise import first_wrong_input, first_wrong_input_text
from harness.core.causes.words import (
    Pair,
    finding_line,
    groups_text,
    in_parameters_text,
    shorten_names,
    sort_fqns,
    traffic_lines,
    where_text,
)
from harness.core.checks.traffic import IN_ANOTHER_DTYPE
from harness.core.judge.result import Cause, Lines
from harness.core.judge.tolerance import relative_difference
from harness.core.judge.traffic import axis_of, axis_text, optional_bytes_by_collective
from harness.core.judge.traffic import observed_bytes_by_collective as observed_traffic
from harness.core.judge.traffic import planned_bytes_by_collective as planned_traffic
from harness.core.judge.trial import Trial
from harness.core.plan.slices import tp_dim
from harness.core.plan.traffic.flow import Flow
from harness.hypotheses.whose import is_count


def wrong_backward(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield facts that explain wrong gradients of the first wrong step: a reduction or a K/V exchange that did not run.

    If neither is seen, or ranks hold other slices than planned, the first of unsummed norms, unreduced whole parameters
    and gradients lost in backward follows. A missing exchange over cp is yielded also where gradients are not judged.
    Nothing if nothing is seen.
    """
    step = ("gradients" in broken and first_wrong_step(trial)) or trial.first_step
    wrong = pairs_with_wrong_gradient(trial, step) if "gradients" in broken else []
    if not wrong:
        if "traffic" in broken and (exchange_fact := _missing_kv_exchange(trial, wrong, step)):
            yield exchange_fact
        return
    layout_fact = _unreduced_axes_of_layout(trial, step)
    reduction_fact = layout_fact
    if "traffic" in broken and not wrong_slices(trial):
        reduction_fact = _unreduced_axes(trial, wrong, step)
    exchange_fact = _missing_kv_exchange(trial, wrong, step) if "traffic" in broken else None
    if exchange_fact and reduction_fact:  # what is wrong with gradients follows from both
        other_checks = tuple(check for check in exchange_fact.checks if check not in reduction_fact.checks)
        exchange_fact = replace(exchange_fact, checks=other_checks)
    if layout_fact or exchange_fact or reduction_fact:
        if reduction_fact:
            yield reduction_fact
        if exchange_fact:
            yield exchange_fact
        if exchange_fact or not layout_fact:
            return
    for find_fact in (_unsummed_norms, _unreduced_whole_parameters, _lost_in_backward):
        if fact := find_fact(trial, wrong, step):
            yield fact
            return


KV_FLOWS = {  # in backward K/V may be exchanged again, by the same collective as their gradients
    ("keys and values", "forward"): "no K/V exchange over cp",
    ("gradients of keys and values", "backward"): "no exchange of K/V gradients over cp: each rank keeps its own",
}


def _missing_kv_exchange(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Return the first planned flow of attention over cp of which nothing was seen, as a fact. None if all were seen.

    Only the lowest rank is looked at. Other planned flows of the same collective over cp are subtracted first. Half of
    the planned bytes are a missing exchange of keys, or of values. wrong: empty where gradients are not judged.
    """
    rank = min(trial.ranks)
    seen = observed_traffic(trial, trial.ranks[rank], step)
    flows = trial.plan.flows_of(rank, step)
    checks = (
        "traffic",
        "exchange",
        "reshard",
        "features",
        *(checks_failing_with_gradients(trial, step) if wrong else ()),
    )
    for role_and_phase, text in KV_FLOWS.items():
        for flow in (flow for flow in flows if (flow.role, flow.phase) == role_and_phase):
            collective = (flow.axis, flow.op, flow.phase)
            same_collective = [
                other for other in flows if other is not flow and (other.axis, other.op, other.phase) == collective
            ]
            key = trial.plan.group_of(rank, flow.axis), flow.op, flow.phase
            moved_bytes = seen.get(key, 0) - sum(other.bytes for other in same_collective)
            lines = NOT_TESTED if wrong else tuple(traffic_lines(trial))
            if 2 * moved_bytes == flow.bytes and (tensor_names := _wrong_keys_or_values(wrong)):
                reason = f"no exchange of the gradients of {tensor_names} over cp: each rank keeps its own"
                return Fact(Cause("K/V not exchanged", reason, details=(("of", tensor_names),)), checks, lines)
            if moved_bytes <= 0:
                other_groups = _excess_groups(trial, rank, step, flow)
                hint = ""
                if other_groups:
                    hint = f"{flow.op} ran over {', '.join(other_groups)} more than planned"
                cause = Cause("K/V not exchanged", text, hint=hint, details=(("instead", other_groups),))
                return Fact(cause, checks, lines)
    return None


def _wrong_keys_or_values(wrong: list[Pair]) -> str:
    """Return "keys" or "values": those with a wrong weight where the weight of the others is right. Empty if both or none.

    The last layer decides, because an earlier one is passed back what is wrong already. Keys and values are equally large.
    """
    fqns = [fqn.split(".") for _, fqn in wrong if fqn.endswith((".wk.weight", ".wv.weight"))]
    last_layer = max((int(parts[1]) for parts in fqns), default=None)
    wrong_names = {parts[-2] for parts in fqns if int(parts[1]) == last_layer}
    return {"wk": "keys", "wv": "values"}[wrong_names.pop()] if len(wrong_names) == 1 else ""


def _excess_groups(trial: Trial, rank: int, step: int, flow: Flow) -> tuple[str, ...]:
    """Return the groups, in words, over which a rank moved more bytes by the flow's collective than planned."""
    observed = observed_traffic(trial, trial.ranks[rank], step)
    planned = planned_traffic(trial, rank, step)
    keys = (key for key in observed if key[1:] == (flow.op, flow.phase) and observed[key] > planned.get(key, 0))
    return tuple(sorted(axis_text(trial, key[0]) for key in keys))


def _unreduced_axes(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Return as a fact the axes over which some rank should reduce gradients and nothing ran. None if there are none.

    The hint has the groups over which the collectives ran instead.
    """
    missing = silent_axes(trial, step)
    if not missing:
        return None
    texts = silent_axes_texts(trial, step, missing)
    other_groups = set[tuple[int, ...]]()
    for op in missing.values():
        other_groups |= unplanned_groups(trial, op)
    if other_groups:
        texts.append(f"but over {groups_text(sorted(other_groups))}")
    silent_steps = [number for number in trial.case.steps if missing.keys() <= silent_axes(trial, number).keys()]
    when = ""
    if len(silent_steps) < len(trial.case.steps):
        noun = "steps" if len(silent_steps) > 1 else "step"
        when = f" in {noun} {', '.join(map(str, silent_steps))}"
    text = f"gradients are not reduced over {' and '.join(missing)}{when}"
    hint = ", ".join(texts)
    checks = ("traffic", "process_groups", "placements", *checks_failing_with_gradients(trial, step))
    cause = Cause("gradients not reduced", text, hint=hint, details=(("axes", tuple(missing)),))
    return Fact(cause, checks, (*traffic_lines(trial), *NOT_TESTED))


def _unreduced_axes_of_layout(trial: Trial, step: int) -> Fact | None:
    """Return as a fact the axes between whose ranks nothing that runs in backward sums gradients, by the lowest rank's
    groups.

    None if there are none, or if ranks hold the slices that are planned.
    """
    rank = min(trial.ranks)
    ops = ("all_reduce", "reduce_scatter")
    calls = (call for call in trial.ranks[rank].collectives if call.phase in ("backward", "pipeline"))
    used = {call.ranks for call in calls if call.op in ops and "float" in call.dtype}
    axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if axis in trial.plan.groups]
    groups = {axis: {*trial.plan.group_of(rank, axis)} for axis in axes}
    missing = []
    for axis, group in groups.items():
        if not any(len(group & {*ranks}) > 1 for ranks in used):
            missing.append(axis)
    if not missing or not wrong_slices(trial):
        return None
    text = f"gradients are not reduced over {' and '.join(missing)}"
    cause = Cause("gradients not reduced", text, details=(("axes", tuple(missing)),))
    return Fact(cause, checks_failing_with_gradients(trial, step), NOT_TESTED)


def silent_axes(trial: Trial, step: int) -> dict[str, str]:
    """Return the axes over which some rank should reduce gradients in a step and nothing ran: axis -> collective."""
    return {axis: op for axis, op, _ in _silent_reductions(trial, step)}


def silent_axes_texts(trial: Trial, step: int, axes: Collection[str]) -> list[str]:
    """Return one text for each axis and collective: over which groups of these axes nothing ran."""
    groups: dict[tuple[str, str], dict[tuple[int, ...], None]] = {}
    for axis, op, group in _silent_reductions(trial, step):
        groups.setdefault((axis, op), {})[group] = None
    return [
        f"no {op} of gradients ran over {groups_text([*groups_of_axis])}"
        for (axis, op), groups_of_axis in groups.items()
        if axis in axes
    ]


def _silent_reductions(trial: Trial, step: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (axis, collective, group) for each rank and planned sum of gradients of which that rank moved nothing."""
    for rank, evidence in sorted(trial.ranks.items()):
        observed = observed_traffic(trial, evidence, step)
        for flow in trial.plan.flows_of(rank, step):
            group = trial.plan.group_of(rank, flow.axis)
            if flow.role == "gradients" and not observed.get((group, flow.op, flow.phase)):
                yield flow.axis, flow.op, group


def unplanned_groups(trial: Trial, op: str) -> set[tuple[int, ...]]:
    """Return the groups of several ranks over which a collective ran in backward and that the plan does not have."""
    planned_groups = set(itertools.chain.from_iterable(trial.plan.groups.values()))
    calls = itertools.chain.from_iterable(evidence.collectives for evidence in trial.ranks.values())
    backward_groups = {
        call.ranks for call in calls if (call.op, call.phase) == (op, "backward") and len(call.ranks) > 1
    }
    return backward_groups - planned_groups


def _unsummed_norms(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Return a fact that gradients are not summed over tp: the sum of those that tp ranks have is the reference's.

    None if it is not, without tp, or if tp cuts a wrong parameter. Each tp rank holds these weights whole, and has the
    gradient of its share of the tokens. The kind is "norms not summed" if all are norm weights.
    """
    fqns = sort_fqns(trial, (fqn for _, fqn in wrong))
    if trial.case.dims.tp == 1 or any(tp_dim(fqn) is not None for fqn in fqns):
        return None
    for group in trial.plan.groups["tp"]:
        gradients_of_group = [observed_gradients(trial, rank, step) for rank in group]
        for fqn in fqns:
            if not all(fqn in gradients for gradients in gradients_of_group):
                continue  # under ZeRO some have nothing of it
            total = np.asarray(sum(gradients[fqn] for gradients in gradients_of_group))
            expected = expected_gradient(trial, group[0], fqn, step)
            if expected is None or relative_difference(total, expected) > 1e-9:
                return None
    where = in_parameters_text(trial, fqns)
    if not all("norm" in fqn for fqn in fqns):
        cause = Cause("gradients not reduced", "gradients are not reduced over tp", where, details=(("axes", ("tp",)),))
        return Fact(cause, checks_failing_with_gradients(trial, step), NOT_TESTED)
    observed = "gradients of norm weights are not summed over tp"
    hint = "under sequence parallel each tp rank's are of its part of the sequence"
    return Fact(
        Cause("norms not summed", observed, where, hint=hint), checks_failing_with_gradients(trial, step), NOT_TESTED
    )


def _unreduced_whole_parameters(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Return a fact that gradients are not reduced over an axis, of parameters held whole though they should be cut.

    It needs that over each group of this axis the mean of their gradients is right. None if no wrong gradient is of such a
    parameter, or no axis has that mean. wrong: rank and fqn.
    """
    whole_fqns = {fqn for _, fqn, _ in wrong_slices(trial)}
    wrong_fqns = sort_fqns(trial, (fqn for _, fqn in wrong))
    fqns = [fqn for fqn in wrong_fqns if fqn in whole_fqns]
    right_gradients = trial.reference_step(step).gradients
    if not fqns:
        return None
    for axis in ("dp_replicate", "dp_shard", "cp"):
        gradients_of_groups = []
        for group, fqn in itertools.product(trial.plan.groups.get(axis, ()), fqns):
            gradients_of_groups.append((fqn, [observed_gradients(trial, rank, step).get(fqn) for rank in group]))
        if gradients_of_groups and all(_has_mean(values, right_gradients[fqn]) for fqn, values in gradients_of_groups):
            text = f"gradients are not reduced over {axis}"
            cause = Cause("gradients not reduced", text, in_parameters_text(trial, fqns), details=(("axes", (axis,)),))
            return Fact(cause, checks_failing_with_gradients(trial, step), NOT_TESTED)
    return None


def _has_mean(values: Sequence[np.ndarray | None], right: np.ndarray) -> bool:
    """Return whether the mean of these values is the right gradient within 1e-9.

    False if one is None or has another shape.
    """
    same_shape = [value for value in values if value is not None and value.shape == right.shape]
    return len(same_shape) == len(values) and relative_difference(np.mean(same_shape, axis=0), right) <= 1e-9


def _lost_in_backward(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Return a fact if gradients are right down to some place that backward passes and wrong in all that it reaches later.

    None if no less was moved than planned: the place alone is no cause.
    """
    wrong_fqns = {fqn for _, fqn in wrong}
    if wrong_fqns & {fqn for _, fqn, _ in wrong_slices(trial)}:
        return None
    right_fqns = sorted((fqn for fqn in trial.plan.shapes if fqn not in wrong_fqns), key=forward_order)
    if (
        not right_fqns
        or loss_difference(trial, step)
        or not max(map(forward_order, wrong_fqns)) < forward_order(right_fqns[0])
    ):
        return None
    if not (traffic_text := _missing_traffic_text(trial, step)):
        return None
    deepest = [fqn for fqn in right_fqns if forward_order(fqn) == forward_order(right_fqns[0])]
    following_text = " and what follows" if len(deepest) < len(right_fqns) else ""
    right_text = f"{shorten_names(deepest)}{following_text}"
    text = f"gradients are right in {right_text}, and wrong in all parameters before: {traffic_text}"
    return Fact(Cause("lost in backward", text), ("traffic", *checks_failing_with_gradients(trial, step)), NOT_TESTED)


ATTENTION = {"attention_norm": 0, "wq": 1, "wk": 1, "wv": 1, "wo": 2}
MODULE_ORDER = {"tok_embeddings": 0, **ATTENTION, "ffn_norm": 3, "w1": 4, "w3": 4, "w2": 5, "norm": 6, "output": 7}


def forward_order(fqn: str) -> tuple[float, int]:
    """Return when forward comes to a parameter: (layer, place in it). The embedding is layer -1, norm and output are last."""
    *path, module, _ = fqn.partition(".lora_")[0].removesuffix(".weight").split(".") + [""]
    layer_outside = -1 if module == "tok_embeddings" else math.inf
    return int(path[1]) if path else layer_outside, MODULE_ORDER[module]


def _missing_traffic_text(trial: Trial, step: int) -> str:
    """Return in words the axes over which the lowest rank moved less in backward than planned, optional flows left out.

    Empty if it moved no less over any.
    """
    rank = min(trial.ranks)
    observed = observed_traffic(trial, trial.ranks[rank], step)
    planned = planned_traffic(trial, rank, step)
    optional = optional_bytes_by_collective(trial, rank, step)
    required = {key: size - optional.get(key, 0) for key, size in planned.items() if key[2] == "backward"}
    short_axes = (axis_of(trial, key[0]) for key, size in required.items() if observed.get(key, 0) < size)
    axes = " and ".join(dict.fromkeys(short_axes))
    return f"backward moves less than planned over {axes}" if axes else ""


FORMATS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Formats of which numbers can be recognised, with half the distance of 1 from the next larger one."""
ENTRIES = 100
"""Numbers other than zero that must all be of a format, at least."""


def coarsely_rounded_numbers(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield facts that wrong gradients, or an optimizer's state, are all numbers of a coarser format than their own
    dtype.

    Nothing for a case that computes in a lower precision or quantizes, or if neither gradients nor updates fail.
    """
    if trial.case.training.compute_dtype or trial.case.training.quantize or not {"gradients", "update"} & {*broken}:
        return
    step = first_wrong_step(trial) if "gradients" in broken else None
    wrong = pairs_with_wrong_gradient(trial, step) if step else []
    values = [observed_gradients(trial, rank, step)[fqn] for rank, fqn in wrong] if step else []
    if step and (format_name := _coarsest_format(values)):
        where = where_text(trial, wrong)
        details = (("format", format_name), ("step", step))
        cause = Cause("rounded", f"gradients of step {step} are all numbers of {format_name}", where, details=details)
        yield Fact(cause, checks_failing_with_gradients(trial, step))
    state: dict[str, list[np.ndarray]] = {}
    if "update" in broken:
        for evidence in trial.ranks.values():
            for tensors in evidence.steps[-1].optimizer_state.values():
                for key, value in tensors.items():
                    state.setdefault(key, []).append(value)
    for key, values_of_key in state.items():
        if format_name := _coarsest_format(values_of_key):
            observed = f"{key} of the optimizer holds only numbers of {format_name}"
            cause = Cause("rounded", observed, details=(("format", format_name),))
            following = {*NUMBER_CHECKS, "reported_loss"} if step is None or step > trial.first_step else {"update"}
            yield Fact(cause, tuple(check for check in following if check in broken))


def _coarsest_format(values: Sequence[np.ndarray]) -> str:
    """Return the coarsest of FORMATS that all numbers are of, though their own dtype is finer; empty if there is none.

    At least ENTRIES numbers must not be zero. Counters and constants are numbers of every format, so they are left out.
    """
    values = [value for value in values if not is_count(value)]
    if not values or not all(value.dtype.kind == "f" for value in values):
        return ""
    nonzero = np.concatenate([value[value != 0].reshape(-1) for value in values]).astype(np.float64)
    finest = max(np.finfo(value.dtype).nmant for value in values)
    for name, unit in FORMATS.items():
        mantissa, _ = np.frexp(nonzero)
        digits = mantissa / unit
        if len(nonzero) >= ENTRIES and unit > 2.0 ** -(finest + 1) and (digits == np.round(digits)).all():
            return name
    return ""


def random_state_not_restored(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield the fact that a recomputation starts from another state of the generator than forward, and draws from it.

    Nothing if gradients do not fail, or nothing is drawn in backward.
    """
    activities = [step.activity for _, step, _ in trial.steps_with_reference()]
    other_states = {*itertools.chain.from_iterable(activity.other_states for activity in activities)}
    has_drawn = any(activity.random.get("backward") for activity in activities)
    if not other_states or not has_drawn or "gradients" not in broken:
        return
    blocks = []
    for fqn in sorted(other_states):
        if not any(fqn.startswith(f"{outer}.") for outer in other_states):
            blocks.append(fqn)
    observed = f"recomputation of {shorten_names(blocks, 4)} starts from another random state than forward"
    cause = Cause("random state not restored", observed, hint="its dropout masks differ from those of the loss")
    yield Fact(cause, ("gradients", "grad_norm", "loss", "reported_loss"), (finding_line(broken["gradients"]),))


# ---- losses of one model that differ


FLOAT32 = 1e-6  # relative to the largest


def rounded_to_float32(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield the fact that in a float64 case all losses and the gradients of step 1 are off by less than float32 rounds.

    Nothing in other cases, if gradients do not fail, or if those of step 1 are right.
    """
    if "gradients" not in broken or not trial.case.has_derived_bounds:
        return
    wrong = pairs_with_wrong_gradient(trial, 1)
    gradients = [distance_to_reference(trial, rank, fqn, 1) for rank, fqn in wrong]
    losses = [loss_difference(trial, step) or 0.0 for step in trial.case.steps]
    if wrong and all(off < FLOAT32 for off in (*losses, *gradients)):
        observed = f"gradients of step 1 are off by up to {max(gradients):.0e}"
        where = where_text(trial, wrong)
        if any(losses):
            where += f", losses of all steps by {max(losses):.0e}"
        hint = "no more than arithmetic in float32 rounds, requested float64"
        located = first_wrong_input(trial)
        lines: Lines = (("first seen", first_wrong_input_text(trial, located)),) if located.first_wrong else ()
        details = (("off", max(gradients)), ("module", located.first_wrong))
        cause = Cause("rounded", observed, where, hint=hint, details=details)
        traffic_findings = broken["traffic"].findings if "traffic" in broken else ()
        narrower = []
        if traffic_findings and all(finding.quantity == IN_ANOTHER_DTYPE for finding in traffic_findings):
            narrower = ["traffic"]
        lines += tuple(finding_line(broken[check]) for check in narrower)
        yield Fact(cause, ("gradients", "loss", "grad_norm", "reported_loss", *narrower), lines)
