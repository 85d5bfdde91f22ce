"""Bytes that autograd keeps of a forward pass until its backward, by a formula: an estimate, unlike all else in a plan.

For each token of a rank, in the dtype that it computes in, with h the model's dim, v that of keys and values, f that of the
feed-forward, t the tp degree, and r = t with sequence parallel, else 1, a block keeps

    2 h / r              inputs of its two norms
    2 h                  inputs of the matmuls that follow them, which every tp rank has whole
    (2 h + 2 v + 4 f)/t  queries, keys, values, attention's output; what w1 and w3 give, silu of it, and the input of w2

That is an eager block with fused norms and a fused attention kernel. Recomputed, it keeps its input, h / r; by operator ("op")
besides that attention's output and the two results that tp reduces. Behind the last block: norm's and output's inputs, the
logits, and the loss's copy of them in float32, of one of `loss_chunks` at a time. Left out: what unfused norms keep (2 h, in
float32), rotary tables, masks, K/V of other cp ranks, heads after GQA expansion, what kernels and an allocator take.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.plan.slices import BYTES
from harness.plan.stages import actions_of_rank, layers_of_stage, recomputed_layers, stages_of_rank
from harness.spec.case import Case
from harness.spec.traits import USUAL, TrainerTraits


def activation_bytes(case: Case, rank: int, traits: TrainerTraits = USUAL) -> int:
    """The most that a rank keeps at any moment of a step: of all microbatches that wait for their backward, and of the block
    that is recomputed."""
    recomputed = set(recomputed_layers(case, rank))

    def of_stage(stage: int) -> int:
        layers = layers_of_stage(case, stage)
        again = sum(layer in recomputed for layer in layers)
        blocks = (len(layers) - again) * block_bytes(case) + again * recomputed_block_bytes(case)
        return blocks + (_loss_bytes(case, traits) if stage == case.n_stages - 1 else 0)

    return most_waiting(case, rank, of_stage) + (block_bytes(case) if recomputed else 0)


def most_waiting(case: Case, rank: int, of_stage: Callable[[int], int]) -> int:
    """Of what a forward pass of a stage leaves until its backward, the most that is there at once, in the schedule's order."""
    if case.dims.pp == 1:
        return of_stage(0)
    sizes = {stage: of_stage(stage) for stage in stages_of_rank(case, rank)}
    there = most = 0
    for stage, kind, _ in actions_of_rank(case, rank):
        there += {"F": 1, "B": -1, "W": -1, "I": 0}[kind] * sizes[stage]
        most = max(most, there)
    return most


def block_bytes(case: Case) -> int:
    """Of one block and one microbatch."""
    model, tp = case.model, case.dims.tp
    kv = model.n_kv_heads * model.head_dim
    width = 2 * model.dim // _residual_degree(case) + 2 * model.dim + (2 * model.dim + 2 * kv + 4 * model.ffn_dim) // tp
    return _tokens(case) * width * _size(case)


def recomputed_block_bytes(case: Case) -> int:
    """Of one that is computed again in backward."""
    model = case.model
    width = model.dim // _residual_degree(case)
    if case.features.activation_checkpointing == "op":
        width += 2 * model.dim // _residual_degree(case) + model.dim // case.dims.tp
    return _tokens(case) * width * _size(case)


def _loss_bytes(case: Case, traits: TrainerTraits) -> int:
    """Of one microbatch in the last stage, behind its blocks."""
    model, tp = case.model, case.dims.tp
    columns = -(-model.vocab_size // tp) if case.features.loss_parallel else model.vocab_size
    inputs = (model.dim // _residual_degree(case) + model.dim) * _size(case)
    return _tokens(case) * (inputs + columns * (_size(case) + BYTES["float32"]) // traits.loss_chunks)


def _residual_degree(case: Case) -> int:
    return case.dims.tp if case.features.sequence_parallel else 1


def _tokens(case: Case) -> int:
    return case.local_batch * (case.training.seq_len // case.dims.cp)


def _size(case: Case) -> int:
    return BYTES[case.training.compute_dtype or case.training.dtype]
