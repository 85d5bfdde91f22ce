"""What a number that ranks report should be, by its meaning: from what they received, did and computed, and nothing else."""

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
from harness.core.judge.held_values import order_of_entries, weights_after
from harness.core.judge.labels import IGNORED
from harness.core.judge.norms import PARAMETERS, nearest, norm_of
from harness.core.judge.places import feeder_of, first_stage_ranks, last_stage_ranks
from harness.core.judge.received_samples import positions_received, received_samples
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.stages import positions

T = TypeVar("T")
Place = tuple[int, ...]
"""Where on the axes of SPLIT."""
Batch = tuple[np.ndarray, np.ndarray]
"""Tokens and labels, int64 [samples, positions]."""
Part = tuple[float, int]
"""The sum of the losses of some tokens, and how many valid ones these are."""


Count = Callable[[Trial, int, int, Number], float]
"""How many samples or tokens a step had: launch, step, rank, number."""


class NotOnRecord(LookupError):
    """The evidence lacks what a number is about; the message says what."""


@dataclass(frozen=True)
class Book:
    """What numbers should be in one trial. Losses of validation are computed once."""

    trial: Trial
    """The launch in which they are reported."""
    losses: dict[int, Mapping[Place, Part]] = field(default_factory=dict)
    """By step, what is known already of validation."""

    def expected(self, rank: int, step: int, name: str, number: Number, count: Count | None = None) -> float:
        """Return what a rank should report by that name. count: `counted` by default, or `requested`. Raises NotOnRecord."""
        if number.rate and not (number.seconds or 0) > 0:
            raise NotOnRecord("it is a rate, and its seconds are not handed over")
        degrees = [getattr(self.trial.case.dims, axis) for axis in number.divided_by]
        below = math.prod(degrees) * ((number.seconds or 1.0) if number.rate else 1.0)
        return self._plain(rank, step, name, number, count or counted) * number.times / below

    def _plain(self, rank: int, step: int, name: str, number: Number, count: Count) -> float:
        if number.of == NORM:
            return self.norm(rank, step)
        if number.of == VALIDATION:
            _each_once(self.trial, step, number.over)
            parts = _of_rank(self._validation(step), self.trial, rank, number.over)
            valid = sum(count for _, count in parts)
            return math.fsum(total for total, _ in parts) / valid if valid else math.nan
        if number.of in ("epoch", "epochs"):
            batches = self.trial.reference.samples[:step][-(number.steps or step) :]
            epochs = sum(map(len, batches)) / _data_size(self.trial, number)
            return epochs if number.of == "epochs" else math.ceil(epochs) - 1
        steps = list(_covered(self.trial, step, number))
        if number.of == "steps":
            return len(steps)
        own = self.trial.case.dims  # of another layout it is the number of all ranks
        where = [(launch, one, rank if launch.case.dims == own else 0) for launch, one in steps]
        if number.of != MEAN:
            return sum(count(*at, number) for at in where)
        means = [part for at in where for part in parts_of_mean(*at, name, number)]
        those = replace(number, of=number.per) if number.per else None
        among = sum(count(*at, those) for at in where) if those else math.fsum(count for _, count in means)
        return math.fsum(total for total, _ in means) / among if among else math.nan

    def norm(self, rank: int, step: int) -> float:
        """Return the 2-norm of all parameters after a step, as a rank sees it: replicas may differ. Raises NotOnRecord."""
        held = {fqn for _, record in self.trial.own_steps() if record.step == step for fqn in record.parameters}
        if held != self.trial.plan.shapes.keys():
            raise NotOnRecord(f"parameters after step {step} are not all on record")
        return norm_of(self.trial, step, nearest(self.trial, rank), of=PARAMETERS)

    def _validation(self, step: int) -> Mapping[Place, Part]:
        if step not in self.losses:
            self.losses[step] = dict(_losses(self.trial, step, validated_on(self.trial, step)))
        return self.losses[step]


