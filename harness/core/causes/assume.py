"""The same evidence under another assumption: another request, another plan, a counterfactual reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case.case import Case
from harness.core.causes.words import Arrays
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.held_values import order_of_entries
from harness.core.judge.places import one_rank_per_share
from harness.core.judge.received_samples import received_samples
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import without_slices
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch, Otherwise


def another_case(trial: Trial, case: Case) -> Trial:
    """Assume that this had been requested: with its plan, and the same reference."""
    plan = make_plan(case, trial.traits)
    return replace(trial, case=case, plan=without_slices(plan) if lacks_slices(trial) else plan)


def lacks_slices(trial: Trial) -> bool:
    """Return whether the job declares only a layout, so that the plan has no slices."""
    return "declared" not in trial.run.provided and not any(trial.plan.slices.values())


def another_feature(trial: Trial, **features: Any) -> Trial:
    return another_case(trial, replace(trial.case, features=replace(trial.case.features, **features)))


def another_recipe(trial: Trial, training: TrainingConfig) -> Trial:
    """Assume that this recipe had been requested: the reference is trained by it."""
    words = {**order_of_entries(trial), **trial.assumption.reference}
    reference = retrain(trial.case.model, training, trial.reference, **words)
    return replace(another_case(trial, replace(trial.case, training=training)), reference=reference)


def another_reference(trial: Trial, **otherwise: Any) -> Trial:
    """Assume another training of the reference, in addition to what is assumed of it already. The words are those of
    reference.counterfactual."""
    known = trial.assumption.reference
    together = {**known} | {key: _after(known.get(key), key, new) for key, new in otherwise.items()}
    words = order_of_entries(trial) | together
    reference = retrain(trial.case.model, trial.case.training, trial.reference, **words)
    return replace(trial, reference=reference).assuming(reference=together)


def inputs_of_first_step(trial: Trial) -> Mapping[str, float]:
    """The mean square of what goes into each module in a launch's first step, by fqn in the order of the calls.

    It is computed where the launch goes on from an earlier one; it is empty where other samples are assumed.
    """
    step, found = trial.first_step, dict[str, float]()
    if step == 1 or "batch" in trial.assumption.reference:
        return trial.reference.inputs if step == 1 else {}
    from torch import from_numpy

    from harness.reference.train import mean_squares

    known = dict(zip(trial.reference.sample_ids, trial.reference.tokens, strict=True))
    rows = np.stack([known[id_] for id_ in trial.reference.samples[step - 1]])[:, : trial.case.seq_len(step)]

    def look(module: Any, number: int) -> None:
        if number == step:
            found.update(mean_squares(module, from_numpy(rows), trial.case.training.document_mask))

    another_reference(trial, altered=look)
    return found


def _after(first: Any, key: str, second: Any) -> Any:
    """What is made of values is done one after the other; all else the second one says alone. What either does not give to
    the optimizer is not given."""
    if first is None or key not in ("batch", "gradients", "left", "altered", "given"):
        return second
    if key == "altered":
        return lambda module, step: (first(module, step), second(module, step))
    if key == "given":
        return lambda *of: _of_those(second(*of), first(*of))
    return lambda step, values: second(step, first(step, values))


def _of_those(given: Mapping[str, Any], those: Mapping[str, Any]) -> dict[str, Any]:
    return {fqn: value for fqn, value in given.items() if fqn in those}


def another_optimizer(trial: Trial, assumed: AssumedOptimizer, **otherwise: Any) -> Trial:
    """Assume that the optimizer of some ranks or parameters did something else, and train the reference so."""
    return another_reference(trial, **otherwise).assuming(assumed)


def apart(trial: Trial, copies: Mapping[int, int], otherwise: Sequence[dict[str, Any]], **told: Any) -> Trial:
    """Assume that ranks train separate copies of the model. copies: by rank, which copy it trains. What is assumed
    of each copy and of all is in the words of reference.counterfactual. A single copy is a reference like any other."""
    together = [{**order_of_entries(trial), **trial.assumption.reference, **one} for one in otherwise]
    runs = retrain_apart(trial.case.model, trial.case.training, trial.reference, together, **told)
    references = {rank: runs[copy] for rank, copy in copies.items()} if len(runs) > 1 else {}
    return replace(trial, reference=runs[0]).assuming(references=references, apart=True)


def retrain_apart(
    model: ModelConfig,
    training: TrainingConfig,
    reference: ReferenceRun,
    otherwise: Sequence[dict[str, Any]],
    **told: Any,
) -> tuple[ReferenceRun, ...]:
    from harness.reference import counterfactual

    chosen = [counterfactual.Otherwise(**one) for one in otherwise]
    return counterfactual.retrain_apart(model, training, reference, counterfactual.Apart(otherwise=chosen, **told))


def retrain(model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, **otherwise: Any) -> ReferenceRun:
    """Imports torch, which judging does not need."""
    from harness.reference import counterfactual

    chosen: Otherwise = counterfactual.Otherwise(**otherwise)
    return counterfactual.retrain(model, training, reference, chosen)


# ---- replicas that train separately: copies of the model, each with what its ranks received


Reduce = Callable[[int, list[Arrays]], list[Arrays]]


def train_apart(
    trial: Trial, axis: str, reduce: Reduce | None = None, otherwise: Sequence[dict[str, Any]] | None = None
) -> Trial:
    """Assume that the replicas along an axis (dp_replicate) are separate copies.

    reduce(step, gradients by replica) -> those that each has then; None: their sum. The last argument is, by replica, what
    reference.counterfactual changes.
    """
    copies = {rank: coordinate(trial.case.dims, rank)[axis] for rank in trial.ranks}
    members = [[rank for rank in copies if copies[rank] == copy] for copy in range(max(copies.values()) + 1)]

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [share_of(trial, ranks, step, batch.labels.shape) for ranks in members]

    owners, together = tuple(range(len(members))), reduce or (lambda step, gradients: summed(gradients))
    return apart(trial, copies, otherwise or [{}] * len(members), owners=owners, shares=shares, reduce=together)


def share_of(trial: Trial, ranks: Sequence[int], step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return how often each token of a step counts if only these ranks' samples do. float64 [global_batch, seq_len]"""
    received = received_samples(trial, step)
    ids = {id_ for rank in one_rank_per_share(trial) if rank in ranks for id_ in received.get(rank, [])}
    counts = np.zeros(shape)
    counts[[place for place, id_ in enumerate(trial.reference.samples[step - 1]) if id_ in ids]] = 1.0
    return counts


def summed(gradients: list[Arrays]) -> list[Arrays]:
    """Return the sum of all, for every replica."""
    first, *others = gradients
    total = {fqn: sum((own[fqn] for own in others), start=value) for fqn, value in first.items()}
    return [total for _ in gradients]


def replicas_differ(trial: Trial, of: Callable[[int, str], object]) -> bool:
    """Say whether two replicas along dp_replicate have something else of one and the same slice."""
    seen: dict[object, tuple[int, object]] = {}
    for rank, held in trial.holdings.items():
        for fqn in held:
            replica, key = coordinate(trial.case.dims, rank)["dp_replicate"], (fqn, trial.slice_of(rank, fqn))
            other, value = seen.setdefault(key, (replica, of(rank, fqn)))
            if other != replica and value != of(rank, fqn):
                return True
    return False


def clipping_apart(trial: Trial) -> Trial:
    """Assume that each rank clips by the norm of the gradients of its copy."""
    norms = {(r, step.step): step.grad_norm for r in trial.ranks for step in trial.reference_of(r).steps}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[rank, step], trial.case.training.max_norm) * gradient

    return trial.assuming(AssumedOptimizer(given=given))
