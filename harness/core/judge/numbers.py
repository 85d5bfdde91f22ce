"""The expected value of a number that ranks report, by its meaning: from the samples they received and the work they did."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from harness.core.evidence.numbers import MEAN, NORM, SPLIT, VALIDATION, Number
from harness.core.evidence.step import Microbatch, StepEvidence
from harness.core.judge.held_values import reference_order_arguments, whole_weights_after
from harness.core.judge.labels import IGNORED
from harness.core.judge.norms import PARAMETERS, norm_of_slices, ranks_by_distance
from harness.core.judge.places import first_stage_peer, first_stage_ranks, last_stage_ranks
from harness.core.judge.received_samples import received_positions_of, samples_of_step
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.stages import token_positions_of_rank

T = TypeVar("T")
ShareCoordinate = tuple[int, ...]
"""Mesh coordinate along the axes of SPLIT."""
Batch = tuple[np.ndarray, np.ndarray]
"""Tokens and labels, int64 [samples, positions]."""
LossSum = tuple[float, int]
"""The sum of the losses of some tokens, and how many valid ones these are."""


Count = Callable[[Trial, int, int, Number], float]
"""How many samples or tokens a step had: launch, step, rank, number."""


class NotOnRecord(LookupError):
    """The evidence lacks what a number depends on; the message names it."""


@dataclass(frozen=True)
class ExpectedNumbers:
    """The expected values of the numbers that ranks report in one launch.

    Losses of validation are computed once and kept.
    """

    trial: Trial
    """The launch in which the numbers are reported."""
    losses: dict[int, Mapping[ShareCoordinate, LossSum]] = field(default_factory=dict)
    """Step -> share's mesh coordinate -> losses of the validation after it, as computed already."""

    def expected_value(self, rank: int, step: int, name: str, number: Number, count: Count | None = None) -> float:
        """Return the value that a rank should report in a step under this name, as the number's meaning defines it.

        NaN for a mean over nothing. Raises NotOnRecord. count: counts samples or tokens; `received_count` by default,
        or `requested_count`.
        """
        if number.rate and not (number.seconds or 0) > 0:
            raise NotOnRecord("it is a rate, and its seconds are not handed over")
        degrees = [getattr(self.trial.case.dims, axis) for axis in number.divided_by]
        seconds = (number.seconds or 1.0) if number.rate else 1.0
        divisor = math.prod(degrees) * seconds
        return self._unscaled_value(rank, step, name, number, count or received_count) * number.times / divisor

    def _unscaled_value(self, rank: int, step: int, name: str, number: Number, count: Count) -> float:
        """Return a number by its meaning alone: a count, an epoch, a norm or a mean.

        It is not yet multiplied or divided. NaN for a mean over nothing. A launch with another layout has no such rank,
        so the number of all its ranks is taken from rank 0. Raises NotOnRecord.
        """
        if number.of == NORM:
            return self.parameter_norm(rank, step)
        if number.of == VALIDATION:
            _refuse_repeated_shares(self.trial, step, number.over)
            parts = _parts_for_rank(self._validation_losses(step), self.trial, rank, number.over)
            valid_tokens = sum(count for _, count in parts)
            return math.fsum(total for total, _ in parts) / valid_tokens if valid_tokens else math.nan
        if number.of in ("epoch", "epochs"):
            batches = self.trial.reference.samples[:step][-(number.steps or step) :]
            epochs = sum(map(len, batches)) / _data_set_size(self.trial, number)
            return epochs if number.of == "epochs" else math.ceil(epochs) - 1
        steps = list(_covered_steps(self.trial, step, number))
        if number.of == "steps":
            return len(steps)
        # A launch with another layout has no such rank. The number covers all its ranks then, so rank 0 has it.
        records = [
            (launch, covered_step, rank if launch.case.dims == self.trial.case.dims else 0)
            for launch, covered_step in steps
        ]
        if number.of != MEAN:
            return sum(count(*record, number) for record in records)
        means: list[tuple[float, float]] = []
        for record in records:
            means += mean_parts_of_rank(*record, name, number)
        if number.per:
            counted_number = replace(number, of=number.per)
            divisor = sum(count(*record, counted_number) for record in records)
        else:
            divisor = math.fsum(count for _, count in means)
        return math.fsum(total for total, _ in means) / divisor if divisor else math.nan

    def parameter_norm(self, rank: int, step: int) -> float:
        """Return the 2-norm of all parameters after a step, from the slices nearest to this rank: replicas may differ.

        Raises NotOnRecord unless every parameter is on record.
        """
        recorded_fqns: set[str] = set()
        for _, record in self.trial.own_steps():
            if record.step == step:
                recorded_fqns.update(record.parameters)
        if recorded_fqns != self.trial.plan.shapes.keys():
            raise NotOnRecord(f"parameters after step {step} are not all on record")
        return norm_of_slices(self.trial, step, ranks_by_distance(self.trial, rank), quantity=PARAMETERS)

    def _validation_losses(self, step: int) -> Mapping[ShareCoordinate, LossSum]:
        """Return the losses of the validation after a step, by share's mesh coordinate. Raises NotOnRecord.

        They are computed when they are first needed, and kept.
        """
        if step not in self.losses:
            self.losses[step] = dict(_validation_loss_parts(self.trial, step, validation_batches(self.trial, step)))
        return self.losses[step]


