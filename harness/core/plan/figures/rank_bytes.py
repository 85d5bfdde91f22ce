"""The bytes of a rank's memory: those kept between steps exactly, those of a moment within a step by its wrapper's
arithmetic.

A step has most either while the loss is differentiated or while the last block is. Left out: the CUDA context, buffers
of NCCL, workspaces of kernels, copies for communication. What an allocator wastes of what it reserves is a factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.plan.figures.activations import block_backward_bytes, kept_activation_bytes, logits_and_gradient_bytes
from harness.core.plan.frozen import trained_values
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.memory import muon_bytes
from harness.core.plan.plan import Plan
from harness.core.plan.slices import BYTES, padded_numels
from harness.core.plan.zero import kept_parameter_dtype
from harness.reference.config import is_trainable

STATE_NUMBERS = {"adamw": 2, "sgd": 0, "muon": 2}
WRAPPERS_WITHOUT_BUFFERS = (None, "fsdp2", "fsdp1")
"""Wrappers that keep no buffers of gradients, so that these are gone when a step begins."""


ALLOCATOR_FACTOR = 1.2
"""What an allocator reserves, of what is in use at the most: fixed on two published runs (docs/results/preflight.md)."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank. The first four stay between steps."""

    parameters: int
    """Bytes of the parameters' slices, exactly."""
    gradients: int
    """Bytes of the gradients' slices, exactly."""
    optimizer: int
    """Bytes of its optimizer's state, exactly."""
    padding: int
    """Padding of parameters and gradients, at most."""
    gathered: int
    """Parameters of other ranks, at their most."""
    gathered_after_forward: int
    """Gathered parameters that are there while the loss is computed."""
    unreduced: int
    """Gradients that wait to be reduced."""
    waiting: bool
    """Whether gradients of earlier microbatches are there while the loss is computed."""
    activations: int
    """What autograd keeps of microbatches, an estimate (activations.py)."""
    in_block: int
    """What the backward of a block has in addition, an estimate."""
    in_loss: int
    """Logits, their copies and gradients, an estimate; 0 without the last stage."""

    @property
    def between_steps(self) -> int:
        """Return the bytes that stay between steps."""
        return self.parameters + self.gradients + self.optimizer + self.padding

    @property
    def loss_peak(self) -> int:
        """Return the bytes that are in use while the loss is differentiated; 0 on a rank without the last stage.

        A step begins without gradients, so that they count only if earlier microbatches left some.
        """
        if not self.in_loss:
            return 0
        gradients = self.gradients + self.unreduced if self.waiting else 0
        before_activations = self.parameters + self.optimizer + self.padding + gradients + self.gathered_after_forward
        return before_activations + self.activations + self.in_loss

    @property
    def backward_peak(self) -> int:
        """Return the bytes that are in use while the last block is differentiated."""
        return self.between_steps + self.gathered + self.unreduced + self.activations + self.in_block

    @property
    def peak(self) -> int:
        """Return the most bytes that are in use at one time."""
        return max(self.loss_peak, self.backward_peak)

    @property
    def peak_phase(self) -> str:
        """Return the phase in which most bytes are in use: "loss" or "backward"."""
        return "loss" if self.loss_peak > self.backward_peak else "backward"

    @property
    def reserved(self) -> int:
        """Return the bytes that an allocator reserves for the peak, an estimate."""
        return int(ALLOCATOR_FACTOR * self.peak)


def rank_bytes(case: Case, plan: Plan, rank: int) -> RankBytes:
    """Return the bytes of a rank's memory, by what they are: exact between steps, estimates and bounds within a step."""
    parameters, padded = plan.parameter_bytes[rank]
    gradients = _gradient_bytes(case, plan, rank)
    state = plan.state_bytes[rank][0] if plan.state_bytes else parameters
    copied = plan.traits.master_weights or kept_parameter_dtype(case) != case.training.dtype
    numbers = STATE_NUMBERS[case.training.optimizer] + (copied and case.wrapper in ZERO)
    return RankBytes(
        parameters=parameters,
        gradients=gradients,
        optimizer=numbers * state - muon_bytes(case, plan.slices[rank]),
        padding=2 * (padded - parameters),
        gathered=_gathered_bytes(case, plan, rank),
        gathered_after_forward=_gathered_after_forward_bytes(case, plan, rank),
        unreduced=_unreduced_bytes(case, plan, rank),
        waiting=case.passes > 1 or case.wrapper not in WRAPPERS_WITHOUT_BUFFERS,
        activations=kept_activation_bytes(case, rank, plan.traits),
        in_block=block_backward_bytes(case, rank, plan.traits),
        in_loss=logits_and_gradient_bytes(case, rank, plan.traits),
    )


