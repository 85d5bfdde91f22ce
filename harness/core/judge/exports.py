"""What an export should hold: the weights after the last step under Hugging Face's names, in the requested order of rows.
Adapters are merged with their matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
TIED, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def weights_of(trial: Trial, step: int) -> dict[str, np.ndarray]:
    """Return whole weights after a step, 0 for those before training, in the reference's order of rows and its shapes."""
    stored = weights_after(trial, step) if step else trial.reference.weights
    found = {}
    for fqn, shape in trial.case.model.parameter_shapes().items():
        if fqn in stored:
            value = restored(np.asarray(stored[fqn]), shape, trial.plan.columns.get(fqn, 1))
            found[fqn] = value[np.argsort(trial.reference.rows[fqn])] if fqn in trial.reference.rows else value
    return found


def exported_name(fqn: str) -> str:
    """Return Hugging Face's name of a parameter."""
    layer, plain = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", fqn).groups()  # type: ignore[union-attr]
    return f"{'model.' + layer if layer else ''}{NAMES[plain]}.weight"


def export_of(
    case: Case, weights: Arrays, permuted: bool | None = None, orders: Mapping[str, Sequence[int]] | None = None
) -> dict[str, np.ndarray]:
    """Return what an export of these weights holds, by name. permuted: whether rows of q and k are in the order for a rotary
    embedding that turns halves; None: as requested. orders: by fused name, another order of its parts."""
    kind = case.features.export
    permuted = kind != "hf_interleaved" if permuted is None else permuted
    held = {exported_name(fqn): value for fqn, value in merged(case.model.lora, weights).items()}
    for name in [name for name in held if permuted and name.endswith(("q_proj.weight", "k_proj.weight"))]:
        held[name] = halves(held[name], case.model.head_dim)
    if case.model.tied_embeddings and TIED in held:
        held[OUTPUT] = held[TIED]
    return _fused(held, orders or {}) if kind == "hf_fused" else held


def merged(lora: Lora | None, weights: Arrays) -> dict[str, np.ndarray]:
    """Return the weights with each adapter added to its matrix."""
    found = {fqn: value for fqn, value in weights.items() if ".lora_" not in fqn}
    for fqn in found:
        a, b = (weights.get(f"{fqn.removesuffix('weight')}lora_{part}.weight") for part in "ab")
        if lora is not None and a is not None and b is not None:
            found[fqn] = found[fqn] + found[fqn].dtype.type(lora.scale) * (b @ a)
    return found


def rounding_of(case: Case, weights: Arrays) -> dict[str, np.ndarray]:
    """Return, by name, by how many units of rounding each entry of an export may be off. What is merged is a sum in any order;
    of all else it is 0."""
    if case.model.lora is None:
        return {}
    plain = {fqn: np.zeros_like(value) for fqn, value in weights.items() if ".lora_" not in fqn}
    most = merged(case.model.lora, {fqn: np.abs(value) for fqn, value in weights.items()})
    terms = case.model.lora.rank + 4
    return export_of(case, plain | {fqn: terms * most[fqn] for fqn in plain if case.model.lora.shapes(fqn, (0, 0))})


def halves(value: np.ndarray, size: int) -> np.ndarray:
    """Put the rows of each head in the order 0 2 4 .. 1 3 5 .."""
    return value.reshape(-1, size // 2, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)


def _fused(held: dict[str, np.ndarray], orders: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    for name in [name for name in held if name.endswith(("q_proj.weight", "gate_proj.weight"))]:
        module = name.rpartition(".")[0].rpartition(".")[0]
        fused, parts = next(one for one in FUSED.items() if module.endswith(one[0].partition(".")[0]))
        values = [held.pop(f"{module}.{part}.weight") for part in parts]
        order = orders.get(fused, range(len(parts)))
        held[f"{module}.{fused.partition('.')[2]}.weight"] = np.concatenate([values[place] for place in order])
    return held
