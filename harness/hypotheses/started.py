"""Causes of weights that ranks go on from and that are not the right ones, before training or between two steps.

Whose values these are is found by `whose`; the reference then goes on from what was seen, and the checks judge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from harness.core.causes.assume import assume_reference
from harness.core.causes.differences import GRADIENT_CHECKS
from harness.core.causes.hypothesis import Broken, Hypothesis, not_tested_line
from harness.core.causes.words import Arrays, Pair, finding_line, rank_text, shorten_names, where_text
from harness.core.checks import update
from harness.core.checks.resume import has_same_bytes
from harness.core.evidence.text import number_text
from harness.core.judge.contents import view_of_slice
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.hypotheses.whose import TensorOnRecord, find_match, is_constant


def value_text(value: np.ndarray, right: np.ndarray, pool: Iterable[tuple[TensorOnRecord, np.ndarray]] = ()) -> str:
    """Return in words whose values these are: a constant, another tensor's, or the right ones changed.

    Empty if none matches. pool: tensors on record that they may be, with their values.
    """
    if value.size > 1 and is_constant(value):
        return f"all {number_text(value.flat[0])}"
    relation = find_match(value, right, pool)
    if relation is None:
        return ""
    if relation.source is None:
        return relation.match_text("", ())
    return f"those of {relation.source.fqn}"


def common_text(texts: Collection[str]) -> str:
    """Return the text that all have; of different ones the first two, and how many more there are.

    Empty if one of them is empty, or there are none.
    """
    different = [*dict.fromkeys(texts)]
    if "" in different:
        return ""
    return different[0] if len(different) == 1 else shorten_names(different)


# ---- initial weights


def other_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield one hypothesis: training starts from other weights than the seed weights, of which the reference is then
    trained.

    If ranks that hold the same slice hold other values of it, no reference shows what follows, and the hypothesis only
    states what is seen. Nothing if initial weights pass.
    """
    if "initial_weights" not in broken or not (strange_pairs := _unexplained_tensors(trial)):
        return
    twins = {pair: _rank_with_same_value(trial, pair) for pair in strange_pairs}
    is_another_draw = trial.repeat is not None and not any(_is_same_in_repeat(trial, pair) for pair in strange_pairs)
    if all(twin is not None for twin in twins.values()):
        (rank, _), twin = next(iter(twins.items()))
        sources = sorted({twin for twin in twins.values() if twin is not None})
        text = f"ranks start from the same shard: the values of {rank_text(sources)} stand again"
        cause = Cause("same shard", text, where_text(trial, strange_pairs), details=(("rank", rank), ("of", twin)))
    else:
        are_text = common_text([_seed_value_text(trial, pair) for pair in strange_pairs])
        hint = ""
        if are_text:
            hint = f"they are {are_text}"
        elif is_another_draw:
            hint = "each run draws new ones"
        text = "training does not start from the seed weights"
        details = (("are", are_text or hint),)
        cause = Cause("other initial weights", text, where_text(trial, strange_pairs), hint=hint, details=details)
    weights = observed_weights(trial)
    seen: tuple[str, ...] = ("initial_weights", "shard_contents")
    if is_another_draw:
        seen += ("determinism",)
    if weights is None:
        line = not_tested_line(
            "the slices that ranks start from do not fit together, and no reference shows what follows"
        )
        yield Hypothesis(cause, None, lines=(line,), seen_by=(*seen, *GRADIENT_CHECKS))
    else:
        yield Hypothesis(cause, partial(assume_reference, weights=weights), seen_by=seen)


def _unexplained_tensors(trial: Trial) -> list[Pair]:
    """Return (rank, fqn) of tensors that are no slice of the seed weights.

    If all are slices, return those that are another rank's without being planned so. Empty if there are none.
    """
    unplanned = []
    for rank, slices_of_rank in sorted(trial.local_slices.items()):
        unplanned += [(rank, fqn) for fqn, slice_ in slices_of_rank.items() if slice_ is None]
    if unplanned:
        return unplanned
    strange_pairs = []
    for rank, fqn in _all_tensors(trial):
        if _rank_with_same_value(trial, (rank, fqn)) is None:
            continue
        planned_slice = trial.plan.slices[rank].get(fqn)
        if not planned_slice or not has_same_bytes(
            _initial_value(trial, (rank, fqn)), view_of_slice(trial.seed_weights[fqn], planned_slice)
        ):
            strange_pairs.append((rank, fqn))
    return strange_pairs


