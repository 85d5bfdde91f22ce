"""The reference's training: one plain loop on one device.

The whole global batch in one forward pass, one backward pass, clip, step. The loss is the sum of the valid tokens'
negative log-likelihoods over their number in the global batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig, TrainingConfig, quantized_modules
from .data import IGNORED, Dataset, build_dataset, document_indices, step_length, step_samples
from .kernels import cpu_kind
from .model import at_least_float32, freeze, initial_weights, llama_from, seed_masks
from .noise import Reordered, SummationOrder, measure_noise, noise_orders_of_kind, reorders_step
from .optimizer import MOMENTS, Optimizer, options_of
from .precision import DTYPES, Worker, float32_matmuls
from .record import ReferenceRun, ReferenceStep


def train(
    model_config: ModelConfig,
    training: TrainingConfig,
    device: str = "cpu",
    weights: Mapping[str, np.ndarray] | None = None,
    steps: int | None = None,
    noise: Sequence[str] = (),
    model_of: int | None = None,
) -> ReferenceRun:
    """Train the recipe from `weights` (by default the seed's) and return all records.

    `steps` stops early; the schedule stays. noise: the kinds to measure, as config.noise_key spells them; each takes
    sixteen times as long again. model_of: train up to this step first, and then anew from those weights alone. Only
    this second run is returned. Repeats that measure noise do both.
    """
    dataset = build_dataset(training, model_config)
    weights = initial_weights(model_config, training.seed) if weights is None else weights
    model = _build_model(weights, model_config, training, device)
    steps = training.steps if steps is None else steps
    samples = tuple(step_samples(training, len(dataset), step) for step in range(1, steps + 1))
    batches = [
        cut_to_length(*stack_samples(dataset, ids, device), step_length(training, step))
        for step, ids in enumerate(samples, start=1)
    ]
    batches_before = batches[: model_of or 0]
    worker = Worker(model, training, quantized_modules(model_config))
    with float32_matmuls(training):
        _train_steps(model, worker, batches_before, training)
        start_weights = arrays_by_fqn(model)
        inputs = _input_mean_squares(worker, batches[0][0], training)
        trained = _train_steps(model, worker, batches, training)

    def repeat(order: SummationOrder) -> tuple[ReferenceStep, ...]:
        """Return the steps of a repeat of the training in this order of summation."""
        repeated_model = _build_model(weights, model_config, training, device)
        worker = Worker(repeated_model, training, quantized_modules(model_config))
        _train_steps(repeated_model, worker, batches_before, training, order)
        return _train_steps(repeated_model, worker, batches, training, order)

    with float32_matmuls(training):
        spread = {key: measure_noise(trained, map(repeat, noise_orders(key, training))) for key in noise}
    return ReferenceRun(
        start_weights,
        trained,
        environment=_environment(device),
        noise=spread,
        inputs=inputs,
        **_sample_fields(dataset, samples),
    )


def _build_model(
    weights: Mapping[str, np.ndarray], config: ModelConfig, training: TrainingConfig, device: str
) -> nn.Module:
    """Return the model with these weights in the recipe's dtype; only the parameters that the recipe trains require
    gradients."""
    model = llama_from(weights, config=config, dtype=DTYPES[training.dtype], device=device)
    freeze(model, training)
    return model


def _environment(device: str) -> dict[str, str]:
    """Return the facts that numbers depend on beside the recipe: torch, device, processor, threads."""
    threads = str(torch.get_num_threads())
    return {"torch": torch.__version__, "device": device, "cpu": cpu_kind(), "threads": threads}


def _sample_fields(dataset: Dataset, samples: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Return the fields of a ReferenceRun that describe samples, by name.

    Each sample is listed once, in the order of first use.
    """
    sample_ids = tuple(dict.fromkeys(itertools.chain.from_iterable(samples)))
    tokens, labels = stack_samples(dataset, sample_ids, "cpu")
    return {"samples": samples, "sample_ids": sample_ids, "tokens": tokens.numpy(), "labels": labels.numpy()}


def _input_mean_squares(worker: Worker, tokens: Tensor, training: TrainingConfig) -> dict[str, float]:
    """Return the mean square of the input of each module in step 1, by fqn; modules whose input is tokens are left out."""
    worker.begin()
    seed_masks(worker.module, training.seed, 1)
    return mean_squares(worker.module, tokens, training.document_mask)


def noise_orders(key: str, training: TrainingConfig) -> list[SummationOrder]:
    """Return the orders of summation of the repeats for one key of noise, as config.noise_key spells it."""
    reduce_dtype, kind = key.split()
    return noise_orders_of_kind(kind, training, DTYPES[reduce_dtype])


def _train_steps(
    model: nn.Module,
    worker: Worker,
    batches: Sequence[tuple[Tensor, Tensor]],
    training: TrainingConfig,
    order: SummationOrder | None = None,
) -> tuple[ReferenceStep, ...]:
    """Train one step for each batch with a new optimizer, and return the steps' records. order: as train_step has it."""
    optimizer = Optimizer(model)
    return tuple(
        train_step(model, optimizer, *both, step=step, training=training, worker=worker, order=order)
        for step, both in enumerate(batches, start=1)
    )


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    tokens: Tensor,
    labels: Tensor,
    *,
    step: int,
    training: TrainingConfig,
    worker: Worker | None = None,
    order: SummationOrder | None = None,
) -> ReferenceStep:
    """Run one optimizer step on a global batch [global_batch, seq_len] and return its record; `step` counts from 1.

    worker: computes for the model, by default the model itself. order: the order of summation; None is one pass over
    the whole batch.
    """
    worker = worker or Worker(model, training, ())
    valid_tokens = count_valid(labels)
    worker.begin()
    seed_masks(worker.module, training.seed, step)
    loss = 0.0
    with Reordered(order, step) if order and reorders_step(order, step, training) else nullcontext():
        parts = order.cut_into_shares(tokens, labels) if order else [(tokens, labels)]
        for part in parts:
            loss += backward(worker.module, *part, valid_tokens=valid_tokens, document_mask=training.document_mask)
            worker.collect_gradients(order.reduce_dtype if order else None)
    worker.store_gradients()
    gradients = arrays_by_fqn(model, gradients=True)
    grad_norm = clip_gradients(model.parameters(), training.max_norm)
    lr = learning_rate(step, training)
    optimizer.step(options_in_step(model, training, lr))
    state = optimizer_state(optimizer)
    return ReferenceStep(step, loss, grad_norm, lr, valid_tokens, gradients, arrays_by_fqn(model), state)


