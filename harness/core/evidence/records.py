"""The evidence of a rank: frozen dataclasses of plain values; arrays are numpy. Its steps are in step.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.core.evidence.checkpoint_index import Checkpoint
from harness.core.evidence.exported import ExportedTensor
from harness.core.evidence.format import LATER
from harness.core.evidence.provided import EVERYTHING, Provided
from harness.core.evidence.seen import FullyReadRun
from harness.core.evidence.step import AfterEvaluation, StepEvidence

CHECKPOINT = "checkpoint"
"""The phase of collectives that torch's and Megatron's checkpointing issues between passes."""
BACKGROUND = "background"
"""The phase of collectives that belong to no step, whatever the thread that trains does meanwhile."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective (or a send or receive), as one rank issued it."""

    op: str
    """Name: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, scatter, gather, reduce, barrier, send or recv."""
    ranks: tuple[int, ...]
    """Global ranks of the group that it ran over, in the group's order."""
    group: str
    """Name of the group."""
    dtype: str
    """Dtype of its elements."""
    bytes: int
    """Size of the unsharded tensor: all_gather's output, reduce_scatter's input, or else what this rank passed."""
    phase: str
    """Phase: forward, backward, pipeline (inside a schedule, between both), optimizer, evaluation (inside a pass that trains
    nothing), checkpoint (while one is written or read), background (in another thread), other."""
    step: int
    """Number of the step; 0 before the first one and in the background; in evaluation the step before it."""
    seq: int
    """Position, from 0, among this rank's collectives of the group, or among its sends or receives with `peer`."""
    peer: int | None = None
    """Global rank of the other side; None unless it is a send or a receive."""
    root: int | None = None
    """Global rank that a broadcast or scatter comes from, or that a reduce or gather goes to; None for all others."""
    began: float | None = field(default=None, metadata=LATER, compare=False)
    """When it was issued, in seconds since 1970 on the clock of its machine; None where that was not seen."""
    blocked: float | None = field(default=None, metadata=LATER, compare=False)
    """Seconds that its thread spent in the call, and in a wait from Python that came next; None where that was not seen."""

    @property
    def root_place(self) -> int | None:
        """Return the root's index in `ranks`, which is the same in groups that do the same. None without a root."""
        return None if self.root is None else self.ranks.index(self.root)


@dataclass(frozen=True)
class Group:
    """A process group that this rank is a member of, whether or not anything ran over it."""

    name: str
    """Name that torch gives it."""
    ranks: tuple[int, ...]
    """Global ranks of its members."""
    backend: str
    """Backend: gloo, nccl, or several with their devices."""
    description: str = ""
    """Description that its creator gave it; empty if none."""


@dataclass(frozen=True)
class OwnCalls:
    """Calls of one collective in one step, over a group that torch has no ranks of."""

    op: str
    """Name, as of a Collective."""
    dtype: str
    """Dtype of its elements."""
    phase: str
    """Phase, as of a Collective."""
    step: int
    """Number of the step."""
    calls: int
    """Number of calls."""
    bytes: int
    """Bytes of all: of each call those of its largest argument."""


@dataclass(frozen=True)
class OwnGroup:
    """A process group that the trainer made itself: torch has no ranks of it."""

    kind: str
    """Class of the group or backend."""
    made: str
    """Place in the code that made it, FILE:LINE; empty where that was not seen."""
    step: int
    """Step in which it was made."""
    place: int | None
    """Rank that this process has in it; None where it does not say."""
    size: int | None
    """Number of its ranks; None where it does not say."""
    issued: int
    """Number of all its calls, recorded or not."""
    calls: tuple[OwnCalls, ...] = ()
    """Calls on record."""


