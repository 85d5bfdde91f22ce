"""Mixed precision policies of FSDP2's units, where some differ from the others, and switches that are not as usual."""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.evidence.records import RankEvidence
from harness.core.judge.trial import Trial

NAMES = {"casts_to": "param_dtype", "reduces_in": "reduce_dtype"}


def switches(trial: Trial) -> str:
    """Return which switches of FSDP2 are not as usual, and in which units; empty where all are."""
    units: dict[str, dict[str, None]] = {}
    every = {unit or "the root" for one in trial.ranks.values() for unit in one.structure}
    for unit, said in ((unit, said) for one in trial.ranks.values() for unit, said in one.switches.items()):
        for switch in said:
            units.setdefault(switch, {})[unit or "the root"] = None
    texts = (f"{one} ({'all units' if {*some} >= every else ', '.join(some)})" for one, some in units.items())
    return "; ".join(f"FSDP2: {text}" for text in texts)


def of_matmuls(evidence: RankEvidence, wanted: str, forward: Mapping[str, int]) -> str:
    """Return how many matmuls of forward have which dtype, where they differ, and the units whose policy is another one."""
    counts = " and ".join(f"{n} in {dtype}" for dtype, n in sorted(forward.items())) if len(forward) > 1 else ""
    units = unlike_others(evidence, wanted, "casts_to")
    return "; ".join(filter(None, (f"in forward {counts}" * bool(counts), units)))


def unlike_others(evidence: RankEvidence, wanted: str, field: str) -> str:
    """Return the units whose policy gives another dtype than wanted, or none, where it is not all of them."""
    given = {unit or "the root": getattr(one, field) for unit, one in evidence.structure.items() if one.kind == "fsdp2"}
    odd = [unit for unit, dtype in given.items() if dtype != wanted]
    if not odd or len(odd) == len(given):
        return ""
    dtypes = " or ".join(sorted({given[unit] or "no" for unit in odd}))
    return f"FSDP units with {dtypes} {NAMES[field]}: {', '.join(odd)}"
