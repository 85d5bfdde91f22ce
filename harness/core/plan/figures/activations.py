"""Bytes that autograd keeps of a forward pass until its backward, by a formula: an estimate, unlike all else in a plan.

h is the model's dim, v that of keys and values, f that of the feed-forward. t is the tp degree; r = t with sequence parallel,
else 1. For each token of a rank, in the dtype that it computes in, a block keeps

    2 h / r              inputs of its two norms.
    2 h                  inputs of the matmuls that follow them, which every tp rank has whole.
    (2 h + 2 v + 4 f)/t  queries, keys, values, attention's output; what w1 and w3 give, silu of it, and the input of w2.

This is an eager block with fused norms and a fused attention kernel. Recomputed, it keeps its input, h / r; by operator ("op")
also what the trainer's policy names (`op_keeps`) and the two results that tp reduces. Norm and output keep their inputs.
Left out: what unfused norms keep (2 h, in float32), rotary tables, masks, K/V of other cp ranks, heads after GQA expansion.

At its most in backward a block also has its gradients, of which there are 2 h / r + h + 3 f / t at once. At its most the loss
has three numbers of at least float32 for each token and row of the vocabulary, in one of `loss_chunks` at a time. They are the
logarithms that autograd keeps, their gradient, and that of the logits; over tp (`loss_parallel`) also their exponentials.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.core.case.case import Case
from harness.core.case.traits import USUAL_TRAITS, TrainerTraits
from harness.core.plan.slices import BYTES
from harness.core.plan.stages import actions_of_rank, layers_of_stage, recomputed_layers, stages_of_rank


def kept_activation_bytes(case: Case, rank: int, traits: TrainerTraits = USUAL_TRAITS) -> int:
    """Return the most bytes of activations that a rank keeps at any moment of a step, for microbatches that wait for
    backward."""
    recomputed = set(recomputed_layers(case, rank))

    def of_stage(stage: int) -> int:
        """Return the bytes that one forward pass of a stage keeps until its backward."""
        layers = layers_of_stage(case, stage)
        again = sum(layer in recomputed for layer in layers)
        blocks = (len(layers) - again) * block_activation_bytes(case) + again * recomputed_block_bytes(case, traits)
        return blocks + (_loss_input_bytes(case) if stage == case.n_stages - 1 else 0)

    return most_waiting_bytes(case, rank, of_stage)


def most_waiting_bytes(case: Case, rank: int, of_stage: Callable[[int], int]) -> int:
    """Return the most bytes that forward passes leave until their backward, at one time in the schedule's order.

    of_stage: the bytes that one forward pass of a stage leaves.
    """
    if case.dims.pp == 1:
        return of_stage(0)
    sizes = {stage: of_stage(stage) for stage in stages_of_rank(case, rank)}
    waiting_bytes = 0
    most_bytes = 0
    for stage, kind, _ in actions_of_rank(case, rank):
        waiting_bytes += {"F": 1, "B": -1, "W": -1, "I": 0}[kind] * sizes[stage]
        most_bytes = max(most_bytes, waiting_bytes)
    return most_bytes


def block_activation_bytes(case: Case) -> int:
    """Return the bytes of one microbatch that a block keeps until backward, if nothing of it is recomputed."""
    model = case.model
    tp = case.dims.tp
    kv = model.n_kv_heads * model.head_dim
    width = 2 * model.dim // _residual_degree(case) + 2 * model.dim + (2 * model.dim + 2 * kv + 4 * model.ffn_dim) // tp
    return microbatch_tokens(case) * width * compute_dtype_bytes(case)


def recomputed_block_bytes(case: Case, traits: TrainerTraits = USUAL_TRAITS) -> int:
    """Return the bytes of one microbatch that a block keeps until backward computes it again; with "op", what the
    policy keeps too."""
    model = case.model
    tp = case.dims.tp
    width = model.dim // _residual_degree(case)
    if case.features.activation_checkpointing == "op":
        kv = model.n_kv_heads * model.head_dim
        results = {"attention": model.dim // tp, "wq": model.dim // tp, "wk": kv // tp, "wv": kv // tp}
        results |= {"w1": model.ffn_dim // tp, "w3": model.ffn_dim // tp, "wo": model.dim, "w2": model.dim}
        width += sum(results[name] for name in traits.op_keeps)
        width += 2 * model.dim // _residual_degree(case) if tp > 1 else 0
    return microbatch_tokens(case) * width * compute_dtype_bytes(case)


def block_backward_bytes(case: Case, rank: int, traits: TrainerTraits = USUAL_TRAITS) -> int:
    """Return the bytes of one block's backward, in addition to those kept by forward: recomputed values and gradients."""
    model = case.model
    tp = case.dims.tp
    again = (
        max(block_activation_bytes(case) - recomputed_block_bytes(case, traits), 0)
        if recomputed_layers(case, rank)
        else 0
    )
    gradients = 2 * model.dim // _residual_degree(case) + model.dim + 3 * model.ffn_dim // tp
    return again + microbatch_tokens(case) * gradients * compute_dtype_bytes(case)


def logits_and_gradient_bytes(case: Case, rank: int, traits: TrainerTraits = USUAL_TRAITS) -> int:
    """Return the most bytes of one microbatch's logits, their copies and gradients, of one chunk if the loss has chunks.

    0 on a rank without the last stage.
    """
    if case.n_stages - 1 not in stages_of_rank(case, rank):
        return 0
    model = case.model
    tp = case.dims.tp
    parallel = case.features.loss_parallel and tp > 1
    columns = -(-model.vocab_size // tp) if parallel else model.vocab_size
    numbers = 4 if parallel else 3
    return (
        microbatch_tokens(case)
        * columns
        * numbers
        * max(compute_dtype_bytes(case), BYTES["float32"])
        // traits.loss_chunks
    )


def _loss_input_bytes(case: Case) -> int:
    """Return the bytes that final norm and output keep of one microbatch: their inputs."""
    return (
        microbatch_tokens(case)
        * (case.model.dim // _residual_degree(case) + case.model.dim)
        * compute_dtype_bytes(case)
    )


def _residual_degree(case: Case) -> int:
    """Return the number of tp ranks over which the residual stream is cut: 1 without sequence parallel."""
    return case.dims.tp if case.features.sequence_parallel else 1


def microbatch_tokens(case: Case) -> int:
    """Return the tokens of a microbatch on a rank."""
    return case.local_batch * (case.training.seq_len // case.dims.cp)


def compute_dtype_bytes(case: Case) -> int:
    """Return the bytes of one number in the dtype of computation."""
    return BYTES[case.training.compute_dtype or case.training.dtype]
