"""Cases that nobody wrote: options of coverage.py drawn at random and combined, as bugs live where several of them meet.

`harness matrix --random 40 --seed 7` judges 40 of them, `random_7_1` and on. A name says all: `harness run random_7_1` draws
that very case again, with the options of the harness at hand; evidence keeps the case itself. They have no golden, and the
noise of narrow recipes is measured on the spot.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

from harness.case import AXES, Case, CaseError, from_json
from harness.coverage import Option, join, options

LAYOUTS = ("data parallel", "tp", "cp", "pp")
LEFT_OUT = ("compile", "async TP")  # minutes each; no CPU kernel
LARGEST_WORLD = 8
PATIENCE = 100  # draws for every case wanted, before a trainer is said to run none


def named(name: str) -> Case | None:
    """The case of such a name; None for any other."""
    found = re.fullmatch(r"random_(\d+)_(\d+)", name)
    return draw(int(found[1]), int(found[2])) if found else None


def first(count: int, seed: int, reason: Callable[[Case], str | None]) -> list[Case]:
    """The first ones for which there is no reason why they cannot run. Raises CaseError if there are too few."""
    numbers = itertools.islice(itertools.count(1), count * PATIENCE)
    found = list(itertools.islice((case for n in numbers if not reason(case := draw(seed, n))), count))
    if not found:
        first = draw(seed, 1)
        raise CaseError(
            f"--random {count}: none of {count * PATIENCE} drawn can run here; of {first.name}: {reason(first)}"
        )
    if len(found) < count:
        raise CaseError(f"--random {count}: {len(found)} of {count * PATIENCE} drawn can run here; ask for fewer")
    return found


def draw(seed: int, number: int) -> Case:
    """One to three ways to divide the model, and two to four other options; drawn anew until that is a valid case."""
    chance = random.Random(f"{seed} {number}")
    kinds = _by_kind()
    others = [kind for kind in kinds if kind not in (*LAYOUTS, *LEFT_OUT)]
    while True:
        drawn = [*chance.sample(LAYOUTS, chance.randint(1, 3)), *chance.sample(others, chance.randint(2, 4))]
        chosen = [chance.choice(kinds[kind]) for kind in drawn]
        if case := _combined(chosen, chance, f"random_{seed}_{number}"):
            return case


@functools.cache
def _by_kind() -> dict[str, list[Option]]:
    found: dict[str, list[Option]] = {}
    for option in options():
        found.setdefault(option.kind, []).append(option)
    return found


def _combined(chosen: list[Option], chance: random.Random, name: str) -> Case | None:
    fragment: dict[str, Any] = functools.reduce(join, (option.fragment for option in chosen), {})
    wider = {axis: degree * chance.choice((1, 1, 2)) for axis, degree in fragment.get("dims", {}).items()}
    earlier = {"dims": {chance.choice(AXES[1:]): 2}} if "resume" in fragment else {}
    fragment |= {"dims": wider, "name": name, "why": ", ".join(option.name for option in chosen)}
    fragment |= {"resume": [entry | earlier for entry in fragment.get("resume", [])]}
    fragment = join(fragment, {"model": {"n_layers": chance.choice((2, 4, 5, 8))}})
    try:
        case = from_json(fragment)
    except CaseError:
        return None
    return case if case.dims.world_size <= LARGEST_WORLD and all(option.holds(case) for option in chosen) else None