@dataclass(frozen=True)
class TensorEvidence:
    """A parameter as this rank holds it. Mesh and placements are what its metadata claims; `value` is what is there."""

    fqn: str
    """Name of the parameter in the reference's spelling."""
    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: str
    """Dtype as torch has it; a bfloat16 value is stored as float32."""
    mesh: Any
    """Ranks of the mesh that it claims, nested by axis; None for a plain tensor."""
    placements: tuple[str, ...]
    """Placement that it claims along each mesh axis, as torch writes it."""
    value: np.ndarray
    """Local elements before the first step, in the local shape."""


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of floating-point numbers."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its dtype."""
    bytes: int
    """Bytes of the storage behind it."""


@dataclass(frozen=True)
class Resumed:
    """The state of a rank once it has resumed."""

    parameters: dict[str, np.ndarray]
    """Fqn -> local parameters before its first forward pass."""
    optimizer_state: dict[str, dict[str, np.ndarray]]
    """Fqn -> the optimizer's key (exp_avg, exp_avg_sq, step) -> local state as the optimizer enters its first step."""


@dataclass(frozen=True)
class Wrapper:
    """The claims of a data-parallel wrapper."""

    kind: str
    """Kind: ddp, replicate, fsdp1 or fsdp2."""
    shard_ranks: tuple[int, ...] = ()
    """Global ranks that it shards over; empty if it does not shard."""
    replicate_ranks: tuple[int, ...] = ()
    """Global ranks that it replicates over; empty if it does not replicate."""
    parameters: tuple[str, ...] = ()
    """Fqns that an FSDP unit gathers together, in its order."""
    ranks_after_forward: int = 1
    """Number of ranks that FSDP2 keeps parameters sharded over after forward; 1 if they stay whole."""
    cpu_offload: bool = False
    """Whether parameters lie on the CPU between uses."""
    casts_to: str = ""
    """Dtype that FSDP2's mixed precision policy gives parameters; empty if none."""
    reduces_in: str = ""
    """Dtype that FSDP2's mixed precision policy reduces gradients in; empty if none."""
    find_unused_parameters: bool = False
    """Whether DDP looks for unused parameters, in a graph that is not static."""
    float_buffers: int = 0
    """Bytes of floating-point buffers that DDP broadcasts before a forward pass."""
    other_buffers: int = 0
    """Bytes of all other buffers that DDP broadcasts before a forward pass."""
    comm_hook: str = ""
    """Communication hook by which DDP reduces gradients; empty if none."""
    ignored: tuple[str, ...] = ()
    """Fqns of its module's parameters that DDP does not manage."""
    backward_gathers: bool = True
    """Whether FSDP2 gathers in backward a unit that was freed after forward."""