def _covered(trial: Trial, step: int, number: Number) -> Iterator[tuple[Trial, int]]:
    """The steps that a number is of, each with the launch that trained it."""
    for one in range(1 if number.steps is None else step - number.steps + 1, step + 1):
        launch = next((launch for launch in reversed(trial.launches) if one in launch.case.steps), None)
        if launch is None:
            raise NotOnRecord(f"step {one} is not on record")
        if launch.case.dims != trial.case.dims and {*number.over} != {*SPLIT}:
            raise NotOnRecord(f"step {one} had another layout, in which no rank's part is this one's")
        yield launch, one


def parts_of_mean(trial: Trial, step: int, rank: int, name: str, number: Number) -> list[tuple[float, float]]:
    """Return the sums and counts that a rank's mean is put together of: one of each place, which tp ranks share, as its own
    stage has it where it has one. Raises NotOnRecord."""
    parts: dict[Place, tuple[float, float]] = {}
    stage = coordinate(trial.case.dims, rank)["pp"]
    for one in sorted(nearest(trial, rank), key=lambda one: coordinate(trial.case.dims, one)["pp"] != stage):
        shown = _record(trial, one, step).numbers.get(name)
        if shown is not None and shown.total is not None and shown.count is not None:
            parts.setdefault(place_of(trial, one), (shown.total, shown.count))
    found = _of_rank(parts, trial, rank, number.over)
    if not found:
        raise NotOnRecord(f"total and count of step {step} are not handed over")
    return found


def counted(trial: Trial, step: int, rank: int, number: Number) -> int:
    """Return how many samples or tokens ranks received in a step."""
    ranks = last_stage_ranks(trial) if number.of == "valid tokens" else first_stage_ranks(trial)
    return sum(_count(trial, one, step, number.of) for one in _sharers(trial, rank, number, ranks))


def requested(trial: Trial, step: int, rank: int, number: Number) -> float:
    """Return how many the recipe gives to these ranks; of valid tokens those of the samples that they received."""
    if number.of == "valid tokens":
        return sum(_labels(trial, one, step) for one in _sharers(trial, rank, number, first_stage_ranks(trial)))
    samples = len(trial.reference.samples[step - 1])
    cut = [axis for axis in SPLIT if axis not in number.over and (number.of, axis) != ("samples", "cp")]
    each = 1 if number.of == "samples" else trial.case.seq_len(step)
    return samples * each / math.prod(getattr(trial.case.dims, axis) for axis in cut)


def _sharers(trial: Trial, rank: int, number: Number, ranks: list[int]) -> list[int]:
    """The ranks whose parts make a rank's number: one for each place, its own where it has one. cp ranks share samples."""
    over = tuple(axis for axis in number.over if (number.of, axis) != ("samples", "cp"))
    parts = {place_of(trial, one): one for one in ranks if coordinate(trial.case.dims, one)["tp"] == 0}
    return _of_rank(parts | ({place_of(trial, rank): rank} if rank in ranks else {}), trial, rank, over)


def _labels(trial: Trial, rank: int, step: int) -> int:
    """Valid labels, by the recipe, of the samples that a rank received."""
    reference, ids = trial.reference, received_samples(trial, step).get(rank, [None])
    if None in ids:
        raise NotOnRecord(f"step {step}: rank {rank} received no samples of the recipe")
    rows = [reference.sample_ids.index(one) for one in ids if one is not None]
    at = positions_received(trial, rank, step)
    return int((reference.labels[rows][:, at] != IGNORED).sum())


def place_of(trial: Trial, rank: int) -> Place:
    place = coordinate(trial.case.dims, rank)
    return tuple(place[axis] for axis in SPLIT)


def _of_rank(parts: Mapping[Place, T], trial: Trial, rank: int, over: tuple[str, ...]) -> list[T]:
    """The parts that a rank's number is put together of."""
    own = place_of(trial, rank)
    alike = [index for index, axis in enumerate(SPLIT) if axis not in over]
    return [part for place, part in parts.items() if all(place[index] == own[index] for index in alike)]


