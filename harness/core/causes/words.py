"""Words of causes: texts of ranks, steps, parameters, groups and traffic, and the findings that stand for many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Line, Result
from harness.core.judge.traffic import axis_of, observed_bytes_outside
from harness.core.judge.traffic import observed_bytes_by_collective as observed_traffic
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE, Flow

Broken = Mapping[str, Result]
"""The results of the checks that fail and say where, by name, in the order of display."""
Pair = tuple[int, str]  # rank, fqn
Arrays = dict[str, np.ndarray]  # by fqn


def shorten_names(names: Sequence[str], most_names: int = 2) -> str:
    """Return a text of the first names and the number of all others: "a, b and 3 more"."""
    ending = f" and {len(names) - most_names} more" if len(names) > most_names else ""
    return ", ".join(names[:most_names]) + ending


def rank_text(ranks: Sequence[int]) -> str:
    """Return a text of global ranks: "rank 3" or "ranks [0,1]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(list(ranks))}"


def steps_text(steps: Sequence[int]) -> str:
    """Return a text of steps: "step 3" or "steps 1, 2, 3"."""
    noun = "steps" if len(steps) > 1 else "step"
    return f"{noun} {', '.join(map(str, steps))}"


def first_finding(findings: Sequence[Finding]) -> Finding:
    """Return the first finding, with all ranks that have the same one. Precondition: there is one."""
    first = findings[0]
    ranks = set[int]()
    for finding in findings:
        if replace(finding, ranks=first.ranks) == first:
            ranks.update(finding.ranks)
    return replace(first, ranks=tuple(sorted(ranks)))


def elsewhere_text(findings: Sequence[Finding]) -> str:
    """Return a text of the other ranks and steps with findings on what the first is about: "also on rank 3 in step 2".

    Empty if there are none. Other values count as well, but not another parameter, module or quantity.
    """
    first = findings[0]
    ranks = {*first_finding(findings).ranks}
    key = (first.kind, first.name, first.quantity)
    other_ranks = set[int]()
    other_steps = set[int]()
    for finding in findings:
        if (finding.kind, finding.name, finding.quantity) == key:
            other_ranks.update(finding.ranks)
            if finding.step is not None and finding.step != first.step:
                other_steps.add(finding.step)
    other_ranks -= ranks
    texts = []
    if other_ranks:
        texts.append(f"on {rank_text(sorted(other_ranks))}")
    if other_steps:
        texts.append(f"in {steps_text(sorted(other_steps))}")
    return f"also {' and '.join(texts)}" if texts else ""


def on_ranks_text(trial: Trial, ranks: Iterable[int]) -> str:
    """Return " on ranks [0,1]", with a space before it. Empty if these are all ranks with evidence."""
    ranks = sorted(set(ranks))
    return "" if len(ranks) == len(trial.ranks) else f" on {rank_text(ranks)}"


def sort_fqns(trial: Trial, fqns: Iterable[str]) -> list[str]:
    """Return each of these parameters once, in the model's order. Those that the plan lacks are left out."""
    names = set(fqns)
    return [fqn for fqn in trial.plan.shapes if fqn in names]


def in_parameters_text(trial: Trial, fqns: Iterable[str]) -> str:
    """Return "in every parameter", or "in 2 of 12 parameters (a, b)", where whole layers are named as such."""
    fqns = sort_fqns(trial, fqns)
    total = len(trial.plan.shapes)
    if len(fqns) == total:
        return "in every parameter"
    return f"in {len(fqns)} of {total} parameters ({shorten_names(layers_or_parameters(trial, fqns))})"


def layers_or_parameters(trial: Trial, fqns: Sequence[str]) -> list[str]:
    """Return the names of the layers that are complete in `fqns`, and the fqns of all other parameters, in order."""
    layers = {fqn: ".".join(fqn.split(".")[:2]) for fqn in fqns if fqn.startswith("layers.")}
    incomplete = set[str]()
    for layer in layers.values():
        if not all(fqn in layers for fqn in trial.plan.shapes if fqn.startswith(f"{layer}.")):
            incomplete.add(layer)
    names = []
    for fqn in fqns:
        is_whole = fqn in layers and layers[fqn] not in incomplete
        names.append(layers[fqn] if is_whole else fqn)
    return list(dict.fromkeys(names))


def where_text(trial: Trial, pairs: Iterable[Pair]) -> str:
    """Return a text of where these (rank, fqn) are: "in 2 of 12 parameters (a, b) on ranks [0,1]".

    If a rank holds more of these parameters than it has in `pairs`, the text adds that it is only a part of them.
    """
    pairs = set(pairs)
    return in_parameters_text(trial, (fqn for _, fqn in pairs)) + on_their_ranks_text(trial, pairs)