@dataclass(frozen=True)
class RankEvidence:
    """All evidence of one rank, in the reference's names and scale, fused tensors separated."""

    rank: int
    """Global rank."""
    world_size: int
    """Number of ranks of the job, as this rank sees it."""
    parameters: tuple[TensorEvidence, ...]
    """Parameters before the first step, and before a checkpoint is read."""
    groups: tuple[Group, ...]
    """Process groups that it is a member of."""
    collectives: tuple[Collective, ...]
    """Calls in the order of issue."""
    steps: tuple[StepEvidence, ...]
    """Steps that it trained, in order."""
    structure: dict[str, Wrapper] = field(default_factory=dict)
    """Parallel wrappers, by the module that each is put on; "" is the root."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions of python and torch, machine and device."""
    compiler: dict[str, int] = field(default_factory=dict)
    """Counts of torch.compile: "graphs", "graph break: why", and "gave up: why" for limits at which code then ran eagerly."""
    fault: bool | None = None
    """Whether the deliberate fault's code ran on this rank; None without a fault."""
    resumed: Resumed | None = None
    """State after resuming; None for a launch that starts at step 1."""
    reports: tuple[str, ...] = ("loss", "grad_norm")
    """Numbers that this trainer reports at all: loss, grad_norm, lr."""
    held: tuple[HeldTensor, ...] | None = None
    """Tensors retained after training, other than parameters, gradients and optimizer state; None if not observed."""
    settings: dict[str, str] = field(default_factory=dict)
    """Values of torch switches by name, as the rank was started with them or as the adapter declares them."""
    reports_every: int = 1
    """Interval of reports: the trainer reports in steps that this number divides."""
    after_evaluation: tuple[AfterEvaluation, ...] = ()
    """One record for each model part and each evaluation between two steps."""
    joined: int | None = None
    """Step after which it ran out of inputs under torch's Join; later steps are not recorded. None if it never did."""
    launch: str = ""
    """Id of the launch that this is evidence of; run.json or recording.json has the same."""
    own_groups: tuple[OwnGroup, ...] = ()
    """Process groups that the trainer made itself, of which torch has no ranks."""
    switches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By FSDP2 module, "" the root, which switches are not as usual, in words: unshard_in_backward off, ..."""
    exported: dict[str, ExportedTensor] | None = None
    """By name, the weights that the job exported after the last step; None on ranks that did not read them."""
    passed: np.ndarray | None = field(default=None, metadata=LATER)
    """int64 [collectives]: sum of the bits that this rank passed to each, 0 where it passed nothing; None if not observed."""


AT_LIMIT = "at the time limit"
"""In the error of ranks killed because their job had not ended by then."""
AT_WORK = "still at work"
"""In the error of ranks killed at the time limit while collectives went on: the job was slow, and none of them hung."""
IN_A_RING = "each waits for the other"
"""Begins the reason of ranks that wait in a ring: one reason of all of them."""


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended."""

    rank: int
    """Global rank."""
    how: str
    """Word for it: ok, raised, signal, lost, or killed (by the harness, at the time limit or because others failed)."""
    code: int | None = None
    """Exit code; None if it has none."""
    signal: str | None = None
    """Name of the signal that ended it; None if none did."""
    error: str = ""
    """One line on what went wrong; empty if nothing did."""
    stack: str = ""
    """Python stack where it raised or was stuck."""
    last_collective: str = ""
    """Collective that it was in, as text."""
    blamed: bool = False
    """Whether this rank caused the failure; False for ranks that only waited for it."""
    reason: str = ""
    """Why it is to blame, from what all ranks issued and how they ended; empty where its own error shows it."""
    diverged: bool = False
    """Whether the reason is a collective that differs from what other members of the group issued."""
    log: str = ""
    """Path of its log."""
    left: tuple[str, ...] = ()
    """Command lines of processes that it started and that outlived it, until they were killed."""
    undelivered: str = ""
    """Message between ranks that did not arrive, where no rank is to blame."""


@dataclass(frozen=True)
class Run(FullyReadRun):
    """All ranks of one launch: how each ended, and what each left."""

    directory: str
    """Folder of the launch."""
    world_size: int
    """Number of ranks that were started."""
    exits: tuple[Exit, ...]
    """Exit of each rank, in the order of ranks."""
    ranks: dict[int, RankEvidence]
    """Rank -> the evidence that could be read."""
    seconds: float = 0.0
    """Seconds that the ranks had their slots."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Rank -> why its file cannot be read. A rank without a file is neither here nor in `ranks`."""
    fault: str | None = None
    """Deliberate fault that was put in; None for none."""
    trainer: str = "llama3"
    """Trainer as harness.core.trainers.load_adapter takes it: NAME, FILE.py or NAME@SOURCE."""
    made: dict[str, str] = field(default_factory=dict)
    """Facts on how the run was made, by name: launch (its id), started, torch, commit (of the trainer), device, launcher,
    replaced (one line each), sources (a digest). No check reads them."""
    checkpoint: Checkpoint | None = None
    """Contents of the checkpoint that it left; None if it left none or nothing read it."""
    provided: Provided = EVERYTHING
    """What of all that checks may need it has."""
    chosen: tuple[int, ...] = ()
    """The ranks that were started, each alone; empty where all were."""
