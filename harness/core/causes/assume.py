"""The same evidence judged under another assumption: another request, another plan, a counterfactual reference.

Each function returns a new trial; the evidence in it stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case.case import Case
from harness.core.causes.words import Arrays
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.held_values import reference_order_arguments
from harness.core.judge.received_samples import requested_rows, samples_of_shares
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import without_slices
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch, Changes


def assume_case(trial: Trial, case: Case) -> Trial:
    """Return the trial as if this case had been requested: with its plan, and the same reference.

    The plan has no slices if the job declares only a layout.
    """
    plan = make_plan(case, trial.traits)
    return replace(trial, case=case, plan=without_slices(plan) if lacks_slices(trial) else plan)


def lacks_slices(trial: Trial) -> bool:
    """Return whether only a layout is requested, and the plan has no slices: what ranks hold is not derived from it."""
    return not trial.case.is_complete and not any(trial.plan.slices.values())


def assume_features(trial: Trial, **features: Any) -> Trial:
    """Return the trial as if these features, keywords of Features, had been requested, with their plan."""
    return assume_case(trial, replace(trial.case, features=replace(trial.case.features, **features)))


def assume_recipe(trial: Trial, training: TrainingConfig) -> Trial:
    """Return the trial as if this recipe had been requested, with its plan. Trains the reference again by it.

    Imports torch.
    """
    words = {**reference_order_arguments(trial), **trial.assumption.reference}
    reference = retrain(trial.case.model, training, trial.reference, **words)
    return replace(assume_case(trial, replace(trial.case, training=training)), reference=reference)


def assume_reference(trial: Trial, **otherwise: Any) -> Trial:
    """Return the trial with a reference that is trained again with these changes. Imports torch.

    Changes that the trial assumes already are kept, and combined with those of the same key. otherwise: fields of
    reference.counterfactual.Changes.
    """
    already_assumed = trial.assumption.reference
    assumed = {**already_assumed}
    for key, change in otherwise.items():
        assumed[key] = _combine_changes(already_assumed.get(key), key, change)
    keywords = reference_order_arguments(trial) | assumed
    reference = retrain(trial.case.model, trial.case.training, trial.reference, **keywords)
    return replace(trial, reference=reference).with_assumption(reference=assumed)


def input_mean_squares(trial: Trial) -> Mapping[str, float]:
    """Return the mean square of the input of each module in a launch's first step, by fqn in the order of the calls.

    For a launch that continues an earlier one the reference is trained again to compute it. Empty there if other
    samples are assumed already.
    """
    step = trial.first_step
    if step == 1 or "batch" in trial.assumption.reference:
        return trial.reference.inputs if step == 1 else {}
    from torch import from_numpy

    from harness.reference.train import mean_squares

    inputs = dict[str, float]()
    rows = trial.reference.tokens[requested_rows(trial, step), : trial.case.seq_len(step)]

    def record_inputs(module: Any, number: int) -> None:
        if number == step:
            inputs.update(mean_squares(module, from_numpy(rows), trial.case.training.document_mask))

    assume_reference(trial, altered=record_inputs)
    return inputs


def _combine_changes(first: Any, key: str, second: Any) -> Any:
    """Return two changes of one key of reference.counterfactual.Changes as a single one. first: None if there is none.

    Changes of values are made one after the other. The optimizer is given only what both give it. For any other key the
    second change replaces the first.
    """
    if first is None or key not in ("batch", "gradients", "left", "altered", "given"):
        return second
    if key == "altered":
        return lambda module, step: (first(module, step), second(module, step))
    if key == "given":
        return lambda *arguments: _restrict_to(second(*arguments), first(*arguments))
    return lambda step, values: second(step, first(step, values))


def _restrict_to(given: Mapping[str, Any], those: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `given` whose fqn is also in `those`."""
    return {fqn: value for fqn, value in given.items() if fqn in those}


def assume_optimizer(trial: Trial, assumed: AssumedOptimizer, **otherwise: Any) -> Trial:
    """Return the trial with this assumption on the optimizer, and a reference trained again with the changes.

    Imports torch. otherwise: as for assume_reference; the optimizer that judges the ranks and the reference's are
    assumed separately.
    """
    return assume_reference(trial, **otherwise).with_assumption(assumed)


def assume_separate_copies(
    trial: Trial, copies: Mapping[int, int], otherwise: Sequence[dict[str, Any]], **apart_fields: Any
) -> Trial:
    """Return the trial as if ranks trained separate copies of the model, each with a reference of its own.

    Imports torch. A single copy is a reference like any other. copies: by rank, the index of its copy. otherwise: the
    changes of each copy, as fields of reference.counterfactual.Changes. apart_fields: those of SeparateCopies.
    """
    common = {**reference_order_arguments(trial), **trial.assumption.reference}
    of_copies = [{**common, **changes} for changes in otherwise]
    runs = retrain_separately(trial.case.model, trial.case.training, trial.reference, of_copies, **apart_fields)
    references = {rank: runs[copy] for rank, copy in copies.items()} if len(runs) > 1 else {}
    return replace(trial, reference=runs[0]).with_assumption(references=references, apart=True)