def _gradient_bytes(case: Case, plan: Plan, rank: int) -> int:
    """Return the bytes of a rank's gradients once they are reduced.

    ZeRO-1 keeps them whole, in the dtype of their sum; ZeRO-2 and 3 keep a part, in the dtype of parameters.
    """
    if case.wrapper not in ZERO:
        return plan.gradient_bytes.get(rank, plan.parameter_bytes[rank])[0]
    kept = kept_parameter_dtype(case)
    if plan.gradient_bytes:
        return plan.gradient_bytes[rank][0] * BYTES[kept] // BYTES[case.training.dtype]
    return plan.parameter_bytes[rank][0] * BYTES[case.features.reduce_dtype or kept] // BYTES[kept]


def _gathered_after_forward_bytes(case: Case, plan: Plan, rank: int) -> int:
    """Return the bytes of gathered parameters that are there while the loss is computed; in a pipeline, those gathered
    at most."""
    if case.dims.pp > 1 or plan.shard_degree == 1:
        return _gathered_bytes(case, plan, rank)
    return sum(kept.bytes for kept in plan.after_forward[rank].values() if kept.degree < plan.shard_degree)


def _gathered_bytes(case: Case, plan: Plan, rank: int) -> int:
    """Return the most bytes of gathered parameters that a rank has at one time; 0 if nothing is sharded.

    These are what is kept whole after forward, and the two largest units that are freed: one in use, one prefetched. A
    pipeline's stages keep what backward gathered until the pass is over.
    """
    if plan.shard_degree == 1:
        return 0
    size = BYTES[case.training.compute_dtype or case.training.dtype]
    if case.dims.pp > 1:
        return _padded_elements(case, plan, rank, plan.slices[rank]) * size
    after = plan.after_forward[rank]
    kept_bytes = sum(kept.bytes for kept in after.values() if kept.degree < plan.shard_degree)
    return kept_bytes + _elements_of_two_largest(case, plan, rank, freed=True) * size


def _unreduced_bytes(case: Case, plan: Plan, rank: int) -> int:
    """Return the bytes of gradients that wait to be reduced.

    If several backwards add up before a reduction, whole gradients are kept, in the dtype of the reduction. If not, those of
    two units are kept, as computed. DDP's buckets are a copy of all. ZeRO-1 adds up in the gradients that it keeps.
    """
    if case.wrapper in ("ddp", "replicate"):
        return plan.gradient_bytes.get(rank, plan.parameter_bytes[rank])[1]
    if case.wrapper == "zero1" or (plan.shard_degree == 1 and case.wrapper is None):
        return 0
    computed = case.training.compute_dtype or case.training.dtype
    features = case.features
    if case.dims.pp > 1 or (features.accumulation > 1 and features.defers_every_reduction):
        return (
            _padded_elements(case, plan, rank, trained_values(case, plan.slices[rank]))
            * BYTES[features.reduce_dtype or computed]
        )
    return _elements_of_two_largest(case, plan, rank, freed=False) * BYTES[computed]


def _elements_of_two_largest(case: Case, plan: Plan, rank: int, *, freed: bool) -> int:
    """Return the elements of the two largest of FSDP's units, counting in each only some parameters.

    freed: whether those count that are freed after forward, rather than those that are trained.
    """
    after = plan.after_forward[rank]

    def is_counted(fqn: str) -> bool:
        if freed:
            return fqn not in after or after[fqn].degree == plan.shard_degree
        return is_trainable(case.training, fqn)

    sizes = []
    for unit in plan.units[rank]:
        sizes.append(_padded_elements(case, plan, rank, filter(is_counted, unit)))
    return sum(sorted(sizes)[-2:])


def _padded_elements(case: Case, plan: Plan, rank: int, names: Iterable[str]) -> int:
    """Return the elements of these parameters as tp leaves them, padded as FSDP gathers them."""
    tp_index = coordinate_of_rank(case.dims, rank)["tp"]
    numels = padded_numels(case, plan.traits, tp_index)
    return sum(numels[fqn] for fqn in names)
