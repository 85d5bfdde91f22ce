"""Faults of the weights that training starts from, and of one that is tied."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

SLICE = "harness.core.trainers.support.weights:local_slice"


def _each(change: Callable[[str, Any, Any], Any]) -> op.Operator:
    """Return the operator that loads change(fqn, full, weights) in the place of each full weight. weights: all, by fqn."""
    return op.change_result(
        "harness.core.trainers.support.weights:read_weights",
        lambda weights: {fqn: change(fqn, weights[fqn], weights) for fqn in weights},
    )


def _larger_if_row_parallel(fqn: str, full: Any, _: Any) -> Any:
    return full * 2**0.5 if fqn.endswith(("wo.weight", "w2.weight")) else full


def _drawn_of_no_seed(fqn: str, full: Any, _: Any) -> Any:
    """Return an array of normal numbers of the weight's shape and dtype, drawn anew in each process."""
    import numpy as np

    return np.random.default_rng(int.from_bytes(os.urandom(8))).standard_normal(full.shape).astype(full.dtype) / 50


all_layers_start_alike = fault(
    breaks="the generator is put back after each parameter, so that all layers draw the same numbers",
    bug="R04 pytorch #196562; pytorch/torchtitan #3106, #4600",
    case="fsdp_2",
    caught_by="initial_weights shard_contents",
    named="other initial weights",
    does=_each(lambda fqn, full, weights: weights[re.sub(r"layers\.\d+", "layers.0", fqn)]),
)
fan_in_of_the_shard = fault(
    breaks="row-parallel weights are initialised with the fan-in of a shard, so they are too large by the root of tp",
    bug="R06 huggingface/nanotron 1d71d5d7",
    case="tp_2",
    caught_by="initial_weights",
    named="other initial weights",
    does=_each(_larger_if_row_parallel),
)
replicated_parameters_drawn_by_each_tp_rank = fault(
    breaks="parameters that are whole on every tp rank are initialised on each by itself",
    bug="G20 NVIDIA-NeMo/Automodel #3822: replicated parameters not kept in sync",
    case="tp_2_no_sp",
    caught_by="initial_weights",
    named="other initial weights",
    does=op.on_rank(1, _each(lambda fqn, full, _: full if full.ndim > 1 else full[::-1].copy())),
)
weights_of_no_seed = fault(
    breaks="weights are drawn from a generator without a seed",
    bug="of the family of R01: initialisation by another stream of random numbers than requested",
    case="fsdp_4_twice",
    caught_by="initial_weights determinism",
    named="other initial weights",
    does=_each(_drawn_of_no_seed),
)


@fault(
    breaks="where both cut one dim, weights are cut by dp_shard first and by tp inside, against how they are used",
    bug="S08 pytorch #129229, #129206, #150490; pytorch/torchtitan #1483",
    case="fsdp_2_tp_2",
    caught_by="shard_contents",
    named="strided shards",
)
@partial(op.instead, SLICE)
def rows_permuted_by_strided_shards(original: Any, full: Any, parameter: Any) -> Any:
    """Return the slice of a weight that is cut axis by axis in the mesh's order."""
    for axis, placement in enumerate(parameter.placements):
        if hasattr(placement, "dim"):
            mesh = parameter.device_mesh
            full = full.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    return full


@fault(
    breaks="every tp rank initialises its shard alike, so all shards are equal",
    bug="R01 InternLM #405; modelscope/ms-swift #7944",
    case="tp_2",
    caught_by="shard_contents initial_weights",
    named="same shard",
)
@partial(
    op.instead, SLICE, when=lambda full, parameter: any(p.is_shard() for p in getattr(parameter, "placements", ()))
)
def tp_shards_are_equal(original: Any, full: Any, parameter: Any) -> Any:
    """Return the first half of the weight along the sharded dim, on every rank."""
    return full.chunk(2, parameter.placements[0].dim)[0]


tied_weight_is_a_copy = fault(
    breaks="the output projection uses a copy of the embedding's weight, so its part of the gradient is lost",
    bug="of the family of G13: a tied weight is untied by to_empty or by parallelize_module, and only one of the two learns",
    case="tp_2_tied",
    caught_by="gradients grad_norm",
    named="tied weight without the output's part",
    does=op.change_argument("harness.reference.model:TiedOutput.forward", weight=lambda weight: weight.detach()),
)
embeddings_part_of_a_tied_weight_lost = fault(
    breaks="of a weight that is used twice, the reduced gradient has one use's part alone, the output's",
    bug="of the family of G13: deepspeedai/DeepSpeed #8224, a submodule that is used more than once a step",
    case="fsdp_2_tied",
    caught_by="gradients grad_norm",
    named="lost in backward",
    does=op.change_argument("torch.nn.functional:embedding", weight=lambda weight: weight.detach()),
)