def retrain_separately(
    model: ModelConfig,
    training: TrainingConfig,
    reference: ReferenceRun,
    otherwise: Sequence[dict[str, Any]],
    **apart_fields: Any,
) -> tuple[ReferenceRun, ...]:
    """Return the reference of each copy of the model, trained again with its changes.

    Imports torch, which judging does not need. otherwise: the changes of each copy, as fields of
    reference.counterfactual.Changes.
    """
    from harness.reference import counterfactual

    changes_of_copies = [counterfactual.Changes(**changes) for changes in otherwise]
    separate_copies = counterfactual.SeparateCopies(otherwise=changes_of_copies, **apart_fields)
    return counterfactual.retrain_separately(model, training, reference, separate_copies)


def retrain(model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, **otherwise: Any) -> ReferenceRun:
    """Return the reference, trained again with these changes, fields of reference.counterfactual.Changes.

    Imports torch, which judging does not need.
    """
    from harness.reference import counterfactual

    chosen: Changes = counterfactual.Changes(**otherwise)
    return counterfactual.retrain(model, training, reference, chosen)


# ---- replicas that train separately: copies of the model, each with what its ranks received


ReduceCopies = Callable[[int, list[Arrays]], list[Arrays]]
"""(step, whole gradients of each replica by fqn) -> the gradients that each replica then has."""


def assume_separate_replicas(
    trial: Trial, axis: str, reduce: ReduceCopies | None = None, otherwise: Sequence[dict[str, Any]] | None = None
) -> Trial:
    """Return the trial as if the replicas along an axis (dp_replicate) were separate copies of the model.

    Imports torch. Each trains on the samples that its ranks received. reduce: (step, gradients by replica) -> the
    gradients that each has then; by default their sum. otherwise: by replica, its changes, as fields of
    reference.counterfactual.Changes.
    """
    copies = {rank: coordinate_of_rank(trial.case.dims, rank)[axis] for rank in trial.ranks}
    members: list[list[int]] = [[] for _ in range(max(copies.values()) + 1)]
    for rank, copy in copies.items():
        members[copy].append(rank)

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [token_counts(trial, ranks, step, batch.labels.shape) for ranks in members]

    owners = tuple(range(len(members)))
    reduce_copies = reduce or (lambda step, gradients: sum_over_replicas(gradients))
    return assume_separate_copies(
        trial, copies, otherwise or [{}] * len(members), owners=owners, shares=shares, reduce=reduce_copies
    )


def token_counts(trial: Trial, ranks: Sequence[int], step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return how often each token of a step counts if only these ranks' samples do: 1 or 0, [global_batch, seq_len].

    shape: that of the result, which is float64.
    """
    received = samples_of_shares(trial, step).on_ranks(ranks).counts
    rows = [row for row, sample_id in enumerate(trial.reference.samples[step - 1]) if sample_id in received]
    counts = np.zeros(shape)
    counts[rows] = 1.0
    return counts


def sum_over_replicas(gradients: list[Arrays]) -> list[Arrays]:
    """Return a list with the same mapping for every replica: by fqn, the sum of all replicas' gradients."""
    first, *others = gradients
    total = {}
    for fqn, value in first.items():
        total[fqn] = sum((replica[fqn] for replica in others), start=value)
    return [total for _ in gradients]


def replicas_differ(trial: Trial, value_of: Callable[[int, str], object]) -> bool:
    """Return whether two replicas along dp_replicate have different values of one and the same slice of a parameter.

    value_of: (rank, fqn) -> the value that is compared.
    """
    first_values: dict[object, tuple[int, object]] = {}
    for rank, local_shards in trial.local_slices.items():
        for fqn in local_shards:
            replica = coordinate_of_rank(trial.case.dims, rank)["dp_replicate"]
            key = (fqn, trial.slice_of(rank, fqn))
            first_replica, first_value = first_values.setdefault(key, (replica, value_of(rank, fqn)))
            if first_replica != replica and first_value != value_of(rank, fqn):
                return True
    return False


def assume_separate_clipping(trial: Trial) -> Trial:
    """Return the trial as if each rank clipped its gradients by the norm of its own copy's, as its reference has it."""
    norms = {}
    for rank in trial.ranks:
        for reference_step in trial.reference_of_rank(rank).steps:
            norms[rank, reference_step.step] = reference_step.grad_norm

    def clipped_gradient(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[rank, step], trial.case.training.max_norm) * gradient

    return trial.with_assumption(AssumedOptimizer(given=clipped_gradient))
