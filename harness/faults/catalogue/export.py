"""Faults of exported weights: their rows, their age, the order of what is fused, the tied output."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

_folders: list[Path] = []
_seeds: list[Path] = []

exported_queries_not_permuted = fault(
    breaks="q and k are exported with the rows of a rotary embedding that turns neighbours, to a model that turns halves",
    bug="S-class, of the kind of huggingface/transformers' convert_llama_weights_to_hf.py without its permutation of q and k",
    case="fsdp_2_exported",
    caught_by="export",
    named="wrong export",
    does=op.instead(".export:halves", lambda original, weight, head_dim: weight),
)


def _note_layer(trainer: Any) -> None:
    """Write the weights of layer 0 to a temporary folder after step 2, as a trainer would that writes each layer when
    it has time.
    """
    import torch

    if trainer.step == 2:
        _folders.append(Path(tempfile.mkdtemp()))
        torch.save(trainer.model_parts[0].module.layers["0"].state_dict(), _folders[0] / "layer.pt")


def _of_step_2(state: Any) -> Any:
    """Return the state with the weights of layer 0 as they were written after step 2, and delete these.

    Unchanged without them.
    """
    import torch

    if not _folders:
        return state
    layer = torch.load(_folders[0] / "layer.pt", weights_only=True)
    shutil.rmtree(_folders.pop())
    return state | {f"layers.0.{name}": value for name, value in layer.items()}


exported_layer_of_an_earlier_step = fault(
    breaks="one layer of the export was written before the last step",
    bug="S-class, of the kind of a torn checkpoint: an export that goes on while training does",
    case="ddp_2_exported_fused",
    caught_by="export",
    named="wrong export",
    does=op.together(
        op.after_call(".trainer:Trainer.train_step", _note_layer),
        op.change_result(".export:whole_state", _of_step_2),
    ),
)
exported_qkv_in_another_order = fault(
    breaks="the fused matrix of an export has k, q and v one below the other, and its readers expect q, k and v",
    bug="S-class, of the kind of Megatron's converters: the order of what is fused is each format's own",
    case="ddp_2_exported_fused",
    caught_by="export",
    named="wrong export",
    does=op.change_result(".export:pop_qkv", lambda parts: [parts[1], parts[0], parts[2]]),
)


def _note_seed(trainer: Any, case: Any, *, weights: Any, **_: Any) -> None:
    _seeds.append(weights)


def _with_seed_output(state: Any) -> Any:
    """Return the exported state with the seed's embedding as its output. Unchanged if it has no output."""
    import numpy as np
    import torch

    if "lm_head.weight" not in state:
        return state
    return state | {"lm_head.weight": torch.from_numpy(np.load(_seeds[-1])["tok_embeddings.weight"].copy())}


exported_tied_output_before_training = fault(
    breaks="the output of an export with tied embeddings is the embedding as it was before training",
    bug="S-class, of the kind of lost tied weights: a tied weight that was cloned before and is exported with the others",
    case="tp_2_exported_tied",
    caught_by="export",
    named="wrong export",
    does=op.together(
        op.before_call(".trainer:Trainer.__init__", _note_seed),
        op.change_result(".export:with_huggingface_names", _with_seed_output),
    ),
)
