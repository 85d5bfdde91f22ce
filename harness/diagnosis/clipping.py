"""Gradients are not clipped once a step by their global norm: by another norm, too often, on some ranks, or not at all."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.checks import update
from harness.diagnosis import assume
from harness.diagnosis.algorithms import Replayed, first_moves
from harness.diagnosis.differences import replicas_agree
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import Piece, Pieces
from harness.diagnosis.norms import Norm, norm_of, other_norms
from harness.diagnosis.replicas import optimizer_of_ranks, replicas_differ
from harness.diagnosis.words import Arrays, rank_words, where_text
from harness.judge.assumed import AssumedOptimizer
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.plan.slices import tp_dim

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Coefficient = Callable[[int, int, str], Any]  # rank, step, fqn


@dataclass(frozen=True)
class Clipping:
    """by: what gradients are multiplied by, in place of clipping. norm: what that is by, if it may be what ranks report."""

    cause: Cause
    by: Coefficient
    norm: Norm | None = None
    fitted: int = 1

    def given(self, rank: int, step: int, fqn: str, gradient: np.ndarray) -> Any:
        return self.by(rank, step, fqn) * gradient

    def assume(self, trial: Trial) -> Trial:
        differ = replicas_differ(
            trial, lambda rank, fqn: [np.asarray(self.by(rank, step, fqn)).tobytes() for step in trial.case.steps]
        )
        assumed = AssumedOptimizer(given=self.given)
        other = optimizer_of_ranks(trial, assumed, lambda ranks: {"given": self._whole(trial, ranks)}, differ=differ)
        shown = [(rank, s.step, s.grad_norm) for rank, s, _ in trial.steps() if s.grad_norm is not None]
        if self.norm and all(math.isclose(seen, self.norm(rank, step), rel_tol=1e-6) for rank, step, seen in shown):
            return other.assuming(reports={"grad_norm": self.norm})
        return other

    def _whole(self, trial: Trial, ranks: Sequence[int]) -> Callable[..., Arrays]:
        """The same for whole gradients: each slice times the coefficient of the rank, one of these, that holds it."""

        def given(step: int, gradients: Arrays, norm: float, parameters: object) -> Arrays:
            scaled = {fqn: gradient.copy() for fqn, gradient in gradients.items()}
            for rank, fqn in itertools.product(ranks, gradients):
                if part := trial.gradient_slice_of(rank, fqn):
                    take(scaled[fqn], part)[...] = self.given(rank, step, fqn, take(gradients[fqn], part))
            return scaled

        return given


def wrong_clipping(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Ways to clip, each tried on a few parameters."""
    limit = trial.case.training.max_norm
    if "update" not in broken or limit is None or not replicas_agree(trial, trial.first_step):
        return
    norm, replayed = {step: update.observed_norm(trial, step) for step in trial.case.steps}, Replayed(trial)
    ways = (*_by_norms(trial, norm, limit), *_in_groups(trial, limit), *_by_value(trial, limit))
    for way in (*ways, *_left_out(trial, norm, limit)):
        if (more := replayed.agrees(AssumedOptimizer(given=way.given))) is not None:
            yield Hypothesis(way.cause, way.assume, way.fitted + more)


def _by_norms(trial: Trial, norm: Mapping[int, float], limit: float) -> Iterator[Clipping]:
    """By another one, each computed once; or otherwise by the global one. Of a rank that holds all, its own is no other one:
    where replicas have other gradients, that is the mistake."""
    first, kind = trial.first_step, "clipped by another norm"
    for whose, norm_of_rank in _norms(trial):
        other = functools.cache(norm_of_rank)
        places = itertools.product(trial.case.steps, sorted(trial.ranks))
        odd = ((step, rank) for step, rank in places if not math.isclose(other(rank, step), norm[step]))
        for step, rank in itertools.islice(odd, 1):
            if _has_all(trial) and math.isclose(other(rank, step), update.observed_norm(trial, step, (rank,))):
                continue
            when = "" if step == first else f" in step {step}"
            seen = f"{other(rank, step):.6g} on rank {rank}{when}, expected {norm[step]:.6g}"
            others = [one for one in sorted(trial.ranks) if not math.isclose(other(one, step), norm[step])]
            some = f"{rank_words(others)} clip{'s' * (len(others) == 1)}"
            who = "each rank clips" if len(others) == len(trial.ranks) else some
            cause = Cause(kind, f"{who} by {whose}, not by the global norm: {seen}")
            yield Clipping(cause, partial(_by_norm, limit, other), other, 1 + (whose == "the norm it reports"))
    if low := next((step for step in trial.case.steps if norm[step] < limit), None):
        when = "" if low == first else f" in step {low}"
        text = f"clipping enlarges gradients{when}: it multiplies by {limit / (norm[low] + 1e-6):.4g}"
        text += f" although the norm {norm[low]:.4g} is below max_norm {limit:g}"
        enlarged = Cause("clipping enlarges gradients", text)
        yield Clipping(enlarged, lambda rank, step, fqn: limit / (norm[step] + 1e-6))
    expected = "max_norm / (norm + 1e-6), as torch does"
    plain = Cause("clipped without 1e-6", "clipping multiplies by max_norm / norm", "", expected)
    yield Clipping(plain, lambda rank, step, fqn: limit / max(norm[step], limit))


