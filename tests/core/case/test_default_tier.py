"""Which cases the default tier has: those that join every kind of parallelism with every feature.

Formats and repeated runs are there once; the nightly tier joins them with every kind of parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.options import all_options

KINDS = ("data parallel", "tp", "cp", "pp", "checkpoint")
ONCE = ("precision", "repeat")
"""Kinds of options that take long, and of which the default tier has each once. The others are joined with every kind."""


def joins(cases: Iterable[Case]) -> set[tuple[str, str]]:
    """Finds every (kind of parallelism, option) and (kind, other kind) that one of the cases has."""
    found = set()
    for case in cases:
        for pair in combinations([option for option in all_options() if option.is_requested_by(case)], 2):
            kinds = [option.kind for option in pair if option.kind in KINDS]
            if len(kinds) == 1:
                found |= {(kinds[0], option.name) for option in pair if option.kind not in KINDS}
            elif len(set(kinds)) == 2:
                found.add((kinds[0], kinds[1]))
    return found


def test_the_default_tier_joins_every_kind_of_parallelism_with_every_feature() -> None:
    """Except what waits for a compiler, which has a tier of its own, and what is expected to fail."""
    usable = [case for case in load_all() if case.tier != "compiled" and case.expected_failure is None]
    default = [case for case in usable if case.tier == "default"]
    once = {option.name for option in all_options() if option.kind in ONCE}
    assert {join for join in joins(usable) - joins(default) if join[1] not in once} == set()
    assert all(any(option.is_requested_by(case) for case in default) for option in all_options() if option.name in once)
