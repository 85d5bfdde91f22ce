"""The records that a rank leaves behind: frozen dataclasses of plain values; arrays are numpy."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from harness.evidence.checkpoint_index import Checkpoint

CHECKPOINT = "checkpoint"
"""The phase of what torch's and Megatron's checkpointing issues between passes."""
BACKGROUND = "background"
"""The phase of what belongs to no step, whatever the thread that trains does meanwhile."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective (or a send or receive), as one rank issued it.

    op: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, scatter, gather, reduce, barrier, send, recv.
    ranks: global ranks of the group it really ran over, ascending as the group lists them.
    bytes: size of the unsharded tensor: all_gather's output, reduce_scatter's input, otherwise what this rank passed.
    phase: "forward", "backward", "pipeline" (inside a schedule, between the two), "optimizer", "evaluation" (inside a pass
    that trains nothing), "checkpoint" (between passes, while one is written or read), "background" (in a thread that Python
    code started beside the one that trains) or "other".
    step: 0 before the first step, and in the background; in evaluation that before it.
    seq: position among this rank's collectives of this group, from 0; of a send or receive, among those to or from `peer`,
    which is the other side.
    root: global rank from which a broadcast or scatter comes, or to which a reduce or gather goes.
    """

    op: str
    ranks: tuple[int, ...]
    group: str
    dtype: str
    bytes: int
    phase: str
    step: int
    seq: int
    peer: int | None = None
    root: int | None = None

    @property
    def root_place(self) -> int | None:
        """Which of `ranks` the root is: the same in groups that do alike."""
        return None if self.root is None else self.ranks.index(self.root)


@dataclass(frozen=True)
class Group:
    """A process group this rank is a member of, whether or not anything ran over it."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    description: str = ""


@dataclass(frozen=True)
class TensorEvidence:
    """A parameter as this rank holds it. Mesh and placements are what its metadata claims; `value` is what is there.

    mesh: the claimed mesh's ranks, nested by axis; None for a plain tensor. placements: one string per mesh axis.
    """

    fqn: str
    global_shape: tuple[int, ...]
    dtype: str
    mesh: Any
    placements: tuple[str, ...]
    value: np.ndarray


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass of this rank received, and the loss it computed from it.

    tokens, labels: int64 [samples, positions], None if never seen: a pipeline's first stage receives tokens, its last
    labels (as they came, where they do not fit the tokens or there are none), -100 those that do not count. loss_sum: over
    this rank's valid tokens. chunks: how many labels each part had, where the loss was computed in several, in order.
    """

    tokens: np.ndarray | None
    labels: np.ndarray | None
    loss_sum: float | None
    valid_tokens: int | None
    chunks: tuple[int, ...] = ()


class Call(NamedTuple):
    """Of a module's forward, from Python: in backward it is a recomputation."""

    phase: str
    fqn: str


class Matmul(NamedTuple):
    """Of all matmuls of a phase in one dtype. phase: as in Collective."""

    phase: str
    dtype: str


class Attention(NamedTuple):
    """kind: fused ("attention"), its backward ("attention_backward"), or a "batched matmul"."""

    phase: str
    kind: str


class QuantizedMatmul(NamedTuple):
    """One of a module's that ran in 8 bits."""

    phase: str
    fqn: str
    format: str


class SavedTensorsHook(NamedTuple):
    """Put on the tensors that autograd saves for backward. owner: the class or function of this Python module that it is of."""

    phase: str
    module: str
    owner: str


@dataclass(frozen=True)
class Activity:
    """What a rank computed in a step, counted.

    random: by phase, operators that drew random numbers. other_states: by fqn, recomputations that began with another state
    of the generator than forward. inputs: by fqn, of step 1 only, the sum of the squares of what went into a module in
    forward, and how many numbers it was.
    """

    calls: dict[Call, int] = field(default_factory=dict)
    matmuls: dict[Matmul, int] = field(default_factory=dict)
    attention: dict[Attention, int] = field(default_factory=dict)
    random: dict[str, int] = field(default_factory=dict)
    quantized: dict[QuantizedMatmul, int] = field(default_factory=dict)
    inputs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    saved: dict[SavedTensorsHook, int] = field(default_factory=dict)
    other_states: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AfterForward:
    """What a rank had in memory of the parameters of one model part at the moment when its forward pass ended.

    bytes: by fqn, of as much of the parameter as is there. storage: of all distinct storages behind that.
    """

    bytes: dict[str, int]
    storage: int


