"""Readings of the weights with which pieces of the batch count in a gradient, as rules for every step.

A rule is read off the first wrong step, where parameters are still right; the checks judge all steps under it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.core.causes import assume
from harness.core.causes.assume import assume_separate_clipping, assume_separate_replicas, sum_over_replicas
from harness.core.causes.contributions import Interpretation, LossReport, gradients_are_scaled, norm_of_gradients
from harness.core.causes.differences import first_wrong_step, observed_gradients, pairs_with_wrong_gradient
from harness.core.causes.factors import factor_text, times_text
from harness.core.causes.hypothesis import Broken, Hypothesis, verdict_of
from harness.core.causes.pieces import (
    FittedWeights,
    Pieces,
    WeightsOfPieces,
    assume_piece_weights,
    count_loss_chunks,
    fit_weights,
)
from harness.core.causes.words import Arrays, Pair, where_text
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import view_of_slice
from harness.core.judge.losses import losses_of_rank
from harness.core.judge.norms import norm_of_slices
from harness.core.judge.result import Cause, Verdict
from harness.core.judge.tolerance import clip_coefficient, relative_difference
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.hypotheses.backward import silent_axes, silent_axes_texts
from harness.hypotheses.other_groups import summed_over_others
from harness.reference.distance import best_fitting_factor

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch


def sums_of_pieces(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses that gradients are sums of what ranks received with other weights than 1, by all rules that fit.

    Costly, for it computes the gradient of each piece. Nothing if gradients do not fail, are one multiple, or if
    samples were not each received once. If no weights fit, exchanged gradients are tried.
    """
    step = first_wrong_step(trial) if "gradients" in broken and not trial.assumption.references else None
    if step is None or gradients_are_scaled(trial, step) or not (pieces := Pieces(trial)).all_received_once:
        return
    gradients = pieces.gradients(step)
    fit = fit_weights(trial, pieces, gradients, step) or _fit_of_chunks(trial, step)
    if fit is None:
        yield from _exchanged_gradients(trial, pieces, gradients, step)
        return
    tables = (_microbatch_readings, _local_mean_readings, _unreduced_readings, summed_over_others)
    readings = [*itertools.chain.from_iterable(read(fit) for read in tables)]
    for reading in readings or _readings_without_rule(fit):
        yield from reading.hypotheses(trial, step)
    yield from _repeated_clippings(fit)


def _fit_of_chunks(trial: Trial, step: int) -> FittedWeights | None:
    """Return the fit to pieces that are cut as the loss was. None if the loss was not cut, or nothing fits."""
    if (chunks := count_loss_chunks(trial, step)) == 1:
        return None
    pieces = Pieces(trial, chunks)
    return fit_weights(trial, pieces, pieces.gradients(step), step)


def _make_reading(
    fit: FittedWeights,
    cause: Cause,
    weights: WeightsOfPieces,
    fitted: int = 1,
    number: LossReport | None = None,
    *,
    free: bool = False,
) -> Interpretation:
    """Return the reading of these weights: a cause, and how to assume it in some steps.

    weights: (step, rank) -> weight of each piece. number: what ranks may report as loss. free: whether some weight may
    be any number, so that two steps are needed.
    """
    assume_weights = partial(assume_piece_weights, pieces=fit.pieces, fqns=fit.fqns, weights=weights)
    return Interpretation(
        cause, fit.fqns, lambda steps: partial(assume_weights, steps=steps), fitted, number, least_steps=1 + free
    )


# ---- the same on all ranks


