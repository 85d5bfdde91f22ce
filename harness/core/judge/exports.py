"""The contents that an export should have: the weights after the last step under Hugging Face's names.

Rows are in the requested order, and adapters are merged with their matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from harness.core.case.case import Case
from harness.core.judge.held_values import weights_after
from harness.core.judge.trial import Trial
from harness.reference.columns import restored
from harness.reference.config import Lora

Arrays = Mapping[str, np.ndarray]
NAMES = {
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
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
TIED = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


def weights_of(trial: Trial, step: int) -> dict[str, np.ndarray]:
    """Return whole weights after a step, 0 for those before training, in the reference's order of rows and its shapes."""
    stored = weights_after(trial, step) if step else trial.reference.weights
    weights = {}
    for fqn, shape in trial.case.model.parameter_shapes().items():
        if fqn in stored:
            value = restored(np.asarray(stored[fqn]), shape, trial.plan.columns.get(fqn, 1))
            if fqn in trial.reference.rows:
                value = value[np.argsort(trial.reference.rows[fqn])]
            weights[fqn] = value
    return weights


def exported_name(fqn: str) -> str:
    """Return Hugging Face's name of a parameter."""
    layer, plain = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", fqn).groups()  # type: ignore[union-attr]
    return f"{'model.' + layer if layer else ''}{NAMES[plain]}.weight"


def export_of(
    case: Case, weights: Arrays, orders: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Return the tensors of an export of these weights, by exported name.

    orders: by fused name, another order of its parts.
    """
    return export_with_rows(case, weights, permuted=case.features.export != "hf_interleaved", orders=orders)


def export_with_rows(
    case: Case, weights: Arrays, *, permuted: bool, orders: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Return the tensors of an export whose rows of q and k are in another order than requested.

    permuted: whether in the order for a rotary embedding that turns halves. orders: by fused name, another order of its parts.
    """
    exported = {exported_name(fqn): value for fqn, value in merged(case.model.lora, weights).items()}
    if permuted:
        for name in [name for name in exported if name.endswith(("q_proj.weight", "k_proj.weight"))]:
            exported[name] = halves(exported[name], case.model.head_dim)
    if case.model.tied_embeddings and TIED in exported:
        exported[OUTPUT] = exported[TIED]
    return _fused(exported, orders) if case.features.export == "hf_fused" else exported


def merged(lora: Lora | None, weights: Arrays) -> dict[str, np.ndarray]:
    """Return the weights with each adapter added to its matrix."""
    merged_weights = {fqn: value for fqn, value in weights.items() if ".lora_" not in fqn}
    for fqn in merged_weights:
        a, b = (weights.get(f"{fqn.removesuffix('weight')}lora_{letter}.weight") for letter in "ab")
        if lora is not None and a is not None and b is not None:
            matrix = merged_weights[fqn]
            merged_weights[fqn] = matrix + matrix.dtype.type(lora.scale) * (b @ a)
    return merged_weights


def rounding_of(case: Case, weights: Arrays) -> dict[str, np.ndarray]:
    """Return, by exported name, by how many units of rounding each entry of an export may be off.

    A matrix with an adapter merged into it is a sum in any order. The number is 0 for all other tensors.
    """
    if case.model.lora is None:
        return {}
    units = {fqn: np.zeros_like(value) for fqn, value in weights.items() if ".lora_" not in fqn}
    magnitudes = merged(case.model.lora, {fqn: np.abs(value) for fqn, value in weights.items()})
    terms = case.model.lora.rank + 4
    adapted = {fqn: terms * magnitudes[fqn] for fqn in units if case.model.lora.shapes(fqn, (0, 0))}
    return export_of(case, units | adapted)


def halves(value: np.ndarray, size: int) -> np.ndarray:
    """Return the matrix with the rows of each head in the order 0 2 4 .. 1 3 5 .. size: rows of a head."""
    return value.reshape(-1, size // 2, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)


def _fused(exported: dict[str, np.ndarray], orders: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Replace the matrices that FUSED names by one each, in place, and return the same dict."""
    for name in [name for name in exported if name.endswith(("q_proj.weight", "gate_proj.weight"))]:
        module = name.rpartition(".")[0].rpartition(".")[0]
        fused, parts = next(entry for entry in FUSED.items() if module.endswith(entry[0].partition(".")[0]))
        values = [exported.pop(f"{module}.{part}.weight") for part in parts]
        order = orders.get(fused, range(len(parts)))
        exported[f"{module}.{fused.partition('.')[2]}.weight"] = np.concatenate([values[index] for index in order])
    return exported
