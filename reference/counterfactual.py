"""The reference, trained again as if one thing had been otherwise: what a supposed mistake would have led to, in every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.reference.config import ModelConfig, TrainingConfig, quantized_modules
from harness.reference.data import IGNORED, documents, step_length
from harness.reference.model import at_least_float32, llama_from, seed_masks
from harness.reference.precision import DTYPES, Worker
from harness.reference.record import ReferenceRun, ReferenceStep
from harness.reference.train import by_fqn, learning_rate, optimizer_state

Arrays = dict[str, np.ndarray]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """What is trained on in a step. tokens, labels: int64 [b, s]. positions: int64 [b, s], of the rotary embedding; None: 0 to
    s - 1. counts: float64 [b, s], how often each token's loss counts in the gradient (not in the loss); None: once."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None
    counts: np.ndarray | None = None


@dataclass(frozen=True)
class Otherwise:
    """What differs from the reference; all that is None is as it was. Arrays are whole tensors by fqn.

    weights: before the first step. batch(step, the recipe's) -> what is trained on. gradients(step, those of backward) ->
    those that there are before clipping. given(step, gradients, their norm) -> what the optimizer is given, in place of
    clipping. rate(step, fqn) -> the learning rate. left(step, parameters) -> what there is when the optimizer is done.
    restart(step) -> whether the optimizer begins that step without state. state(step) -> the state it begins that step with,
    by fqn and name; None: what it has. model(module, step) alters the model in place before that step's forward pass.
    loss(logits [n, vocab], labels [n]) -> the loss of each token, 0 where none counts.
    """

    weights: Mapping[str, np.ndarray] | None = None
    batch: Callable[[int, Batch], Batch] | None = None
    gradients: Callable[[int, Arrays], Arrays] | None = None
    given: Callable[[int, Arrays, float], Arrays] | None = None
    rate: Callable[[int, str], float] | None = None
    left: Callable[[int, Arrays], Arrays] | None = None
    restart: Callable[[int], bool] | None = None
    state: Callable[[int], Mapping[str, Mapping[str, np.ndarray]] | None] | None = None
    model: Callable[[nn.Module, int], None] | None = None
    loss: Loss | None = None


def retrain(
    model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, otherwise: Otherwise
) -> ReferenceRun:
    """The same run with other steps. model, training: the recipe to train by, which may be another than the reference's.

    One thread: the model is small, and threads that wait for each other take ten times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _retrain(model, training, reference, otherwise)
    finally:
        torch.set_num_threads(threads)


def _retrain(
    model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, otherwise: Otherwise
) -> ReferenceRun:
    weights = reference.weights if otherwise.weights is None else otherwise.weights
    trained = llama_from(weights, config=model, dtype=DTYPES[training.dtype], device="cpu")
    worker = Worker(trained, training, quantized_modules(model))
    optimizer = _optimizer(trained, training)
    steps = []
    for number, ids in enumerate(reference.samples, start=1):
        usual = _batch(reference, ids, step_length(training, number))
        chosen = otherwise.batch(number, usual) if otherwise.batch else usual
        steps.append(_step(trained, worker, optimizer, chosen, number, training, otherwise))
    return dataclasses.replace(reference, weights=_as_kept(weights, reference), steps=tuple(steps))


def _as_kept(weights: Mapping[str, np.ndarray], reference: ReferenceRun) -> Arrays:
    """In the order and the dtypes in which the reference keeps its own."""
    return {fqn: np.asarray(weights[fqn]).astype(own.dtype) for fqn, own in reference.weights.items()}


def _batch(reference: ReferenceRun, ids: tuple[int, ...], length: int) -> Batch:
    rows = [reference.sample_ids.index(id_) for id_ in ids]
    return Batch(reference.tokens[rows, :length], reference.labels[rows, :length])


def _optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """As the reference's, one group a parameter, so that each may have a rate of its own."""
    groups = [
        {
            "params": [p],
            "weight_decay": training.weight_decay if training.decay == "all" or p.dim() > 1 else 0.0,
            "fqn": fqn,
        }
        for fqn, p in model.named_parameters()
    ]
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=training.lr, foreach=False)
    betas = (training.beta1, training.beta2)
    return torch.optim.AdamW(groups, lr=training.lr, betas=betas, eps=training.eps, foreach=False)


