"""Deliberate mistakes in Megatron's distributed optimizer, checkpoints and loss, for its cases alone. All of them, and one:

    harness faults --trainer megatron --checks-only
    harness run zero1_2 --fault harness/faults/megatron.py:NAME --trainer megatron --cases harness/adapters/megatron/cases

What each is named: docs/results/megatron.md.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

nothing_is_wrong = fault(
    breaks="nothing: the optimizer's step is called through one more function",
    bug="",
    case="zero1_2",
    caught_by="",
    named="",
    does=op.before_call(f"{OPTIMIZER}.step_with_ready_grads", lambda *_, **__: None),
)

distributed_optimizer_left_out = fault(
    breaks="the distributed optimizer is not used where it is requested: every rank has all optimizer state",
    bug="of the family of M01 pytorch/torchtitan #711: another parallelism than requested, and equal losses",
    case="zero1_2",
    caught_by="features memory",
    named="another stage of ZeRO",
    does=op.together(
        op.override_argument(
            "harness.adapters.megatron.model:DistributedDataParallelConfig.__init__", use_distributed_optimizer=False
        ),
        op.override_argument(
            "harness.adapters.megatron.trainer:OptimizerConfig.__init__", use_distributed_optimizer=False
        ),
    ),
)

parameters_not_gathered = fault(
    breaks="parameters updated by other ranks are not gathered",
    bug="of the family of G: a collective that is left out",
    case="zero1_2",
    caught_by="replica_agreement traffic",
    named="parameters not gathered",
    does=op.skip_call(f"{BUCKETS}.start_param_sync"),
)

gradients_not_reduced = fault(
    breaks="gradients are not reduced: each rank's optimizer steps on its own samples' gradients",
    bug="of the family of G: a reduction that is left out",
    case="zero1_2",
    caught_by="gradients traffic",
    named="gradients not reduced",
    does=op.skip_call(f"{BUCKETS}.start_grad_sync"),
)


@fault(
    breaks="the rank's shard of the gradients is read one element off, so that each is the neighbour's",
    bug="of the family of S10 pytorch/torchtitan #3356: an offset into a flat vector",
    case="zero1_2",
    caught_by="gradients",
    named="gradients shifted",
)
@partial(op.before_call, f"{OPTIMIZER}._copy_model_grads_to_main_grads")
def gradients_one_off(optimizer: Any) -> None:
    """Shift this rank's part of each gradient buffer by one element, before the optimizer copies it."""
    for buffer in optimizer.buffers:
        part = buffer.grad_data.chunk(optimizer.data_parallel_group.size())[optimizer.data_parallel_group.rank()]
        part.copy_(part.roll(1))


@fault(
    breaks="the ranges of parameters that a rank owns begin one element late: it steps on one that is not reduced for it",
    bug="of the family of S10 pytorch/torchtitan #3356: an offset into a flat vector",
    case="zero1_2",
    caught_by="gradients",
    named="not explained",
)
@partial(op.instead, f"{OPTIMIZER}._build_model_gbuf_param_range_map")
def ranges_one_off(original: Any, places: Any, shard: Any, offset: int) -> Any:
    return original(places, type(shard)(shard.start + 1, shard.end + 1), offset)


norms_not_summed_over_tp = fault(
    breaks="gradients of norms, of which each tp rank has seen its part of the sequence, are not summed over tp",
    bug="T01 NVIDIA/Megatron-LM #1446",
    case="zero1_2_tp_2",
    caught_by="gradients grad_norm",
    named="norms not summed",
    does=op.skip_call("megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"),
)


def _reverse_halves(factory: Any) -> Any:
    merged = factory.merge_fn
    return dataclasses.replace(factory, merge_fn=lambda halves: merged(halves[::-1]))


gate_and_up_exchanged = fault(
    breaks="the halves of the gated layer are read in each other's place",
    bug="of the family of S10 pytorch/torchtitan #3356: what is put together lies in another order",
    case="dist_tp_2_to_pp_2",
    caught_by="resume",
    named="parameters exchanged",
    does=op.change_result("megatron.core.transformer.mlp:apply_swiglu_sharded_factory", _reverse_halves),
)


@fault(
    breaks="what a checkpoint has of the optimizer's moments is read and then forgotten",
    bug="of the family of C: a resume that begins with an empty optimizer",
    case="dist_tp_2_to_pp_2",
    caught_by="resume",
    named="optimizer state lost",
)
@partial(op.after_call, "megatron.core.optimizer.optimizer:FP32Optimizer.load_state_dict")
def moments_forgotten(optimizer: Any, *_: Any) -> None:
    """Set both moments to zero after the optimizer's state was loaded."""
    for state in optimizer.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def _gather_logits(original: Any, model: Any, *args: Any, **named: Any) -> None:
    original(model, *args, **(named | {"parallel_output": False}))


gathered_logits = fault(
    breaks="the model gathers its logits, and gives them to the loss over a split vocabulary",
    bug="T06 NVIDIA/Megatron-LM #7452, item 2: loss and gradients with parallel_output=False",
    case="tp_2",
    caught_by="loss",
    named="not explained",
    does=op.instead("megatron.core.models.gpt.gpt_model:GPTModel.__init__", _gather_logits),
)

initialisers_left_out = fault(
    breaks="initialisers are not called, which alone mark a weight as tensor parallel: the norm counts tp rank 0's parts alone",
    bug="C06 NVIDIA/Megatron-LM #4084 a72c0278e6",
    case="tp_2",
    caught_by="grad_norm",
    named="clipped by another norm",
    does=op.override_argument(
        "harness.adapters.megatron.model:TransformerConfig.__init__", perform_initialization=False
    ),
)

interleaved_as_it_comes = fault(
    breaks="two pipeline ranks send and receive of both neighbours at once, which are one rank: tensors change places",
    bug="NVIDIA/Megatron-LM #750: the interleaved schedule on two ranks without overlap_p2p_comm",
    case="pp_2_interleaved",
    caught_by="loss",
    named="",
    does=op.override_argument(
        "harness.adapters.megatron.model:TransformerConfig.__init__", batch_p2p_comm=True, overlap_p2p_comm=False
    ),
)
