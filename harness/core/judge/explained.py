"""The amounts by which a run may differ from its plan's exact numbers, as plan, case or adapter allow.

Allowances are read here alone. A check adds up the differences of one kind, and states which allowances it used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.case.allowance import Allowance, declaration
from harness.core.judge.trial import Trial

Used = Callable[[Allowance], bool]
"""Whether something uses an allowance."""


@dataclass(frozen=True)
class ExplainedDifference:
    """Something that a rank may do or keep in addition to what is planned exactly."""

    what: Any
    """What differs: the kind of an allowance, or the ranks, op and phase of a collective."""
    most: int
    """The most of it: bytes, matmuls or graphs."""
    allowance: Allowance | None = None
    """What allows it; None where the plan explains it."""


def allowances_of_kind(trial: Trial, kind: str) -> list[Allowance]:
    """Return the allowances of one kind that case and trainer declare. kind: a key of allowance.AMOUNT_KEYS."""
    return [allowance for allowance in trial.allow if allowance.what == kind]


def differences_by_plan(amounts: Mapping[Any, int]) -> list[ExplainedDifference]:
    """Return one difference for each amount, explained by the plan. amounts: by what differs."""
    return [ExplainedDifference(what, amount) for what, amount in amounts.items()]


def allowed_bytes(trial: Trial, rank: int, kind: str) -> list[ExplainedDifference]:
    """Return the bytes that a rank may keep, gather or copy: one difference for each allowance of this kind."""
    parameters = trial.plan.parameter_bytes[rank][1]
    return [
        ExplainedDifference(kind, allowance.byte_limit(parameters), allowance)
        for allowance in allowances_of_kind(trial, kind)
    ]


def allowed_traffic(trial: Trial, rank: int) -> list[ExplainedDifference]:
    """Return the bytes that a rank may move in a step by allowance: one difference for each allowance.

    Each difference's `what` is (ranks, op, phase) of the collective.
    """
    parameters = trial.plan.parameter_bytes[rank][1]
    world = tuple(range(trial.plan.dims.world_size))
    differences = []
    for allowance in allowances_of_kind(trial, "moved"):
        ranks = world if allowance.axis == "world" else trial.plan.peers(rank, allowance.axis)
        key = (ranks, allowance.op, allowance.phase)
        differences.append(ExplainedDifference(key, allowance.byte_limit(parameters), allowance))
    return differences


def allowed_matmuls(trial: Trial, forward: int) -> list[ExplainedDifference]:
    """Return the matmuls that a step may compute outside of its passes: one difference for each allowance.

    forward: the matmuls of its forward passes, of which an allowance may be a share.
    """
    allowed = allowances_of_kind(trial, "computed")
    return [ExplainedDifference("computed", allowance.matmul_limit(forward), allowance) for allowance in allowed]


def allowed_graphs(trial: Trial) -> list[ExplainedDifference]:
    """Return the graphs that a rank may compile in a launch: one difference for each allowance."""
    allowed = allowances_of_kind(trial, "compiled")
    return [ExplainedDifference("compiled", allowance.graphs, allowance) for allowance in allowed]


def allowed_hooks(trial: Trial) -> set[str]:
    """Return the owners ("module.function") of the hooks on tensors saved for backward that are allowed.

    Empty if none are.
    """
    return {allowance.name for allowance in allowances_of_kind(trial, "hooks")}


def explained_total(differences: Iterable[ExplainedDifference]) -> int:
    """Return the sum of what these differences explain: bytes, matmuls or graphs."""
    return sum(difference.most for difference in differences)


def explained_total_by_what(differences: Iterable[ExplainedDifference]) -> dict[Any, int]:
    """Return, by what differs, the sum of what these differences explain."""
    amounts: dict[Any, int] = {}
    for difference in differences:
        amounts[difference.what] = amounts.get(difference.what, 0) + difference.most
    return amounts


def unexplained_total(observed: Mapping[Any, int], differences: Iterable[ExplainedDifference]) -> int:
    """Return the sum of what was observed beyond what these differences explain, 0 if all is explained.

    observed: amounts by what differs. What one kind has left does not make up for another.
    """
    explained = explained_total_by_what(differences)
    return sum(max(amount - explained.get(key, 0), 0) for key, amount in observed.items())


def without_allowances_of_kind(differences: Iterable[ExplainedDifference], kind: str) -> list[ExplainedDifference]:
    """Return the differences but for those that an allowance of this kind explains."""
    kept = []
    for difference in differences:
        if difference.allowance is None or difference.allowance.what != kind:
            kept.append(difference)
    return kept


def allowances_text(trial: Trial, used: Mapping[str, Used]) -> str:
    """Return a note of the allowances of these kinds, each with ", not used" if nothing uses it.

    Empty without allowances. used: by kind, a function that returns whether an allowance is used. One that is not used
    should be deleted.
    """
    texts = []
    for allowance in dict.fromkeys(trial.allow):
        if allowance.what in used:
            note = "" if used[allowance.what](allowance) else ", not used"
            texts.append(declaration([allowance]) + note)
    return "; ".join(texts)
