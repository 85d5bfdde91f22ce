"""Alterations of the reference's model, in place: as an adapter may misread a trainer's model, or with other positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Alter = Callable[[nn.Module, int], None]
"""Alters a model in place before a step's forward pass."""
Alteration = Callable[[nn.Module], None]
"""Alters a module in place."""

PARTS = {"model": "", "block": r"layers\.\d+", "attention": r".*\.attention", "norm": ".*norm"}


def modules_of(model: nn.Module, part: str) -> list[str]:
    """Return the names of all modules of a part (a key of PARTS), in the model's order."""
    return [name for name, _ in model.named_modules() if re.fullmatch(PARTS[part], name)]


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Patch a module's forward: `forward` is called with the former forward and the arguments, and its result returned."""
    before = module.forward
    module.forward = lambda *args, **kwargs: forward(before, *args, **kwargs)


def with_config_values(**values: Any) -> Alteration:
    """Return an alteration that sets these values in the configuration that a module reads."""

    def alter(module: nn.Module) -> None:
        module.config = replace(module.config, **values)

    return alter


def with_eps(value: float) -> Alteration:
    """Return an alteration that sets the eps of a norm."""
    return lambda norm: setattr(norm, "eps", value)


def exchange_forwards(module: nn.Module, *, first_name: str, second_name: str) -> None:
    """Exchange the forwards of two submodules, in place."""
    first = module.get_submodule(first_name)
    second = module.get_submodule(second_name)
    first.forward, second.forward = second.forward, first.forward


def exchange_embedding_and_output(model: nn.Module) -> None:
    """Patch the model so that the embedding looks up in the output's weight, and the output multiplies by the
    embedding's."""
    replace_forward(model.tok_embeddings, lambda original, tokens: F.embedding(tokens, model.output.weight))
    replace_forward(model.output, lambda original, x: F.linear(x, model.tok_embeddings.weight))


def detach_output_weight(model: nn.Module, step: int) -> None:
    """Patch a model with tied embeddings, in step 1, so that the output gives the shared weight no gradient; later it
    does nothing."""
    if step == 1:
        replace_forward(model.output, lambda original, x, weight: original(x, weight.detach()))


def in_eval_mode(steps: Iterable[int]) -> Alter:
    """Return an alteration that leaves the model in eval mode in these steps, so that dropout keeps everything."""
    eval_steps = {*steps}

    def alter(model: nn.Module, step: int) -> None:
        model.train(step not in eval_steps)

    return alter


def scale_output_gradients(names: Iterable[str], factor: float, steps: Iterable[int]) -> Alter:
    """Return an alteration that multiplies the gradients of the outputs of these modules in these steps."""
    outputs = [*names]
    scaled_steps = {*steps}
    now = [0]  # the step that runs

    def scaled(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad and now[0] in scaled_steps:
            output.register_hook(lambda gradient: gradient * factor)

    def alter(model: nn.Module, step: int) -> None:
        now[0] = step
        if step == 1:
            for module in map(model.get_submodule, outputs):
                module.register_forward_hook(scaled)

    return alter


def transpose_matrices(names: Iterable[str]) -> Alteration:
    """Return an alteration that makes these matrices of a block multiply by their transpose. They must be square."""

    def alter(block: nn.Module) -> None:
        for matrix in map(block.get_submodule, names):
            replace_forward(matrix, lambda original, x, matrix=matrix: F.linear(x, matrix.weight.T))

    return alter


def turn_halves(attention: nn.Module) -> None:
    """Patch wq and wk to return each head's entries i and i + head_dim / 2 as neighbours, which then turn together.

    Dot products stay the same but for the turning.
    """
    width = attention.config.head_dim
    order = torch.arange(width).view(2, -1).T.flatten()
    for name in ("wq", "wk"):
        replace_forward(
            attention.get_submodule(name),
            lambda original, x: original(x).unflatten(-1, (-1, width))[..., order].flatten(-2),
        )


def turn_by_positions(by_step: Mapping[int, Mapping[int, np.ndarray]]) -> Alter:
    """Return an alteration that turns queries and keys by the angles of these positions [(b,) s], by step and layer.

    Batches of another size, such as an evaluated one, keep theirs.
    """
    now: dict[str, int] = {}

    def alter(model: nn.Module, step: int) -> None:
        now["step"] = step
        if step != 1:
            return
        for name, layer in model.layers.items():
            replace_forward(layer.attention, _forward_with_positions(by_step, int(name), now))

    return alter


def _forward_with_positions(
    by_step: Mapping[int, Mapping[int, np.ndarray]], layer: int, now: dict[str, int]
) -> Callable[..., Tensor]:
    """Return a forward for replace_forward, of the attention of a layer, that uses the positions of the step `now["step"]`.

    The given positions are used where `by_step` has none for that step and layer, or the batch has another size.
    """

    def forward(original: Callable[..., Tensor], x: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        rows = by_step.get(now["step"], {}).get(layer)
        fits = rows is not None and (rows.ndim == 1 or len(rows) == len(x))
        return original(x, torch.from_numpy(rows) if fits else positions, documents)

    return forward
