"""What torch.compile ran on a rank: blocks where a case requests them, and a helper or a loss where the trainer declares it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from harness.core.judge.finding import Finding, Limit, Value
from harness.core.judge.trial import Trial

Looked = Iterator[Finding | None]  # None: something was looked at, and was right


def looked_at(trial: Trial, rank: int) -> Looked:
    """Judge what a rank compiled. Where a trainer declares what it compiles, graph breaks are its choice, too."""
    compiler, most = trial.ranks[rank].compiler, most_graphs(trial)
    graphs, breaks = compiler.get("graphs", 0), sorted(key for key in compiler if key.startswith("graph break"))
    if trial.case.features.compile:
        yield _unless(graphs > 0, rank, GRAPHS, Limit(least=1), graphs)
    else:
        yield _unless(graphs <= most, rank, GRAPHS, Limit(most=most), graphs)
    if not most:
        yield _unless(not breaks, rank, "graph breaks", None, breaks[0] if breaks else None)
    limits = tuple(gave_up(trial, rank))
    yield _unless(not limits, rank, "limits reached", None, limits[:1])
    yield from compiled_again(trial, rank)


GRAPHS = "compiled graphs"
RECOMPILED = "graphs recompiled"


def _unless(right: bool, rank: int, quantity: str, expected: Value, observed: Value) -> Finding | None:
    return (
        None if right else Finding.at(rank, expected, observed, kind="feature", name="torch.compile", quantity=quantity)
    )


def most_graphs(trial: Trial) -> int:
    """Return how many graphs a rank may compile where the case requests no compiled blocks."""
    return 0 if trial.case.features.compile else sum(one.graphs for one in trial.allow)


def gave_up(trial: Trial, rank: int) -> Iterator[str]:
    """Return why code that was compiled once now runs eagerly."""
    return (key.removeprefix("gave up: ") for key in trial.ranks[rank].compiler if key.startswith("gave up: "))


def compiled_again(trial: Trial, rank: int) -> Looked:
    """In the first two steps of a launch compilers settle; later only a length that is new is compiled anew."""
    steps = trial.ranks[rank].steps
    for before, step in itertools.pairwise(steps):
        seen = {trial.case.seq_len(earlier.step) for earlier in steps if earlier.step < before.step}
        lengths = {trial.case.seq_len(before.step), trial.case.seq_len(step.step)}
        if step.graphs is not None and before.graphs is not None and lengths <= seen:
            more = step.graphs - before.graphs
            what: dict[str, Any] = {
                "step": step.step,
                "kind": "feature",
                "name": "torch.compile",
                "quantity": RECOMPILED,
            }
            yield Finding.at(rank, 0, more, **what) if more else None
