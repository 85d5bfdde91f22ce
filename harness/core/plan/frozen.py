"""Frozen parameters: which parameters a recipe trains, and what backward leaves out because all before it is frozen."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from harness.core.case.case import Case
from harness.core.case.measured import Unit
from harness.reference.config import ModelConfig, TrainingConfig, is_trainable

T = TypeVar("T")
BLOCK_HALVES = (
    ("attention_norm", "attention", ("wq", "wk", "wv"), "wo"),
    ("ffn_norm", "feed_forward", ("w1", "w3"), "w2"),
)
"""Of a block: the norm, the module, its matrices that share an input, and the one that gives the result."""


def has_frozen(case: Case) -> bool:
    """Return whether the recipe freezes a parameter."""
    return len(trained_values(case, case.model.parameter_shapes())) < len(case.model.parameter_shapes())


def trained_values(case: Case, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values, by fqn, of parameters that are trained."""
    return {fqn: value for fqn, value in values.items() if is_trainable(case.training, fqn)}


def units_gathered_in_backward(case: Case, units: Sequence[Unit]) -> list[Unit]:
    """Return the units, in forward's order, that FSDP2 gathers for backward: all of them if nothing is frozen.

    They begin with the first one of which the result has a gradient. The one before is gathered for nothing, because
    each unit has its predecessor fetched ahead. A trained embedding that is tied to the output makes them all.
    """
    first_trained = 0
    for index, unit in enumerate(units):
        if any(is_trainable(case.training, fqn) for fqn in unit.parameters):
            first_trained = index
            break
    at_start = case.model.tied_embeddings and is_trainable(case.training, "tok_embeddings.weight")
    return [*units] if at_start else [*units[max(0, first_trained - 1) :]]


class ActivationGradients(NamedTuple):
    """Modules of a model by name, such as layers.0.attention.wq or output, and whether backward computes gradients of
    activations."""

    into: Mapping[str, bool]
    """Module -> whether its input has a gradient."""
    out_of: Mapping[str, bool]
    """Module -> whether its result has a gradient."""


@functools.lru_cache(maxsize=64)
def gradients_of_activations(model: ModelConfig, training: TrainingConfig) -> ActivationGradients:
    """Return which modules' inputs and results have a gradient: a result has one if something that it is made of is
    trained.

    `into` has each block's matrices and the output, `out_of` the embedding and each block's attention and feed-forward.
    """

    def is_trained(module: str) -> bool:
        weights = (f"{module}.weight", *(model.lora.shapes(f"{module}.weight", (0, 0)) if model.lora else ()))
        return any(is_trainable(training, fqn) for fqn in weights)

    stream = is_trained("tok_embeddings")
    into = dict[str, bool]()
    out_of = {"tok_embeddings": stream}
    for layer in range(model.n_layers):
        for norm, module, shared, last in BLOCK_HALVES:
            prefix = f"layers.{layer}.{module}"
            normed = stream or is_trained(f"layers.{layer}.{norm}")
            into |= dict.fromkeys((f"{prefix}.{name}" for name in shared), normed)
            into[f"{prefix}.{last}"] = normed or any(is_trained(f"{prefix}.{name}") for name in shared)
            out_of[prefix] = into[f"{prefix}.{last}"] or is_trained(f"{prefix}.{last}")
            stream = stream or out_of[prefix]
    into["output"] = stream or is_trained("norm")
    return ActivationGradients(into, out_of)


def count_differentiated_layers(case: Case, layers: Sequence[int]) -> int:
    """Return in how many of these layers attention runs in backward: those where its result, which wo multiplies, has a
    gradient."""
    into = gradients_of_activations(case.model, case.training).into
    return sum(into[f"layers.{layer}.attention.wo"] for layer in layers)


def matmuls_of_block(model: ModelConfig, *, merged: bool) -> int:
    """Return the number of matmuls in one block's forward, if none of its matrices are fused; LoRA adapters included.

    merged: whether an adapter's halves are multiplied with each other and added to their matrix, rather than applied
    one after the other.
    """
    matmuls = sum(len(shared) + 1 for _, _, shared, _ in BLOCK_HALVES)
    if model.lora:
        matmuls += len(model.lora.targets) * (1 if merged else 2)
    return matmuls


def matmuls_left_out(case: Case, layers: Sequence[int], *, outputs: int, merged: bool = False) -> int:
    """Return by how many matmuls a step's backward falls short of two for each of forward's, on a rank with these layers.

    They are those of frozen weights' gradients, and of inputs without one. outputs: how often a pass applies the output
    layer, such as once for each chunk of a loss. merged: as in `matmuls_of_block`; a frozen matrix then has a gradient
    that goes on to the adapter's halves.
    """
    model = case.model
    training = case.training
    count = 0
    into = gradients_of_activations(model, training).into
    prefixes = (*(f"layers.{layer}." for layer in layers), *(["output"] if outputs else []))
    for module in into:
        if not module.startswith(prefixes):
            continue
        tied = module == "output" and model.tied_embeddings
        weight = "tok_embeddings.weight" if tied else f"{module}.weight"
        if merged and (halves := _adapter_halves(model, module)):
            trains_a, trains_b = (is_trainable(training, fqn) for fqn in halves)
            fewer = (
                (not into[module])
                + (not (trains_a or trains_b or is_trainable(training, weight)))
                + (not trains_a)
                + (not trains_b)
            )
        else:
            fewer = (not into[module]) + (not is_trainable(training, weight))
            fewer += _adapter_matmuls_left_out(model, training, module, into[module])
        count += fewer * (outputs if module == "output" else 1)
    return case.passes * count


def _adapter_matmuls_left_out(model: ModelConfig, training: TrainingConfig, module: str, into: bool) -> int:
    """Return by how many matmuls the backward of a module's adapter falls short of two for each of forward's; 0 without
    one.

    into: whether the module's input has a gradient.
    """
    halves = _adapter_halves(model, module)
    if not halves:
        return 0
    trains_a, trains_b = (is_trainable(training, fqn) for fqn in halves)
    return (not into) + (not trains_a) + (not (into or trains_a)) + (not trains_b)


def _adapter_halves(model: ModelConfig, module: str) -> tuple[str, ...]:
    """Return the fqns of both halves of a module's LoRA adapter, the one that is applied first in front; () without an
    adapter."""
    if model.lora is None or module.rpartition(".")[2] not in model.lora.targets:
        return ()
    return tuple(model.lora.shapes(f"{module}.weight", (0, 0)))
