"""What was seen of gradients in the first step that is wrong, where no single reference shows what follows from it.

Subjects are collectives of backward that did not run, shares of norm weights that were not added, and rounding. Where less was
moved than planned, the place is given down to which gradients are right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from harness.core.causes.differences import (
    NUMBERS,
    consequences,
    distance,
    expected_gradient,
    first_wrong_step,
    loss_off,
    seen_gradients,
    wrong_pairs,
)
from harness.core.causes.hypothesis import NOT_TESTED, Broken, Fact
from harness.core.causes.layouts import wrong_parts
from harness.core.causes.localise import first_wrong_input, place_words
from harness.core.causes.words import (
    Pair,
    finding_line,
    groups_text,
    in_order,
    in_parameters,
    some,
    traffic_lines,
    where_text,
)
from harness.core.checks.traffic import IN_ANOTHER_DTYPE
from harness.core.judge.result import Cause, Lines
from harness.core.judge.tolerance import relative_difference
from harness.core.judge.traffic import axis_of, axis_text
from harness.core.judge.traffic import observed as observed_traffic
from harness.core.judge.traffic import planned as planned_traffic
from harness.core.judge.trial import Trial
from harness.core.plan.slices import tp_dim
from harness.core.plan.traffic.flow import Flow
from harness.hypotheses.whose import is_count


def wrong_backward(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """The first of these that is seen, beside what another layout leads to; what is not exchanged over cp also where
    gradients are not judged."""
    step = ("gradients" in broken and first_wrong_step(trial)) or trial.first_step
    wrong = wrong_pairs(trial, step) if "gradients" in broken else []
    if not wrong:
        yield from filter(None, [_no_exchange(trial, wrong, step)] if "traffic" in broken else [])
        return
    other = _of_another_layout(trial, step)
    reduced = other
    if "traffic" in broken and not wrong_parts(trial):
        reduced = _other_groups(trial, wrong, step)
    exchange = _no_exchange(trial, wrong, step) if "traffic" in broken else None
    if exchange and reduced:  # what is wrong with gradients follows from both
        exchange = replace(exchange, checks=tuple(check for check in exchange.checks if check not in reduced.checks))
    if other or exchange or reduced:
        yield from filter(None, (reduced, exchange))
        if exchange or not other:
            return
    rest = (
        fact for look in (_norms_not_summed, _whole_not_reduced, _lost_before) if (fact := look(trial, wrong, step))
    )
    yield from itertools.islice(rest, 1)


OF_ATTENTION = {  # in backward K/V may be exchanged again, by the same collective as their gradients
    ("keys and values", "forward"): "no K/V exchange over cp",
    ("gradients of keys and values", "backward"): "no exchange of K/V gradients over cp: each rank keeps its own",
}


def _no_exchange(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Context parallel: planned flows of attention over cp of which nothing was seen, beside what else runs there."""
    rank = min(trial.ranks)
    seen, flows = observed_traffic(trial, trial.ranks[rank], step), trial.plan.flows_of(rank, step)
    checks = ("traffic", "exchange", "reshard", "features", *(consequences(trial, step) if wrong else ()))
    for place, text in OF_ATTENTION.items():
        for flow in (flow for flow in flows if (flow.role, flow.phase) == place):
            alike = [f for f in flows if f is not flow and (f.axis, f.op, f.phase) == (flow.axis, flow.op, flow.phase)]
            own = trial.plan.group_of(rank, flow.axis), flow.op, flow.phase
            moved = seen.get(own, 0) - sum(one.bytes for one in alike)
            lines = NOT_TESTED if wrong else tuple(traffic_lines(trial))
            if 2 * moved == flow.bytes and (whose := _wrong_of_keys_and_values(wrong)):
                what = f"no exchange of the gradients of {whose} over cp: each rank keeps its own"
                return Fact(Cause("K/V not exchanged", what, details=(("of", whose),)), checks, lines)
            if moved <= 0:
                instead = _more_than_planned(trial, rank, step, flow)
                hint = f"{flow.op} ran over {', '.join(instead)} more than planned" * bool(instead)
                return Fact(Cause("K/V not exchanged", text, hint=hint, details=(("instead", instead),)), checks, lines)
    return None


def _wrong_of_keys_and_values(wrong: list[Pair]) -> str:
    """Return which of the two have a wrong weight where that of the other is right.

    The last layer decides, because an earlier one is passed back what is wrong already. Keys and values are equally large.
    """
    fqns = [fqn.split(".") for _, fqn in wrong if fqn.endswith((".wk.weight", ".wv.weight"))]
    last = max((int(of[1]) for of in fqns), default=None)
    own = {of[-2] for of in fqns if int(of[1]) == last}
    return {"wk": "keys", "wv": "values"}[own.pop()] if len(own) == 1 else ""


