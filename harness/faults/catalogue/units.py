"""Mistakes in what FSDP wraps and frees after forward; FSDP1 and DDP in other forms than requested. No number shows them."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op
from harness.faults.catalogue.mesh import hsdp_runs_as_fsdp

SHARD = ".parallelize:fully_shard"


def _is_block(unit: Any, **_: Any) -> bool:
    return hasattr(unit, "ffn_norm")


def _is_root(unit: Any, **_: Any) -> bool:
    return hasattr(unit, "tok_embeddings")


# ---- what is freed

last_unit_freed_after_forward = fault(
    breaks="every unit is freed after forward, the last one too, which backward needs at once",
    bug="H01 pytorch/torchtitan #1094, #1091, #822",
    case="fsdp_4",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=True),
)
nothing_freed_after_forward = fault(
    breaks="set_reshard_after_forward(False) is left on: parameters stay gathered from forward to backward",
    bug="H02 pytorch/torchtitan #4143",
    case="fsdp_4_reshard_always",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=False),
)
units_of_its_own_are_kept = fault(
    breaks="where units are left to the trainer, no block is freed though the policy always is requested",
    bug="of the family of H02 pytorch/torchtitan #4143: parameters stay gathered from forward to backward",
    case="fsdp_4_open_reshard_always",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=False),
)
replicas_keep_different_units = fault(
    breaks="the second replica keeps its blocks gathered, as a policy set by a node's free memory would",
    bug="of the family of H01 pytorch/torchtitan #1094: which units are kept is decided in another way than meant",
    case="hsdp_2x2_open",
    caught_by="placements",
    named="ranks disagree on units",
    does=op.on_rank((2, 3), op.override_argument(SHARD, reshard_after_forward=False, when=_is_block)),
)
first_unit_kept_instead_of_last = fault(
    breaks="the last unit is looked for by name and not found, so the first is kept in its stead",
    bug="H01 pytorch/torchtitan #1094: the default kept another unit than the last",
    case="fsdp_4",
    caught_by="reshard traffic",
    named="other units",
    does=op.together(
        op.override_argument(
            SHARD, reshard_after_forward=False, when=lambda unit, **_: hasattr(unit, "num_embeddings")
        ),
        op.override_argument(SHARD, reshard_after_forward=True, when=lambda unit, **_: isinstance(unit, list)),
    ),
)
number_taken_for_true = fault(
    breaks="a number is taken for true: units are freed entirely, and gathered over the whole shard group again",
    bug="of the family of M01: the smaller group requested is made and not used",
    case="fsdp_4_reshard_2",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=True, when=lambda unit, **_: not _is_root(unit)),
)
stages_resharded_after_each_microbatch = fault(
    breaks="under pp every stage is freed after each microbatch, as it is right without pp",
    bug="H01 pytorch/torchtitan #822: under pp each microbatch gathered everything anew",
    case="pp_2_fsdp_2",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=True, when=lambda unit, **_: not _is_root(unit)),
)
freed_on_paper_only = fault(
    breaks="gathered parameters are given up, but something holds on to their memory",
    bug="of the family of P15 pytorch #164756: gathered parameters linger",
    case="fsdp_2",
    caught_by="reshard",
    named="another policy after forward",
    does=op.skip_call("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.free_unsharded_param"),
)
module_inside_ddp_called = fault(
    breaks="the model inside DDP is called in training, so that its reducer is never armed and nothing is reduced",
    bug="E-class: model.module(..) taken over from an evaluation loop",
    case="ddp_4",
    caught_by="gradients traffic replica_agreement",
    named="gradients not reduced",
    does=op.change_argument(".trainer:loss_of", model=lambda model: getattr(model, "module", model)),
)


@fault(
    breaks="norm weights are given to FSDP1 as states to ignore: whole on every rank, each with a gradient of its own",
    bug="E-class: parameters ignored to keep them in another dtype, whose gradients nobody reduces",
    case="fsdp1_4",
    caught_by="placements gradients replica_agreement",
    named="other units",
)
@partial(op.instead, "torch.distributed.fsdp:FullyShardedDataParallel.__init__")
def norms_ignored_by_fsdp1(original: Any, self: Any, module: Any, *args: Any, **rest: Any) -> None:
    norms = [parameter for name, parameter in module.named_parameters() if name.endswith("norm.weight")]
    original(self, module, *args, **{"ignored_states": norms, **rest})


# ---- what is retained besides

_whole: dict[int, Any] = {}


@fault(
    breaks="a hook keeps a copy of all weights that were gathered (an average, a debugger), on every rank for ever",
    bug="of the family of P15 pytorch #164756: gathered parameters linger",
    case="fsdp_2",
    caught_by="memory",
    named="retained",
)
@partial(op.after_call, "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard")
def whole_weights_kept(group: Any, *_: Any) -> None:
    for parameter in group.fsdp_params:
        _whole[id(parameter)] = parameter._unsharded_param.detach().clone()


@fault(
    breaks="gradients are also kept in a float32 buffer of the whole model, as one makes for accumulation",
    bug="of the family of G11 NVIDIA/Megatron-LM #3023: a buffer of gradients beside the gradients",
    case="hsdp_2x2",
    caught_by="memory",
    named="retained",
)
@partial(op.after_call, ".trainer:Trainer.__init__")
def whole_buffer_of_gradients(trainer: Any, *_: Any, **__: Any) -> None:
    import torch

    numbers = sum(parameter.numel() for part in trainer.model_parts for parameter in part.parameters())
    trainer.gradient_buffer = torch.zeros(numbers, dtype=torch.float32)


# ---- what is wrapped


def _wrapped_in_fsdp1(original: Any, model: Any, mesh: Any, case: Any) -> Any:
    from harness.trainers.llama3.parallelize import apply_fsdp1

    return apply_fsdp1(model, mesh["dp_shard"], case)


whole_model_is_one_unit = fault(
    breaks="the policy that wraps blocks finds none, so that the whole model is one FSDP unit",
    bug="H03 huggingface/accelerate #3999",
    case="fsdp_4_reshard_always",
    caught_by="reshard traffic",
    named="other units",
    does=op.skip_call(SHARD, when=lambda unit, **_: not _is_root(unit)),
)


@fault(
    breaks="every linear is an FSDP unit of its own, as with a wrapping policy by size: many small gathers",
    bug="of the family of H03 huggingface/accelerate #3999: the policy that wraps blocks finds other modules",
    case="fsdp_2",
    caught_by="placements",
    named="other units",
)
@partial(op.instead, SHARD, when=_is_block)
def every_linear_is_a_unit(original: Any, unit: Any, **requested: Any) -> Any:
    for inner in unit.modules():
        if type(inner).__name__ == "Linear":
            original(inner, **requested)
    return original(unit, **requested)


bucket_size_ignored = fault(
    breaks="the bucket size requested is not passed on, so DDP reduces in buckets of its usual size",
    bug="of the family of G11 NVIDIA/Megatron-LM #3023: buckets are not what they should be",
    case="ddp_2_bucket",
    caught_by="features",
    named="odd traces",
    does=op.change_result(
        ".parallelize:ddp_options", lambda options: {key: options[key] for key in options if key != "bucket_cap_mb"}
    ),
)
shard_grad_op_for_full_shard = fault(
    breaks="FSDP1 gets SHARD_GRAD_OP, which keeps parameters from forward to backward, for FULL_SHARD",
    bug="of the family of M01: another strategy ran than the one requested",
    case="fsdp1_4",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.change_result(".parallelize:fsdp1_strategy", lambda strategy: type(strategy).SHARD_GRAD_OP),
)
embedding_falls_to_the_root = fault(
    breaks="the embedding is no unit of its own, so that the root gathers it and keeps it until backward",
    bug="of the family of H01: what is freed after forward is not what was asked",
    case="fsdp_4",
    caught_by="reshard",
    named="other units",
    does=op.change_argument(
        ".parallelize:present", modules=lambda modules: [one for one in modules if not hasattr(one, "embedding_dim")]
    ),
)
fsdp1_without_units = fault(
    breaks="FSDP1's policy wraps nothing: the whole model is one flat vector, gathered at once",
    bug="E-class: auto_wrap_policy names a class of which the model has no module",
    case="fsdp1_4",
    caught_by="placements shard_contents reshard traffic",
    named="other units",
    does=op.override_argument(".parallelize:CustomPolicy", lambda_fn=lambda module: False),
)
fsdp1_hybrid_runs_as_full_shard = fault(
    breaks="FSDP1 gets all data-parallel ranks as one group, so HYBRID_SHARD is FULL_SHARD over them",
    bug="M01 pytorch/torchtitan #711, with FSDP1",
    case="fsdp1_2x2",
    caught_by="shard_contents placements traffic memory",
    named="another layout",
    does=op.together(
        hsdp_runs_as_fsdp.apply,
        op.change_result(".parallelize:fsdp1_strategy", lambda strategy: type(strategy).FULL_SHARD),
        op.instead(".parallelize:flat_group", lambda original, mesh, case: mesh._flatten("dp").get_group()),
    ),
)
fsdp2_runs_as_fsdp1 = fault(
    breaks="FSDP1 wraps the model where FSDP2 is requested",
    bug="of the family of M01: another strategy ran than the one requested",
    case="fsdp_2",
    caught_by="features shard_contents placements",
    named="another feature",
    does=op.together(
        op.skip_call(".parallelize:apply_fsdp"),
        op.instead(".parallelize:replicate", _wrapped_in_fsdp1),
        op.instead(".parallelize:flat_group", lambda original, mesh, case: mesh.get_group("dp_shard")),
    ),
)
