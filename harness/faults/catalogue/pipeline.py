"""Faults of pipelines: what stages hold, what is summed over them, the schedule and what it does to gradients."""

from __future__ import annotations

import dataclasses

from harness.faults import fault
from harness.faults import operators as op

# ---- stages


loss_normalised_after_backward = fault(
    breaks="the loss is divided by the number of tokens only when the schedule has run backward already",
    bug="L04 pytorch/torchtitan #4194",
    case="pp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.override_argument(".trainer:scale_loss", valid_tokens=1),
)
norm_of_each_stage = fault(
    breaks="the gradient norm is not summed over the stages: each clips by its own",
    bug="C01 pytorch/torchtitan #649, #596",
    case="pp_2",
    caught_by="grad_norm update",
    named="clipped by another norm",
    does=op.skip_call(".pipeline:group_of"),
)
layers_left_over_are_never_built = fault(
    breaks="each stage gets the same number of layers, and those that are left over are never built",
    bug="P05 pytorch/torchtitan #963",
    case="pp_2_uneven_layers",
    caught_by="completed",
    named="layers lost",
    does=op.instead("numpy:array_split", lambda split, layers, n: split(layers[: len(layers) // n * n], n)),
)
stages_start_alike = fault(
    breaks="every stage draws its weights from the same seed, so that stages start alike",
    bug="R02 pytorch/torchtitan #689; allenai/OLMo-core #679",
    case="pp_2",
    caught_by="initial_weights",
    named="other initial weights",
    does=op.on_rank(  # layer 2 is its first one
        1,
        op.change_result(
            "harness.core.trainers.support.weights:read_weights",
            lambda weights: {fqn: weights[fqn.replace("layers.2.", "layers.0.")] for fqn in weights},
        ),
    ),
)
only_the_first_part_clipped = fault(
    breaks="only the first of a rank's model parts is clipped",
    bug="P13 pytorch/torchtitan #500, #792: a loop over [model] where all model parts are meant",
    case="pp_2_zbv",
    caught_by="grad_norm update",
    named="clipping left out",
    does=op.change_argument(".clip:clip_gradients", parameters=lambda of_both: of_both[: len(of_both) // 2]),
)

# ---- the schedule

gpipe_whatever_is_asked = fault(
    breaks="every pipeline runs GPipe, whatever schedule is requested",
    bug="of the family of P07: a schedule that is looked up by another name; numbers are the same, memory is not",
    case="pp_2",
    caught_by="schedule",
    named="another feature",
    does=op.override_argument(".pipeline:get_schedule_class", schedule_name="GPipe"),
)
as_many_microbatches_as_stages = fault(
    breaks="the batch is cut into as many microbatches as there are stages, not into as many as requested",
    bug="P07 pytorch/torchtitan #781: the default number of microbatches was pp",
    case="pp_2",
    caught_by="schedule samples",
    named="another feature",
    does=op.change_argument(
        ".pipeline:build_schedule",
        case=lambda case: dataclasses.replace(
            case, features=dataclasses.replace(case.features, microbatches=case.dims.pp)
        ),
    ),
)
gradients_scaled_in_every_pass = fault(
    breaks="each pass of the schedule divides all gradients by the number of microbatches, those of earlier passes again",
    bug="P01 pytorch/torchtitan #1732: scale_grads=True together with gradient accumulation",
    case="pp_2_accum",
    caught_by="gradients grad_norm",
    named="unequal contributions",
    does=op.override_argument("torch.distributed.pipelining.schedules:Schedule1F1B.__init__", scale_grads=True),
)
each_stage_halves_its_gradient = fault(
    breaks="the gradient that each stage sends back is halved, so the further from the loss, the smaller",
    bug="P02 deepspeedai/DeepSpeed #8154: every stage divides by the accumulation steps again",
    case="pp_3",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.scale_gradient(
        "torch.distributed.pipelining.stage:PipelineStage.forward_maybe_with_nosync",
        1 / 2,
        when=lambda stage, *_, **__: not stage.is_last,
    ),
)
