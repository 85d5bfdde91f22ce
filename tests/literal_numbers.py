"""Recordings as numbers: four parameters, three steps, and changes of these, for tests of comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.core.judge.result import Cause
from harness.recording.judged.judge_same_training import compare_numbers
from harness.recording.judged.judge_sketched import Numbers, sum_sketches
from harness.recording.judged.sketched import diagnose
from harness.recording.sketches import BUCKETS, GRADIENT, WEIGHTS, RankSketches, Sketch

SHAPES = {"layers.0.norm": (4,), "layers.0.up": (8, 4), "output": (16, 4), "layers.1.up": (8, 4)}
FQNS = (*SHAPES,)
ALIKE = {"layers.0.up": "layers.1.up", "layers.1.up": "layers.0.up"}
STEPS = (1, 2, 3)
Change = Callable[[int, str, str, np.ndarray], np.ndarray]
"""(step, kind, fqn, sums) -> other sums."""


def sums_of(step: int, kind: str, fqn: str) -> np.ndarray:
    """The same for every rank and recording."""
    seed = [step if kind != WEIGHTS else 100, len(kind), FQNS.index(fqn)]
    drawn = np.random.default_rng(seed).standard_normal(BUCKETS)
    return drawn + 1e-3 * step * sums_of(step, "exp_avg", fqn) if kind == WEIGHTS else drawn


def rank(
    number: int = 0, world: int = 1, change: Change = lambda step, kind, fqn, sums: sums, **more: Any
) -> RankSketches:
    """One that holds every parameter whole."""
    found = []
    for step in (0, *STEPS):
        for kind in (WEIGHTS, GRADIENT, "exp_avg") if step else (WEIGHTS,):
            for fqn in FQNS:
                shape = SHAPES[fqn]
                rows, columns = shape[0], int(np.prod(shape[1:]))
                sums = change(step, kind, fqn, sums_of(step, kind, fqn))
                place = f"0:{rows}|0:{columns}"
                found.append(Sketch(step, kind, fqn, place, rows * columns, float(np.sum(sums**2)), sums))
    usual: dict[str, Any] = {
        "shapes": SHAPES,
        "dtypes": dict.fromkeys(FQNS, "float32"),
        "passes": {step: (tuple(10 * step + row for row in range(4)),) for step in STEPS},
        "tokens": dict.fromkeys(STEPS, 7),
        "rates": dict.fromkeys(STEPS, 0.1),
        "optimizers": ("AdamW(betas (0.9, 0.95))",),
        "plain": FQNS,
    }
    return RankSketches(number, world, sketches=tuple(found), **usual | more)


def numbers(change: Change = lambda step, kind, fqn, sums: sums, **more: Any) -> Numbers:
    return sum_sketches([rank(change=change, **more)])


RIGHT = numbers()


def first_cause(baseline: Numbers, candidate: Numbers) -> Cause | None:
    """Return the first cause of what differs. None if nothing does."""
    diagnosis = diagnose(baseline, candidate, compare_numbers(baseline, candidate))
    if diagnosis is None:
        return None
    assert "not tried" not in [label for label, _ in diagnosis.evidence], diagnosis.evidence
    return diagnosis.causes[0]


def told(other: Numbers) -> tuple[str, dict[str, Any]]:
    cause = first_cause(RIGHT, other)
    assert cause is not None
    return cause.kind, {"check": cause.explains[0], **dict(cause.details)}


def of(kind: str, factor: float, fqn: str = "", since: int = 1) -> Change:
    def change(step: int, of_kind: str, name: str, sums: np.ndarray) -> np.ndarray:
        return factor * sums if (of_kind, step >= since) == (kind, True) and name.startswith(fqn) else sums

    return change