def _count(trial: Trial, rank: int, step: int, what: str) -> int:
    passes = _record(trial, rank, step).microbatches
    if what == "valid tokens":
        counts = [part.valid_tokens for part in passes]
    else:
        dim = 0 if what == "samples" else None
        counts = [
            None if part.tokens is None else part.tokens.shape[0] if dim == 0 else part.tokens.size for part in passes
        ]
    if not counts or None in counts:
        raise NotOnRecord(f"step {step}: the {what} of rank {rank} were not seen")
    return sum(count for count in counts if count is not None)


def _record(trial: Trial, rank: int, step: int) -> StepEvidence:
    found = next((one for one in trial.ranks[rank].steps if one.step == step), None)
    if found is None:
        raise NotOnRecord(f"step {step} of rank {rank} is not on record")
    return found


def _data_size(trial: Trial, number: Number) -> int:
    """Samples of the data set: known of one made from a seed, and of a file once a sample came again, else as handed over."""
    drawn, reference = [one for ids in trial.reference.samples for one in ids], trial.reference
    if trial.case.training.data is None:
        return trial.case.training.made_samples
    if len(drawn) > len(reference.sample_ids):
        return len(reference.sample_ids)
    if number.data_size:
        return number.data_size
    raise NotOnRecord("how many samples the file has is not on record until one comes again, nor handed over")


# ---- validation


def validated_on(trial: Trial, step: int) -> dict[Place, list[Batch]]:
    """Return what was evaluated after a step, by share, as the trainer says, or as its passes show. Raises NotOnRecord."""
    return _said(trial, step) or _seen(trial, step)


def trained_on_before(trial: Trial, step: int) -> tuple[int, int]:
    """Return how many of the samples that were evaluated after a step it or an earlier one had trained on, and how many there
    are. None is held out once the data has ended. Raises NotOnRecord."""
    reference, rows = (
        trial.reference,
        [row for of in validated_on(trial, step).values() for tokens, _ in of for row in tokens],
    )
    drawn = [one for ids in reference.samples[:step] for one in ids]
    ended = len({*drawn}) < len(drawn) or len(drawn) >= trial.case.training.made_samples
    known = {reference.tokens[reference.sample_ids.index(one)].tobytes() for one in ([] if ended else {*drawn})}
    return sum(np.asarray(row, np.int64).tobytes() in known for row in rows), len(rows)


def validated_twice(trial: Trial, step: int) -> dict[Place, tuple[int, int]]:
    """Return, by share of a validation that has a row again, how many of its rows came before, and how many rows it has.

    A row whose labels are all ignored counts for nothing. Raises NotOnRecord where the data may have a row twice.
    """
    found: dict[Place, tuple[int, int]] = {}
    for share, batches in validated_on(trial, step).items():
        rows = [
            (row.tobytes(), valid.tobytes())
            for tokens, labels in batches
            for row, valid in zip(tokens, labels, strict=True)
            if (valid != IGNORED).any()
        ]
        counts = Counter(rows)
        if len({*counts.values()}) > 1:  # several validations of the same rows have each of them as often
            found[share] = (len(rows) - len(counts), len(rows))
    if found and trial.case.training.data is not None:
        raise NotOnRecord(
            "a share of the validation has a row twice, and whether the file has it twice is not on record"
        )
    most = trial.case.training.made_samples
    return {share: counts for share, counts in found.items() if counts[1] <= most}