def _microbatch_readings(fit: FittedWeights) -> Iterator[Interpretation]:
    """Yield readings with one weight a microbatch: all pieces of the n-th microbatches of all ranks count alike.

    A second reading is that lost microbatches come with the next step's gradient. Nothing without accumulation, or if
    weights are not so.
    """
    fitted_weights = fit.common_weights
    numbers = fit.pieces.microbatch
    passes = fit.trial.case.passes
    counted = fit.has_tokens
    if fitted_weights is None or passes == 1 or len({*numbers[counted].tolist()}) < passes:
        return
    weights = np.array([np.mean(fitted_weights[counted & (numbers == number)]) for number in range(passes)])
    if not fit.is_same_weight(fitted_weights[counted], weights[numbers][counted]):
        return
    weights = np.where(np.abs(weights - weights.round()) <= fit.tolerance, weights.round() + 0.0, weights)
    lost_microbatches = tuple((np.flatnonzero(weights == 0) + 1).tolist())
    text = (
        f"{_microbatches_with_verb(fit, lost_microbatches)} not contribute to the gradient" if lost_microbatches else ""
    )
    hint = "weights " + ", ".join(number_text(weight, 4) for weight in weights)
    cause = Cause("unequal contributions", text or "microbatches contribute unequally to the gradient", hint=hint)
    cause = replace(cause, details=(("microbatches", lost_microbatches), ("weights", tuple(weights.tolist()))))
    free = len({*weights.tolist()} - {0.0, 1.0})
    yield _make_reading(fit, cause, lambda step, rank: weights[numbers], free + 1, free=free > 0)
    is_first = fit.step == fit.trial.first_step and len(fit.fqns) == len(fit.trial.plan.shapes)
    if is_first and 0 < len(lost_microbatches) < passes:
        is_late = np.isin(numbers + 1, lost_microbatches)
        text = f"{_microbatches_with_verb(fit, lost_microbatches)} not count until the next step's gradient"
        cause = Cause("unequal contributions", text, details=(("microbatches", lost_microbatches), ("steps late", 1)))
        yield _make_reading(fit, cause, lambda step, rank: np.stack([~is_late, is_late]).astype(float), 2)


def _microbatches_with_verb(fit: FittedWeights, numbers: Sequence[int]) -> str:
    """Return these microbatches with a verb, as in "microbatches 1, 3 of 4 do"."""
    numbers_text = f"{', '.join(map(str, numbers))} of {fit.trial.case.passes}"
    if len(numbers) == 1:
        return f"microbatch {numbers_text} does"
    return f"microbatches {numbers_text} do"


def _readings_without_rule(fit: FittedWeights) -> Iterator[Interpretation]:
    """Yield one reading: pieces count with any weights. Nothing in inexact cases, where noise can have made them."""
    if fit.trial.case.has_derived_bounds:
        fitted_weights = np.stack([*fit.weights.values()]).round(9)[:, fit.has_tokens] + 0.0
        smallest = float(fitted_weights.min())
        largest = float(fitted_weights.max())
        ones = np.ones(len(fit.has_tokens))
        hint = f"weights {number_text(smallest, 4)} to {number_text(largest, 4)}"
        details = (("least weight", smallest), ("largest weight", largest))
        cause = Cause("unequal contributions", "samples count unequally in the gradient", hint=hint, details=details)
        weights = lambda step, rank: fit.weights.get(rank, ones)  # noqa: E731
        yield _make_reading(fit, cause, weights, len(np.unique(fitted_weights.round(6))), free=True)


# ---- means that are taken in the wrong place


class Unit(NamedTuple):
    """A part of the batch that may divide its loss by its own number of tokens."""

    name: str
    axes: tuple[str, ...]
    """Ranks of one unit have the same coordinates along these axes."""
    samples: int
    """Number of a rank's samples that are one unit."""
    chunk: bool = False
    """Whether each chunk of the loss is a unit."""


def _units(trial: Trial, chunks: int) -> Iterator[Unit]:
    """Yield all units by which a loss may be averaged. chunks: how many chunks the loss is computed in."""
    passes = trial.case.passes
    size = trial.case.local_batch
    axes = _data_axes(trial)
    for chosen_axes in _nonempty_choices(axes):
        yield Unit(f"{' and '.join(chosen_axes)} rank", chosen_axes, size * passes)
    if passes > 1:
        yield Unit("microbatch", (), size)
        if axes:
            yield Unit("microbatch of each rank", axes, size)
    yield Unit("sample", tuple(axis for axis in axes if axis != "cp"), 1)
    if chunks > 1:
        yield Unit("chunk of each microbatch", axes, size, chunk=True)


def _data_axes(trial: Trial) -> tuple[str, ...]:
    """Return the axes along which ranks receive other tokens."""
    return tuple(axis for axis in ("dp_shard", "dp_replicate", "cp") if getattr(trial.case.dims, axis) > 1)


