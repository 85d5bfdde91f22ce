"""Accepting the reference's curves. A golden belongs to a recipe, so it is rewritten for all cases that use it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from harness.core.case.case import Case
from harness.core.evidence.store import load
from harness.core.evidence.text import counted
from harness.core.judge import golden
from harness.core.run.options import Options
from harness.core.run.reference_cache import reference_folder
from harness.reference.record import ReferenceRun

FEW = 4
"""Names of cases that are listed."""


def accept(case: Case, options: Options, every: Sequence[Case], chosen: Collection[str]) -> list[str]:
    """Rewrite the golden of a launch's recipe, with the noise that all its cases are judged by, and return what changed.

    case: of golden.references. every: all cases of its folder. chosen: names of the selected ones. Raises GoldenError in CI.
    """
    name = golden.recipe_name(case)
    users = [(one, of) for one in every for of in golden.references(one) if golden.recipe_name(of) == name]
    needed = [of for _, of in users if not of.exact]
    noise = list(dict.fromkeys(key for of in needed for key in (of.noise_key, of.golden_noise_key)))
    reference = load(reference_folder(case, options, noise) / "reference.npz", ReferenceRun)
    said = [golden.accept(case, reference)]
    if others := [one.name for one, _ in users if one.name not in chosen]:
        names = ", ".join(others[:FEW]) + ", .." * (len(others) > FEW)
        said.append(f"  it is also the golden of {counted(len(others), 'other case')}: {names}")
    return said