def _all_tensors(trial: Trial) -> Iterator[Pair]:
    """Yield (rank, fqn) of all tensors that ranks hold before training."""
    for rank, evidence in sorted(trial.ranks.items()):
        for tensor in evidence.parameters:
            yield rank, tensor.fqn


def _initial_value(trial: Trial, pair: Pair) -> np.ndarray | None:
    """Return the values that a rank holds of a parameter before training. None if it holds none."""
    return next((tensor.value for tensor in trial.ranks[pair[0]].parameters if tensor.fqn == pair[1]), None)


def _rank_with_same_value(trial: Trial, pair: Pair) -> int | None:
    """Return a rank that should hold another slice and holds these very values. None if there is none.

    One of the two ranks is wrong, or both are. Slices of a constant are all alike, so they have no twin.
    """
    rank, fqn = pair
    value = _initial_value(trial, pair)
    part = trial.plan.slices[rank].get(fqn)
    if value is None or is_constant(value) or value.shape == trial.plan.shapes.get(fqn):
        return None
    peers = (peer for peer in trial.ranks if trial.plan.slices[peer].get(fqn, part) != part)
    return next((peer for peer in peers if has_same_bytes(_initial_value(trial, (peer, fqn)), value)), None)


def _seed_value_text(trial: Trial, pair: Pair) -> str:
    """Return in words whose seed weights, or which constant, a rank holds in place of the right ones. Empty if none.

    It is empty, too, if the rank holds nothing of the parameter. pair: rank and fqn.
    """
    rank, fqn = pair
    part = trial.plan.slices[rank][fqn]
    weights = trial.seed_weights
    pool = (
        (TensorOnRecord("weight", other, part), view_of_slice(other_values, part))
        for other, other_values in weights.items()
        if other != fqn and other_values.shape == weights[fqn].shape
    )
    values = _initial_value(trial, pair)
    return "" if values is None else value_text(values, view_of_slice(weights[fqn], part), pool)


def _is_same_in_repeat(trial: Trial, pair: Pair) -> bool:
    """Return whether the repeat of the run started from the same values. False if it has no such tensor.

    Precondition: there is a repeat.
    """
    rank, fqn = pair
    assert trial.repeat is not None
    others = trial.repeat.ranks[rank].parameters if rank in trial.repeat.ranks else ()
    return any(tensor.fqn == fqn and has_same_bytes(_initial_value(trial, pair), tensor.value) for tensor in others)


def observed_weights(trial: Trial) -> Arrays | None:
    """Return whole parameters, put together from the slices that ranks hold by the plan.

    None if ranks hold other values of the same slice, or shapes do not fit.
    """
    whole = {fqn: full.copy() for fqn, full in trial.seed_weights.items()}
    bytes_by_slice: dict[object, bytes] = {}
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            part = trial.plan.slices[rank].get(tensor.fqn)
            if part is None or view_of_slice(whole[tensor.fqn], part).shape != tensor.value.shape:
                return None
            if bytes_by_slice.setdefault((tensor.fqn, part), tensor.value.tobytes()) != tensor.value.tobytes():
                return None
            view_of_slice(whole[tensor.fqn], part)[...] = tensor.value
    return whole


# ---- weights between two steps


