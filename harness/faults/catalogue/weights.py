"""Mistakes in the weights that training starts from."""

from __future__ import annotations

import os
from typing import Any

from harness.faults import Fired, fault, replace


def _alter_weights(change: Any) -> None:
    """change(fqn, full, weights): the full weight that is loaded in the place of `full`."""
    from harness.trainers.support import weights

    def make(original: Any) -> Any:
        def altered(*args: Any) -> Any:
            weights = dict(original(*args))
            return {fqn: change(fqn, full, weights) for fqn, full in weights.items()}

        return altered

    replace(weights, "read_weights", make)


@fault(
    breaks="the generator is put back after each parameter, so that all layers draw the same numbers",
    bug="R04 pytorch #196562; pytorch/torchtitan #3106, #4600",
    case="fsdp_2",
    caught_by="initial_weights shard_contents",
    named="layers.1.attention.wq.weight holds the values of layers.0.attention.wq.weight",
)
def all_layers_start_alike(fired: Fired) -> None:
    import re

    def change(fqn: str, full: Any, weights: Any) -> Any:
        fired()
        return weights[re.sub(r"layers\.\d+", "layers.0", fqn)]

    _alter_weights(change)


@fault(
    breaks="row-parallel weights are initialised with the fan-in of a shard, so they are too large by the root of tp",
    bug="R06 huggingface/nanotron 1d71d5d7",
    case="tp_2",
    caught_by="initial_weights",
    named="1.41421 times",
)
def fan_in_of_the_shard(fired: Fired) -> None:
    def change(fqn: str, full: Any, weights: Any) -> Any:
        if not fqn.endswith(("wo.weight", "w2.weight")):
            return full
        fired()
        return full * 2**0.5

    _alter_weights(change)


@fault(
    breaks="parameters that are whole on every tp rank are initialised on each by itself",
    bug="G20 NVIDIA-NeMo/Automodel #3822: replicated parameters not kept in sync",
    case="tp_2_no_sp",
    caught_by="initial_weights",
    named="on rank 1",
)
def replicated_parameters_drawn_by_each_tp_rank(fired: Fired) -> None:
    def change(fqn: str, full: Any, weights: Any) -> Any:
        if full.ndim > 1 or os.environ.get("RANK") == "0":
            return full
        fired()
        return full[::-1].copy()

    _alter_weights(change)


@fault(
    breaks="weights are drawn from a generator that nobody seeded",
    bug="of the family of R01: initialisation by another stream of random numbers than requested",
    case="fsdp_4_twice",
    caught_by="initial_weights determinism",
    named="training does not start from the seed weights",
)
def weights_of_no_seed(fired: Fired) -> None:
    import numpy as np

    def change(fqn: str, full: Any, weights: Any) -> Any:
        fired()
        return np.random.default_rng(int.from_bytes(os.urandom(8))).standard_normal(full.shape).astype(full.dtype) / 50

    _alter_weights(change)


@fault(
    breaks="where both cut one dim, weights are cut by dp_shard first and by tp inside, against how they are used",
    bug="S08 pytorch #129229, #129206, #150490; pytorch/torchtitan #1483",
    case="fsdp_2_tp_2",
    caught_by="shard_contents",
    named="are cut by dp_shard first and by tp inside",
)
def rows_permuted_by_strided_shards(fired: Fired) -> None:
    from harness.trainers.support import weights

    def make(original: Any) -> Any:
        def plain_order(full: Any, parameter: Any) -> Any:
            mesh = parameter.device_mesh
            for axis, placement in enumerate(parameter.placements):
                if hasattr(placement, "dim"):
                    fired()
                    full = full.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
            return full

        return plain_order

    replace(weights, "local_slice", make)


@fault(
    breaks="norm weights, which are no matrices, are left out of the checkpoint and start from ones",
    bug="of the family of S05: what is loaded is not what was meant to be",
    case="fsdp_2",
    caught_by="initial_weights",
    named="training does not start from the seed weights in 5 of 21 parameters",
)
def norm_weights_start_from_ones(fired: Fired) -> None:
    def change(fqn: str, full: Any, weights: Any) -> Any:
        if full.ndim > 1:
            return full
        fired()
        return full * 0 + 1

    _alter_weights(change)


@fault(
    breaks="every tp rank initialises its shard alike, so all shards are equal",
    bug="R01 InternLM #405; modelscope/ms-swift #7944",
    case="tp_2",
    caught_by="shard_contents initial_weights",
    named="ranks along tp start from the same shard",
)
def tp_shards_are_equal(fired: Fired) -> None:
    from harness.trainers.support import weights

    def make(original: Any) -> Any:
        def first_shard(full: Any, parameter: Any) -> Any:
            for axis, placement in enumerate(getattr(parameter, "placements", ())):
                if parameter.device_mesh.mesh_dim_names[axis] == "tp" and placement.is_shard():
                    fired()
                    return full.chunk(parameter.device_mesh.size(axis), placement.dim)[0]
            return original(full, parameter)

        return first_shard

    replace(weights, "local_slice", make)
