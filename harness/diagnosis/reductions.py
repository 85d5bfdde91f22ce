"""Gradients that are not reduced over some axes: each rank's hold only what ranks with its place along these received."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from harness.diagnosis.backward import silent_axes
from harness.diagnosis.differences import spans
from harness.diagnosis.factors import factor_text, times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import DATA_AXES, Mixture, Pieces, Weights, assuming
from harness.diagnosis.words import groups_text, rank_words, traffic_lines
from harness.evidence.text import ranks_text
from harness.judge.result import Cause, Lines
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.plan.slices import numel
from harness.plan.traffic.flow import Flow

T = TypeVar("T")
Flows = Mapping[int, tuple[Flow, ...]]


def of_each_rank(trial: Trial, pieces: Pieces, mixture: Mixture, broken: Broken) -> Iterator[Hypothesis]:
    """Of all microbatches or of some, only those that ranks with the same place along some axes received."""
    axes = [axis for axis in (*DATA_AXES, "cp") if getattr(trial.case.dims, axis) > 1]
    for missing, chosen in itertools.product(_some(axes), _some(range(trial.case.passes))):
        table = _own_only(trial, pieces, missing, chosen)
        if (factor := _factor(mixture, table, pieces)) is not None:
            found = list(_not_reduced(trial, pieces, mixture, missing, chosen, factor, table))
            yield from found
            if "traffic" in broken and len(mixture.fqns) < len(trial.plan.shapes):
                yield from (one.and_then(partial(_moving_less, mixture.fqns)) for one in found)


def _some(of: Sequence[T]) -> list[tuple[T, ...]]:
    """Every choice of one or more of these, the smallest first."""
    return [chosen for fewer in range(len(of)) for chosen in itertools.combinations(of, fewer + 1)]


Table = dict[int, tuple[np.ndarray, np.ndarray]]
"""By rank, the pieces that are not reduced and count there, and those that are not reduced and do not."""


def _own_only(trial: Trial, pieces: Pieces, missing: tuple[str, ...], chosen: tuple[int, ...]) -> Table:
    def place(rank: int, **cp: int) -> tuple[int, ...]:
        at = coordinate(trial.case.dims, rank) | cp
        return tuple(at[axis] for axis in missing)

    of_chosen = np.array([piece.row // trial.case.local_batch in chosen for piece in pieces.all])
    found = {}
    for rank in trial.ranks:
        own = np.array([place(piece.rank, cp=piece.place) == place(rank) for piece in pieces.all])
        found[rank] = (of_chosen & own, of_chosen & ~own)
    return found


def _factor(mixture: Mixture, table: Table, pieces: Pieces) -> float | None:
    """How often what a rank adds of its own counts; None if weights are not so."""
    counted = pieces.tokens(mixture.step) > 0
    values = np.concatenate([seen[table[rank][0] & counted] for rank, seen in mixture.weights.items()])
    if not values.size:
        return None
    factor = float(np.median(values))
    if abs(factor - round(factor)) <= mixture.close:
        factor = float(round(factor))
    expected = {rank: _weights(table[rank], factor) for rank in mixture.weights}
    alike = all(mixture.same(seen[counted], expected[rank][counted]) for rank, seen in mixture.weights.items())
    return factor if alike and factor else None


def _weights(sets: tuple[np.ndarray, np.ndarray], factor: float) -> np.ndarray:
    own, others = sets
    return np.where(own, factor, np.where(others, 0.0, 1.0))


def _not_reduced(
    trial: Trial,
    pieces: Pieces,
    mixture: Mixture,
    missing: tuple[str, ...],
    chosen: tuple[int, ...],
    factor: float,
    table: Table,
) -> Iterator[Hypothesis]:
    passes, over, held = trial.case.passes, " and ".join(missing), _holds(trial, missing)
    silent = silent_axes(trial, mixture.step)
    alone = {axis: op for axis, op in silent.items() if axis.removesuffix("_cp") in missing}
    which = f" of microbatch{'es' * (len(chosen) > 1)} {', '.join(str(m + 1) for m in chosen)}" * (len(chosen) < passes)
    where = mixture.where(trial)
    if which:
        of = f"{which} of {passes}"
        text = f"gradients{of} are not reduced over {over}{{when}}{where}: each rank adds only its own"
    elif where:
        text = f"gradients are not reduced over {over}{{when}}{where}: {held}"
    elif alone:
        texts = [f"no {op} ran over {groups_text(trial.plan.groups[axis])}" for axis, op in alone.items()]
        text = f"gradient reduction missing over {over}{{when}}: {', '.join(texts)}"
    else:
        text = f"gradient reduction over {over} has no effect{{when}}: {held}, though collectives ran"
    if factor not in (1, math.prod(getattr(trial.case.dims, axis) for axis in missing)):  # not divided either
        text += f"; each rank's own share counts {times_text(factor)}{factor_text(trial, factor, everywhere=False)}"
    weights: Weights = lambda step, rank: _weights(table[rank], factor)  # noqa: E731
    kind = "gradients not reduced"
    for when, steps, more in spans(trial, mixture.step):
        cause = Cause(kind, text.format(when=when))
        assume = partial(assuming, pieces=pieces, fqns=mixture.fqns, weights=weights, steps=steps)
        hypothesis = Hypothesis(cause, assume, 1 + more, _lines(trial, missing, which))
        if alone:
            hypothesis = _without_traffic(hypothesis, tuple(alone), steps)
        yield hypothesis


def _without_traffic(hypothesis: Hypothesis, axes: tuple[str, ...], steps: Sequence[int]) -> Hypothesis:
    """What is not reduced does not move."""
    left_out = frozenset(itertools.product(axes, steps))
    return hypothesis.and_then(lambda t: replace(t, plan=replace(t.plan, unreduced=t.plan.unreduced | left_out)))


def _moving_less(fqns: Sequence[str], trial: Trial) -> Trial:
    """Gradients of these parameters do not move."""
    plan = trial.plan

    def of(flows: Flows) -> Flows:
        found = {}
        for rank, own in flows.items():
            sizes = {fqn: numel(part) for fqn, part in plan.slices[rank].items()}
            whole, left = sum(sizes.values()), sum(size for fqn, size in sizes.items() if fqn not in fqns)
            less = (replace(f, bytes=f.bytes * left // whole) if f.role == "gradients" else f for f in own)
            found[rank] = tuple(less)
        return found

    return replace(trial, plan=replace(plan, flows=of(plan.flows), even_flows=of(plan.even_flows)))


def _reached(trial: Trial, rank: int, missing: tuple[str, ...]) -> list[int]:
    """The ranks of whose samples its gradient holds some: all tokens, or those of its cp rank."""

    def place(of: int) -> list[int]:
        return [coordinate(trial.case.dims, of)[axis] for axis in missing if axis != "cp"]

    return [other for other in trial.one_rank_per_share() if place(other) == place(rank)]


def _tokens(trial: Trial, rank: int) -> str:
    return f"the tokens of cp rank {coordinate(trial.case.dims, rank)['cp']} of {trial.case.dims.cp}"


def _holds(trial: Trial, missing: tuple[str, ...]) -> str:
    rank = min(trial.ranks)
    held = [_tokens(trial, rank)] * ("cp" in missing)
    if missing != ("cp",):
        held.append(f"the samples of {rank_words(_reached(trial, rank, missing))}")
    return f"rank {rank}'s gradient holds only {' in '.join(held)}"


def _lines(trial: Trial, missing: tuple[str, ...], which: str) -> Lines:
    wanted, texts = ranks_text(trial.one_rank_per_share()), []
    for rank in sorted(trial.ranks)[:2]:
        held, all_of = f"the samples of ranks {ranks_text(_reached(trial, rank, missing))}", ""
        if "cp" in missing:
            held, all_of = f"{_tokens(trial, rank)} in {held}", "all of "
        texts.append(f"rank {rank}'s gradient{which} holds {held}, expected {all_of}{wanted}")
    return (*(("samples", text) for text in texts), *traffic_lines(trial))
