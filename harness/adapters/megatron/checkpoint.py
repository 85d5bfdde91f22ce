"""Saving and loading of distributed checkpoints in torch_dist, by the calls of megatron.training's save_checkpoint and
load_checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn

CONTENT = {"non_homogeneous_layers": True, "chained_optim_avoid_prefix": True}
"""Each layer is saved under its own number, not all of them as one tensor."""


def save(folder: Path, step: int, chunks: list[nn.Module], optimizer: Any) -> None:
    """Write model and optimizer as a checkpoint into FOLDER/iter_STEP. All ranks must call it."""
    iteration_folder = folder / f"iter_{step:07d}"
    if dist.get_rank() == 0:
        iteration_folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _state(chunks, optimizer, is_loading=False)
    dist_checkpointing.save({**state, "iteration": step}, str(iteration_folder), content_metadata=CONTENT)


def load(folder: Path, chunks: list[nn.Module], optimizer: Any) -> int:
    """Load model and optimizer from the latest complete checkpoint in the folder. Return the step that it was saved after.

    Raises ValueError if there is no complete one.
    """
    complete = sorted(path.parent for path in folder.glob("iter_*/metadata.json"))
    if not complete:
        raise ValueError(f"no complete checkpoint in {folder}")
    state = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(complete[-1]))
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        chunk.module.load_state_dict(_by_own_numbers(state[key], chunk.module))
    optimizer.load_state_dict(state["optimizer"])
    return int(state["iteration"])


def _state(chunks: list[nn.Module], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return the sharded state of the chunks ("model", or "model0" ..) and of the optimizer, as dist_checkpointing takes it."""
    models = {
        key: chunk.module.sharded_state_dict(metadata=CONTENT) for key, chunk in zip(_keys(chunks), chunks, strict=True)
    }
    return {**models, "optimizer": optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=CONTENT)}


def _keys(chunks: list[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _by_own_numbers(state: dict[str, Any], stage: Any) -> dict[str, Any]:
    """Return a chunk's state with layers numbered as in the whole model (model.py), instead of 0, 1, .. in each stage."""
    first = stage.decoder.layers.first

    def own(name: str) -> str:
        return re.sub(r"^(decoder\.layers\.)(\d+)", lambda match: f"{match[1]}{int(match[2]) + first}", name)

    return {own(name): value for name, value in state.items()}