def _covered_steps(trial: Trial, step: int, number: Number) -> Iterator[tuple[Trial, int]]:
    """Yield (launch, step) for each step that a number covers, up to `step`, with the last launch that trained it.

    Raises NotOnRecord for a step of no launch. Raises it as well for one of another layout, unless the number is of all
    ranks.
    """
    first_step = 1 if number.steps is None else step - number.steps + 1
    for covered_step in range(first_step, step + 1):
        launch = next((launch for launch in reversed(trial.launches) if covered_step in launch.case.steps), None)
        if launch is None:
            raise NotOnRecord(f"step {covered_step} is not on record")
        if launch.case.dims != trial.case.dims and {*number.over} != {*SPLIT}:
            raise NotOnRecord(f"step {covered_step} had another layout, in which no rank's part is this one's")
        yield launch, covered_step


def mean_parts_of_rank(trial: Trial, step: int, rank: int, name: str, number: Number) -> list[tuple[float, float]]:
    """Return the (sum, count) pairs that make up a rank's mean: one for each coordinate along SPLIT.

    Raises NotOnRecord if none. tp ranks share a pair. Of several stages the rank's own comes first, then the nearest
    rank's.
    """
    parts: dict[ShareCoordinate, tuple[float, float]] = {}
    stage = coordinate_of_rank(trial.case.dims, rank)["pp"]

    def is_of_another_stage(other: int) -> bool:
        return coordinate_of_rank(trial.case.dims, other)["pp"] != stage

    for other in sorted(ranks_by_distance(trial, rank), key=is_of_another_stage):
        reported = _step_record(trial, other, step).numbers.get(name)
        if reported is not None and reported.total is not None and reported.count is not None:
            parts.setdefault(share_coordinate(trial, other), (reported.total, reported.count))
    own_parts = _parts_for_rank(parts, trial, rank, number.over)
    if not own_parts:
        raise NotOnRecord(f"total and count of step {step} are not handed over")
    return own_parts


def received_count(trial: Trial, step: int, rank: int, number: Number) -> int:
    """Return how many samples, tokens or valid tokens the ranks of a number received in a step. Raises NotOnRecord."""
    ranks = last_stage_ranks(trial) if number.of == "valid tokens" else first_stage_ranks(trial)
    return sum(
        _count_on_rank(trial, sharer, step, number.of) for sharer in _contributing_ranks(trial, rank, number, ranks)
    )


def requested_count(trial: Trial, step: int, rank: int, number: Number) -> float:
    """Return how many samples or tokens of a step the recipe gives to the ranks of a number.

    It is a fraction if their parts are uneven. Of valid tokens it is the number in the samples that they received, by
    the recipe's labels. Raises NotOnRecord if these samples are not known.
    """
    if number.of == "valid tokens":
        sharers = _contributing_ranks(trial, rank, number, first_stage_ranks(trial))
        return sum(_valid_label_count(trial, sharer, step) for sharer in sharers)
    samples = len(trial.reference.samples[step - 1])
    divided_axes = [axis for axis in SPLIT if axis not in number.over and (number.of, axis) != ("samples", "cp")]
    per_sample = 1 if number.of == "samples" else trial.case.seq_len(step)
    return samples * per_sample / math.prod(getattr(trial.case.dims, axis) for axis in divided_axes)


