"""Gradients that a trainer reduces itself, without a wrapper: what its adapter has to write, for nothing of it can be seen from
outside. The evidence alone says whether they are reduced: over the plan's groups, and no fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.diagnosis.words import Broken
from harness.evidence.text import ranks_text
from harness.judge.result import Lines
from harness.judge.traffic import INSIDE, observed, observed_outside
from harness.judge.trial import Trial
from harness.plan.traffic.flow import OUTSIDE, Flow

IN_BACKWARD = (
    "gradients are reduced outside of backward; if functions of the trainer's own do that: "
    "`with harness.probe.values.reducing_gradients():` around them; if lines of the training loop do, which no adapter can"
    " wrap: move them, and the division by the number of ranks, into a function of the script first"
)


def lines_to_write(trial: Trial, broken: Broken) -> Lines:
    """None of a trainer whose wrapper reduces them."""
    if not {"features", "traffic"} & {*broken}:
        return ()
    return tuple(("adapter", text) for text in _remedies(trial))


def _remedies(trial: Trial) -> Iterator[str]:
    behind = all(_are_reduced(trial, rank, outside=True) for rank in trial.ranks)
    inside = all(_are_reduced(trial, rank, outside=False) for rank in trial.ranks)
    if behind and not inside:
        yield IN_BACKWARD
    wrapped = any(evidence.structure for evidence in trial.ranks.values())
    if (behind or inside) and not wrapped and trial.case.wrapper in ("ddp", "replicate"):
        axis = trial.plan.replicate_axis
        ranks = ranks_text(trial.plan.group_of(min(trial.ranks), axis))
        call = f'harness.probe.structure.note_wrapper(model, "{trial.case.wrapper}", replicate_ranks=..)'
        yield f"if it needs no wrapper: `{call}`, the rank's group over {axis}, of rank 0 {ranks}"


def _are_reduced(trial: Trial, rank: int, *, outside: bool) -> bool:
    """In the first step, over the groups and by the collectives of the plan."""
    evidence, step = trial.ranks[rank], trial.first_step
    seen = observed_outside(evidence, step) if outside else observed(trial, evidence, step)
    flows = [flow for flow in trial.plan.flows_of(rank, step) if flow.role == "gradients" and flow.phase in INSIDE]
    return bool(flows) and all(seen.get(_key(trial, rank, flow, outside), 0) >= flow.bytes for flow in flows)


def _key(trial: Trial, rank: int, flow: Flow, outside: bool) -> tuple[tuple[int, ...], str, str]:
    return trial.plan.group_of(rank, flow.axis), flow.op, OUTSIDE if outside else flow.phase
