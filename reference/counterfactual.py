"""The reference, trained again with one thing changed: the numbers that a supposed mistake leads to, in every step."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .budget import spend_logits
from .columns import flatten_by_blocks, restore_from_blocks
from .config import ModelConfig, TrainingConfig, quantized_modules
from .data import IGNORED, document_indices, step_length
from .model import at_least_float32, freeze, llama_from, seed_masks
from .optimizer import MOMENTS, Optimizer, options_of
from .precision import DTYPES, Worker
from .record import ReferenceRun, ReferenceStep
from .spellings import Alter
from .train import arrays_by_fqn, learning_rate, to_numpy

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """The samples of a step."""

    tokens: np.ndarray
    """int64 [b, s]"""
    labels: np.ndarray
    """int64 [b, s]"""
    counts: np.ndarray | None = None
    """float64 [b, s]: how often each token's loss counts in the gradient (not in the loss); None: once."""


@dataclass(frozen=True)
class Changes:
    """The differences from the reference. A field that is None changes nothing. Arrays are whole tensors by fqn."""

    weights: Mapping[str, np.ndarray] | None = None  # before the first step
    batch: Callable[[int, Batch], Batch] | None = None  # (step, the recipe's) -> what is trained on
    gradients: Callable[[int, Arrays], Arrays] | None = None  # (step, those of backward) -> those before clipping
    given: Callable[[int, Arrays, float, Arrays], Arrays] | None = None
    """(step, gradients, their norm, parameters) -> the optimizer's, in place of clipped ones; others it leaves alone."""
    rate: Callable[[int, str], float] | None = None  # (step, fqn) -> the learning rate
    recipe: Callable[[int, str], TrainingConfig] | None = None
    """(step, fqn) -> the one whose betas, eps and weight decay train the parameter, from step `since` on."""
    since: int = 1
    left: Callable[[int, Arrays], Arrays] | None = None  # (step, parameters) -> what there is after the optimizer
    state: Callable[[int], Mapping[str, Mapping[str, np.ndarray]] | None] | None = None
    """(step) -> the optimizer's state, by fqn and name, as that step begins; None: what it has."""
    amsgrad: bool = False  # what torch.optim.AdamW calls so
    altered: Alter | None = None  # (module, step) alters a model in place before that step's forward pass
    rows: Mapping[str, np.ndarray] | None = None  # by fqn, which of the reference's rows each row of the arrays is
    columns: Mapping[str, int] = field(default_factory=dict)
    """Fqn of arrays that are vectors -> how many blocks of a matrix's columns lie there, one behind the other."""


@dataclass(frozen=True)
class SeparateCopies:
    """Copies of the model that train separately, and the shares of the batch that each computes."""

    owners: Sequence[int]  # by share, the copy that computes it
    shares: Callable[[int, Batch], Sequence[np.ndarray]]
    """(step, the recipe's batch) -> by share, how often each token counts in its gradient, float64 [b, s]. A share without any
    is not computed, nor its loss."""
    reduce: Callable[[int, list[Arrays]], list[Arrays]]  # (step, gradients by share) -> those by copy
    otherwise: Sequence[Changes]  # by copy


def retrain(model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, otherwise: Changes) -> ReferenceRun:
    """Train all steps again with these changes, and return the reference's run with the weights and steps of this training.

    model, training: the recipe to train by, which may be another than the reference's.
    """
    alone = SeparateCopies(
        (0,), lambda step, batch: (_counts_of_one(batch),), lambda step, gradients: gradients, (otherwise,)
    )
    return retrain_separately(model, training, reference, alone)[0]


def retrain_separately(
    model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, apart: SeparateCopies
) -> tuple[ReferenceRun, ...]:
    """Train copies of the model separately, and return the run of each, in order.

    The loss of a step, equal for all copies, is the sum over all shares.
    """
    with one_thread():
        copies = [_Copy(model, training, reference, otherwise) for otherwise in apart.otherwise]
        steps = [
            _step_of_copies(copies, apart, _batch_of_step(reference, ids, step_length(training, number)), number)
            for number, ids in enumerate(reference.samples, start=1)
        ]
    return tuple(
        dataclasses.replace(reference, weights=copy.weights, steps=of_copy)
        for copy, of_copy in zip(copies, zip(*steps, strict=True), strict=True)
    )