def _contributing_ranks(trial: Trial, rank: int, number: Number, ranks: list[int]) -> list[int]:
    """Return the ranks whose counts make up a rank's number: one of `ranks` for each of its mesh coordinates.

    Of its own coordinate it is the rank itself, otherwise a rank with tp 0. Of samples cp ranks count once, for they
    share them.
    """
    over = tuple(axis for axis in number.over if (number.of, axis) != ("samples", "cp"))
    rank_by_place = {
        share_coordinate(trial, other): other
        for other in ranks
        if coordinate_of_rank(trial.case.dims, other)["tp"] == 0
    }
    if rank in ranks:
        rank_by_place[share_coordinate(trial, rank)] = rank
    return _parts_for_rank(rank_by_place, trial, rank, over)


def _valid_label_count(trial: Trial, rank: int, step: int) -> int:
    """Return the number of valid labels, by the recipe, at the positions and of the samples that a rank received.

    Raises NotOnRecord if the rank received none, or tokens that are no sample of the recipe.
    """
    reference = trial.reference
    sample_ids = samples_of_step(trial, step).by_rank.get(rank, [None])
    if None in sample_ids:
        raise NotOnRecord(f"step {step}: rank {rank} received no samples of the recipe")
    rows = [reference.sample_ids.index(sample_id) for sample_id in sample_ids if sample_id is not None]
    received_positions = received_positions_of(trial, rank, step)
    return int((reference.labels[rows][:, received_positions] != IGNORED).sum())


def share_coordinate(trial: Trial, rank: int) -> ShareCoordinate:
    """Return a rank's mesh coordinate along the axes of SPLIT."""
    mesh_coordinate = coordinate_of_rank(trial.case.dims, rank)
    return tuple(mesh_coordinate[axis] for axis in SPLIT)


def _parts_for_rank(parts: Mapping[ShareCoordinate, T], trial: Trial, rank: int, over: tuple[str, ...]) -> list[T]:
    """Return those of the parts whose coordinates differ from the rank's along axes of `over` alone.

    parts: by mesh coordinate along SPLIT.
    """
    own = share_coordinate(trial, rank)
    common_axes = [index for index, axis in enumerate(SPLIT) if axis not in over]
    selected = []
    for other, part in parts.items():
        if all(other[index] == own[index] for index in common_axes):
            selected.append(part)
    return selected


def _count_on_rank(trial: Trial, rank: int, step: int, quantity: str) -> int:
    """Return the samples, tokens or valid tokens of all microbatches of a rank in a step.

    Raises NotOnRecord if one is not known. quantity: "samples", "valid tokens", or anything else for tokens.
    """
    microbatches = _step_record(trial, rank, step).microbatches
    counts: list[int | None]
    if quantity == "valid tokens":
        counts = [microbatch.valid_tokens for microbatch in microbatches]
    elif quantity == "samples":
        counts = [None if microbatch.tokens is None else microbatch.tokens.shape[0] for microbatch in microbatches]
    else:
        counts = [None if microbatch.tokens is None else microbatch.tokens.size for microbatch in microbatches]
    if not counts or None in counts:
        raise NotOnRecord(f"step {step}: the {quantity} of rank {rank} were not seen")
    return sum(count for count in counts if count is not None)


def _step_record(trial: Trial, rank: int, step: int) -> StepEvidence:
    """Return a rank's evidence of a step. Raises NotOnRecord if it has none."""
    record = next((record for record in trial.ranks[rank].steps if record.step == step), None)
    if record is None:
        raise NotOnRecord(f"step {step} of rank {rank} is not on record")
    return record


def _data_set_size(trial: Trial, number: Number) -> int:
    """Return the number of samples of the data set. Raises NotOnRecord.

    Data made from a seed have a known size. Of a file it is known once a sample came again; until then it is the
    number's `data_size`.
    """
    reference = trial.reference
    drawn = list(itertools.chain.from_iterable(reference.samples))
    if trial.case.training.data is None:
        return trial.case.training.made_samples
    if len(drawn) > len(reference.sample_ids):
        return len(reference.sample_ids)
    if number.data_size:
        return number.data_size
    raise NotOnRecord("how many samples the file has is not on record until one comes again, nor handed over")


