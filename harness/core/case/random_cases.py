"""Generated cases: options of options.py drawn at random and combined, as bugs live where several of them meet.

`harness matrix --random 40 --seed 7` judges 40 of them, `random_7_1` and on. A name says all: `harness run random_7_1` draws
that very case again, with the options of the harness at hand; evidence keeps the case itself. They have no golden, and the
noise of narrow recipes is measured on the spot.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from harness.core.case.case import Case, CaseError
from harness.core.case.dims import AXES
from harness.core.case.loading import from_json
from harness.core.case.options import Option, all_options, merge_fragments
from harness.core.case.variants import with_dtype

LAYOUTS = ("data parallel", "tp", "cp", "pp")
LEFT_OUT_KINDS = ("compile", "async TP")  # minutes each; no CPU kernel
LARGEST_WORLD = 8
MOST_REFUSED = 2000  # draws in a row that cannot run, before cases that can are said to be too rare
MOST_REASONS = 3


def case_of_name(name: str) -> Case | None:
    """Return the case of a name like random_7_1, drawn again from that seed and number. None for any other name."""
    match = re.fullmatch(r"random_(\d+)_(\d+)", name)
    return draw_random_case(int(match[1]), int(match[2])) if match else None


def draw_runnable_cases(
    count: int, seed: int, reason: Callable[[Case], str | None], dtype: str | None = None
) -> list[Case]:
    """Return the first `count` cases of a seed that can run, in this dtype; None leaves each in the dtype that it was
    drawn in.

    reason: returns why a case cannot run, None if it can. Those that cannot are skipped. Raises CaseError after
    MOST_REFUSED of them in a row.
    """
    cases: list[Case] = []
    reasons: list[str] = []
    for number in itertools.count(1):
        case = with_dtype(draw_random_case(seed, number), dtype)
        if refused := reason(case):
            reasons.append(refused)
        else:
            cases = [*cases, case]
            reasons = []
        if len(cases) == count:
            return cases
        if len(reasons) == MOST_REFUSED:
            raise CaseError(f"--random {count}: {_too_rare_text(len(cases), number, reasons)}")
    raise AssertionError("counting does not end")


def _too_rare_text(runnable: int, drawn: int, reasons: list[str]) -> str:
    """Return "of 2003 drawn this trainer runs 3, ..; most often because of: ..", with the most frequent reasons.

    It shows a person which option of the adapter or command would help.
    """
    frequent_reasons = [f"{count} x {reason}" for reason, count in Counter(reasons).most_common(MOST_REASONS)]
    text = f"of {drawn} drawn this trainer runs {runnable}, of the last {len(reasons)} none"
    return f"{text}; most often because of: {'; '.join(frequent_reasons)}"


def draw_random_case(seed: int, number: int) -> Case:
    """Return the case random_SEED_NUMBER: one to three layouts and two to four other options, drawn anew until that is
    a valid case.

    A seed and a number always give the same case. Options of LEFT_OUT_KINDS are never drawn.
    """
    generator = random.Random(f"{seed} {number}")
    kinds = _options_by_kind()
    other_kinds = [kind for kind in kinds if kind not in (*LAYOUTS, *LEFT_OUT_KINDS)]
    while True:
        drawn_kinds = [
            *generator.sample(LAYOUTS, generator.randint(1, 3)),
            *generator.sample(other_kinds, generator.randint(2, 4)),
        ]
        chosen = [generator.choice(kinds[kind]) for kind in drawn_kinds]
        if case := _combined_case(chosen, generator, f"random_{seed}_{number}"):
            return case


@functools.cache
def _options_by_kind() -> dict[str, list[Option]]:
    """Return all options by their kind, in the order of the table in docs/checks.md."""
    by_kind: dict[str, list[Option]] = {}
    for option in all_options():
        by_kind.setdefault(option.kind, []).append(option)
    return by_kind


def _combined_case(chosen: list[Option], generator: random.Random, name: str) -> Case | None:
    """Return the case that requests all chosen options, with degrees and layers drawn.

    None if validation refuses it, if it needs more than LARGEST_WORLD ranks, or if an option excludes another.
    """
    fragment: dict[str, Any] = functools.reduce(merge_fragments, (option.fragment for option in chosen), {})
    wider = {axis: degree * generator.choice((1, 1, 2)) for axis, degree in fragment.get("dims", {}).items()}
    earlier = {"dims": {generator.choice(AXES[1:]): 2}} if "resume" in fragment else {}
    fragment |= {"dims": wider, "name": name, "why": ", ".join(option.name for option in chosen)}
    fragment |= {"resume": [entry | earlier for entry in fragment.get("resume", [])]}
    fragment = merge_fragments(fragment, {"model": {"n_layers": generator.choice((2, 4, 5, 8))}})
    try:
        case = from_json(fragment)
    except CaseError:
        return None
    return (
        case
        if case.dims.world_size <= LARGEST_WORLD and all(option.is_requested_by(case) for option in chosen)
        else None
    )
