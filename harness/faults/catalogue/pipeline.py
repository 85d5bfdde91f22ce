"""Mistakes of pipelines: what stages hold, what is summed over them, the schedule and what it does to gradients."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

# ---- stages


loss_normalised_after_backward = fault(
    breaks="the loss is divided by the number of tokens only when the schedule has run backward already",
    bug="L04 pytorch/torchtitan #4194",
    case="pp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.override_argument(".trainer:scaled", valid_tokens=1),
)
loss_not_passed_on = fault(
    breaks="the loss is not passed on from the last stage, so that the first one reports 0",
    bug="E-class: a sum that each rank reports of its own",
    case="pp_2",
    caught_by="reported_loss",
    named="wrong report",
    does=op.instead(".trainer:reported_loss", lambda original, total, mesh, tokens: original(total, None, tokens)),
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
            "harness.trainers.support.weights:read_weights",
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
only_the_first_stage_is_zeroed = fault(
    breaks="gradients of a rank's second stage are not zeroed between steps",
    bug="of the family of G17 (zero_grad skipped for a config branch): zero_grad of model_parts[0] alone",
    case="pp_2_zbv",
    caught_by="gradients grad_norm loss",
    named="gradients not zeroed",
    does=op.skip_call("torch.optim:Optimizer.zero_grad", when=op.nth_call(*range(2, 80, 2))),
)


@fault(
    breaks="the layer left over goes to the last stage, which has the output too, not to the first",
    bug="E-class: stage boundaries are round(k * n_layers / n_stages), and Python rounds 2.5 to 2",
    case="pp_2_uneven_layers",
    caught_by="completed",
    named="another feature",
)
@partial(op.instead, ".pipeline:cut", when=lambda model, stage, case: case.n_stages > 1)
def stage_boundaries_rounded(original: Any, model: Any, stage: int, case: Any) -> None:
    n_layers, n_stages = len(model.layers), case.n_stages
    first, end = (round(k * n_layers / n_stages) for k in (stage, stage + 1))
    for index in {*range(n_layers)} - {*range(first, end)}:
        del model.layers[str(index)]
    if stage > 0:
        model.tok_embeddings = None
    if stage < n_stages - 1:
        model.norm = model.output = None


@fault(
    breaks="the first stage deals its samples to microbatches round robin, the last stage's labels stay in blocks",
    bug="E-class: a strided split into microbatches is applied to the inputs and forgotten for the target",
    case="pp_4",
    caught_by="samples gradients loss",
    named="wrong labels",
)
@partial(op.instead, ".pipeline:run")
def tokens_dealt_to_other_microbatches_than_labels(
    original: Any, schedule: Any, tokens: Any, labels: Any, **rest: Any
) -> Any:
    dealt = tokens.unflatten(0, (-1, schedule._n_microbatches)).transpose(0, 1).flatten(0, 1)
    return original(schedule, dealt, labels, **rest)
