"""Faults of a tied embedding of which the first and the last stage of a pipeline have a copy each."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

EMBEDDING = "tok_embeddings.weight"
SUM = ".tied:sum_gradients"

tied_gradients_not_summed_over_stages = fault(
    breaks="each stage steps its copy of a tied embedding by the gradient of its own use",
    bug="G23 uw-syfi/piper #13",
    case="pp_2_tied",
    caught_by="gradients grad_norm traffic replica_agreement",
    named="gradients not reduced",
    does=op.skip_call(SUM),
)


@fault(
    breaks="slices of a tied embedding's gradient are added to other rows, because the last stage's ranks hold them in another"
    " order",
    bug="G24 NVIDIA/Megatron-LM #844, #6500: each stage's flat buffer has it at another place",
    case="pp_2_fsdp_2_tied",
    caught_by="gradients grad_norm traffic",
    named="not explained",
)
@partial(op.instead, ".tied:group_of_ends")
def tied_gradients_of_other_rows_summed(original: Any, *_: Any) -> Any:
    """Return the group of this rank among [0, 3] and [1, 2], whose ranks hold different rows. Makes both groups."""
    import torch.distributed as dist

    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 3), (1, 2))}
    return next(group for ranks, group in groups.items() if op.this_rank() in ranks)


tied_gradients_summed_twice = fault(
    breaks="the gradients of a tied embedding's copies are added up twice",
    bug="of the family of G13: of a weight with two names, each name has its gradient reduced",
    case="pp_2_tied",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.repeat_call(SUM),
)


@fault(
    breaks="the gradients of a tied embedding's copies are averaged",
    bug="of the family of G23: copies of a parameter are taken for replicas, whose gradients are averaged",
    case="pp_2_tp_2_tied",
    caught_by="gradients grad_norm",
    named="gradients scaled",
)
@partial(op.after_call, SUM)
def tied_gradients_averaged_over_stages(parts: Any, group: Any) -> None:
    """Divide the summed gradients of the tied weight by two."""
    from harness.core.trainers.llama3 import clip, tied

    for gradient in clip.local_gradients(tied.weights(parts)):
        gradient.div_(2)


tied_copy_counted_in_the_norm = fault(
    breaks="the gradient norm counts a tied embedding on both stages that have it",
    bug="C12 NVIDIA/Megatron-LM #7227, #7228",
    case="pp_4_tied",
    caught_by="grad_norm update",
    named="clipped by another norm",
    does=op.change_argument(".clip:clip_gradients", copies=lambda _: ()),
)

_late: list[Any] = []
tied_gradients_summed_after_clipping = fault(
    breaks="the gradients of a tied embedding's copies are added up only when they are clipped",
    bug="of the family of C12: the norm counts one part of a tied embedding's gradient",
    case="pp_2_tied",
    caught_by="gradients grad_norm replica_agreement",
    named="gradients not reduced",
    does=op.together(
        op.instead(SUM, lambda original, *args: _late.append(partial(original, *args))),
        op.after_call(".clip:clip_gradients", lambda *_: [_late.pop()() for _ in [*_late]]),
    ),
)


def _without_copies(original: Any, parameters: Any, max_norm: Any, groups: Any, copies: Any) -> Any:
    ids_of_copies = {*map(id, copies)}
    return original([parameter for parameter in parameters if id(parameter) not in ids_of_copies], max_norm, groups)


tied_copy_not_clipped = fault(
    breaks="the copy of a tied embedding that the norm leaves out is not clipped either, so that copies drift",
    bug="of the family of C07: some ranks alone clip a parameter that others have as well",
    case="pp_2_tied",
    caught_by="update replica_agreement",
    named="clipping left out",
    does=op.instead(".clip:clip_gradients", _without_copies, when=lambda *args: bool(args[-1])),
)


def _left_out(original: Any, *args: Any) -> Any:
    """Return the optimizer without the embedding, which comes first among the parameters of a stage."""
    optimizer = original(*args)
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:]
    return optimizer


tied_copy_never_stepped = fault(
    breaks="the last stage's optimizer lacks its copy of a tied embedding, which stays as it began",
    bug="of the family of G23: NVIDIA/Megatron-LM #656, copies that begin alike and part",
    case="pp_2_tied",
    caught_by="completed memory",
    named="incomplete",
    does=op.on_rank(1, op.instead(".recipe:build_optimizer", _left_out)),
)
tied_copy_starts_differently = fault(
    breaks="the last stage draws its copy of a tied embedding by itself",
    bug="of the family of R02: stages that draw from other seeds, where they should start alike",
    case="pp_2_tied",
    caught_by="initial_weights shard_contents",
    named="other initial weights",
    does=op.on_rank(
        1,
        op.change_result(
            "harness.core.trainers.support.weights:read_weights",
            lambda weights: {**weights, EMBEDDING: weights[EMBEDDING][::-1].copy()},
        ),
    ),
)


def _without_embedding(original: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Load a checkpoint into the state but for the embedding, which stays as it is."""
    kept = state["model"].pop(EMBEDDING)
    original(state, *args, **kwargs)
    state["model"][EMBEDDING] = kept


tied_copy_not_loaded = fault(
    breaks="the last stage does not read its copy of a tied embedding, which the checkpoint has under the first stage's name",
    bug="of the family of S05: partial loads (strict=False) leave a parameter at its initial value",
    case="tied_fsdp_2_to_pp_2",
    caught_by="resume loss gradients",
    named="parameters not loaded",
    does=op.on_rank(1, op.instead("torch.distributed.checkpoint:load", _without_embedding)),
)