def _has_all(trial: Trial) -> bool:
    """Whether each rank holds every parameter whole."""
    return trial.case.dims.dp_replicate == trial.case.dims.world_size


def _by_norm(limit: float, norm: Norm, rank: int, step: int, fqn: str) -> float:
    return clip_coefficient(norm(rank, step), limit)


def _norms(trial: Trial) -> Iterator[tuple[str, Norm]]:
    yield from other_norms(trial)
    if trial.first_step == 1:
        yield "the norm of the step before", lambda rank, step: update.observed_norm(trial, step - 1)
        yield (
            "the norm of the step before (in step 1 its own)",
            lambda rank, step: update.observed_norm(trial, max(1, step - 1)),
        )
    shown = {(rank, step.step): step.grad_norm for rank, step in trial.own_steps() if step.grad_norm is not None}
    if {*shown} >= {*itertools.product(trial.ranks, trial.case.steps)}:
        usual = {step.step: step.grad_norm for step in trial.reference.steps}  # of launches before
        yield "the norm it reports", lambda rank, step: shown.get((rank, step), usual[step])


def _in_groups(trial: Trial, limit: float) -> Iterator[Clipping]:
    """Each parameter, layer or kind of parameters by a norm of its own."""
    shapes = trial.case.model.parameter_shapes()
    groupings: dict[str, Callable[[str], object]] = {
        "parameter": lambda fqn: fqn,
        "layer": lambda fqn: ".".join(fqn.split(".")[:2]),
        "kind of parameters (matrices, vectors)": lambda fqn: len(shapes[fqn]),
    }
    if trial.case.dims.tp > 1:
        groupings["placement over tp (dim 0, dim 1, replicated)"] = tp_dim
    for name, group in groupings.items():
        members: dict[object, set[str]] = {}
        for fqn in trial.plan.shapes:
            members.setdefault(group(fqn), set()).add(fqn)
        table = {
            (fqn, step): clip_coefficient(norm, limit)
            for step, fqns in itertools.product(trial.case.steps, members.values())
            for norm in [norm_of(trial, fqns, step)]
            for fqn in fqns
        }
        cause = Cause("clipped by another norm", f"each {name} is clipped by its own norm")
        yield Clipping(cause, lambda rank, step, fqn, table=table: table[fqn, step])  # type: ignore[misc]


def _by_value(trial: Trial, limit: float) -> Iterator[Clipping]:
    seen = {(rank, step.step): step.gradients for rank, step in trial.own_steps()}

    def by(most: float, rank: int, step: int, fqn: str) -> Any:
        return most / np.maximum(np.abs(seen[rank, step][fqn]), np.float64(most))

    for most in dict.fromkeys((limit, 1.0)):
        text = f"gradients are clipped entry by entry, to {most:g}, not by their norm"
        yield Clipping(Cause("clipped by value", text), partial(by, most))


def _left_out(trial: Trial, norm: Mapping[int, float], limit: float) -> Iterator[Clipping]:
    """Of all, or of those for which the first step is what the optimizer makes of the whole gradient."""
    clip = clip_coefficient(norm[trial.first_step], limit)
    pairs = {*first_moves(trial, 1.0, explained=True)} - {*first_moves(trial, clip, explained=True)}
    if not pairs:
        return
    where = where_text(trial, sorted(pairs)).removeprefix("in ")
    if where == "every parameter":
        cause = Cause("clipping left out", f"gradients are not clipped (coefficient {clip:.4g})")
        yield Clipping(cause, lambda rank, step, fqn: 1.0, fitted=0)
        return
    others = set(trial.plan.shapes) - {fqn for _, fqn in pairs}
    own = {step: norm_of(trial, others, step) for step in trial.case.steps}

    def but_for(norms: Mapping[int, float], rank: int, step: int, fqn: str) -> float:
        return 1.0 if (rank, fqn) in pairs else clip_coefficient(norms[step], limit)

    for norms, hint in ((norm, ""), (own, ", the others are clipped by their own norm")):
        text = f"clipping is not applied to {where} (coefficient {clip:.4g}){hint}"
        cause = Cause("clipping left out", text)
        yield Clipping(cause, partial(but_for, norms), lambda rank, step, norms=norms: norms[step])  # type: ignore[misc]


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
