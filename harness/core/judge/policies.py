"""Texts on FSDP2's units: mixed precision policies that differ, and switches that are not as usual."""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.evidence.records import RankEvidence
from harness.core.judge.trial import Trial

POLICY_FIELDS = {"casts_to": "param_dtype", "reduces_in": "reduce_dtype"}
"""Field of a wrapper's evidence -> its name in FSDP2's MixedPrecisionPolicy."""


def unusual_switches_text(trial: Trial) -> str:
    """Return a text of FSDP2's switches that are not as usual, each with its units on any rank.

    Empty where all are as usual.
    """
    all_units: set[str] = set()
    units_by_switch: dict[str, dict[str, None]] = {}
    for evidence in trial.ranks.values():
        all_units.update(unit or "the root" for unit in evidence.structure)
        for unit, unusual_switches in evidence.switches.items():
            for switch in unusual_switches:
                units_by_switch.setdefault(switch, {})[unit or "the root"] = None
    texts = []
    for switch, units in units_by_switch.items():
        units_text = "all units" if {*units} >= all_units else ", ".join(units)
        texts.append(f"FSDP2: {switch} ({units_text})")
    return "; ".join(texts)


def matmul_dtypes_text(evidence: RankEvidence, wanted: str, forward: Mapping[str, int]) -> str:
    """Return a text of forward's matmuls by dtype, and of the units that cast to another dtype than wanted.

    Each half is left out if there is no difference, so the text may be empty. forward: by dtype, the number of matmuls.
    """
    texts = []
    if len(forward) > 1:
        counts = " and ".join(f"{count} in {dtype}" for dtype, count in sorted(forward.items()))
        texts.append(f"in forward {counts}")
    if units := differing_units_text(evidence, wanted, "casts_to"):
        texts.append(units)
    return "; ".join(texts)


def differing_units_text(evidence: RankEvidence, wanted: str, field: str) -> str:
    """Return a text of a rank's FSDP2 units whose policy has another dtype than wanted, or none.

    Empty if none differs, or all. field: a key of POLICY_FIELDS. wanted: the dtype's name.
    """
    dtype_by_unit = {}
    for unit, wrapper in evidence.structure.items():
        if wrapper.kind == "fsdp2":
            dtype_by_unit[unit or "the root"] = getattr(wrapper, field)
    differing_units = [unit for unit, dtype in dtype_by_unit.items() if dtype != wanted]
    if not differing_units or len(differing_units) == len(dtype_by_unit):
        return ""
    dtypes = " or ".join(sorted({dtype_by_unit[unit] or "no" for unit in differing_units}))
    return f"FSDP units with {dtypes} {POLICY_FIELDS[field]}: {', '.join(differing_units)}"