def changed_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield one hypothesis: weights change between two steps, outside the optimizer.

    Nothing unless updates fail and that is seen. The reference goes on from the changed weights, if they have the
    shapes of what the optimizer left. Else nothing is assumed, and the hypothesis only states what is seen.
    """
    changes = update.later_changes(trial)
    if "update" not in broken or not changes:
        return
    step, pairs = next(iter(changes.items()))
    records = {(rank, record.step): record for rank, record, _ in trial.steps_with_reference()}
    values_of_pairs = {}
    for rank, fqn in pairs:
        record = records[rank, step]
        values_of_pairs[rank, fqn] = ((record.changed or {})[fqn], record.parameters.get(fqn))
    have_shapes = all(
        before is not None and after.size == before.size and after.dtype == before.dtype
        for after, before in values_of_pairs.values()
    )
    became_text = "another shape"
    if have_shapes:
        values = [(after, before) for after, before in values_of_pairs.values() if before is not None]
        became_text = common_text([value_text(after.reshape(before.shape), before) for after, before in values])
    if not became_text:
        became_text = _mean_text(trial, step, {pair: after for pair, (after, _) in values_of_pairs.items()})
    if have_shapes and _is_decayed(trial, step, values_of_pairs.values()):
        became_text += ", as weight decay makes them"
    text = f"weights are changed outside the optimizer {update.time_after_step(trial, step)}"
    if became_text:
        text += f", to {became_text}"
    cause = Cause("weights changed", text, where_text(trial, pairs), details=(("step", step), ("are", became_text)))

    def apply_changes(number: int, parameters: Arrays) -> Arrays:
        """Return whole parameters with the values that ranks changed them to after this step."""
        whole = {fqn: value.copy() for fqn, value in parameters.items()}
        for rank, fqn in changes.get(number, ()):
            part = trial.slice_of(rank, fqn)
            changed = (records[rank, number].changed or {})[fqn]
            target = view_of_slice(whole[fqn].reshape(trial.plan.shapes[fqn]), part) if part else changed
            if target.size == changed.size:
                target[...] = changed.reshape(target.shape)
        return whole

    assume = partial(assume_reference, left=apply_changes) if have_shapes else None
    yield Hypothesis(cause, assume, lines=(finding_line(broken["update"]),), seen_by=("update",))


def _is_decayed(trial: Trial, step: int, values_of_pairs: Iterable[tuple[np.ndarray, np.ndarray | None]]) -> bool:
    """Return whether the changed weights are those that the optimizer left, smaller by this step's weight decay.

    False if there is no decay in this step.
    """
    remaining = 1 - trial.reference_step(step).lr * trial.case.training.weight_decay
    matches = []
    for after, before in values_of_pairs:
        if before is not None and after.dtype.kind == "f":
            bound = 4 * np.finfo(after.dtype).eps
            matches.append(np.allclose(after.ravel(), remaining * before.ravel(), rtol=bound, atol=0))
    return remaining != 1 and bool(matches) and all(matches)


def _mean_text(trial: Trial, step: int, changed_values: Mapping[Pair, np.ndarray]) -> str:
    """Return in words which mean of the weights at the start and after each step so far the changed weights are.

    The shares are fitted to the largest tensor, must fit all, and sum to 1. Empty if they do not, or if the mean is just
    the weights after this step. Empty, too, if values are missing or not finite, or the largest tensor is too small to fit.
    """
    steps = [other for other in trial.case.steps if other <= step]
    largest = max(changed_values, key=lambda pair: changed_values[pair].size)
    values_by_step = {pair: _values_after_steps(trial, pair, steps) for pair in changed_values}
    if changed_values[largest].size <= 2 * (len(steps) + 1):
        return ""
    for pair, changed in changed_values.items():
        if any(value.size != changed.size for value in values_by_step[pair]):
            return ""
    if not np.isfinite(np.stack(values_by_step[largest])).all():
        return ""
    if not all(np.isfinite(changed).all() for changed in changed_values.values()):
        return ""
    shares = np.linalg.lstsq(np.stack(values_by_step[largest]).T, changed_values[largest].ravel().astype(np.float64))[0]
    fits = (
        np.allclose(shares @ np.stack(values_by_step[pair]), changed.ravel(), rtol=0, atol=1e-5 * np.abs(changed).max())
        for pair, changed in changed_values.items()
    )
    if not np.isclose(shares.sum(), 1, rtol=1e-6) or not all(fits):
        return ""
    names = ["before training", *(f"after step {number}" for number in steps)]
    terms = [f"those {name} x {share:.3g}" for name, share in zip(names, shares, strict=True) if abs(share) > 1e-4]
    unchanged_terms = [f"those after step {step} x 1"]  # which they were changed from
    return "" if terms == unchanged_terms else " + ".join(terms).removesuffix(" x 1")


def _values_after_steps(trial: Trial, pair: Pair, steps: Sequence[int]) -> list[np.ndarray]:
    """Return a rank's own values at the start, and as the optimizer left them after each of these steps. float64 [entries]

    They are empty where nothing was recorded.
    """
    rank, fqn = pair
    parameters_by_step = [record.parameters for record in trial.ranks[rank].steps if record.step in steps]
    known = (parameters.get(fqn, np.empty(0)) for parameters in (trial.initial_parameters(rank), *parameters_by_step))
    return [value.ravel().astype(np.float64) for value in known]
