"""The evidence of one rank on one optimizer step: frozen dataclasses of plain values; arrays are numpy."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from harness.core.evidence.format import LATER
from harness.core.evidence.numbers import Number


@dataclass(frozen=True)
class Microbatch:
    """The inputs of one forward pass of this rank, and the loss that it computed from them."""

    tokens: np.ndarray | None
    """int64 [samples, positions]; None if this rank received none. A pipeline's first stage receives them."""
    labels: np.ndarray | None
    """int64 [samples, positions], -100 where a token does not count; None if this rank received none. They keep their own shape
    where it is not that of the tokens."""
    loss_sum: float | None
    """Sum of the losses of this rank's valid tokens, in nats; None if this rank computed no loss."""
    valid_tokens: int | None
    """Number of tokens whose labels count; None if this rank computed no loss."""
    chunks: tuple[int, ...] = ()
    """Number of labels of each part, in order, if the loss was computed in several parts."""


class Call(NamedTuple):
    """A call of a module's forward from Python; in backward it is a recomputation."""

    phase: str
    """Phase, as in Collective."""
    fqn: str
    """Name of the module."""


class Matmul(NamedTuple):
    """All matmuls of a phase in one dtype."""

    phase: str
    """Phase, as in Collective."""
    dtype: str
    """Dtype of the operands."""


class Attention(NamedTuple):
    """An operator of attention."""

    phase: str
    """Phase, as in Collective."""
    kind: str
    """Fused kernel ("attention"), its backward ("attention_backward"), or "batched matmul"."""


class QuantizedMatmul(NamedTuple):
    """A matmul of a module that ran in 8 bits."""

    phase: str
    """Phase, as in Collective."""
    fqn: str
    """Name of the module."""
    format: str
    """8-bit format of the operands."""


class SavedTensorsHook(NamedTuple):
    """A hook on the tensors that autograd saves for backward."""

    phase: str
    """Phase in which it was put on."""
    module: str
    """Python module that defines the hook."""
    owner: str
    """Class or function of that module."""


@dataclass(frozen=True)
class Activity:
    """The work of a rank in a step, as counts of calls."""

    calls: dict[Call, int] = field(default_factory=dict)
    """Calls of each module's forward."""
    matmuls: dict[Matmul, int] = field(default_factory=dict)
    """Matmuls by phase and dtype."""
    attention: dict[Attention, int] = field(default_factory=dict)
    """Attention operators by phase and kind."""
    random: dict[str, int] = field(default_factory=dict)
    """Operators that drew random numbers, by phase."""
    quantized: dict[QuantizedMatmul, int] = field(default_factory=dict)
    """Matmuls in 8 bits, by phase, module and format."""
    inputs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Fqn -> the sum of squares of a module's forward inputs, and how many numbers these are; in step 1 alone."""
    saved: dict[SavedTensorsHook, int] = field(default_factory=dict)
    """Hooks on tensors saved for backward."""
    other_states: dict[str, int] = field(default_factory=dict)
    """Fqn -> recomputations that began with another state of the random generator than forward did."""


@dataclass(frozen=True)
class AfterForward:
    """Parameters of one model part that were in memory when its forward pass ended."""

    bytes: dict[str, int]
    """Fqn -> bytes of the parameter that are there."""
    storage: int
    """Bytes of all distinct storages behind them."""


@dataclass(frozen=True)
class AfterEvaluation:
    """Parameters of one model part that were in memory after passes that trained nothing, when the next step began."""

    step: int
    """Last step before those passes."""
    bytes: dict[str, int]
    """Fqn -> bytes of the parameter that are there."""
    storage: int
    """Bytes of all distinct storages behind them."""
    gathered: tuple[str, ...] = ()
    """Fqns of which more than this rank's slice is there. Bytes do not show it: two slices in half the size equal one."""


