"""Which cases the default tier needs: the fewest ranks that join every kind of parallelism with every feature once.

A join is a kind of parallelism (or resuming) with an option of another kind, or two of those kinds with each other. What a
case joins is read from it as coverage.py of harness/spec does. A greedy cover takes the case that adds the most joins for
its ranks; the cases of deliberate faults are taken before, for a fault is only noticed where it fires. What is left of the
ranks that the tier may take goes to cases that are in it already, those with the most pairs of options first.

    python -m tools.composition    proposes which cases to move into the default tier, and out of it; moves nothing
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import combinations

from harness.cli.exit_codes import NOT_JUDGED, PASSED
from harness.faults.attempt import accepted
from harness.spec.case import Case
from harness.spec.coverage import Option, options
from harness.spec.loading import load_all
from tools.noticed import load, noticed

KINDS = ("data parallel", "tp", "cp", "pp", "checkpoint")
RANKS = 520
"""That the default tier may start: about two minutes on two cores."""

Join = tuple[str, str]


@dataclass(frozen=True)
class Proposal:
    """promote: cases of other tiers that the default tier needs. demote: cases of it that add nothing and cost too much."""

    promote: tuple[Case, ...]
    demote: tuple[Case, ...]
    ranks: int


def ranks(case: Case) -> int:
    """How many processes all launches of a case start, repeats included: what it costs."""
    return sum(launched.dims.world_size for launched in case.launches.values()) + case.dims.world_size * (case.runs - 1)


def joins(case: Case) -> set[Join]:
    """Every (kind of parallelism, option) and (kind, kind) that the case has."""
    found = set()
    for one, other in combinations(_options_of(case), 2):
        kinds = [option.kind for option in (one, other) if option.kind in KINDS]
        if len(kinds) == 1:
            feature = other if one.kind in KINDS else one
            found.add((kinds[0], feature.name))
        elif len(set(kinds)) == 2:
            found.add((kinds[0], kinds[1]))
    return found


def missing(cases: Iterable[Case]) -> dict[Join, list[str]]:
    """The joins that no case of the default tier has, each with the cases of other tiers that have it.

    Not what waits for a compiler, which has a tier of its own, nor what is expected to fail.
    """
    usable = [case for case in cases if _usable(case)]
    here = {join for case in usable if case.tier == "default" for join in joins(case)}
    found: dict[Join, list[str]] = {}
    for case in usable:
        for join in sorted(joins(case) - here):
            found.setdefault(join, []).append(case.name)
    return found


def propose(cases: Sequence[Case], demanded: Collection[str], most: int = RANKS) -> Proposal:
    """demanded: names of cases that are taken whatever they join. Expected failures stay where they are, and as long as
    nothing is missing nothing is promoted."""
    usable = [case for case in cases if _usable(case)]
    now = [case for case in usable if case.tier == "default"]
    stay = [case for case in cases if case.tier == "default" and case not in usable]
    taken = [*stay, *(case for case in usable if case.name in demanded)]
    taken += _cover(usable if missing(cases) else now, taken, joins)
    for has in (values, _pairs):
        taken += _within(_cover(now, taken, has), most - sum(map(ranks, taken)))
    rest = sorted((case for case in now if case not in taken), key=ranks)
    taken += _within(rest, most - sum(map(ranks, taken)))
    names = {case.name for case in taken}
    promote = tuple(case for case in taken if case.tier != "default")
    return Proposal(promote, tuple(case for case in now if case.name not in names), sum(map(ranks, taken)))


def _cover(pool: Sequence[Case], taken: Sequence[Case], has: Callable[[Case], set]) -> list[Case]:
    """Cases of the pool, the one that adds most for its ranks first, until none adds anything; without those that others
    chosen after them make superfluous."""
    having = {case.name: has(case) for case in pool}
    before: set = set().union(*map(has, taken))
    left = set().union(*having.values()) - before
    chosen: list[Case] = []
    while left:
        best = max(pool, key=lambda case: len(having[case.name] & left) / ranks(case))
        left -= having[best.name]
        chosen.append(best)
    for case in sorted(chosen, key=ranks, reverse=True):
        others = before.union(*(having[other.name] for other in chosen if other is not case))
        if having[case.name] <= others:
            chosen.remove(case)
    return chosen


def _within(cases: Iterable[Case], most: int) -> list[Case]:
    """As many of the cases, in their order, as this many ranks allow."""
    kept: list[Case] = []
    for case in cases:
        if ranks(case) <= most:
            kept.append(case)
            most -= ranks(case)
    return kept


def _options_of(case: Case) -> list[Option]:
    return [option for option in options() if option.holds(case)]


def values(case: Case) -> set[tuple[str, object]]:
    """Everything that the case says, whether or not it is an option of coverage.py."""
    records = (case.dims, case.features, case.training, case.model)
    return {(field.name, getattr(record, field.name)) for record in records for field in fields(record)}


def _pairs(case: Case) -> set[Join]:
    return {(one.name, other.name) for one, other in combinations(_options_of(case), 2) if one.kind != other.kind}


def _usable(case: Case) -> bool:
    return case.tier != "compiled" and case.expected_failure is None


def proposal_text(cases: Sequence[Case], proposal: Proposal) -> str:
    now = sum(ranks(case) for case in cases if case.tier == "default")
    lines = [f"missing   {kind} with {other}: {', '.join(names)}" for (kind, other), names in missing(cases).items()]
    lines += [f"promote   {case.name} ({ranks(case)} ranks, {case.file})" for case in proposal.promote]
    lines += [f"demote    {case.name} ({ranks(case)} ranks, {case.file})" for case in proposal.demote]
    return "\n".join([*lines, f"the default tier starts {now} ranks; as proposed, {proposal.ranks}"])


def main() -> int:
    """The exit code is 2 where the default tier lacks a join. Cases that notice faults are needed."""
    cases = load_all()
    demanded = {case for _, case in noticed(accepted(), cases, load())}
    print(proposal_text(cases, propose(cases, demanded)))
    return NOT_JUDGED if missing(cases) else PASSED


if __name__ == "__main__":
    sys.exit(main())
