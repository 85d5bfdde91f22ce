"""Selection of cases by name and tier, and the number of processes that a case takes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from harness.core.case.case import Case, CaseError

ALL_TIERS = "all"


def select_matching(cases: Iterable[Case], expression: str) -> list[Case]:
    """Return the cases that `-k` selects: words of a name, any case of letters, joined by and, or, not.

    An empty expression selects all. Raises CaseError if none is selected, or for another syntax.
    """
    chosen = [case for case in cases if matches_expression(expression, case.name)]
    if not chosen:
        raise CaseError(f"-k {expression!r} selects no case; `harness matrix --list` lists them")
    return chosen


def select_tier(cases: Sequence[Case], tier: str) -> list[Case]:
    """Return the cases of a tier, or all of them for ALL_TIERS.

    Raises CaseError if there is none, naming the tiers with some.
    """
    chosen = [case for case in cases if tier in (ALL_TIERS, case.tier)]
    if not chosen:
        others = Counter(case.tier for case in cases)
        tiers_text = ", ".join(f"{count} of tier {name}" for name, count in others.items())
        raise CaseError(
            f"no case of tier {tier} is selected, but {tiers_text}; add --tier {next(iter(others))} or --tier all"
        )
    return chosen


def matches_expression(expression: str, name: str) -> bool:
    """Return whether an expression of `-k` matches a name; an empty one does. Raises CaseError for another syntax.

    Each word becomes True or False; nothing but these, and, or, not and parentheses is ever evaluated.
    """
    words = re.findall(r"\w+|\S", expression)
    terms = [w if w in ("and", "or", "not", "(", ")") else str(w.lower() in name.lower()) for w in words]
    syntax_error = CaseError(f"-k {expression!r}: expected words joined by and, or, not and parentheses")
    for before, after in itertools.pairwise(terms):  # what Python would read as a call, or as an empty tuple
        if (before in (")", "True", "False") and after in ("(", "True", "False")) or (before, after) == ("(", ")"):
            raise syntax_error
    try:
        return not terms or bool(eval(" ".join(terms), {}))
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: parentheses nested by hundreds
        raise syntax_error from error


def count_processes(case: Case) -> int:
    """Return how many processes the case takes: its ranks, twice if it runs twice, and the reference."""
    return 1 + case.dims.world_size * case.runs
