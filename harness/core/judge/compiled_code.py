"""Judgement of the code that torch.compile ran on a rank.

A case requests compiled blocks. A trainer may also declare that it compiles helpers or a loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from harness.core.judge.explained import allowed_graphs, explained_total
from harness.core.judge.finding import Finding, Limit, Value
from harness.core.judge.trial import Trial

FindingsOrRight = Iterator[Finding | None]
"""The result of each comparison: None if it was right."""


def judge_compiled_code(trial: Trial, rank: int) -> FindingsOrRight:
    """Judge what a rank compiled, and yield a finding or None (right) for each comparison.

    Compared are the number of graphs, graph breaks, code that runs eagerly again, and graphs that were recompiled
    later. With compiled blocks at least one graph is expected, otherwise at most as many as the trainer declares. If it
    declares some, graph breaks are its choice and are not judged.
    """
    compiler = trial.ranks[rank].compiler
    allowed_graphs = allowed_graph_count(trial)
    graphs = compiler.get("graphs", 0)
    breaks = sorted(key for key in compiler if key.startswith("graph break"))
    if trial.case.features.compile:
        yield _compile_finding(graphs > 0, rank, GRAPHS, Limit(least=1), graphs)
    else:
        yield _compile_finding(graphs <= allowed_graphs, rank, GRAPHS, Limit(most=allowed_graphs), graphs)
    if not allowed_graphs:
        yield _compile_finding(not breaks, rank, "graph breaks", None, breaks[0] if breaks else None)
    limits = tuple(reasons_of_eager_fallback(trial, rank))
    yield _compile_finding(not limits, rank, "limits reached", None, limits[:1])
    yield from judge_recompilations(trial, rank)


GRAPHS = "compiled graphs"
RECOMPILED = "graphs recompiled"


def _compile_finding(right: bool, rank: int, quantity: str, expected: Value, observed: Value) -> Finding | None:
    """Return the finding on torch.compile, or None if `right`."""
    if right:
        return None
    return Finding.at(rank, expected, observed, kind="feature", name="torch.compile", quantity=quantity)


def allowed_graph_count(trial: Trial) -> int:
    """Return how many graphs the trainer's allowances let a rank compile. 0 where the case requests compiled blocks."""
    if trial.case.features.compile:
        return 0
    return explained_total(allowed_graphs(trial))


def reasons_of_eager_fallback(trial: Trial, rank: int) -> Iterator[str]:
    """Return the reasons that the compiler of a rank gave for running compiled code eagerly again.

    Empty if it never did.
    """
    return (key.removeprefix("gave up: ") for key in trial.ranks[rank].compiler if key.startswith("gave up: "))


def judge_recompilations(trial: Trial, rank: int) -> FindingsOrRight:
    """Judge each step in which no new graph is expected: yield a finding if its count of graphs changed, else None.

    Not judged are the first two steps of a launch, in which compilers settle, and steps without a count of graphs. A
    step is left out, too, if its sequence length, or that of the step before, was not compiled earlier.
    """
    steps = trial.ranks[rank].steps
    for before, step in itertools.pairwise(steps):
        compiled_lengths = {trial.case.seq_len(earlier.step) for earlier in steps if earlier.step < before.step}
        lengths = {trial.case.seq_len(before.step), trial.case.seq_len(step.step)}
        if step.graphs is not None and before.graphs is not None and lengths <= compiled_lengths:
            new_graphs = step.graphs - before.graphs
            subject: dict[str, Any] = {
                "step": step.step,
                "kind": "feature",
                "name": "torch.compile",
                "quantity": RECOMPILED,
            }
            yield Finding.at(rank, 0, new_graphs, **subject) if new_graphs else None
