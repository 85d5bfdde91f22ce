"""The contents that an export should have: the weights after the last step under Hugging Face's names.

Rows of q and k are in the order that the case requests, and LoRA's adapters are added to their matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from harness.core.case.case import Case
from harness.core.judge.held_values import whole_weights_after
from harness.core.judge.trial import Trial
from harness.reference.columns import restore_from_blocks
from harness.reference.config import Lora

Arrays = Mapping[str, np.ndarray]
EXPORTED_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""The reference's name of a module, without its layer -> Hugging Face's."""
FUSED_MATRICES = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
"""Hugging Face's name of a fused module -> the last part of the names of the matrices that it joins, in order."""
EMBEDDING_WEIGHT = "model.embed_tokens.weight"
OUTPUT_WEIGHT = "lm_head.weight"


def weights_to_export(trial: Trial, step: int) -> dict[str, np.ndarray]:
    """Return whole weights by fqn, as ranks held them after a step, in the reference's own order of rows and shapes.

    Step 0: the weights before training. A parameter that is not on record is left out; an entry that no rank held is
    NaN.
    """
    stored = whole_weights_after(trial, step) if step else trial.reference.weights
    weights = {}
    for fqn, shape in trial.case.model.parameter_shapes().items():
        if fqn in stored:
            value = restore_from_blocks(np.asarray(stored[fqn]), shape, trial.plan.column_blocks.get(fqn, 1))
            if fqn in trial.reference.rows:
                value = value[np.argsort(trial.reference.rows[fqn])]
            weights[fqn] = value
    return weights


def exported_name(fqn: str) -> str:
    """Return Hugging Face's name of a weight. Raises KeyError for a module that EXPORTED_NAMES lacks."""
    layer, plain = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", fqn).groups()  # type: ignore[union-attr]
    return f"{'model.' + layer if layer else ''}{EXPORTED_NAMES[plain]}.weight"


def expected_export(
    case: Case, weights: Arrays, orders: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Return the tensors that the case's kind of export makes of these weights, by exported name.

    Rows of q and k are permuted unless the export is "hf_interleaved". orders: by fused name, the order in which its
    parts are joined, as indices; by default that of FUSED_MATRICES.
    """
    return tensors_with_row_order(case, weights, permuted=case.features.export != "hf_interleaved", orders=orders)


def tensors_with_row_order(
    case: Case, weights: Arrays, *, permuted: bool, orders: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Return the tensors of the case's export by exported name, with rows of q and k permuted or not.

    Adapters are merged, a tied output is added, and "hf_fused" joins matrices. permuted: each head's rows in the order
    0 2 4 .. 1 3 5 .., for a rotary embedding that turns halves. orders: as in expected_export.
    """
    exported = {exported_name(fqn): value for fqn, value in merge_adapters(case.model.lora, weights).items()}
    if permuted:
        for name in [name for name in exported if name.endswith(("q_proj.weight", "k_proj.weight"))]:
            exported[name] = rows_in_half_order(exported[name], case.model.head_dim)
    if case.model.tied_embeddings and EMBEDDING_WEIGHT in exported:
        exported[OUTPUT_WEIGHT] = exported[EMBEDDING_WEIGHT]
    return _fuse_matrices(exported, orders) if case.features.export == "hf_fused" else exported


def merge_adapters(lora: Lora | None, weights: Arrays) -> dict[str, np.ndarray]:
    """Return the weights by fqn, with each LoRA product times its scale added to its matrix.

    The adapters themselves are left out.
    """
    merged_weights = {fqn: value for fqn, value in weights.items() if ".lora_" not in fqn}
    for fqn in merged_weights:
        a, b = (weights.get(f"{fqn.removesuffix('weight')}lora_{letter}.weight") for letter in "ab")
        if lora is not None and a is not None and b is not None:
            matrix = merged_weights[fqn]
            merged_weights[fqn] = matrix + matrix.dtype.type(lora.scale) * (b @ a)
    return merged_weights


def rounding_units(case: Case, weights: Arrays) -> dict[str, np.ndarray]:
    """Return, by exported name, an array of how many units of rounding each entry of an export may be off.

    An entry of a matrix with a merged adapter is a sum in any order: rank + 4, times the sum of its terms' magnitudes.
    Entries of other tensors are 0. Empty for a model without LoRA.
    """
    if case.model.lora is None:
        return {}
    units = {fqn: np.zeros_like(value) for fqn, value in weights.items() if ".lora_" not in fqn}
    magnitudes = merge_adapters(case.model.lora, {fqn: np.abs(value) for fqn, value in weights.items()})
    terms = case.model.lora.rank + 4
    adapted = {fqn: terms * magnitudes[fqn] for fqn in units if case.model.lora.shapes(fqn, (0, 0))}
    return expected_export(case, units | adapted)


def rows_in_half_order(value: np.ndarray, size: int) -> np.ndarray:
    """Return a new matrix with the rows of each head in the order 0 2 4 .. 1 3 5 ... size: rows of a head."""
    return value.reshape(-1, size // 2, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)


def _fuse_matrices(exported: dict[str, np.ndarray], orders: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Replace q, k, v and gate, up of each layer by one fused matrix each, in place, and return the same dict.

    orders: by fused name, the order of its parts as indices; by default that of FUSED_MATRICES.
    """
    for name in [name for name in exported if name.endswith(("q_proj.weight", "gate_proj.weight"))]:
        module = name.rpartition(".")[0].rpartition(".")[0]
        fused, parts = next(entry for entry in FUSED_MATRICES.items() if module.endswith(entry[0].partition(".")[0]))
        values = [exported.pop(f"{module}.{part}.weight") for part in parts]
        order = orders.get(fused, range(len(parts)))
        exported[f"{module}.{fused.partition('.')[2]}.weight"] = np.concatenate([values[index] for index in order])
    return exported
