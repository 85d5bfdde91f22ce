"""What torch.compile ran on a rank: blocks where a case requests them, and a helper or a loss where the trainer declares it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from harness.judge.result import Finding
from harness.judge.trial import Trial

Looked = Iterator[Finding | None]  # None: something was looked at, and was right


def looked_at(trial: Trial, rank: int) -> Looked:
    """Judge what a rank compiled. Where a trainer declares what it compiles, graph breaks are its choice, too."""
    compiler, most = trial.ranks[rank].compiler, most_graphs(trial)
    graphs, breaks = compiler.get("graphs", 0), sorted(key for key in compiler if key.startswith("graph break"))
    if trial.case.features.compile:
        yield _expect(rank, "compiled graphs", "compiled graphs" if graphs else "no compiled graph")
    else:
        wanted = f"at most {counted_graphs(most)}" if most else "no compiled graph"
        yield _expect(rank, wanted, wanted if graphs <= most else counted_graphs(graphs))
    if not most:
        yield _expect(rank, "no graph break", breaks[0] if breaks else "no graph break")
    yield _expect(rank, "no limit reached", next(gave_up(trial, rank), "no limit reached"))
    yield from compiled_again(trial, rank)


def _expect(rank: int, expected: str, observed: str) -> Finding | None:
    return None if expected == observed else Finding.at(rank, expected, observed, name="torch.compile")


def counted_graphs(count: int) -> str:
    return f"{count} compiled graph{'s' * (count != 1)}"


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
            yield Finding.at(rank, "0", str(more), step=step.step, name="graphs recompiled") if more else None