def backward(
    model: nn.Module, tokens: Tensor, labels: Tensor, *, valid_tokens: int, document_mask: bool = False
) -> float:
    """Run forward and backward of these samples: return their part of the mean loss, and add its gradients to those in
    .grad."""
    loss = forward_loss(model, tokens, labels, document_mask=document_mask) / valid_tokens
    loss.backward()
    return loss.item()


def forward_loss(model: nn.Module, tokens: Tensor, labels: Tensor, *, document_mask: bool = False) -> Tensor:
    """Return the sum of the valid labels' negative log-likelihoods, in at least float32. tokens, labels [b, s] -> []"""
    logits = at_least_float32(
        model(tokens, documents=document_indices(tokens) if document_mask else None)
    )  # [b, s, vocab]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def count_valid(labels: Tensor) -> int:
    """Return the number of labels that count in the loss."""
    return int((labels != IGNORED).sum())


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Return the learning rate of a step, counted from 1: its entry of `rates`, or lr * lr_factor(step).

    After the last of `rates` the last one counts: a scheduler looks one step ahead.
    """
    if training.rates is not None:
        return training.rates[min(step, len(training.rates)) - 1]
    return training.lr * lr_factor(step, training)


def lr_factor(step: int, training: TrainingConfig) -> float:
    """Return the rate of a step over the peak: step / warmup_steps up to the end of the warm-up (W), then a cosine.

    The cosine reaches final_lr_fraction (f) at `steps` (N):

        f + (1 - f) * (1 + cos(pi * (step - W) / (N - W))) / 2, and f from step N on.

    With `rates` it is the step's rate over lr. Step 0, which a scheduler that is a step late begins with, has the peak
    where there is no warm-up.
    """
    if training.rates is not None:
        return learning_rate(step, training) / training.lr
    warmup = training.warmup_steps
    final = training.final_lr_fraction
    if warmup and step <= warmup:
        return step / warmup
    progress = min(1.0, (step - warmup) / max(1, training.steps - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients in place by min(1, max_norm / (norm + 1e-6)); return their global norm before that.

    The formula is torch's clip_grad_norm_. The norm is taken in at least float32.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = float(torch.stack([at_least_float32(g).square().sum() for g in gradients]).sum().sqrt())
    if max_norm is not None:
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def options_in_step(model: nn.Module, training: TrainingConfig, lr: float) -> dict[str, dict[str, Any]]:
    """Return the optimizer's options of a step, by fqn.

    With `decay` other than "all", vectors (norm weights) do not decay.
    """
    return {
        fqn: options_of(training, fqn, lr=lr, decays=training.decay == "all" or p.dim() > 1)
        for fqn, p in model.named_parameters()
    }


def cut_to_length(tokens: Tensor, labels: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the first `length` tokens of each sample, and their labels."""
    return tokens[:, :length], labels[:, :length]


def mean_squares(model: nn.Module, tokens: Tensor, document_mask: bool = False) -> dict[str, float]:
    """Return the mean square of the input of each module in one forward pass, by fqn in the order of the calls.

    Modules whose first input is not floating point (the embedding, the whole model) are left out.
    """
    squares: dict[str, float] = {}

    def note(fqn: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs[0].is_floating_point():
                squares[fqn] = inputs[0].double().square().mean().item()

        return hook

    hooks = [module.register_forward_pre_hook(note(fqn)) for fqn, module in model.named_modules()]
    with torch.no_grad():
        model(tokens, documents=document_indices(tokens) if document_mask else None)
    for hook in hooks:
        hook.remove()
    return squares


def stack_samples(dataset: Dataset, ids: Sequence[int], device: str) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of these samples, int64 [len(ids), seq_len] each."""
    tokens, labels = zip(*(dataset[sample_id] for sample_id in ids), strict=True)
    return torch.stack(tokens).to(device), torch.stack(labels).to(device)


def arrays_by_fqn(model: nn.Module, *, gradients: bool = False) -> dict[str, np.ndarray]:
    """Return a copy of every parameter, or of its gradient, by fqn. A parameter without a gradient is left out then."""
    named = ((fqn, p.grad if gradients else p) for fqn, p in model.named_parameters())
    return {fqn: to_numpy(value) for fqn, value in named if value is not None}


def optimizer_state(optimizer: Optimizer) -> dict[str, dict[str, np.ndarray]]:
    """Return a copy of the moments by fqn: AdamW's two, Muon's one, none of SGD."""
    moments: dict[str, dict[str, np.ndarray]] = {}
    for fqn, state in optimizer.state.items():
        moments[fqn] = {key: to_numpy(state[key]) for key in MOMENTS if key in state}
    return moments


def to_numpy(value: Tensor) -> np.ndarray:
    """Return a copy on the host.

    bfloat16 becomes float32, which holds each of its values exactly: numpy has no bfloat16.
    """
    dtype = torch.float32 if value.dtype == torch.bfloat16 else value.dtype
    return value.detach().to("cpu", dtype, copy=True).numpy()