def _more_than_planned(trial: Trial, rank: int, step: int, flow: Flow) -> tuple[str, ...]:
    """The groups over which a rank moved more by a collective than planned, where it should have by another."""
    seen, wanted = observed_traffic(trial, trial.ranks[rank], step), planned_traffic(trial, rank, step)
    keys = (key for key in seen if key[1:] == (flow.op, flow.phase) and seen[key] > wanted.get(key, 0))
    return tuple(sorted(axis_text(trial, key[0]) for key in keys))


def _other_groups(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Axes over which some rank should reduce gradients and nothing ran; and the groups over which it ran instead."""
    missing = silent_axes(trial, step)
    if not missing:
        return None
    texts = silent_text(trial, step, missing)
    instead = sorted({ranks for op in missing.values() for ranks in groups_of_no_axis(trial, op)})
    texts += [f"but over {groups_text(instead)}"] if instead else []
    silent = [number for number in trial.case.steps if missing.keys() <= silent_axes(trial, number).keys()]
    when = (
        f" in step{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        if len(silent) < len(trial.case.steps)
        else ""
    )
    text, hint = f"gradients are not reduced over {' and '.join(missing)}{when}", ", ".join(texts)
    checks = ("traffic", "process_groups", "placements", *consequences(trial, step))
    cause = Cause("gradients not reduced", text, hint=hint, details=(("axes", tuple(missing)),))
    return Fact(cause, checks, (*traffic_lines(trial), *NOT_TESTED))


def _of_another_layout(trial: Trial, step: int) -> Fact | None:
    """Where ranks hold other slices: axes between whose ranks nothing that runs in backward sums gradients."""
    rank, ops = min(trial.ranks), ("all_reduce", "reduce_scatter")
    calls = (call for call in trial.ranks[rank].collectives if call.phase in ("backward", "pipeline"))
    used = {call.ranks for call in calls if call.op in ops and "float" in call.dtype}
    axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if axis in trial.plan.groups]
    lines = {axis: {*trial.plan.group_of(rank, axis)} for axis in axes}
    missing = [axis for axis, line in lines.items() if not any(len(line & {*ranks}) > 1 for ranks in used)]
    if not missing or not wrong_parts(trial):
        return None
    text = f"gradients are not reduced over {' and '.join(missing)}"
    cause = Cause("gradients not reduced", text, details=(("axes", tuple(missing)),))
    return Fact(cause, consequences(trial, step), NOT_TESTED)


def silent_axes(trial: Trial, step: int) -> dict[str, str]:
    """Axes over which some rank should reduce gradients in a step and nothing ran, with the collective that should."""
    return {axis: op for axis, op, _ in _silent(trial, step)}


def silent_text(trial: Trial, step: int, axes: Collection[str]) -> list[str]:
    """Say over which groups of these axes nothing ran."""
    groups: dict[tuple[str, str], dict[tuple[int, ...], None]] = {}
    for axis, op, group in _silent(trial, step):
        groups.setdefault((axis, op), {})[group] = None
    return [f"no {op} of gradients ran over {groups_text([*of])}" for (axis, op), of in groups.items() if axis in axes]


def _silent(trial: Trial, step: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Axis, collective and group of each sum of gradients of which some rank moved nothing."""
    for rank, evidence in sorted(trial.ranks.items()):
        seen = observed_traffic(trial, evidence, step)
        for flow in trial.plan.flows_of(rank, step):
            group = trial.plan.group_of(rank, flow.axis)
            if flow.role == "gradients" and not seen.get((group, flow.op, flow.phase)):
                yield flow.axis, flow.op, group


def groups_of_no_axis(trial: Trial, op: str) -> set[tuple[int, ...]]:
    """The groups over which an operation ran in backward, and that the plan does not know."""
    known = {group for groups in trial.plan.groups.values() for group in groups}
    calls = (call for evidence in trial.ranks.values() for call in evidence.collectives)
    return {c.ranks for c in calls if (c.op, c.phase) == (op, "backward") and len(c.ranks) > 1} - known


def _norms_not_summed(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Compare the sum of what tp ranks have with the reference's: of weights that are whole on each, theirs are shares."""
    fqns = in_order(trial, (fqn for _, fqn in wrong))
    if trial.case.dims.tp == 1 or any(tp_dim(fqn) is not None for fqn in fqns):
        return None
    for group in trial.plan.groups["tp"]:
        of_group = [seen_gradients(trial, rank, step) for rank in group]
        for fqn in (fqn for fqn in fqns if all(fqn in seen for seen in of_group)):  # under ZeRO some have nothing of it
            total = np.asarray(sum(seen[fqn] for seen in of_group))
            expected = expected_gradient(trial, group[0], fqn, step)
            if expected is None or relative_difference(total, expected) > 1e-9:
                return None
    where = in_parameters(trial, fqns)
    if not all("norm" in fqn for fqn in fqns):
        cause = Cause("gradients not reduced", "gradients are not reduced over tp", where, details=(("axes", ("tp",)),))
        return Fact(cause, consequences(trial, step), NOT_TESTED)
    observed = "gradients of norm weights are not summed over tp"
    hint = "under sequence parallel each tp rank's are of its part of the sequence"
    return Fact(Cause("norms not summed", observed, where, hint=hint), consequences(trial, step), NOT_TESTED)


def _whole_not_reduced(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Name what ranks hold whole, though it should be cut, if the mean of their gradients is the right one."""
    held = {fqn for _, fqn, _ in wrong_parts(trial)}
    fqns = [fqn for fqn in in_order(trial, (fqn for _, fqn in wrong)) if fqn in held]
    right = trial.reference_step(step).gradients
    for axis in ("dp_replicate", "dp_shard", "cp") if fqns else ():
        groups = trial.plan.groups.get(axis, ())
        own = [
            (fqn, [seen_gradients(trial, rank, step).get(fqn) for rank in group]) for group in groups for fqn in fqns
        ]
        if own and all(_mean_is(values, right[fqn]) for fqn, values in own):
            text = f"gradients are not reduced over {axis}"
            cause = Cause("gradients not reduced", text, in_parameters(trial, fqns), details=(("axes", (axis,)),))
            return Fact(cause, consequences(trial, step), NOT_TESTED)
    return None


def _mean_is(values: Sequence[np.ndarray | None], right: np.ndarray) -> bool:
    whole = [one for one in values if one is not None and one.shape == right.shape]
    return len(whole) == len(values) and relative_difference(np.mean(whole, axis=0), right) <= 1e-9


def _lost_before(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Right down to some place that backward passes, wrong in all that it reaches later, and less was moved than planned. The
    place alone is no cause."""
    bad = {fqn for _, fqn in wrong}
    if bad & {fqn for _, fqn, _ in wrong_parts(trial)}:
        return None
    right = sorted((fqn for fqn in trial.plan.shapes if fqn not in bad), key=depth)
    if not right or loss_off(trial, step) or not max(map(depth, bad)) < depth(right[0]):
        return None
    if not (less := _less_than_planned(trial, step)):
        return None
    first = [fqn for fqn in right if depth(fqn) == depth(right[0])]
    text = f"gradients are right in {some(first)}{' and what follows' * (len(first) < len(right))}, and wrong in all"
    text += f" parameters before: {less}"
    return Fact(Cause("lost in backward", text), ("traffic", *consequences(trial, step)), NOT_TESTED)


ATTENTION = {"attention_norm": 0, "wq": 1, "wk": 1, "wv": 1, "wo": 2}
PLACES = {"tok_embeddings": 0, **ATTENTION, "ffn_norm": 3, "w1": 4, "w3": 4, "w2": 5, "norm": 6, "output": 7}


def depth(fqn: str) -> tuple[float, int]:
    """When forward comes to a parameter: layer, and place in it. The embedding is layer -1, norm and output are last."""
    *path, module, _ = fqn.partition(".lora_")[0].removesuffix(".weight").split(".") + [""]
    outside = -1 if module == "tok_embeddings" else math.inf
    return int(path[1]) if path else outside, PLACES[module]


def _less_than_planned(trial: Trial, step: int) -> str:
    """Return the axes over which the first rank moved less in backward than planned, optional flows left out."""
    rank = min(trial.ranks)
    seen = observed_traffic(trial, trial.ranks[rank], step)
    wanted, spare = (planned_traffic(trial, rank, step, optional_only=only) for only in (False, True))
    least = {key: size - spare.get(key, 0) for key, size in wanted.items() if key[2] == "backward"}
    short = (axis_of(trial, key[0]) for key, size in least.items() if seen.get(key, 0) < size)
    axes = " and ".join(dict.fromkeys(short))
    return f"backward moves less than planned over {axes}" if axes else ""


FORMATS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Formats of which numbers can be recognised, with half the distance of 1 from the next larger one."""
ENTRIES = 100
"""Numbers other than zero that must all be of a format, at least."""


def coarse(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Numbers that should have more digits are all ones of a coarser format: gradients that fail, or an optimizer's state."""
    if trial.case.training.compute_dtype or trial.case.training.quantize or not {"gradients", "update"} & {*broken}:
        return
    step = first_wrong_step(trial) if "gradients" in broken else None
    wrong = wrong_pairs(trial, step) if step else []
    values = [seen_gradients(trial, rank, step)[fqn] for rank, fqn in wrong] if step else []
    if step and (form := _format_of(values)):
        where, details = where_text(trial, wrong), (("format", form), ("step", step))
        cause = Cause("rounded", f"gradients of step {step} are all numbers of {form}", where, details=details)
        yield Fact(cause, consequences(trial, step))
    state: dict[str, list[np.ndarray]] = {}
    for evidence in trial.ranks.values() if "update" in broken else ():
        for of in evidence.steps[-1].optimizer_state.values():
            for key, value in of.items():
                state.setdefault(key, []).append(value)
    for key, held in state.items():
        if form := _format_of(held):
            cause = Cause(
                "rounded", f"{key} of the optimizer holds only numbers of {form}", details=(("format", form),)
            )
            follow = {*NUMBERS, "reported_loss"} if step is None or step > trial.first_step else {"update"}
            yield Fact(cause, tuple(check for check in follow if check in broken))


def _format_of(values: Sequence[np.ndarray]) -> str:
    """Return the coarsest format that all numbers are of, though their own is finer; empty if there is none. Counters and
    constants are numbers of every format."""
    values = [one for one in values if not is_count(one)]
    if not values or not all(one.dtype.kind == "f" for one in values):
        return ""
    every = np.concatenate([one[one != 0].reshape(-1) for one in values]).astype(np.float64)
    finest = max(np.finfo(one.dtype).nmant for one in values)
    for name, unit in FORMATS.items():
        mantissa, _ = np.frexp(every)
        digits = mantissa / unit
        if len(every) >= ENTRIES and unit > 2.0 ** -(finest + 1) and (digits == np.round(digits)).all():
            return name
    return ""


def random_state_not_restored(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """A recomputation starts from another state of the generator than forward, and draws from it."""
    seen = [step.activity for _, step, _ in trial.steps()]
    other, drawn = {fqn for one in seen for fqn in one.other_states}, any(one.random.get("backward") for one in seen)
    if not other or not drawn or "gradients" not in broken:
        return
    blocks = sorted(fqn for fqn in other if not any(fqn.startswith(f"{outer}.") for outer in other))
    observed = f"recomputation of {some(blocks, 4)} starts from another random state than forward"
    cause = Cause("random state not restored", observed, hint="its dropout masks differ from those of the loss")
    yield Fact(cause, ("gradients", "grad_norm", "loss", "reported_loss"), (finding_line(broken["gradients"]),))


# ---- losses of one model that differ


FLOAT32 = 1e-6  # relative to the largest


def rounding(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """In a float64 case all losses and the gradients of step 1 are off by less than float32 rounds."""
    if "gradients" not in broken or not trial.case.exact:
        return
    wrong = wrong_pairs(trial, 1)
    gradients = [distance(trial, rank, fqn, 1) for rank, fqn in wrong]
    losses = [loss_off(trial, step) or 0.0 for step in trial.case.steps]
    if wrong and all(off < FLOAT32 for off in (*losses, *gradients)):
        observed = f"gradients of step 1 are off by up to {max(gradients):.0e}"
        where = where_text(trial, wrong) + f", losses of all steps by {max(losses):.0e}" * any(losses)
        hint = "no more than arithmetic in float32 rounds, requested float64"
        place = first_wrong_input(trial)
        more: Lines = (("first seen", place_words(trial, place)),) if place.wrong else ()
        details = (("off", max(gradients)), ("module", place.wrong))
        cause = Cause("rounded", observed, where, hint=hint, details=details)
        moved = broken["traffic"].findings if "traffic" in broken else ()
        narrower = ["traffic"] * bool(moved and all(one.quantity == IN_ANOTHER_DTYPE for one in moved))
        more += tuple(finding_line(broken[check]) for check in narrower)
        yield Fact(cause, ("gradients", "loss", "grad_norm", "reported_loss", *narrower), more)