def _unit_of_each_piece(pieces: Pieces, unit: Unit) -> np.ndarray:
    """Return the number of each piece's unit, from 0. int [pieces]"""
    rows = np.column_stack([pieces.mesh_coordinates(unit.axes), pieces.row // unit.samples, pieces.chunk * unit.chunk])
    return np.unique(rows, axis=0, return_inverse=True)[1].ravel()


def _local_mean_readings(fit: FittedWeights) -> Iterator[Interpretation]:
    """Yield readings of local means: each unit divides by its own number of valid tokens.

    These means are averaged, or summed, over all units, or over those of a microbatch, which then counts by its tokens.
    Units that give the same weights are one reading. Those whose weights are all 1 are left out.
    """
    trial = fit.trial
    pieces = fit.pieces
    units_by_weights = dict[bytes, tuple[list[Unit], np.ndarray, np.ndarray]]()
    one_group = np.zeros(len(pieces.all), dtype=int)
    size = trial.case.local_batch
    for unit in _units(trial, pieces.chunks):
        unit_numbers = _unit_of_each_piece(pieces, unit)
        groupings = [one_group]
        if unit.chunk:
            groupings.append(_unit_of_each_piece(pieces, Unit("", _data_axes(trial), size)))
        for group_numbers in groupings:
            table = np.stack(
                [_weights_if_averaged(pieces, unit_numbers, group_numbers, 1, step, 0) for step in trial.case.steps]
            )
            if not fit.is_same_weight(table, 1.0):  # else it changes nothing
                units_by_weights.setdefault(table.tobytes(), ([], unit_numbers, group_numbers))[0].append(unit)
    for units, unit_numbers, group_numbers in units_by_weights.values():
        names = tuple(unit.name for unit in units)
        axes = units[0].axes
        group_count = len({*group_numbers.tolist()})
        without = partial(_weights_if_averaged, pieces, unit_numbers, group_numbers, 0)
        averaged = partial(_weights_if_averaged, pieces, unit_numbers, group_numbers, 1)
        unit_count = len({*unit_numbers.tolist()}) // group_count
        if (factor := fit.fit_factor(without, averaged, (1, unit_count))) is None:
            continue
        text = f"the loss is averaged per {' or '.join(names)}"
        free = factor not in (1, unit_count)
        hint = "each divides by its own number of valid tokens"
        if factor == unit_count:
            hint += ", which is not summed"
        if group_count > 1:
            hint += ", and microbatches count by their tokens"
        if free:
            hint += f"; gradients are {times_text(factor)} that{factor_text(trial, factor)}"
        details = (("units", names), ("axes", axes), ("factor", factor))
        cause = Cause("averaged locally", text, hint=hint, details=details)
        is_rank = units[0].samples == trial.case.local_batch * trial.case.passes and not units[0].chunk
        number = (
            partial(_loss_divided_by_own, trial, axes, 1 if factor == unit_count else unit_count) if is_rank else None
        )
        weights = partial(_weights_if_averaged, pieces, unit_numbers, group_numbers, factor)
        yield _make_reading(fit, cause, weights, 1 + free, number, free=free)


def _weights_if_averaged(
    pieces: Pieces, units: np.ndarray, groups: np.ndarray, factor: float, step: int, rank: int
) -> np.ndarray:
    """Return the weight of each piece if each unit is averaged by itself. float64 [pieces]

    units, groups: by piece, the number of its unit, and the number of the group over whose units means are averaged.
    factor: of all weights. rank: has no effect.
    """
    tokens = pieces.valid_tokens(step)
    unit_tokens = np.bincount(units, tokens)
    group_tokens = np.bincount(groups, tokens)
    units_of_groups = [{*units[groups == group].tolist()} for group in range(len(group_tokens))]
    units_per_group = np.array([len(numbers) for numbers in units_of_groups])
    return np.asarray(factor * (group_tokens / units_per_group)[groups] / np.maximum(unit_tokens, 1)[units])


def _loss_divided_by_own(trial: Trial, axes: Sequence[str], units: int, rank: int, step: int, right: float) -> float:
    """Return the loss that a rank may report: the sum of all losses divided by `units` times the valid tokens of its
    own peers.

    Peers have this rank's coordinates along the axes. right: has no effect.
    """
    peers = [peer for peer in trial.ranks if coordinate_of_rank(trial.case.dims, peer)["tp"] == 0]
    losses_by_rank = {peer: losses_of_rank(trial, peer, step) for peer in peers}
    coordinates = _coordinates_along(trial, rank, axes)
    own_peers = [peer for peer in peers if _coordinates_along(trial, peer, axes) == coordinates]
    own_losses = itertools.chain.from_iterable(losses_by_rank[peer] for peer in own_peers)
    own_tokens = sum(tokens for _, tokens in own_losses)
    all_losses = itertools.chain.from_iterable(losses_by_rank.values())
    return sum(loss for loss, _ in all_losses) / max(units * own_tokens, 1)


def _coordinates_along(trial: Trial, rank: int, axes: Sequence[str]) -> list[int]:
    """Return the coordinates of a rank along these axes."""
    return [coordinate_of_rank(trial.case.dims, rank)[axis] for axis in axes]


# ---- not the same on all ranks


def _unreduced_readings(fit: FittedWeights) -> Iterator[Interpretation]:
    """Yield readings of gradients that are not reduced over some axes: a rank adds only what ranks with its coordinates
    received.

    This may be so in all microbatches, or in some. Nothing if all ranks have the same weights.
    """
    trial = fit.trial
    pieces = fit.pieces
    choices = [*_nonempty_choices(range(1, trial.case.passes + 1))] if fit.common_weights is None else []
    for missing, microbatch_numbers in itertools.product(_nonempty_choices(_data_axes(trial)), choices):
        is_other = ~np.isin(pieces.microbatch + 1, microbatch_numbers)
        coordinates = pieces.mesh_coordinates(missing)
        own_pieces = {}
        for rank in trial.ranks:
            own_pieces[rank] = (coordinates == _coordinates_along(trial, rank, missing)).all(axis=1) & ~is_other
        usual_factors = (1, math.prod(getattr(trial.case.dims, axis) for axis in missing))  # not divided either
        without_own = partial(_weights_with_own, is_other, own_pieces, 0)
        own_alone = partial(_weights_with_own, np.zeros_like(is_other), own_pieces, 1)
        factor = fit.fit_factor(without_own, own_alone, usual_factors)
        if factor is not None:
            cause, silent = _unreduced_cause(fit, missing, microbatch_numbers, factor, usual_factors)
            weights = partial(_weights_with_own, is_other, own_pieces, factor)
            reading = _make_reading(fit, cause, weights, free=factor not in usual_factors)
            yield replace(reading, assume=partial(_assume_nothing_moved, reading, silent))


def _weights_with_own(
    is_other: np.ndarray, own_pieces: Mapping[int, np.ndarray], factor: float, step: int, rank: int
) -> np.ndarray:
    """Return the weight of each piece on a rank: 1 for others, `factor` for its own, 0 for the rest. float64 [pieces]"""
    return np.asarray(is_other + factor * own_pieces[rank])


def _nonempty_choices(options: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield every choice of one or more of these, the smallest first."""
    return itertools.chain.from_iterable(itertools.combinations(options, count + 1) for count in range(len(options)))


def _unreduced_cause(
    fit: FittedWeights,
    missing: tuple[str, ...],
    microbatch_numbers: tuple[int, ...],
    factor: float,
    usual_factors: Sequence[float],
) -> tuple[Cause, list[str]]:
    """Return (the cause, the axes over which nothing ran).

    microbatch_numbers: from 1, those that are not reduced. factor: how often a rank's own pieces count, noted if it is
    not usual.
    """
    trial = fit.trial
    microbatches = microbatch_numbers if len(microbatch_numbers) < fit.trial.case.passes else ()
    silent_ops = {axis: op for axis, op in silent_axes(trial, fit.step).items() if axis.removesuffix("_cp") in missing}
    has_traffic = verdict_of(trial, "traffic") is Verdict.PASS
    hints = silent_axes_texts(trial, fit.step, silent_ops)
    owner = "rank" if {*missing} == {*_data_axes(trial)} else f"place along {' and '.join(missing)}"
    if not hints:
        hints = [f"each {owner} adds only its own" + (", though collectives ran" if has_traffic else "")]
    if factor not in usual_factors:
        hints = [*hints, f"its own counts {times_text(factor)}{factor_text(trial, factor, False)}"]
    microbatches_text = f" of {_microbatches_with_verb(fit, microbatches).rpartition(' ')[0]}" if microbatches else ""
    text = f"gradients{microbatches_text} are not reduced over {' and '.join(missing)}"
    details = (("axes", missing), ("microbatches", microbatches), ("factor", factor))
    return Cause("gradients not reduced", text, hint=", ".join(hints), details=details), [*silent_ops]


def _assume_nothing_moved(
    reading: Interpretation, axes: Sequence[str], steps: Sequence[int]
) -> Callable[[Trial], Trial]:
    """Return the assumption of this reading in these steps, and in addition that nothing is to move over these axes
    in them."""
    left_out = frozenset(itertools.product(axes, steps))

    def assume_both(trial: Trial) -> Trial:
        assumed = reading.assume(steps)(trial)
        return replace(assumed, plan=replace(assumed.plan, unreduced=assumed.plan.unreduced | left_out))

    return assume_both


# ---- clipped more than once a step


def _repeated_clippings(fit: FittedWeights) -> Iterator[Hypothesis]:
    """Yield hypotheses that the accumulated gradient is clipped after every microbatch: of all ranks, or on each rank
    its own.

    Each is yielded also with a further clipping before the step. Nothing without accumulation or clipping, or if the
    last microbatch does not count once.
    """
    trial = fit.trial
    pieces = fit.pieces
    passes = fit.trial.case.passes
    last = fit.has_tokens & (pieces.microbatch == passes - 1)
    is_clipped_once = passes == 1 or trial.case.training.max_norm is None
    if is_clipped_once or fit.common_weights is None or not fit.is_same_weight(fit.common_weights[last], 1.0):
        return
    pieces_of_chains = defaultdict[tuple[int, int], list[int]](list)
    for number, (rank, _, cp_rank, _) in enumerate(pieces.all):
        pieces_of_chains[rank, cp_rank].append(number)
    chain_choices = [("", [[*range(len(pieces.all))]])]
    if len(pieces_of_chains) > 1:
        chain_choices.append(("each rank clips its own before they are reduced", [*pieces_of_chains.values()]))
    for (hint, chains), twice in itertools.product(chain_choices, (False, True)):
        text_of_times = "after every microbatch" + (" and once more before the step" if twice else "")
        details = (("each rank", bool(hint)), ("once more", twice))
        text = f"accumulated gradients are clipped {text_of_times}"
        cause = Cause("clipped in every microbatch", text, "", "once a step", hint, details=details)
        yield Hypothesis(cause, partial(_assume_clipping, pieces, chains, twice))


def _assume_clipping(pieces: Pieces, chains: Sequence[Sequence[int]], twice: bool, trial: Trial) -> Trial:
    """Return the trial under the assumption that each chain of pieces adds up its own, and clips the sum after every
    microbatch.

    chains: numbers of pieces; their gradients are averaged over chains. twice: the result is clipped again, and the
    norm of the clipped sum is reported.
    """
    passes = trial.case.passes
    limit = trial.case.training.max_norm
    pieces_of_shares = []
    for chain, number in itertools.product(chains, range(passes)):
        pieces_of_shares.append([piece for piece in chain if pieces.microbatch[piece] == number])

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        """Return the mask of the tokens of each share: one for each chain and microbatch."""
        masks = []
        for pieces_of_share in pieces_of_shares:
            masks.append(np.asarray(sum(pieces.token_mask(piece, step) for piece in pieces_of_share)))
        return masks

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        """Return the sum over chains of gradients that are clipped as each microbatch is added. gradients: of each share."""
        sums = []
        for first in range(0, len(gradients), passes):
            accumulated = gradients[first]
            for gradient in gradients[first + 1 : first + passes]:
                coefficient = clip_coefficient(len(chains) * norm_of_gradients(accumulated), limit)
                accumulated = {
                    fqn: gradient[fqn] + value.dtype.type(coefficient) * value for fqn, value in accumulated.items()
                }
            sums.append(accumulated)
        return sum_over_replicas(sums)[:1]

    def clipped_norm(norm: float) -> float:
        return norm * clip_coefficient(norm, limit)

    def coefficient_of_both(norm: float) -> float:
        return clip_coefficient(norm, limit) * clip_coefficient(clipped_norm(norm), limit)

    def clip_twice(step: int, gradients: Arrays, norm: float, _: Any) -> Arrays:
        return {fqn: coefficient_of_both(norm) * gradient for fqn, gradient in gradients.items()}

    norms = {step: norm_of_slices(trial, step) for step in trial.case.steps}
    changes = [{"given": clip_twice} if twice else {}]
    owners = [0] * len(pieces_of_shares)
    assumed_trial = assume.assume_separate_copies(trial, {}, changes, owners=owners, shares=shares, reduce=reduce)
    if not twice:
        return assumed_trial
    assumed = AssumedOptimizer(given=lambda rank, step, fqn, gradient: coefficient_of_both(norms[step]) * gradient)
    return assumed_trial.with_assumption(assumed, reports={"grad_norm": lambda rank, step: clipped_norm(norms[step])})


# ---- another parameter of the partner


def _exchanged_gradients(trial: Trial, pieces: Pieces, gradients: list[Arrays], step: int) -> Iterator[Hypothesis]:
    """Yield one hypothesis: a rank of two replicas adds another parameter's gradient of its partner, in place of the
    right one.

    Nothing for other numbers of replicas, in inexact cases, if gradients are wrong on all ranks, or if some wrong one
    has no such sum.
    """
    wrong = pairs_with_wrong_gradient(trial, step)
    if (
        trial.case.dims.dp_replicate != 2
        or not trial.case.has_derived_bounds
        or {rank for rank, _ in wrong} == {*trial.ranks}
    ):
        return
    replicas = pieces.mesh_coordinates(("dp_replicate",))[:, 0]
    gradients_of_replicas = []
    for replica in (0, 1):
        gradients_of_pieces = [gradients[piece] for piece in np.flatnonzero(replicas == replica)]
        gradients_of_replicas.append(sum_over_replicas(gradients_of_pieces)[0])
    added_gradients = {
        pair: added for pair in wrong if (added := _added_partner_gradient(trial, *pair, step, gradients_of_replicas))
    }
    if len(added_gradients) == len(wrong):
        (rank, fqn), (other, factor) = next(iter(added_gradients.items()))
        hint = f"rank {rank} adds {times_text(factor)} its partner's {other} to its {fqn}"
        details = (("rank", rank), ("parameter", fqn), ("adds", other), ("factor", factor))
        text = "tensors are swapped in the reduction over dp_replicate"
        cause = Cause("reductions exchanged", text, where_text(trial, wrong), hint=hint, details=details)
        factors = {factor for _, factor in added_gradients.values()}
        yield Hypothesis(cause, partial(_assume_added_gradients, added_gradients, step), 1 + len(factors))


def _added_partner_gradient(
    trial: Trial, rank: int, fqn: str, step: int, gradients_of_replicas: list[Arrays]
) -> tuple[str, float] | None:
    """Return (the partner's parameter that is added, its factor). None if there is none.

    gradients_of_replicas: by replica, the gradients that its samples give.
    """
    seen = observed_gradients(trial, rank, step)[fqn]
    for other in trial.plan.shapes:
        own_gradient, partner_gradient = _own_and_partner_gradient(trial, rank, fqn, other, gradients_of_replicas)
        if np.any(partner_gradient):
            factor = best_fitting_factor(seen - own_gradient, partner_gradient)
            if relative_difference(seen - own_gradient, factor * partner_gradient) < 1e-9:
                return other, round(factor, 9)
    return None


def _own_and_partner_gradient(
    trial: Trial, rank: int, fqn: str, other: str, gradients: list[Arrays]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (a rank's slice of a gradient, its partner's slice of another parameter's gradient in the same shape).

    The second is zeros if the sizes differ. gradients: by replica.
    """
    peers = trial.plan.peers(rank, "dp_replicate")
    replicas = {peer: coordinate_of_rank(trial.case.dims, peer)["dp_replicate"] for peer in peers}
    partner = next(peer for peer in replicas if peer != rank)

    def gradient_of(holder: int, name: str) -> np.ndarray:
        slice_ = trial.slice_of(holder, name)
        return np.zeros(0) if slice_ is None else view_of_slice(gradients[replicas[holder]][name], slice_)

    own_gradient = gradient_of(rank, fqn)
    partner_gradient = gradient_of(partner, other)
    if partner_gradient.size != own_gradient.size:
        return own_gradient, np.zeros_like(own_gradient)
    return own_gradient, partner_gradient.reshape(own_gradient.shape)


def _assume_added_gradients(added_gradients: Mapping[Pair, tuple[str, float]], since: int, trial: Trial) -> Trial:
    """Return the trial under the assumption that ranks add these gradients of their partner from step `since` on.

    added_gradients: (rank, fqn) -> (partner's fqn that is added, factor).
    """

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        total = []
        for gradients_of_share in sum_over_replicas(gradients):
            total.append({fqn: value.copy() for fqn, value in gradients_of_share.items()})
        if step < since:
            return total
        for (rank, fqn), (other, factor) in added_gradients.items():
            own_gradient, partner_gradient = _own_and_partner_gradient(trial, rank, fqn, other, gradients)
            target, _ = _own_and_partner_gradient(trial, rank, fqn, other, total)
            target[...] = own_gradient + factor * partner_gradient
        return total

    return assume_separate_clipping(assume_separate_replicas(trial, "dp_replicate", reduce))