@dataclass(frozen=True)
class UnsettledGradient:
    """A DTensor gradient whose placements differ from its parameter's."""

    mesh: Any
    """Ranks of the mesh, nested by axis."""
    placements: tuple[str, ...]
    """Placement of the gradient along each mesh axis: Partial(sum), Partial(avg), Replicate, Shard(0)."""
    wanted: tuple[str, ...]
    """Placement of the parameter along each mesh axis."""
    bytes: int
    """Bytes of the rank's part."""
    settled_bytes: int
    """Bytes of the rank's part once it lies as the parameter does."""


@dataclass(frozen=True)
class StepEvidence:
    """One optimizer step on one rank. Arrays are this rank's local parts, by the reference's fqn."""

    step: int
    """Number of the step, from 1."""
    microbatches: tuple[Microbatch, ...]
    """Forward passes that trained, in order."""
    reported_loss: float | None
    """Loss that the trainer reports; None if it reports none."""
    grad_norm: float | None
    """Norm of gradients that the trainer reports; None if it reports none."""
    lr: float | None
    """Learning rate, as the optimizer has it in its step; None if it was not read."""
    gradients: dict[str, np.ndarray]
    """Gradients that clipping was given, on their way to the optimizer."""
    parameters: dict[str, np.ndarray]
    """Parameters after the step."""
    optimizer_state: dict[str, dict[str, np.ndarray]]
    """State after the step, by fqn and the optimizer's key; only of the last step and of one that a checkpoint follows."""
    memory: dict[str, int]
    """Bytes held after the step, by kind: parameters, gradients, optimizer_state."""
    activity: Activity = field(default_factory=Activity)
    """Counts of what the rank computed."""
    positions: tuple[np.ndarray, ...] = ()
    """Different position arrays that model parts received: int64 [positions] or [samples, positions]."""
    actions: tuple[str, ...] = ()
    """Actions of pipeline stages in order, as torch writes them: stage, kind (F, B, I, W), microbatch."""
    after_forward: tuple[AfterForward, ...] = ()
    """One record for each forward pass of each model part."""
    changed: dict[str, np.ndarray] | None = None
    """New values of parameters that changed after the optimizer's step, before the next one; None if not observed."""
    graphs: int | None = None
    """Graphs that torch.compile had made when the optimizer had stepped; None if not observed."""
    settings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Torch switch -> every value that it had in this step."""
    kept: dict[str, int] | None = None
    """"dtype shape" -> bytes of float tensors that outlived the step, other than parameters, gradients and optimizer state;
    None if not observed."""
    copied: dict[str, int] | None = None
    """Phase -> the most bytes of copies of weights at once; None if not observed."""
    reported_lr: float | None = None
    """Learning rate that the trainer reports; None if it reports none."""
    scaled: float | None = None
    """Number that all gradients were multiplied by after backward; NaN if changed another way; None if torch's clipping ran."""
    seconds: float | None = None
    """Seconds from the first forward pass to the end of the optimizer's step, on the device's clock. No check reads it."""
    allocator: dict[str, int] | None = None
    """Bytes of a GPU's allocator: "allocated", "reserved", and the "peak" of each until then. No check reads it."""
    unwaited: int | None = None
    """Results of functional collectives that were never waited for, since the start; None if not observed."""
    reported_largest: float | None = None
    """Largest mean loss of any part of the batch that the trainer reports; None if it reports none."""
    graphs_retained: int | None = None
    """Backward passes whose autograd graph lived on in the next forward pass; None if not observed."""
    gathered: tuple[str, ...] | None = None
    """Fqns of which more than this rank's slice was there when backward had ended; None if not observed."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Other numbers that the trainer reports, by its name for each."""
    evaluated: tuple[Microbatch, ...] = ()
    """What passes without gradients received between this step and the next, and their losses."""

    unsettled: dict[str, UnsettledGradient] = field(default_factory=dict, metadata=LATER)
    """By fqn, how gradients lay that did not lie as their parameters; `gradients` has them as they lie once settled."""

    @functools.cached_property
    def squares(self) -> dict[str, float]:
        """Return the sum of the squares of each local gradient's elements, by fqn, float64."""
        return {fqn: float(np.sum(np.square(value, dtype=np.float64))) for fqn, value in self.gradients.items()}
