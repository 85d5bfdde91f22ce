"""FSDP2's units as ranks report them. Without a claim of a wrapper nothing that depends on units is judged: UNKNOWN."""

from __future__ import annotations

from harness.core.judge.trial import Trial


def untold_units(trial: Trial) -> str:
    """Why nothing that depends on FSDP's units can be judged; empty if they are requested, or wrappers claim them."""
    untold = [rank for rank, units in (trial.plan.observed or {}).items() if not units and trial.plan.units[rank]]
    return untold_rank(untold[0]) if untold else ""


def untold_rank(rank: int) -> str:
    return f"no wrapper of rank {rank} claims which parameters it gathers"


def units_seen(trial: Trial, rank: int) -> set[frozenset[str]]:
    """Modules that were wrapped as one claim the same unit."""
    return {frozenset(wrapper.parameters) for wrapper in trial.ranks[rank].structure.values() if wrapper.parameters}