def on_their_ranks_text(trial: Trial, pairs: Iterable[Pair]) -> str:
    """Return on_ranks_text of these (rank, fqn).

    A note is added if some rank holds more of these parameters than it has in `pairs`, but not under ZeRO.
    """
    pairs = set(pairs)
    fqns = {fqn for _, fqn in pairs}
    ranks = {rank for rank, _ in pairs}
    text = on_ranks_text(trial, ranks)
    for rank in ranks:
        held_fqns = {tensor.fqn for tensor in trial.ranks[rank].parameters if tensor.value.size}
        has_more = any((rank, fqn) not in pairs for fqn in held_fqns & fqns)
        if has_more and not trial.plan.state_slices:
            return f"{text}, on some ranks only in a part of them"
    return text


def extent_text(trial: Trial, findings: Iterable[Finding]) -> str:
    """Return a text of the parameters and ranks that these findings are about.

    Empty unless they are about two parameters or ranks at least, because the first finding names one.
    """
    pairs = set[Pair]()
    for finding in findings:
        if finding.kind == "parameter" and finding.name in trial.plan.shapes:
            pairs.update((rank, finding.name) for rank in finding.ranks if rank in trial.ranks)
    return where_text(trial, pairs) if len(pairs) > 1 else ""


def from_step_text(trial: Trial, step: int) -> str:
    """Return "from step 2 on", or "in step 3" for the last step, because no later one can show it."""
    return f"in step {step}" if step >= trial.case.steps[-1] else f"from step {step} on"


def groups_text(groups: Sequence[tuple[int, ...]]) -> str:
    """Return the groups in brackets: the first two, dots and the last one if there are more than three."""
    shown = [ranks_text(group) for group in groups]
    return " ".join(shown if len(shown) <= 3 else [*shown[:2], "..", shown[-1]])


def finding_line(result: Result) -> Line:
    """Return the line of a failing check: its name, and its first finding with all ranks that have the same one."""
    return result.check, first_finding(result.findings)


def traffic_lines(trial: Trial) -> Iterator[tuple[str, str]]:
    """Yield what the lowest rank moved in the first step, where that is not as planned. Nothing if all is.

    A line for each planned collective that moved other bytes, behind a line with rank and step. Then one for each group
    that is no axis of the plan.
    """
    rank = min(trial.ranks)
    texts = [*_planned_traffic_texts(trial, rank), *_unplanned_traffic_texts(trial, rank)]
    if texts:
        yield "traffic", f"of rank {rank} in step {trial.first_step}:"
    for text in texts:
        yield "traffic", text


def _planned_traffic_texts(trial: Trial, rank: int) -> Iterator[str]:
    """Yield a text on each planned collective of a rank that moved other bytes than planned in the first step.

    If the plan is not exact, only those that moved less are yielded. Flows that may be left out have no text.
    """
    least = "" if trial.plan.is_exact else "at least "
    planned = (flow for flow in trial.plan.flows[rank] if trial.plan.states(flow))
    bytes_inside = observed_traffic(trial, trial.ranks[rank], trial.first_step)
    bytes_outside = observed_bytes_outside(trial.ranks[rank], trial.first_step)
    for (axis, op, phase), flows in _flows_by_collective(planned).items():
        key = (trial.plan.group_of(rank, axis), op, phase)
        planned_bytes = sum(flow.bytes for flow in flows)
        moved = bytes_inside.get(key, 0) if phase != OUTSIDE else min(planned_bytes, bytes_outside.get(key, 0))
        enough = moved == planned_bytes or (least and moved > planned_bytes)
        if not enough and not all(flow.optional for flow in flows):
            over = ranks_text(key[0]) if axis.startswith("post_forward") else axis  # which nobody wrote
            when = "outside of forward and backward" if phase == OUTSIDE else f"in {phase}"
            collective = f"{' and '.join(flow.role for flow in flows)}, {op} over {over} {when}"
            yield f"{collective}: planned {least}{bytes_text(planned_bytes)}, moved {bytes_text(moved)}"


def _unplanned_traffic_texts(trial: Trial, rank: int) -> Iterator[str]:
    """Yield a text on each group of a rank that is no axis of the plan, and moved bytes in forward or backward."""
    moved_over: dict[tuple[int, ...], dict[str, int]] = {}
    for (ranks, op, _), moved in observed_traffic(trial, trial.ranks[rank], trial.first_step).items():
        if not axis_of(trial, ranks):
            moved_by_op = moved_over.setdefault(ranks, {})
            moved_by_op[op] = moved_by_op.get(op, 0) + moved
    for ranks, moved_by_op in sorted(moved_over.items()):
        moved_text = ", ".join(f"{bytes_text(moved)} by {op}" for op, moved in sorted(moved_by_op.items()))
        yield f"over {ranks_text(ranks)}, no planned axis: {moved_text}"


def _flows_by_collective(flows: Iterable[Flow]) -> dict[tuple[str, str, str], list[Flow]]:
    """Return flows by (axis, op, phase).

    Flows of one key cannot be distinguished: over cp both parameters and keys are gathered.
    """
    flows_by_collective: dict[tuple[str, str, str], list[Flow]] = {}
    for flow in flows:
        flows_by_collective.setdefault((flow.axis, flow.op, flow.phase), []).append(flow)
    return flows_by_collective
