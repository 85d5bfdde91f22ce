"""Mistakes in what FSDP2 keeps gathered and what it wraps: the numbers are right, memory and traffic are not."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


def _always_pass(fired: Fired, **options: Any) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def otherwise(module: Any, **asked: Any) -> Any:
            fired()
            return original(module, **(asked | options))

        return otherwise

    replace(parallelize, "fully_shard", make)


@fault(
    breaks="every unit is freed after forward, the last one too, which backward needs at once",
    bug="H01 pytorch/torchtitan #1094, #1091, #822",
    case="fsdp_4",
    caught_by="reshard traffic",
    named="reshard_after_forward default is requested, always is observed",
)
def last_unit_freed_after_forward(fired: Fired) -> None:
    _always_pass(fired, reshard_after_forward=True)


@fault(
    breaks="set_reshard_after_forward(False) is left on: parameters stay gathered from forward to backward",
    bug="H02 pytorch/torchtitan #4143",
    case="fsdp_4_reshard_always",
    caught_by="reshard traffic",
    named="reshard_after_forward always is requested, never is observed",
)
def nothing_freed_after_forward(fired: Fired) -> None:
    _always_pass(fired, reshard_after_forward=False)


@fault(
    breaks="the policy that wraps blocks finds none, so that the whole model is one FSDP unit",
    bug="H03 huggingface/accelerate #3999",
    case="fsdp_4_reshard_always",
    caught_by="reshard traffic",
    named="reshard_after_forward always is requested, never is observed",
)
def whole_model_is_one_unit(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def root_only(module: Any, **asked: Any) -> Any:
            if isinstance(module, list) or not hasattr(module, "tok_embeddings"):
                fired()
                return module
            return original(module, **asked)

        return root_only

    replace(parallelize, "fully_shard", make)


@fault(
    breaks="where units are left to the trainer, no block is freed though the policy always is requested",
    bug="of the family of H02 pytorch/torchtitan #4143: parameters stay gathered from forward to backward",
    case="fsdp_4_open_reshard_always",
    caught_by="reshard traffic",
    named="reshard_after_forward always is requested, never is observed",
)
def units_of_its_own_are_kept(fired: Fired) -> None:
    _always_pass(fired, reshard_after_forward=False)


@fault(
    breaks="the second replica keeps its blocks gathered, as a policy set by a node's free memory would",
    bug="of the family of H01 pytorch/torchtitan #1094: which units are kept is decided in another way than meant",
    case="hsdp_2x2_open",
    caught_by="placements",
    named="ranks wrap different fsdp2 units: ranks [2,3] have layers.0 (9) kept; layers.1 (9) kept",
)
def replicas_keep_different_units(fired: Fired) -> None:
    import os

    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def kept(module: Any, **asked: Any) -> Any:
            if hasattr(module, "ffn_norm") and int(os.environ["RANK"]) >= 2:
                fired()
                asked["reshard_after_forward"] = False
            return original(module, **asked)

        return kept

    replace(parallelize, "fully_shard", make)