def _each_once(trial: Trial, step: int, over: tuple[str, ...]) -> None:
    """Raise NotOnRecord where two shares that a loss adds up validated the same samples: others may be left out."""
    of = validated_on(trial, step).items()
    rows = {share: sorted(row.tobytes() for tokens, _ in batches for row in tokens) for share, batches in of}
    for one, other in itertools.combinations(sorted(rows), 2):
        apart = [axis for axis, a, b in zip(SPLIT, one, other, strict=False) if a != b]
        if rows[one] and rows[one] == rows[other] and {*apart} <= {*over}:
            text = f"the same samples are validated along {' and '.join(apart)}, and others may be left out"
            raise NotOnRecord(f"{text}; where each is to validate all, hand the loss over without this axis in `over`")


def _said(trial: Trial, step: int) -> dict[Place, list[Batch]]:
    """What the trainer says that it validated on, by share."""
    found: dict[Place, list[Batch]] = {}
    for rank, record in trial.own_steps():
        for number in record.numbers.values() if record.step == step else ():
            if number.tokens is not None and number.labels is not None:
                found[place_of(trial, rank)[:2]] = [(number.tokens, number.labels)]
    return found


def _seen(trial: Trial, step: int) -> dict[Place, list[Batch]]:
    """What passes that trained nothing received after a step, by share; what cp cut is put together."""
    parts: dict[Place, list[tuple[int, list[Batch]]]] = {}
    for rank in last_stage_ranks(trial):
        if coordinate(trial.case.dims, rank)["tp"] == 0:
            passes = _record(trial, rank, step).evaluated, _record(trial, feeder_of(trial, rank), step).evaluated
            both = [_batch(rank, step, *one) for one in zip(*passes, strict=True)]
            parts.setdefault(place_of(trial, rank)[:2], []).append((rank, both))
    return {share: [_whole(trial, one, n) for n in range(len(one[0][1]))] for share, one in parts.items()}


def _batch(rank: int, step: int, last: Microbatch, first: Microbatch) -> Batch:
    if first.tokens is None or last.labels is None or last.labels.size != first.tokens.size:
        raise NotOnRecord(f"tokens or labels that rank {rank} validated on after step {step} were not seen")
    return first.tokens, last.labels.reshape(first.tokens.shape)


def _whole(trial: Trial, parts: list[tuple[int, list[Batch]]], n: int) -> Batch:
    """The n-th pass of all cp ranks of a share."""
    rows, length = parts[0][1][n][0].shape
    tokens, labels = (np.zeros((rows, length * trial.case.dims.cp), np.int64) for _ in range(2))
    for rank, batches in parts:
        at = positions(trial.case, rank, tokens.shape[1])
        tokens[:, at], labels[:, at] = batches[n]
    return tokens, labels


def _losses(trial: Trial, step: int, batches: Mapping[Place, list[Batch]]) -> Iterator[tuple[Place, Part]]:
    """Yield, by place, the losses of its part by the reference's model with the weights that ranks held after the step."""
    if not any(batches.values()):
        raise NotOnRecord(f"no pass without gradients was seen after step {step}")
    weights = weights_after(trial, step)
    for share, each in batches.items():
        computed = [(losses_of(trial, weights, *batch), batch[1]) for batch in each]
        for rank in (one for one in first_stage_ranks(trial) if place_of(trial, one)[:2] == share):
            cut = [positions(trial.case, rank, labels.shape[1]) for _, labels in computed]
            total = math.fsum(float(losses[:, at].sum()) for (losses, _), at in zip(computed, cut, strict=True))
            valid = sum(int((labels[:, at] != IGNORED).sum()) for (_, labels), at in zip(computed, cut, strict=True))
            yield place_of(trial, rank), (total, valid)


def losses_of(trial: Trial, weights: Mapping[str, np.ndarray], tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the loss of each token by these weights, float64 [samples, positions]. Imports torch, as no other check does."""
    from harness.reference import counterfactual

    otherwise: Any = counterfactual.Otherwise(weights=weights, **order_of_entries(trial))
    batch = counterfactual.Batch(tokens, labels)
    return counterfactual.losses_evaluated(trial.case.model, trial.case.training, trial.reference, batch, otherwise)
