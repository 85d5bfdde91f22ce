"""FSDP2's units as ranks report them. Without a claim of a wrapper nothing that depends on units is judged: UNKNOWN."""

from __future__ import annotations

from harness.core.judge.trial import Trial


def untold_units(trial: Trial) -> str:
    """Return the reason why nothing that depends on FSDP's units can be judged.

    Empty if units are requested, or wrappers claim them.
    """
    observed_units = trial.plan.observed or {}
    for rank, units in observed_units.items():
        if not units and trial.plan.units[rank]:
            return untold_rank(rank)
    return ""


def untold_rank(rank: int) -> str:
    """Return the reason why the units of this rank are unknown."""
    return f"no wrapper of rank {rank} claims which parameters it gathers"


def units_seen(trial: Trial, rank: int) -> set[frozenset[str]]:
    """Return the units that a rank's wrappers claim, as sets of fqns. Modules that were wrapped as one claim the same unit."""
    return {frozenset(wrapper.parameters) for wrapper in trial.ranks[rank].structure.values() if wrapper.parameters}