@dataclass(frozen=True)
class AfterEvaluation:
    """The same when the next step began, or training ended, after passes that trained nothing. step: the last one before.

    gathered: the parameters of which more is there than this rank's own slice. Bytes do not tell it: where FSDP casts to a
    type of half the size, what two ranks gather is as large as the slice of one.
    """

    step: int
    bytes: dict[str, int]
    storage: int
    gathered: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepEvidence:
    """One optimizer step on one rank. Arrays are this rank's local parts, by fqn.

    gradients: as they were before clipping and before the optimizer. parameters: after the step; optimizer_state:
    likewise, kept for the last step, and for one after which a checkpoint was written.
    reported_loss, grad_norm, reported_lr, reported_largest: what the trainer reports. lr: read from the optimizer in its step.
    scaled: where no clipping of torch's was seen, the number by which all gradients were multiplied between the end of backward
    and the optimizer; `gradients` are those before. NaN: altered otherwise, and as the optimizer was given them.
    changed: of parameters that were something else when the next step began, or training ended, what they then were;
    None if nobody looked.
    memory: bytes held after the step, by kind (parameters, gradients, optimizer_state).
    positions: int64 [positions] or [samples, positions], the different ones that model parts received for their tokens.
    actions: what pipeline stages did, in order, as torch writes it: stage, kind (F, B, I, W), microbatch.
    after_forward: one record for each forward pass of each model part.
    graphs: how many torch.compile had made in this process when the optimizer had stepped; None if nobody looked.
    settings: switches of torch by name, and every value that each was seen to have in this step.
    kept: of float tensors besides parameters, gradients and optimizer state, the bytes that lived on when the step was over,
    by "dtype shape". copied: of copies of weights, the most bytes at once, by phase. Both None if nobody looked.
    seconds: from the first forward pass to the end of the optimizer's step, on the device's clock. allocator: of a GPU, the
    bytes that its allocator holds when the optimizer has stepped, "allocated" and "reserved", and the "peak" of each until
    then. No check reads these two.
    unwaited: functional collectives whose results nobody had waited for when the step was over, counted from the start: torch
    keeps these. None if nobody looked. graphs_retained: backward passes whose autograd graph lived on in the next forward pass;
    None likewise.
    """

    step: int
    microbatches: tuple[Microbatch, ...]
    reported_loss: float | None
    grad_norm: float | None
    lr: float | None
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    optimizer_state: dict[str, dict[str, np.ndarray]]
    memory: dict[str, int]
    activity: Activity = field(default_factory=Activity)
    positions: tuple[np.ndarray, ...] = ()
    actions: tuple[str, ...] = ()
    after_forward: tuple[AfterForward, ...] = ()
    changed: dict[str, np.ndarray] | None = None
    graphs: int | None = None
    settings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kept: dict[str, int] | None = None
    copied: dict[str, int] | None = None
    reported_lr: float | None = None
    scaled: float | None = None
    seconds: float | None = None
    allocator: dict[str, int] | None = None
    unwaited: int | None = None
    reported_largest: float | None = None
    graphs_retained: int | None = None
    gathered: tuple[str, ...] | None = None
    """Parameters of which more than this rank's slice was still there when backward had ended; None if nobody looked."""

    @functools.cached_property
    def squares(self) -> dict[str, float]:
        """The sum of the squares of each gradient's elements, by fqn."""
        return {fqn: float(np.sum(np.square(value, dtype=np.float64))) for fqn, value in self.gradients.items()}


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of floating-point numbers; bytes: of the storage behind it."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Resumed:
    """What a rank holds once it has resumed, by fqn: parameters before its first forward pass, and the optimizer's state
    (whatever tensors it keeps, such as exp_avg, exp_avg_sq, step) as the optimizer enters its first step."""

    parameters: dict[str, np.ndarray]
    optimizer_state: dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Wrapper:
    """What a data-parallel wrapper says of itself.

    kind: ddp, replicate, fsdp1, fsdp2. shard_ranks, replicate_ranks: those that it shards and replicates over; empty if it
    does not. parameters: those that an FSDP unit gathers together. ranks_after_forward: of FSDP2, over how many ranks they
    stay sharded after forward, 1 if they stay whole. casts_to, reduces_in: of FSDP2, the dtypes that its mixed precision
    policy gives parameters and the reduction of gradients; empty if none. find_unused_parameters: of DDP, in a graph that
    is not static. float_buffers, other_buffers: of DDP, the bytes of its module's buffers that it broadcasts before a forward
    pass, those of floating-point numbers and all others. comm_hook: of DDP, the communication hook by which it reduces
    gradients; empty if none. ignored: of DDP, the parameters of its module that it does not look after. backward_gathers:
    of FSDP2, whether a unit that was freed after forward is gathered in backward, as an embedding need not be.
    """

    kind: str
    shard_ranks: tuple[int, ...] = ()
    replicate_ranks: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    ranks_after_forward: int = 1
    cpu_offload: bool = False
    casts_to: str = ""
    reduces_in: str = ""
    find_unused_parameters: bool = False
    float_buffers: int = 0
    other_buffers: int = 0
    comm_hook: str = ""
    ignored: tuple[str, ...] = ()
    backward_gathers: bool = True


