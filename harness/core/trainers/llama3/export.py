"""Export of the weights under Hugging Face's names, into one file that torch.load reads.

Every rank gathers, rank 0 writes.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from harness.core.case.case import Case
from harness.core.trainers.llama3 import lora

State = dict[str, Tensor]
MODEL_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    **{f"attention.w{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"},
    **{"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"},
    **{"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}


def export(model: nn.Module, case: Case, folder: Path) -> None:
    """Write folder/pytorch_model.bin, from rank 0. Call it on every rank: all of them gather the weights."""
    state = with_huggingface_names(whole_state(model), case)
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "pytorch_model.bin")


def whole_state(model: nn.Module) -> State:
    """Return the whole weights, by fqn, on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def with_huggingface_names(state: State, case: Case) -> State:
    """Return the weights by Hugging Face's names, with adapters merged, and q, k, v and gate, up fused if the case
    requests it.

    Rows of q and k are put in the order that Hugging Face's rotary embedding needs, unless the case requests
    "hf_interleaved". A tied embedding is also listed as lm_head.weight.
    """
    state = lora.with_merged_adapters(state, case.model.lora) if case.model.lora and state else state
    exported = {huggingface_name(fqn): value for fqn, value in state.items()}
    if case.features.export != "hf_interleaved":
        rotated_names = [name for name in exported if name.endswith(("q_proj.weight", "k_proj.weight"))]
        exported |= {name: halves(exported[name], case.model.head_dim) for name in rotated_names}
    if case.model.tied_embeddings and exported:
        exported["lm_head.weight"] = exported["model.embed_tokens.weight"]
    return fuse_matrices(exported) if case.features.export == "hf_fused" else exported


def huggingface_name(fqn: str) -> str:
    """Return Hugging Face's name of a parameter, from its fqn. KeyError for one that is not Llama 3's."""
    name = fqn.removesuffix(".weight")
    if name in MODEL_NAMES:
        return f"{MODEL_NAMES[name]}.weight"
    _, layer, name = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_NAMES[name]}.weight"


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Return the weight with the rows of each head in the order 0 2 4 .. 1 3 5 ..

    This model turns neighbouring entries, Hugging Face's turns entry i with i + head_dim / 2.
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def fuse_matrices(state: State) -> State:
    """Replace q, k and v by one matrix, and gate and up by another one, in place. Return the state."""
    for name in [name for name in state if name.endswith("self_attn.q_proj.weight")]:
        layer = name.removesuffix("self_attn.q_proj.weight")
        state[f"{layer}self_attn.qkv_proj.weight"] = torch.cat(pop_qkv(state, f"{layer}self_attn."))
        gate_and_up = [state.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up")]
        state[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(gate_and_up)
    return state


def pop_qkv(state: State, attention: str) -> list[Tensor]:
    """Remove the matrices q, k and v of an attention from the state, and return them in this order."""
    return [state.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
