"""Gradients are clipped more than once a step: after every microbatch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.checks import update
from harness.diagnosis import assume
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import Piece, Pieces
from harness.diagnosis.words import Arrays
from harness.judge.assumed import AssumedOptimizer
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

# ---- more than once a step

Chain = tuple[Piece, ...]


def _receiver(piece: Piece) -> tuple[int, int]:
    return piece.rank, piece.place


def clipped_while_adding_up(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """After every microbatch, what has been added up until then: reduced already, or what each data rank has of its own."""
    pieces = Pieces(trial)
    if "gradients" not in broken or trial.case.training.max_norm is None or trial.case.passes == 1 or not pieces.known:
        return
    all_pieces: tuple[Chain, ...] = (pieces.all,)
    of_ranks = tuple(tuple(group) for _, group in itertools.groupby(sorted(pieces.all, key=_receiver), key=_receiver))
    alone = "; each rank clips its own before they are reduced"
    whose = {"": all_pieces, **({alone: of_ranks} if len(of_ranks) > 1 else {})}
    for (hint, chains), twice in itertools.product(whose.items(), (False, True)):
        times = "after every microbatch" + " and once more before the step" * twice
        text = f"accumulated gradients are clipped {times}, requested once a step{hint}"
        yield Hypothesis(Cause("clipped in every microbatch", text), partial(_clipping_chains, pieces, chains, twice))


def _norm(gradients: Arrays) -> float:
    return math.sqrt(math.fsum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients.values()))


def _clipping_chains(pieces: Pieces, chains: Sequence[Chain], twice: bool, trial: Trial) -> Trial:
    """Each chain holds its own pieces, microbatch after microbatch, and as much larger as they are averaged over chains.
    twice: their sum is clipped, and what comes of that again, whose norm is reported."""
    passes, limit, size = trial.case.passes, trial.case.training.max_norm, trial.case.local_batch

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [
            np.asarray(sum(pieces.mask(piece, step) for piece in chain if piece.row // size == number))
            for chain in chains
            for number in range(passes)
        ]

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        sums = []
        for first in range(0, len(gradients), passes):
            held = gradients[first]
            for more in gradients[first + 1 : first + passes]:
                by = clip_coefficient(len(chains) * _norm(held), limit)
                held = {fqn: more[fqn] + held[fqn].dtype.type(by) * held[fqn] for fqn in held}
            sums.append(held)
        return [{fqn: np.asarray(sum(held[fqn] for held in sums)) for fqn in sums[0]}]

    def clipped_before(norm: float) -> float:
        """The norm that the last clipping finds."""
        return norm * clip_coefficient(norm, limit)

    def by(norm: float) -> float:
        return clip_coefficient(norm, limit) * clip_coefficient(clipped_before(norm), limit)

    norms = {step: update.observed_norm(trial, step) for step in trial.case.steps}
    given = {"given": lambda step, gradients, norm, _: {fqn: by(norm) * g for fqn, g in gradients.items()}}
    owners = [0] * len(chains) * passes
    other = assume.apart(trial, {}, [given if twice else {}], owners=owners, shares=shares, reduce=reduce)
    if not twice:
        return other
    assumed = AssumedOptimizer(given=lambda rank, step, fqn, gradient: by(norms[step]) * gradient)
    return other.assuming(assumed, reports={"grad_norm": lambda rank, step: clipped_before(norms[step])})