def _step(
    model: nn.Module,
    worker: Worker,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    number: int,
    training: TrainingConfig,
    otherwise: Otherwise,
) -> ReferenceStep:
    valid = int((batch.labels != IGNORED).sum())
    worker.begin()
    seed_masks(worker.module, training.seed, number)
    if otherwise.model:
        otherwise.model(worker.module, number)
    loss = _backward(worker.module, batch, valid, training.document_mask, otherwise.loss)
    worker.collect(None)
    worker.finish()
    gradients = by_fqn(model, gradients=True)
    gradients = otherwise.gradients(number, gradients) if otherwise.gradients else gradients
    norm = float(np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients.values())))
    given = otherwise.given(number, gradients, norm) if otherwise.given else _clipped(gradients, norm, training)
    _set_gradients(model, given)
    for group in optimizer.param_groups:
        group["lr"] = (otherwise.rate or _usual_rate(training))(number, group["fqn"])
    rates = {group["lr"] for group in optimizer.param_groups}
    lr = rates.pop() if len(rates) == 1 else learning_rate(number, training)
    if otherwise.restart and otherwise.restart(number):
        optimizer.state.clear()
    if otherwise.state and (held := otherwise.state(number)) is not None:
        _set_state(model, optimizer, held)
    optimizer.step()
    state = optimizer_state(model, optimizer)
    after = by_fqn(model)
    if otherwise.left:
        _set_parameters(model, after := otherwise.left(number, after))
    return ReferenceStep(number, loss, norm, lr, valid, gradients, after, state)


def _backward(model: nn.Module, batch: Batch, valid: int, document_mask: bool, per_token: Loss | None = None) -> float:
    """The mean loss over the valid tokens; gradients are those of the losses as often as each counts."""
    losses = token_losses(model, batch, document_mask, per_token) / valid
    counts = 1.0 if batch.counts is None else torch.from_numpy(batch.counts).flatten().to(losses.dtype)
    (losses * counts).sum().backward()
    return losses.sum().item()


def token_losses(model: nn.Module, batch: Batch, document_mask: bool, per_token: Loss | None = None) -> Tensor:
    """Of each token, row after row, 0 where none counts. [b * s]"""
    tokens, labels = _integers(batch.tokens), _integers(batch.labels)
    positions = None if batch.positions is None else _integers(batch.positions)
    logits = at_least_float32(model(tokens, positions, documents=documents(tokens) if document_mask else None))
    flat = (logits.flatten(0, 1), labels.flatten())
    return per_token(*flat) if per_token else F.cross_entropy(*flat, ignore_index=IGNORED, reduction="none")


def _integers(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _usual_rate(training: TrainingConfig) -> Callable[[int, str], float]:
    return lambda step, fqn: learning_rate(step, training)


def _clipped(gradients: Arrays, norm: float, training: TrainingConfig) -> Arrays:
    by = 1.0 if training.max_norm is None else min(1.0, training.max_norm / (norm + 1e-6))
    return {fqn: g * g.dtype.type(by) for fqn, g in gradients.items()}


@torch.no_grad()
def _set_gradients(model: nn.Module, gradients: Arrays) -> None:
    for fqn, p in model.named_parameters():
        p.grad = _tensor(gradients[fqn], p) if fqn in gradients else None


@torch.no_grad()
def _set_parameters(model: nn.Module, parameters: Arrays) -> None:
    for fqn, p in model.named_parameters():
        p.copy_(_tensor(parameters[fqn], p))


def _set_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """A step counter is a number beside the tensors."""
    for fqn, p in model.named_parameters():
        held = {
            key: torch.as_tensor(v).clone() if not v.ndim else _tensor(v, p) for key, v in state.get(fqn, {}).items()
        }
        optimizer.state[p] = {key: value.float() if not value.ndim else value for key, value in held.items()}


def _tensor(value: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value)).to(like.dtype).reshape(like.shape)
