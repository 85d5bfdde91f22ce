"""What all kinds of causes share: how ranks, groups, parameters and traffic are put in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Line, Result
from harness.core.judge.traffic import OF_PARAMETERS, observed_outside
from harness.core.judge.traffic import observed as observed_traffic
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE, Flow

Broken = Mapping[str, Result]
"""The results of the checks that fail and say where, by name, in the order of display."""
Pair = tuple[int, str]  # rank, fqn
Arrays = dict[str, np.ndarray]  # by fqn


def some(names: Sequence[str], most: int = 2) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def rank_words(ranks: Sequence[int]) -> str:
    """rank 3, ranks [0,1]."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(list(ranks))}"


def steps_words(steps: Sequence[int]) -> str:
    """step 3, steps 1, 2, 3."""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def first_finding(findings: Sequence[Finding]) -> Finding:
    """Return the first finding, of all ranks of which the same is found."""
    first = findings[0]
    alike = [one for one in findings if replace(one, ranks=first.ranks) == first]
    return replace(first, ranks=tuple(sorted({rank for one in alike for rank in one.ranks})))


def elsewhere(findings: Sequence[Finding]) -> str:
    """Name the ranks and steps that have a finding of the first one's quantity, beside it; empty if there are none."""
    first, ranks = findings[0], {*first_finding(findings).ranks}
    what = (first.kind, first.name, first.quantity)
    others = [one for one in findings if (one.kind, one.name, one.quantity) == what]
    on = sorted({rank for one in others for rank in one.ranks} - ranks)
    steps = sorted({one.step for one in others if one.step is not None} - {first.step})
    texts = [f"on {rank_words(on)}"] * bool(on) + [f"in {steps_words(steps)}"] * bool(steps)
    return f"also {' and '.join(texts)}" if texts else ""


def on_ranks(trial: Trial, ranks: Iterable[int]) -> str:
    """ " on ranks [0,1]"; nothing if it is all of them."""
    ranks = sorted(set(ranks))
    return "" if len(ranks) == len(trial.ranks) else f" on {rank_words(ranks)}"


def in_order(trial: Trial, fqns: Iterable[str]) -> list[str]:
    """Each once, as the model has them."""
    names = set(fqns)
    return [fqn for fqn in trial.plan.shapes if fqn in names]


def in_parameters(trial: Trial, fqns: Iterable[str]) -> str:
    """in every parameter, in 2 of 12 parameters (a, b)."""
    fqns, total = in_order(trial, fqns), len(trial.plan.shapes)
    if len(fqns) == total:
        return "in every parameter"
    return f"in {len(fqns)} of {total} parameters ({some(modules(trial, fqns))})"


def modules(trial: Trial, fqns: Sequence[str]) -> list[str]:
    """Layers of which all parameters are among them, and the other parameters, in order."""
    layers = {fqn: ".".join(fqn.split(".")[:2]) for fqn in fqns if fqn.startswith("layers.")}
    whole = {
        one for one in layers.values() if all(fqn in layers for fqn in trial.plan.shapes if fqn.startswith(f"{one}."))
    }
    return list(dict.fromkeys(layers[fqn] if layers.get(fqn) in whole else fqn for fqn in fqns))


def where_text(trial: Trial, pairs: Iterable[Pair]) -> str:
    """in 2 of 12 parameters (a, b) on ranks [0,1]. Says so where that is a union: where a rank holds more of them than it has
    in `pairs`."""
    pairs = set(pairs)
    return in_parameters(trial, (fqn for _, fqn in pairs)) + on_their_ranks(trial, pairs)


def on_their_ranks(trial: Trial, pairs: Iterable[Pair]) -> str:
    """on_ranks, and whether some of these ranks hold more of these parameters than they have in `pairs`."""
    pairs = set(pairs)
    fqns, ranks = {fqn for _, fqn in pairs}, {rank for rank, _ in pairs}
    held = {(rank, one.fqn) for rank in ranks for one in trial.ranks[rank].parameters if one.value.size}
    union = not trial.plan.state_slices and any(pair not in pairs for pair in held if pair[1] in fqns)
    return on_ranks(trial, ranks) + ", on some ranks only in a part of them" * union


def extent(trial: Trial, findings: Iterable[Finding]) -> str:
    """In which parameters and on which ranks these are, where that is more than the first one says."""
    pairs = {(rank, one.name) for one in findings if one.kind == "parameter" for rank in one.ranks}
    known = {at for at in pairs if at[1] in trial.plan.shapes and at[0] in trial.ranks}
    return where_text(trial, known) if len(known) > 1 else ""


def from_step(trial: Trial, step: int) -> str:
    """From step 2 on; "in step 3" of the last, after which there is none to show it."""
    return f"in step {step}" if step >= trial.case.steps[-1] else f"from step {step} on"


def groups_text(groups: Sequence[tuple[int, ...]]) -> str:
    shown = [ranks_text(group) for group in groups]
    return " ".join(shown if len(shown) <= 3 else [*shown[:2], "..", shown[-1]])


def finding_line(result: Result) -> Line:
    """Return the first finding of a check, beside its name."""
    return result.check, first_finding(result.findings)


def traffic_lines(trial: Trial) -> Iterator[tuple[str, str]]:
    """The first rank's planned flows that did not happen as planned, in the first step; of a recorded job, that moved less."""
    declared = "declared" in trial.run.provided
    rank, least = min(trial.ranks), "" if declared else "at least "
    planned = (flow for flow in trial.plan.flows[rank] if declared or flow.role in OF_PARAMETERS)
    seen = observed_traffic(trial, trial.ranks[rank], trial.first_step)
    outside = observed_outside(trial.ranks[rank], trial.first_step)
    for (axis, op, phase), flows in _by_collective(planned).items():
        key, wanted = (trial.plan.group_of(rank, axis), op, phase), sum(flow.bytes for flow in flows)
        moved = seen.get(key, 0) if phase != OUTSIDE else min(wanted, outside.get(key, 0))
        enough = moved == wanted or (least and moved > wanted)
        if not enough and not all(flow.optional for flow in flows):
            over = ranks_text(key[0]) if axis.startswith("post_forward") else axis  # which nobody wrote
            when = "outside of forward and backward" if phase == OUTSIDE else f"in {phase}"
            what = f"{' and '.join(flow.role for flow in flows)}: {op} over {over} {when}"
            expected = f"expected {least}{bytes_text(wanted)} in step {trial.first_step}"
            yield "traffic", f"{what}: {expected}, observed {bytes_text(moved)}"


def _by_collective(flows: Iterable[Flow]) -> dict[tuple[str, str, str], list[Flow]]:
    """Group flows that cannot be distinguished: over cp both parameters and keys are gathered."""
    found: dict[tuple[str, str, str], list[Flow]] = {}
    for flow in flows:
        found.setdefault((flow.axis, flow.op, flow.phase), []).append(flow)
    return found
