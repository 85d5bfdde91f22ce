"""Accepting the reference's curves. A golden belongs to a recipe, so it is rewritten for all cases that use it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from harness.core.case.case import Case
from harness.core.evidence.store import load_stored
from harness.core.evidence.text import count_text
from harness.core.judge import golden
from harness.core.run.options import Options
from harness.core.run.reference_cache import reference_folder
from harness.reference.record import ReferenceRun

MAX_NAMES_LISTED = 4
"""Names of cases that are listed."""


def accept_golden_of(case: Case, options: Options, all_cases: Sequence[Case], chosen: Collection[str]) -> list[str]:
    """Rewrite the golden of a launch's recipe, with the noise that all its cases are judged by.

    Return lines on what changed, and on cases beyond the chosen ones that use this golden. case: one of
    `launches_with_reference`. all_cases: those of its folder. chosen: names of the selected ones. Raises GoldenError in
    CI, and as `accept_golden` does.
    """
    name = golden.recipe_name(case)
    users: list[tuple[Case, Case]] = []  # a case, and its reference of this recipe
    for using_case in all_cases:
        for recipe_case in golden.launches_with_reference(using_case):
            if golden.recipe_name(recipe_case) == name:
                users.append((using_case, recipe_case))
    keys: list[str] = []
    for _, recipe_case in users:
        if not recipe_case.has_derived_bounds:
            keys += [recipe_case.noise_key, recipe_case.golden_noise_key]
    noise = list(dict.fromkeys(keys))
    reference = load_stored(reference_folder(case, options, noise) / "reference.npz", ReferenceRun)
    lines = [golden.accept_golden(case, reference)]
    if others := [using_case.name for using_case, _ in users if using_case.name not in chosen]:
        names = ", ".join(others[:MAX_NAMES_LISTED])
        if len(others) > MAX_NAMES_LISTED:
            names += ", .."
        lines.append(f"  it is also the golden of {count_text(len(others), 'other case')}: {names}")
    return lines
