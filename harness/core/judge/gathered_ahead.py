"""Parameters that a trainer gathers by hand before the forward pass that would: a call of FSDP2's `unshard`.

Whether the weights were those of the step before is not judged here: losses and gradients show it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from harness.core.evidence.records import Collective
from harness.core.judge.traffic import INSIDE, Key, observed, planned
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE

GATHER = "all_gather"


def gathered_ahead(trial: Trial, rank: int, step: int) -> tuple[Collective, ...]:
    """Return the calls before forward passes of a step that gathered just what these passes lack; none if they do not make that
    up to the byte."""
    if trial.case.wrapper != "fsdp2":
        return ()  # ZeRO's gathers have their place in the plan
    key = _forward(trial, rank)
    wanted = planned(trial, rank, step).get(key, 0)
    lacking = wanted - observed(trial, trial.ranks[rank], step).get(key, 0)
    calls = _before_passes(trial.ranks[rank].collectives, key[0])[step] if lacking > 0 else []
    for count in range(1, len(calls) + 1):
        if sum(call.bytes for call in calls[-count:]) == lacking:
            return tuple(calls[-count:])
    return ()


def lacking_in_forward(trial: Trial, rank: int, step: int) -> dict[Key, int]:
    """Return the plan's bytes of the gathers in forward, if a part of them came before it; else nothing."""
    key = _forward(trial, rank)
    return {key: planned(trial, rank, step)[key]} if gathered_ahead(trial, rank, step) else {}


def ahead_outside(trial: Trial, rank: int, step: int) -> dict[Key, int]:
    """Return the bytes that a step moves outside of its passes for forward passes that come later, by collective."""
    moved = Counter[Key]()
    for later in trial.case.steps:
        for call in gathered_ahead(trial, rank, later):
            if call.step == step:
                moved[call.ranks, call.op, OUTSIDE] += call.bytes
    return dict(moved)


def _forward(trial: Trial, rank: int) -> Key:
    return trial.plan.peers(rank, trial.plan.shard_axis), GATHER, "forward"


def _before_passes(calls: Sequence[Collective], ranks: tuple[int, ...]) -> dict[int, list[Collective]]:
    """Return, by step, the gathers over these ranks that come between two passes, or before the first one."""
    found, waiting = defaultdict[int, list[Collective]](list), list[Collective]()
    for call in calls:
        if call.phase in INSIDE:
            found[call.step] += waiting
            waiting = []
        elif call.phase == "optimizer":
            waiting = []  # weights from before the step
        elif (call.phase, call.op, call.ranks) == ("other", GATHER, ranks) and "float" in call.dtype:
            waiting.append(call)
    return found
