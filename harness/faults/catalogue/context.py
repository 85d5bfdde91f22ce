"""Faults of context parallel: who receives which positions, the K/V exchange, and what is reduced over cp."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op
from harness.faults.catalogue.loss import tokens_times_ranks

CUT = ".context:shard_sequence"

# ---- what is reduced over cp


fsdp_left_out_with_cp_alone = fault(
    breaks="FSDP is applied only where dp_shard is above 1, so with cp alone nothing reduces gradients over cp",
    bug="M03 pytorch/torchtitan #685",
    case="cp_2",
    caught_by="shard_contents placements traffic gradients replica_agreement",
    named="another layout",
    does=op.skip_call(".parallelize:apply_fsdp"),
)
dp_shard_and_cp_not_folded = fault(
    breaks="fully_shard gets (dp_shard, cp) unfolded and takes it for HSDP's (replicate, shard)",
    bug="M02 NVIDIA-NeMo/Automodel #2768: a native 2-D slice handed to fully_shard",
    case="fsdp_2_cp_2",
    caught_by="shard_contents placements traffic memory",
    named="another layout",
    does=op.instead(".parallelize:data_parallel_mesh", lambda original, mesh: mesh["dp_shard", "cp"]),
)


@fault(
    breaks="the reported loss is summed over the dp ranks and not over cp",
    bug="M08 pytorch/torchtitan #761",
    case="fsdp_2_cp_2",
    caught_by="reported_loss",
    named="wrong report",
)
@partial(op.instead, ".trainer:reported_loss")
def displayed_loss_not_reduced_over_cp(original: Any, loss_sum: Any, mesh: Any, valid_tokens: int) -> float:
    """Return the loss with its sum reduced over dp_shard alone."""
    import torch.distributed as dist

    dist.all_reduce(loss_sum, group=mesh.get_group("dp_shard"))
    return float(loss_sum) / valid_tokens


loss_averaged_per_cp_rank = fault(
    breaks="every cp rank divides by the valid tokens in its part of the sequence alone",
    bug="L02 NVIDIA/Megatron-LM #7513; volcengine/verl #5993: the denominator is the count of the cp rank",
    case="cp_2",
    caught_by="gradients grad_norm reported_loss",
    named="averaged locally",
    does=op.instead(".trainer:count_valid", tokens_times_ranks),
)
gradients_scaled_without_cp = fault(
    breaks="gradients are scaled by the number of dp ranks, but averaged over dp and cp ranks",
    bug="G09 NVIDIA/Megatron-LM 3bdcbbbe5d; SkyRL #1420: scaling by the size of dp without cp",
    case="cp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.change_argument(".trainer:scale_loss", ranks=lambda ranks: ranks // 2),  # the case has cp 2
)

# ---- positions


def _positions_changed(change: Any) -> Any:
    """Return the operator that gives a cp rank change(its positions)."""
    return op.change_result(CUT, lambda part: (*part[:2], change(part[2])))


rope_restarts_on_each_cp_rank = fault(
    breaks="every cp rank counts positions from 0, so rotary angles restart with each part of the sequence",
    bug="X04 pytorch/torchtitan #792; VeOmni #448: RoPE positions not those of the rank's own tokens",
    case="cp_2_contiguous",
    caught_by="positions loss gradients",
    named="positions",
    does=_positions_changed(lambda at: at - at[0]),
)
rope_counted_by_each_cp_rank = fault(
    breaks="the model gets no positions under cp and counts its tokens from 0 on every rank",
    bug="X04 of the family of VeOmni #448: nobody hands a cp rank its positions",
    case="cp_2",
    caught_by="loss gradients",
    named="not explained",
    does=op.change_result(".trainer:sequence_part", lambda part: part._replace(positions=None)),
)
rope_contiguous_under_load_balancing = fault(
    breaks="rotary positions are sliced contiguously while tokens are balanced head with tail",
    bug="X04 pytorch/torchtitan #2780: RoPE contiguous, tokens zig-zag",
    case="cp_2",
    caught_by="positions loss gradients",
    named="positions",
    does=_positions_changed(lambda at: at.argsort() + op.this_rank() * len(at)),
)
rope_of_later_stages_not_sliced = fault(
    breaks="only the first pipeline stage is given the positions of its cp rank, later ones count from 0",
    bug="X04 pytorch/torchtitan #792: of all model parts, only the first one's rotary table was sliced",
    case="pp_2_cp_2_contiguous",
    caught_by="positions loss gradients",
    named="positions",
    does=op.on_rank((2, 3), op.change_argument(".pipeline:run", positions=lambda at: at - at[0])),
)

# ---- what a cp rank receives


def _option_of_the_ring(name: str, value: bool) -> Any:
    """Return an act that sets an option of torch's ring attention, whatever it is called with."""

    def assign(*_: Any, **__: Any) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        setattr(ring._cp_options, name, value)

    return assign


