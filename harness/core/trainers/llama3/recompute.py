"""Recomputation and compilation, block by block: activation checkpointing and torch.compile.

Order, as in torchtitan: tensor parallel, then checkpointing, then compile, then FSDP around it, so that FSDP's
gathering is neither recomputed nor traced.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from harness.core.case.case import Case
from harness.reference.model import Llama

WRAPPER = "_checkpoint_wrapped_module."
KEPT_OPERATORS = (
    "aten.mm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
)
"""Costly operators, whose results "op" keeps. Of matmuls it keeps every second one: the 1st, 3rd, .. of a block."""


def apply_checkpointing(model: Llama, case: Case) -> None:
    """Wrap the blocks that the case recomputes, in place: they free their activations and compute them again in backward."""
    for name, block in list(model.layers.items()):
        if is_checkpointed(int(name), case):
            model.layers[name] = with_checkpointing(block, case)


def is_checkpointed(layer: int, case: Case) -> bool:
    """Return whether a block is recomputed: all with "full" or "op", every second one with "layer", none otherwise.

    `layer` is counted over the whole model, so that stages of a pipeline do not matter.
    """
    kind = case.features.activation_checkpointing
    return kind in ("full", "op") or (kind == "layer" and layer % 2 == 1)


def with_checkpointing(block: nn.Module, case: Case) -> nn.Module:
    """Return the block in a wrapper that recomputes it.

    Trap: without preserve_rng_state a recomputed dropout would draw another mask.
    """
    options: dict[str, Any] = {"preserve_rng_state": True}
    if case.features.activation_checkpointing == "op":
        options["context_fn"] = kept_operators
    return checkpoint_wrapper(block, **options)


def kept_operators() -> Any:
    """Return torch's two contexts (forward, recomputation) in which a block keeps the results of KEPT_OPERATORS.

    torch calls it for every forward pass of a block, so that counting matmuls begins anew.
    """
    matmuls: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return whether an operator's result is kept: every second matmul, and other operators of KEPT_OPERATORS."""
        if str(operator) == "aten.mm.default":
            matmuls[context.is_recompute] += 1
            if matmuls[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if str(operator) in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def plain(name: str) -> str:
    """Return a parameter's name without what the wrapper adds."""
    return name.replace(WRAPPER, "")


def apply_compile(model: Llama, mesh: DeviceMesh | None, case: Case) -> None:
    """Compile each block in place, so that names stay; do nothing unless the case requests it.

    Blocks are alike: the first is compiled, the others reuse its code.
    """
    if not case.features.compile:
        return
    if case.features.async_tp and mesh is not None:
        pipeline_products_with_collectives(mesh)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and model.tok_embeddings is not None:
        model.tok_embeddings.register_forward_hook(plain_copy)
    for block in model.layers.values():
        block.compile(fullgraph=True, dynamic=False)


def plain_copy(_: nn.Module, args: Any, embedded: Tensor) -> Tensor:
    """Return a copy of what the embedding returns.

    Trap: compiled code cannot differentiate what a row-wise embedding returns.
    upstream_bugs/compile_rowwise_embedding.py shows it.
    """
    return embedded.clone()


def pipeline_products_with_collectives(mesh: DeviceMesh) -> None:
    """Switch async TP on: inductor fuses all-gathers and reduce-scatters with the matmuls beside them. GPUs only.

    It changes a global switch of inductor.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
