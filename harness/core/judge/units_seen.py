"""FSDP2's units as ranks report them. Without a claim of a wrapper nothing that depends on units is judged: UNKNOWN."""

from __future__ import annotations

from harness.core.judge.trial import Trial


def unknown_units_reason(trial: Trial) -> str:
    """Return the reason why nothing that depends on FSDP's units can be judged: the first rank without claims.

    Empty if the case or the traits name the units, or if the wrappers of each rank claim them.
    """
    observed_units = trial.plan.measured_units or {}
    for rank, units in observed_units.items():
        if not units and trial.plan.units[rank]:
            return unknown_rank_reason(rank)
    return ""


def unknown_rank_reason(rank: int) -> str:
    """Return the reason why the units of this rank are unknown."""
    return f"no wrapper of rank {rank} claims which parameters it gathers"


def claimed_unit_sets(trial: Trial, rank: int) -> set[frozenset[str]]:
    """Return the units that a rank's wrappers claim, as sets of fqns. Empty if no wrapper claims parameters.

    Modules that were wrapped as one claim the same unit.
    """
    return {frozenset(wrapper.parameters) for wrapper in trial.ranks[rank].structure.values() if wrapper.parameters}
