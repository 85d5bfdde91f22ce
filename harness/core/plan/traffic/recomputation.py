"""Traffic of recomputation: collectives that run again because activations are recomputed in backward."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.plan.slices import BYTES
from harness.core.plan.stages import recomputed_layers
from harness.core.plan.traffic.context_parallel import cp_width
from harness.core.plan.traffic.flow import Flow


def recomputed_flows(case: Case, traits: TrainerTraits, rank: int, length: int) -> Iterable[Flow]:
    """Yield what activation checkpointing issues again in backward, for the rank's recomputed layers; flows of 0 bytes
    without any.

    FSDP issues nothing again: it gathers once for all of backward. A block runs again only until the last activation
    that backward needs, the input of w2. So the residual stream is brought into attention and feed-forward again, and
    out of attention, but not out of feed-forward. Two things bring it out of there, too: dropout, whose mask backward
    needs, and a trainer that does not stop early (`ac_early_stop`). "op" keeps the results of reductions and of
    attention, and with the latter what a ring passed on for it. What was gathered before attention (`cp_gathers`) is
    gathered again.
    """
    dims = case.dims
    model = case.model
    training = case.training
    layers = len(recomputed_layers(case, rank))
    keeps_results = case.features.activation_checkpointing == "op"
    size = BYTES[training.compute_dtype or training.dtype]
    activation = layers * case.local_batch * (length // dims.cp) * model.dim * size * case.passes
    if dims.tp > 1 and case.features.sequence_parallel:
        yield Flow("tp", "recomputed activations", "all_gather", "backward", 2 * activation)
    if dims.tp > 1 and not keeps_results:
        op = "reduce_scatter" if case.features.sequence_parallel else "all_reduce"
        to_the_end = model.dropout or not traits.ac_early_stop
        yield Flow("tp", "recomputed activations", op, "backward", (2 if to_the_end else 1) * activation)
    if dims.cp > 1 and (traits.cp_gathers or not keeps_results):
        gathered = traits.cp_gathers or case.features.cp_rotation == "allgather"
        op, times = ("all_gather", dims.cp) if gathered else ("all_to_all", dims.cp - 1)
        passed = 2 * activation * cp_width(case, traits) // model.dim // dims.tp
        yield Flow("cp", "recomputed keys and values", op, "backward", times * passed)
