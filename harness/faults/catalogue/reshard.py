"""Mistakes in which units FSDP frees after forward; FSDP1 and DDP in other forms than requested. No number shows them."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


def _resharding_by(fired: Fired, choose: Any) -> None:
    """fully_shard with another reshard_after_forward: choose(unit, the one requested), None for the root."""
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def other(unit: Any, *, reshard_after_forward: Any = None, **options: Any) -> Any:
            chosen = choose(unit, reshard_after_forward)
            if chosen != reshard_after_forward:
                fired()
            return original(unit, reshard_after_forward=chosen, **options)

        return other

    replace(parallelize, "fully_shard", make)


@fault(
    breaks="the last unit is looked for by name and not found, so the first is kept in its stead",
    bug="H01 pytorch/torchtitan #1094: the default kept another unit than the last",
    case="fsdp_4",
    caught_by="reshard traffic",
    named="tok_embeddings still gathered, should be freed; norm, output freed, should be gathered",
)
def first_unit_kept_instead_of_last(fired: Fired) -> None:
    from torch import nn

    def choose(unit: Any, asked: Any) -> Any:
        return False if isinstance(unit, nn.Embedding) else True if isinstance(unit, list) else asked

    _resharding_by(fired, choose)


@fault(
    breaks="a number is taken for true: units are freed entirely, and gathered over the whole shard group again",
    bug="of the family of M01: the smaller group requested is made and not used",
    case="fsdp_4_reshard_2",
    caught_by="reshard traffic",
    named="reshard_after_forward 2 is requested, always is observed",
)
def number_taken_for_true(fired: Fired) -> None:
    _resharding_by(fired, lambda unit, asked: None if asked is None else True)


@fault(
    breaks="under pp every stage is freed after each microbatch, as it is right without pp",
    bug="H01 pytorch/torchtitan #822: under pp each microbatch gathered everything anew",
    case="pp_2_fsdp_2",
    caught_by="reshard traffic",
    named="reshard_after_forward default is requested, always is observed",
)
def stages_resharded_after_each_microbatch(fired: Fired) -> None:
    _resharding_by(fired, lambda unit, asked: None if asked is None else True)


@fault(
    breaks="gathered parameters are given up, but something holds on to their memory",
    bug="of the family of P15 pytorch #164756: gathered parameters linger",
    case="fsdp_2",
    caught_by="reshard",
    named="still gathered, should be freed",
)
def freed_on_paper_only(fired: Fired) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    replace(FSDPParam, "free_unsharded_param", lambda original: lambda self: fired())


@fault(
    breaks="every linear is an FSDP unit of its own, as with a wrapping policy by size: many small gathers",
    bug="of the family of H03 huggingface/accelerate #3999: the policy that wraps blocks finds other modules",
    case="fsdp_2",
    caught_by="placements",
    named="fsdp2 units are finer than requested: parameters are gathered in 18 pieces, requested 4",
)
def every_linear_is_a_unit(fired: Fired) -> None:
    from torch import nn

    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def finer(module: Any, **asked: Any) -> Any:
            for inner in [] if isinstance(module, list) or not hasattr(module, "ffn_norm") else module.modules():
                if isinstance(inner, nn.Linear):
                    fired()
                    original(inner, **asked)
            return original(module, **asked)

        return finer

    replace(parallelize, "fully_shard", make)


@fault(
    breaks="a hook keeps a copy of all weights that were gathered (an average, a debugger), on every rank for ever",
    bug="of the family of P15 pytorch #164756: gathered parameters linger",
    case="fsdp_2",
    caught_by="memory",
    named="1.051 MB of float64 are retained in unaccounted tensors: 21 tensors of the shapes of whole",
)
def whole_weights_kept(fired: Fired) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    kept = {}

    def make(original: Any) -> Any:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(self, *args, **kwargs)
            for parameter in self.fsdp_params:
                fired()
                kept[id(parameter)] = parameter._unsharded_param.detach().clone()
            return done

        return wait

    replace(FSDPParamGroup, "wait_for_unshard", make)


@fault(
    breaks="gradients are also kept in a float32 buffer of the whole model, as one makes for accumulation",
    bug="of the family of G11 NVIDIA/Megatron-LM #3023: a buffer of gradients beside the gradients",
    case="hsdp_2x2",
    caught_by="memory",
    named="525.6 kB of float32 are retained in unaccounted tensors: 1 tensors of no parameter's shape",
)
def whole_buffer_of_gradients(fired: Fired) -> None:
    import torch

    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            fired()
            numbers = sum(parameter.numel() for part in self.model_parts for parameter in part.parameters())
            self.gradient_buffer = torch.zeros(numbers, dtype=torch.float32)

        return init

    replace(Trainer, "__init__", make)


@fault(
    breaks="the bucket size requested is not passed on, so DDP reduces in buckets of its usual size",
    bug="of the family of G11 NVIDIA/Megatron-LM #3023: buckets are not what they should be",
    case="ddp_2_bucket",
    caught_by="features",
    named="bucket_mb 0.03125 is requested",
)
def bucket_size_ignored(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def usual(mesh: Any, case: Any) -> Any:
            fired()
            return {key: value for key, value in original(mesh, case).items() if key != "bucket_cap_mb"}

        return usual

    replace(parallelize, "ddp_options", make)


@fault(
    breaks="FSDP1 gets SHARD_GRAD_OP, which keeps parameters from forward to backward, for FULL_SHARD",
    bug="of the family of M01: another strategy ran than the one requested",
    case="fsdp1_4",
    caught_by="reshard traffic",
    named="reshard_after_forward default is requested, never is observed",
)
def shard_grad_op_for_full_shard(fired: Fired) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    from harness.trainers.llama3 import parallelize

    def grad_op(case: Any) -> Any:
        fired()
        return ShardingStrategy.SHARD_GRAD_OP

    replace(parallelize, "fsdp1_strategy", lambda original: grad_op)


@fault(
    breaks="FSDP1 gets all data-parallel ranks as one group, so HYBRID_SHARD is FULL_SHARD over them",
    bug="M01 pytorch/torchtitan #711, with FSDP1",
    case="fsdp1_2x2",
    caught_by="shard_contents placements traffic memory",
    named="HSDP ran as FSDP",
)
def fsdp1_hybrid_runs_as_full_shard(fired: Fired) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    from harness.faults.catalogue.mesh import hsdp_runs_as_fsdp
    from harness.trainers.llama3 import parallelize

    hsdp_runs_as_fsdp.apply(fired)
    replace(parallelize, "fsdp1_strategy", lambda original: lambda case: ShardingStrategy.FULL_SHARD)
    replace(
        parallelize,
        "flat_group",
        lambda original: lambda mesh, case: None if mesh is None else mesh._flatten("dp").get_group(),
    )


@fault(
    breaks="FSDP1 wraps the model where FSDP2 is requested",
    bug="of the family of M01: another strategy ran than the one requested",
    case="fsdp_2",
    caught_by="features shard_contents placements",
    named="wrapper fsdp2 is requested, fsdp1 is observed",
)
def fsdp2_runs_as_fsdp1(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def keep_whole(model: Any, mesh: Any, case: Any) -> None:
        fired()

    def wrap(model: Any, mesh: Any, case: Any) -> Any:
        return parallelize.apply_fsdp1(model, mesh["dp_shard"], case)

    replace(parallelize, "apply_fsdp", lambda original: keep_whole)
    replace(parallelize, "replicate", lambda original: wrap)
    replace(parallelize, "flat_group", lambda original: lambda mesh, case: mesh.get_group("dp_shard"))