context_parallel_never_entered = fault(
    breaks="the batch is never cut: every cp rank computes whole sequences, with local attention",
    bug="X01 pytorch/torchtitan #1880: the context is never entered (wrong indentation), cp silently off",
    case="cp_2",
    caught_by="samples traffic",
    named="CP not applied",
    does=op.together(
        op.instead(CUT, lambda original, tokens, labels, mesh, **_: (tokens, labels, None)),
        op.skip_call(".context:apply_context_parallel"),
    ),
)
attention_stays_local = fault(
    breaks="attention of each cp rank looks at its own part of the sequence only",
    bug="of the family of X01: forms of cp that patch a function are lost on attention that imported it by name",
    case="cp_2_contiguous",
    caught_by="traffic loss gradients exchange",
    named="K/V not exchanged",
    does=op.skip_call(".context:apply_context_parallel"),
)
ring_merges_in_float32 = fault(
    breaks="the ring merges the partial results of attention in float32, whatever the model's dtype",
    bug="of the family of N03: torch's default for ring attention (_cp_options.convert_to_f32), whatever the model's dtype",
    case="cp_2",
    caught_by="traffic loss gradients",
    named="rounded",
    does=op.after_call(
        "harness.core.trainers.support.cpu_attention:support_ring", _option_of_the_ring("convert_to_f32", True)
    ),
)

# ---- the mask of packed documents

MASK = ".context:document_mask"


def _mask_of(documents: Any, queries: Any, keys: Any, *, causal: Any, positions: Any) -> Any:
    """Return the mask of attention, True where a query sees a key: in the same document, and not before it.

    causal: positions of the queries where order counts. positions: those where documents count.
    """
    same_document = documents[:, positions].unsqueeze(-1) == documents[:, keys].unsqueeze(-2)
    return same_document & (causal.unsqueeze(-1) >= keys)


def _positions_from_zero(positions: Any) -> Any:
    """Return positions 0, 1, .. in the number of those given."""
    import torch

    return torch.arange(len(positions), device=positions.device)


mask_from_local_positions = fault(
    breaks="the mask compares each rank's queries, counted from 0, with the positions of all keys",
    bug="of the family of X04: a mask made from local positions",
    case="cp_2_documents_contiguous",
    caught_by="loss gradients grad_norm",
    named="not explained",
    does=op.instead(
        MASK, lambda _, rows, at, keys: _mask_of(rows, at, keys, causal=_positions_from_zero(at), positions=at)
    ),
)
borders_of_the_whole_row_on_each_rank = fault(
    breaks="each cp rank takes its queries' documents from the beginning of the row, whatever part it holds",
    bug="of the family of K07: cu_seqlens of the whole row handed to every cp rank",
    case="cp_2_documents_contiguous",
    caught_by="loss gradients grad_norm",
    named="not explained",
    does=op.instead(
        MASK, lambda _, rows, at, keys: _mask_of(rows, at, keys, causal=at, positions=_positions_from_zero(at))
    ),
)


@fault(
    breaks="documents are numbered after the load-balanced shuffle, which has torn them apart",
    bug="of the family of X04 pytorch/torchtitan #2780: borders of documents read from tokens that are shuffled already",
    case="cp_2_documents",
    caught_by="loss gradients grad_norm",
    named="not explained",
)
@partial(op.instead, MASK)
def borders_lost_after_the_shuffle(original: Any, documents: Any, queries: Any, keys: Any) -> Any:
    """Return the mask of documents that are numbered anew in the order of the shuffled tokens."""
    begins = (documents.diff(dim=1, prepend=documents[:, :1]) != 0)[:, keys]
    numbered = documents.scatter(1, keys.expand_as(documents), begins.cumsum(dim=1))
    return original(numbered, queries, keys)