_COMPUTES = threading.RLock()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run the block with one thread of torch, and in only one thread of this process at a time.

    The model is small: torch's threads that wait for each other take ten times as long. Cases may be judged at once in several
    threads of this process. Dropout draws from torch's generator, which they share, so they compute one after the other.
    """
    with _COMPUTES:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _counts_of_one(batch: Batch) -> np.ndarray:
    """Return counts with which every token counts once. float64 [b, s]"""
    return np.ones(batch.labels.shape)


def _step_of_copies(copies: Sequence[_Copy], apart: SeparateCopies, usual: Batch, number: int) -> list[ReferenceStep]:
    """Compute the gradients of all shares, reduce them, let every copy take its step, and return each copy's record of
    the step."""
    loss = 0.0
    gradients = []
    valid = 0
    for owner, counts in zip(apart.owners, apart.shares(number, usual), strict=True):
        copy = copies[owner]
        batch = copy.otherwise.batch(number, usual) if copy.otherwise.batch else usual
        valid = int((batch.labels != IGNORED).sum())
        share = _counted_rows(batch, counts)
        if share.labels.size:
            share_loss, share_gradients = copy.backward(share, valid, number)
        else:
            share_loss = 0.0
            share_gradients = copy.zeros()
        loss += share_loss
        gradients.append(share_gradients)
    reduced = apart.reduce(number, gradients)
    return [copy.step(number, loss, valid, own_gradients) for copy, own_gradients in zip(copies, reduced, strict=True)]


def _counted_rows(batch: Batch, counts: np.ndarray) -> Batch:
    """Return the rows of a batch in which some token counts, with the labels of all other tokens ignored.

    Its `counts` is None if the batch has none and every token of these rows counts once.
    """
    rows = counts.any(axis=1)
    labels = np.where(counts[rows] != 0, batch.labels[rows], IGNORED)
    if batch.counts is None and (counts[rows] == 1).all():
        return Batch(batch.tokens[rows], labels, None)
    all_counts = counts if batch.counts is None else counts * batch.counts
    return Batch(batch.tokens[rows], labels, all_counts[rows])


class _Copy:
    """A copy of the model and its optimizer, which is trained with `otherwise`, its changes."""

    def __init__(
        self, config: ModelConfig, training: TrainingConfig, reference: ReferenceRun, otherwise: Changes
    ) -> None:
        weights = reference.weights if otherwise.weights is None else otherwise.weights
        self.weights = _in_reference_dtypes(weights, reference)
        self.shapes = {fqn: value.shape for fqn, value in reference.weights.items()}
        self.training = training
        self.otherwise = otherwise
        self._altered_in = 0
        model_weights = _model_weights(weights, config, otherwise.columns)
        self.model = llama_from(model_weights, config=config, dtype=DTYPES[training.dtype], device="cpu")
        freeze(self.model, training)
        _reorder_outputs(self.model, otherwise.rows or {})
        self.worker = Worker(self.model, training, quantized_modules(config))
        self.optimizer = Optimizer(self.model, amsgrad=otherwise.amsgrad)

    def zeros(self) -> Arrays:
        """Return gradients of zero for all trained parameters, by fqn, in the reference's shapes."""
        trained = {fqn for fqn, parameter in self.optimizer.parameters.items() if parameter.requires_grad}
        return {fqn: np.zeros_like(value) for fqn, value in self._arrays_by_fqn().items() if fqn in trained}

    def _arrays_by_fqn(self, *, gradients: bool = False) -> Arrays:
        """Return the parameters, or their gradients, by fqn, in the reference's shapes, which may be flat."""
        return {
            fqn: self._in_reference_shape(fqn, value)
            for fqn, value in arrays_by_fqn(self.model, gradients=gradients).items()
        }

    def _in_reference_shape(self, fqn: str, value: np.ndarray) -> np.ndarray:
        return flatten_by_blocks(value, self.otherwise.columns.get(fqn, 1)).reshape(self.shapes[fqn])

    def backward(self, batch: Batch, valid: int, number: int) -> tuple[float, Arrays]:
        """Return a share's part of the mean loss, and its gradients by fqn.

        valid: number of valid tokens of the whole batch.
        """
        self._begin(number)
        loss = _backward(self.worker.module, batch, valid, self.training.document_mask)
        self.worker.collect_gradients(None)
        self.worker.store_gradients()
        return loss, self._arrays_by_fqn(gradients=True)

    def token_losses(self, batch: Batch, number: int) -> Tensor:
        """Return the loss of each token, row after row, 0 where its label is ignored; nothing is trained. [b * s]"""
        self._begin(number)
        with torch.no_grad():
            return token_losses(self.worker.module, batch, self.training.document_mask)

    def _begin(self, number: int) -> None:
        """Begin a step: clear gradients, renew the copy in the compute dtype, seed the dropout masks and alter the model."""
        self.worker.begin()
        seed_masks(self.worker.module, self.training.seed, number)
        self._alter(number)

    def _alter(self, number: int) -> None:
        """Alter the model once in each step, however many shares the copy computes: an alteration must not be applied
        twice."""
        if self.otherwise.altered and number != self._altered_in:
            self.otherwise.altered(self.worker.module, number)
            self._altered_in = number

    def step(self, number: int, loss: float, valid: int, gradients: Arrays) -> ReferenceStep:
        """Run the optimizer with these gradients, changed as `otherwise` says, and return the record of the step.

        `lr` is the rate of all parameters, or the recipe's if they have several.
        """
        otherwise = self.otherwise
        if otherwise.gradients:
            gradients = otherwise.gradients(number, gradients)
        squares = [float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in gradients.values()]
        norm = float(np.sqrt(sum(squares)))
        if otherwise.given:
            optimizer_gradients = otherwise.given(number, gradients, norm, self._arrays_by_fqn())
        else:
            optimizer_gradients = _clip_gradients(gradients, norm, self.training)
        _set_gradients(self.model, optimizer_gradients, otherwise.columns)
        if otherwise.state and (changed_state := otherwise.state(number)) is not None:
            self._set_state(changed_state)
        options = {fqn: self._options(number, fqn, parameter) for fqn, parameter in self.optimizer.parameters.items()}
        self.optimizer.step(options)
        state = self._moments()
        parameters = self._arrays_by_fqn()
        if otherwise.left:
            parameters = otherwise.left(number, parameters)
            _set_parameters(self.model, parameters, otherwise.columns)
        gradients = self.zeros() | gradients  # a parameter that did not run has no gradient
        rates = {parameter_options["lr"] for parameter_options in options.values()}
        lr = rates.pop() if len(rates) == 1 else learning_rate(number, self.training)
        return ReferenceStep(number, loss, norm, lr, valid, gradients, parameters, state)

    def _options(self, number: int, fqn: str, p: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's options for a parameter in a step, with the rate and the recipe that `otherwise` sets."""
        otherwise = self.otherwise
        rate = otherwise.rate(number, fqn) if otherwise.rate else learning_rate(number, self.training)
        other_recipe = otherwise.recipe(number, fqn) if otherwise.recipe and number >= otherwise.since else None
        is_exempt = other_recipe is None and self.training.decay != "all" and p.dim() == 1
        return options_of(other_recipe or self.training, fqn, lr=rate, decays=not is_exempt)

    def _moments(self) -> dict[str, Arrays]:
        """Return a copy of the moments by fqn: AdamW's two, Muon's one, none of SGD."""
        moments: dict[str, Arrays] = {}
        for fqn, state in self.optimizer.state.items():
            moments[fqn] = {key: self._in_reference_shape(fqn, to_numpy(state[key])) for key in MOMENTS if key in state}
        return moments

    def _set_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Replace the optimizer's state of all parameters; one that is not in `state` starts anew.

        Numbers are its step counters.
        """
        for fqn, parameter in self.optimizer.parameters.items():
            blocks = self.otherwise.columns.get(fqn, 1)
            self.optimizer.state[fqn] = {
                key: _tensor(value, parameter, blocks) if value.ndim else torch.tensor(float(value))
                for key, value in state.get(fqn, {}).items()
            }


def _model_weights(weights: Mapping[str, np.ndarray], config: ModelConfig, columns: Mapping[str, int]) -> Arrays:
    """Return the weights of the model's parameters, by fqn, in the model's shapes. columns: by fqn, as Changes has it."""
    shapes = config.parameter_shapes()
    return {
        fqn: restore_from_blocks(np.asarray(weights[fqn]), shape, columns.get(fqn, 1)) for fqn, shape in shapes.items()
    }


def _reorder_outputs(model: nn.Module, rows: Mapping[str, np.ndarray]) -> None:
    """Hook each matrix whose rows are in another order so that its outputs come in the reference's order."""
    for fqn, order in rows.items():
        inverse = torch.from_numpy(np.argsort(order))
        model.get_submodule(fqn.removesuffix(".weight")).register_forward_hook(
            lambda module, inputs, output, inverse=inverse: output[..., inverse]
        )


def _in_reference_dtypes(weights: Mapping[str, np.ndarray], reference: ReferenceRun) -> Arrays:
    """Return weights in the order and the dtypes in which the reference keeps its own."""
    return {fqn: np.asarray(weights[fqn]).astype(own.dtype) for fqn, own in reference.weights.items()}


def _batch_of_step(reference: ReferenceRun, ids: tuple[int, ...], length: int) -> Batch:
    """Return the first `length` tokens of these samples, with their labels."""
    rows = [reference.sample_ids.index(sample_id) for sample_id in ids]
    return Batch(reference.tokens[rows, :length], reference.labels[rows, :length])


def _backward(model: nn.Module, batch: Batch, valid: int, document_mask: bool) -> float:
    """Add the gradients of the losses, each as often as it counts, and return the batch's part of the mean loss."""
    losses = token_losses(model, batch, document_mask) / valid
    counts = 1.0 if batch.counts is None else torch.from_numpy(batch.counts).flatten().to(losses.dtype)
    (losses * counts).sum().backward()
    return losses.sum().item()


def token_losses(model: nn.Module, batch: Batch, document_mask: bool) -> Tensor:
    """Return the loss of each token, row after row, 0 where its label is ignored. [b * s]

    It counts against the budget: BudgetExceeded if that is spent.
    """
    tokens = _integer_tensor(batch.tokens)
    labels = _integer_tensor(batch.labels)
    logits = at_least_float32(model(tokens, documents=document_indices(tokens) if document_mask else None))
    spend_logits(logits.numel())
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")


def loss_sums_of_rows(
    model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, step: int, otherwise: Changes
) -> np.ndarray:
    """Return the sum of the token losses of each sample of a step, by the model before training, with changes.

    float64 [b]
    """
    batch = _batch_of_step(reference, reference.samples[step - 1], step_length(training, step))
    with one_thread():
        losses = _Copy(model, training, reference, otherwise).token_losses(batch, step)
        return losses.double().view(batch.labels.shape).sum(dim=1).numpy()


def evaluate_token_losses(
    model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, batch: Batch, otherwise: Changes
) -> np.ndarray:
    """Return the loss of each token of a batch, by the model before training, with changes, in eval mode.

    float64 [b, s]
    """
    with one_thread():
        copy = _Copy(model, training, reference, otherwise)
        copy.worker.module.eval()
        return copy.token_losses(batch, 0).double().view(batch.labels.shape).numpy()


def _integer_tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _clip_gradients(gradients: Arrays, norm: float, training: TrainingConfig) -> Arrays:
    """Return the gradients times min(1, max_norm / (norm + 1e-6)); unchanged without max_norm."""
    coefficient = 1.0 if training.max_norm is None else min(1.0, training.max_norm / (norm + 1e-6))
    return {fqn: gradient * gradient.dtype.type(coefficient) for fqn, gradient in gradients.items()}


@torch.no_grad()
def _set_gradients(model: nn.Module, gradients: Arrays, columns: Mapping[str, int]) -> None:
    """Set the gradient of every parameter, in its own shape; None for those that `gradients` lacks."""
    for fqn, p in model.named_parameters():
        p.grad = _tensor(gradients[fqn], p, columns.get(fqn, 1)) if fqn in gradients else None


@torch.no_grad()
def _set_parameters(model: nn.Module, parameters: Arrays, columns: Mapping[str, int]) -> None:
    for fqn, p in model.named_parameters():
        p.copy_(_tensor(parameters[fqn], p, columns.get(fqn, 1)))


def _tensor(value: np.ndarray, like: Tensor, blocks: int = 1) -> Tensor:
    """Return a copy of an array as a tensor of the shape and dtype of `like`. A copy, for stored arrays are read-only."""
    array = restore_from_blocks(value, tuple(like.shape), blocks)
    return torch.tensor(np.ascontiguousarray(array), dtype=like.dtype)