# ---- validation


def validation_batches(trial: Trial, step: int) -> dict[ShareCoordinate, list[Batch]]:
    """Return, by share, the (tokens, labels) batches that were evaluated after a step.

    A share: dp_replicate and dp_shard. They are those that the trainer reports. If it reports none, they are those that
    passes without gradients received. Raises NotOnRecord.
    """
    return _reported_batches(trial, step) or _evaluated_batches(trial, step)


def count_trained_validation_rows(trial: Trial, step: int) -> tuple[int, int]:
    """Return (evaluated samples that training had used up to this step, all evaluated samples). Raises NotOnRecord.

    The first number is 0 once training has used all data, because no sample is held out then.
    """
    reference = trial.reference
    rows: list[np.ndarray] = []
    for batches in validation_batches(trial, step).values():
        for tokens, _ in batches:
            rows += [*tokens]
    drawn = list(itertools.chain.from_iterable(reference.samples[:step]))
    data_ended = len({*drawn}) < len(drawn) or len(drawn) >= trial.case.training.made_samples
    trained_rows: set[bytes] = set()
    if not data_ended:
        trained_rows = {reference.tokens[reference.sample_ids.index(sample_id)].tobytes() for sample_id in {*drawn}}
    return sum(np.asarray(row, np.int64).tobytes() in trained_rows for row in rows), len(rows)


def repeated_validation_rows(trial: Trial, step: int) -> dict[ShareCoordinate, tuple[int, int]]:
    """Return, by share of a validation that has some rows more often than others, (repetitions, all rows).

    Rows whose labels are all ignored do not count. Shares with more rows than the data set has samples are left out.
    Raises NotOnRecord where the data are a file, which may have a row twice.
    """
    repeated: dict[ShareCoordinate, tuple[int, int]] = {}
    for share, batches in validation_batches(trial, step).items():
        rows: list[tuple[bytes, bytes]] = []
        for tokens, labels in batches:
            for row, valid in zip(tokens, labels, strict=True):
                if (valid != IGNORED).any():
                    rows.append((row.tobytes(), valid.tobytes()))
        counts = Counter(rows)
        if len({*counts.values()}) > 1:  # several validations of the same rows have each of them as often
            repeated[share] = (len(rows) - len(counts), len(rows))
    if repeated and trial.case.training.data is not None:
        raise NotOnRecord(
            "a share of the validation has a row twice, and whether the file has it twice is not on record"
        )
    largest = trial.case.training.made_samples
    return {share: counts for share, counts in repeated.items() if counts[1] <= largest}


def _refuse_repeated_shares(trial: Trial, step: int, over: tuple[str, ...]) -> None:
    """Raise NotOnRecord where two shares that a loss adds up validated the same samples: others may be left out."""
    rows: dict[ShareCoordinate, list[bytes]] = {}
    for share, batches in validation_batches(trial, step).items():
        rows[share] = []
        for tokens, _ in batches:
            rows[share] += [row.tobytes() for row in tokens]
        rows[share].sort()
    for first, second in itertools.combinations(sorted(rows), 2):
        differing_axes = [axis for axis, a, b in zip(SPLIT, first, second, strict=False) if a != b]
        if rows[first] and rows[first] == rows[second] and {*differing_axes} <= {*over}:
            text = f"the same samples are validated along {' and '.join(differing_axes)}, and others may be left out"
            raise NotOnRecord(f"{text}; where each is to validate all, hand the loss over without this axis in `over`")


def _reported_batches(trial: Trial, step: int) -> dict[ShareCoordinate, list[Batch]]:
    """Return, by share, the batch that the trainer reports to have validated on. Empty if it reports none."""
    batches: dict[ShareCoordinate, list[Batch]] = {}
    for rank, record in trial.own_steps():
        if record.step != step:
            continue
        for number in record.numbers.values():
            if number.tokens is not None and number.labels is not None:
                batches[share_coordinate(trial, rank)[:2]] = [(number.tokens, number.labels)]
    return batches


