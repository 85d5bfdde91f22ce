"""Coverage of the matrix: every pair of options that a user can request, with its cases or the reason why there can be
none.

The options are those of options.py. Two options of one kind are alternatives and no pair. A pair is covered by a case
that has both and that the trainer runs. Without such a case, validation or the trainer must refuse both together, with
a reason. A pair that is neither covered nor refused is MISSING, and a test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from harness.core.case.case import Case, CaseError
from harness.core.case.loading import from_json
from harness.core.case.options import Option, all_options, merge_fragments

WhyUnsupported = Callable[[Case], str | None]

MISSING = "MISSING: neither a case nor a reason"


@dataclass(frozen=True)
class Pair:
    """Two options of different kinds."""

    first: Option
    second: Option
    cases: tuple[str, ...] = ()
    """Names of the cases that request both and that the trainer runs, in the order of the cases."""
    by_default: bool = False
    """Whether a case of the default tier is among them."""
    reason: str = ""
    """Why no case can request both, or MISSING; empty if a case does."""

    @property
    def is_missing(self) -> bool:
        return self.reason == MISSING


def option_pairs(cases: Sequence[Case], unsupported: WhyUnsupported) -> list[Pair]:
    """Return every pair of options of different kinds, each with the cases that request both, or the reason why none can.

    unsupported: returns why the trainer cannot run a case, None if it can. A case with an unsupported launch covers no
    pair.
    """
    every = all_options()
    runnable = [case for case in cases if not any(map(unsupported, case.launches.values()))]
    having: dict[str, set[str]] = {}
    for option in every:
        having[option.name] = {case.name for case in runnable if option.is_requested_by(case)}
    order = [case.name for case in runnable]
    by_default = {case.name for case in runnable if case.tier == "default"}
    all_pairs = []
    for first, second in combinations(every, 2):
        if first.kind != second.kind:
            common_cases = tuple(sorted(having[first.name] & having[second.name], key=order.index))
            reason = "" if common_cases else _why_no_case(first, second, unsupported)
            all_pairs.append(Pair(first, second, common_cases, not by_default.isdisjoint(common_cases), reason))
    return all_pairs


def _why_no_case(first: Option, second: Option, unsupported: WhyUnsupported) -> str:
    """Return why no case can request both options: what validation or the trainer says of a case that does, or that one
    option excludes the other.

    MISSING if nothing refuses it.
    """
    fragment = merge_fragments(first.fragment, second.fragment)
    try:
        case = from_json({"name": "pair", "why": "-"} | fragment)
    except CaseError as error:
        return str(error).removeprefix(": case 'pair': ")
    if not (first.is_requested_by(case) and second.is_requested_by(case)):
        return f"one excludes the other: together they are {case.dims}"
    return unsupported(case) or MISSING


# ---- what is shown


def pairs_text(all_pairs: Sequence[Pair]) -> str:
    """Return a line for each pair: its first case, or the reason why there is none. Then a line with the numbers of pairs.

    There must be at least one pair.
    """
    width = max(len(_pair_title(pair)) for pair in all_pairs)
    lines = [f"{_pair_title(pair):<{width}}  {_pair_outcome(pair)}" for pair in all_pairs]
    covered = sum(bool(pair.cases) for pair in all_pairs)
    by_default = sum(pair.by_default for pair in all_pairs)
    missing = sum(pair.is_missing for pair in all_pairs)
    refused = len(all_pairs) - covered - missing
    total = (
        f"{len(all_pairs)} pairs of options: {covered} in a case ({by_default} in one of the default tier), {refused} refused"
        f" with a reason, {missing} missing"
    )
    return "\n".join([*lines, "", total])


def _pair_title(pair: Pair) -> str:
    return f"{pair.first.name} x {pair.second.name}"


def _pair_outcome(pair: Pair) -> str:
    """Return "hsdp_2x2 and 3 more", the first case of a pair and the number of others.

    Without a case "refused: REASON", or MISSING.
    """
    if not pair.cases:
        return pair.reason if pair.is_missing else f"refused: {pair.reason}"
    others = f" and {len(pair.cases) - 1} more" if len(pair.cases) > 1 else ""
    return pair.cases[0] + others