@dataclass(frozen=True)
class RankEvidence:
    """All that one rank saw. `parameters` is the state before the first step, and before a checkpoint is read.

    structure: the parallel wrappers, by the module that each is put on; "" is the root.
    compiler: graphs that torch.compile made ("graphs"), its graph breaks ("graph break: why"), and limits at which it left code
    to run eagerly ("gave up: why").
    fault: None, or whether the deliberate fault's code ran on this rank.
    resumed: None for a launch that starts at step 1. reports: what this trainer shows its user at all;
    reports_every: in which steps, those that this number divides.
    after_evaluation: one record for each model part and time between two steps at which there was any.
    held: tensors kept when training had ended, besides parameters, gradients and optimizer state; None if nobody looked.
    rows: int64 [rows], which row of the reference's parameter each row of this trainer's is, where the order is another.
    starts: of a fused tensor of whose gradient and optimizer state there is an interval, at which of its elements that begins.
    settings: switches of torch by name, as the rank was started with them, or as the adapter says that its trainer sets them.
    joined: the step after which this rank had no more inputs where others had, under torch's Join; None if it always had. What
    it did from then on is not recorded.
    """

    rank: int
    world_size: int
    parameters: tuple[TensorEvidence, ...]
    groups: tuple[Group, ...]
    collectives: tuple[Collective, ...]
    steps: tuple[StepEvidence, ...]
    structure: dict[str, Wrapper] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    compiler: dict[str, int] = field(default_factory=dict)
    fault: bool | None = None
    resumed: Resumed | None = None
    reports: tuple[str, ...] = ("loss", "grad_norm")
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    held: tuple[HeldTensor, ...] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    reports_every: int = 1
    after_evaluation: tuple[AfterEvaluation, ...] = ()
    joined: int | None = None
    launch: str = ""
    """The id of the launch that this is evidence of; run.json or recording.json has the same."""


AT_LIMIT = "at the time limit"
"""In the error of ranks killed because their job had not ended by then."""
AT_WORK = "still at work"
"""In the error of ranks killed at the time limit while collectives went on: the job was slow, and none of them hung."""


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended.

    how: "ok", "raised", "signal", "killed" (by the harness, at the time limit or because others failed) or "lost".
    error: one line. stack: the Python stack where it raised or was stuck. last_collective: the one it was in.
    blamed: True for the rank that caused the failure, False for those that only waited for it.
    left: command lines of processes that it started and that outlived it, until they were killed.
    undelivered: where no rank is to blame, what did not come through between them.
    """

    rank: int
    how: str
    code: int | None = None
    signal: str | None = None
    error: str = ""
    stack: str = ""
    last_collective: str = ""
    blamed: bool = False
    log: str = ""
    left: tuple[str, ...] = ()
    undelivered: str = ""


@dataclass(frozen=True)
class Run:
    """All ranks of one launch: how each ended and what each left. A rank without a file is not in `ranks`; one whose file
    cannot be read is in `unreadable`, with the reason.

    trainer: as harness.trainers.load takes it, NAME, FILE.py or NAME@SOURCE. made: of how it came about what reads well in
    a report, "launch", its id, "started", "torch", "commit" of the trainer's sources, "device", "launcher", "replaced" (what
    of the trainer does not run as its users run it, a line each), and "sources", a digest of all that the harness and its own
    trainer consist of, empty for another trainer; no check reads it.
    checkpoint: what the one that it left holds; None if it left none, or nobody looked.
    """

    directory: str
    world_size: int
    exits: tuple[Exit, ...]
    ranks: dict[int, RankEvidence]
    seconds: float = 0.0
    unreadable: dict[int, str] = field(default_factory=dict)
    fault: str | None = None
    trainer: str = "llama3"
    made: dict[str, str] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