def _evaluated_batches(trial: Trial, step: int) -> dict[ShareCoordinate, list[Batch]]:
    """Return the batches of passes without gradients after a step, by share. Slices of cp ranks are joined.

    Raises NotOnRecord.
    """
    parts: dict[ShareCoordinate, list[tuple[int, list[Batch]]]] = {}
    for rank in last_stage_ranks(trial):
        if coordinate_of_rank(trial.case.dims, rank)["tp"] == 0:
            last_stage_passes = _step_record(trial, rank, step).evaluated
            first_stage_passes = _step_record(trial, first_stage_peer(trial, rank), step).evaluated
            batches = [
                _batch_of_pass(rank, step, last, first)
                for last, first in zip(last_stage_passes, first_stage_passes, strict=True)
            ]
            parts.setdefault(share_coordinate(trial, rank)[:2], []).append((rank, batches))
    joined: dict[ShareCoordinate, list[Batch]] = {}
    for share, cp_parts in parts.items():
        _, first_batches = cp_parts[0]
        joined[share] = [_join_cp_slices(trial, cp_parts, number) for number in range(len(first_batches))]
    return joined


def _batch_of_pass(rank: int, step: int, last: Microbatch, first: Microbatch) -> Batch:
    """Return the tokens that the first stage received, with the labels that the last one used in their shape.

    Raises NotOnRecord.
    """
    if first.tokens is None or last.labels is None or last.labels.size != first.tokens.size:
        raise NotOnRecord(f"tokens or labels that rank {rank} validated on after step {step} were not seen")
    return first.tokens, last.labels.reshape(first.tokens.shape)


def _join_cp_slices(trial: Trial, parts: list[tuple[int, list[Batch]]], n: int) -> Batch:
    """Return the n-th batch of a share, whole: each cp rank's slice at its positions of the sequence."""
    _, first_batches = parts[0]
    first_tokens, _ = first_batches[n]
    rows, length = first_tokens.shape
    shape = (rows, length * trial.case.dims.cp)
    tokens = np.zeros(shape, np.int64)
    labels = np.zeros(shape, np.int64)
    for rank, batches in parts:
        rank_positions = token_positions_of_rank(trial.case, rank, tokens.shape[1])
        tokens[:, rank_positions], labels[:, rank_positions] = batches[n]
    return tokens, labels


def _validation_loss_parts(
    trial: Trial, step: int, batches: Mapping[ShareCoordinate, list[Batch]]
) -> Iterator[tuple[ShareCoordinate, LossSum]]:
    """Yield (mesh coordinate along SPLIT, (sum of losses, valid tokens)) of each part of the validation.

    The reference's model computes the losses, with the weights that ranks held after the step. Raises NotOnRecord if
    there is no batch.
    """
    if not any(batches.values()):
        raise NotOnRecord(f"no pass without gradients was seen after step {step}")
    weights = whole_weights_after(trial, step)
    for share, share_batches in batches.items():
        computed = [(token_losses_of(trial, weights, tokens, labels), labels) for tokens, labels in share_batches]
        for rank in first_stage_ranks(trial):
            if share_coordinate(trial, rank)[:2] != share:
                continue
            totals: list[float] = []
            valid_tokens = 0
            for losses, labels in computed:
                rank_positions = token_positions_of_rank(trial.case, rank, labels.shape[1])
                totals.append(float(losses[:, rank_positions].sum()))
                valid_tokens += int((labels[:, rank_positions] != IGNORED).sum())
            yield share_coordinate(trial, rank), (math.fsum(totals), valid_tokens)


def token_losses_of(
    trial: Trial, weights: Mapping[str, np.ndarray], tokens: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Return the loss of each token by these weights, in nats, float64 [samples, positions].

    Imports torch, which other checks do not.
    """
    from harness.reference import counterfactual

    otherwise: Any = counterfactual.Changes(weights=weights, **reference_order_arguments(trial))
    batch = counterfactual.Batch(tokens, labels)
    return counterfactual.evaluate_token_losses(
        trial.case.model, trial.case.training, trial.reference, batch, otherwise
    )
