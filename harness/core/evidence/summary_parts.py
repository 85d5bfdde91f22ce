"""Parts of a Summary: small records of one subject each.

A file has their fields among those of the Summary. A field that is renamed here keeps its name there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.core.evidence.format import LATER, stored_as
from harness.core.evidence.recording import Beside, Last, Reached
from harness.core.evidence.records import OwnGroup


@dataclass(frozen=True)
class Use:
    """What a rank moved in the step that is shown, over one group, by one collective in one phase."""

    ranks: str
    """Global ranks of the group, in the words of ranks_key."""
    op: str
    """Name of the collective."""
    phase: str
    """Phase of the step."""
    dtype: str
    """Dtype of the elements."""
    calls: int
    """Number of calls."""
    bytes: int
    """Bytes of all calls."""
    steps: str = ""
    """Recorded steps in which it moved as much, in the words of ranks_key; empty for all of several."""
    blocked: dict[int, float] = field(default_factory=dict, metadata=LATER, compare=False)
    """Recorded step that ended -> seconds in which its calls blocked their thread, where that was seen of all of them."""


@dataclass(frozen=True)
class Outside:
    """What a rank moved outside of forward and backward, over one group, by one collective: the same in each of these steps."""

    ranks: str
    """Global ranks of the group, in the words of ranks_key."""
    op: str
    """Name of the collective."""
    phase: str
    """Phase: optimizer, evaluation, checkpoint or other."""
    dtype: str
    """Dtype of the elements."""
    calls: int
    """Number of calls."""
    bytes: int
    """Bytes of all calls."""
    steps: str
    """Steps, in the words of ranks_key."""


@dataclass(frozen=True)
class Issued:
    """All that a rank issued over one group in the recorded steps, in order."""

    group: str
    """Name of the group."""
    ranks: str
    """Global ranks of the group, in the words of ranks_key."""
    calls: int
    """Number of calls."""
    digest: int
    """One number for all calls."""
    steps: dict[int, int] = field(default_factory=dict)
    """Step -> one number for its calls."""


@dataclass(frozen=True)
class Progress:
    """How far a rank came, and how it ended."""

    ended: str
    """Word for how it ended, as in RankRecord."""
    error: str
    """What it raised; empty if nothing."""
    steps_seen: int
    """Number of all steps that it trained to their end."""
    last: Last | None
    """Last collective that it issued; None if it issued none."""
    joined: int | None
    """Step after which it ran out of inputs, as in RankEvidence."""
    reached: Reached | None
    """How far it came; None before the first pass."""


@dataclass(frozen=True)
class Environment:
    """Where and how the process of a rank ran."""

    host: str
    """Name of its machine."""
    launch: str
    """Id of the recording."""
    argv: tuple[str, ...]
    """Command line of the process."""
    versions: dict[str, str]
    """Versions of python and torch, machine and device."""
    settings: dict[str, str]
    """Values of torch switches by name, in the step that is shown."""


@dataclass(frozen=True)
class Recorder:
    """What the recorder itself did."""

    left_out: tuple[str, ...]
    """Models that are not recorded, and why."""
    failed: tuple[str, ...]
    """What it raised."""
    seconds: float = field(metadata=stored_as("own"))
    """Seconds that it took."""


@dataclass(frozen=True)
class Modules:
    """Models, their wrappers and their optimizers."""

    classes: tuple[str, ...] = field(metadata=stored_as("parts"))
    """Classes of the models."""
    wrappers: dict[str, int]
    """Kind -> number of wrappers."""
    hooks: tuple[str, ...]
    """Communication hooks of DDP."""
    optimizers: tuple[str, ...]
    """Optimizers, each in one line."""
    unstepped: int
    """Number of parameters that no optimizer has."""
    buffers: int = field(default=0, metadata=LATER)
    """Number of buffers of floating-point numbers."""


@dataclass(frozen=True)
class Parameters:
    """Names, shapes and placements of a rank's parameters."""

    model: int
    """One number for names, whole shapes and dtypes."""
    count: int = field(metadata=stored_as("parameters"))
    """Number of parameters."""
    elements: int
    """Number of their elements, as whole tensors."""
    placements: dict[str, int]
    """Placement as text -> number of parameters that are claimed to lie so."""
    slices: int
    """One number for the parts of parameters that the rank claims to hold; 0 where nothing is claimed."""


@dataclass(frozen=True)
class Contents:
    """Digests of what a rank's parameters hold, after each recorded step and before the first, which is 0."""

    by_step: dict[int, int] = field(metadata=stored_as("contents"))
    """Step -> one number for the bytes of parameters: of those that `slices` is of, where there are any."""
    copies: dict[str, dict[int, int]]
    """Group over which some parameters are cut -> the contents by step of those that are copied over it."""
    ignored: dict[str, dict[int, int]]
    """Fqn -> the contents by step of parameters that a wrapper ignores, but for those that begin as constants."""
    unclaimed: dict[str, tuple[int, int]]
    """Fqn of parameters that nothing claims -> two digests, as in claimed.unclaimed_digests."""
    not_finite: dict[int, tuple[str, ...]]
    """Step -> parameters with infinite numbers or NaN."""
    idle_steps: tuple[int, ...]
    """Steps in which none of the parameters had a gradient."""
    uncut: dict[str, dict[int, int]] = field(default_factory=dict, metadata=LATER)
    """Group over which DTensors cut others, and how parameters began -> the contents by step.

    As in evidence.claimed.uncut_contents.
    """


@dataclass(frozen=True)
class Received:
    """Digests of the samples that a rank received."""

    batches: dict[int, int] = field(metadata=stored_as("fed"))
    """Step -> one number for the samples of its forward passes."""
    tokens: dict[int, int]
    """Step -> as `batches`, for samples that are integers."""
    inputs: dict[int, tuple[int, ...]]
    """Step -> digests of all tensors that its forward passes were called with; the first ones of many."""
    drawn: tuple[int, ...] = field(default=(), metadata=LATER)
    """Digests of the indices of its samples, as in RankRecord."""
    samples: dict[int, tuple[int, ...]] = field(default_factory=dict, metadata=LATER)
    """Step -> digests of single samples, as in RankRecord."""


@dataclass(frozen=True)
class Traffic:
    """What a rank moved."""

    uses: tuple[Use, ...]
    """What it moved inside forward and backward of the step that is shown."""
    waits: int
    """Number of barriers inside forward and backward of the step that is shown."""
    outside: tuple[Outside, ...]
    """What it moved outside of forward and backward in `whole`."""
    whole: tuple[int, ...]
    """Recorded steps of which all is on record."""
    background: tuple[Use, ...]
    """What other threads moved than the one that trains, as far as it is on record; of no step."""


@dataclass(frozen=True)
class Groups:
    """Process groups that a rank is a member of."""

    roles: dict[str, str]
    """Ranks of a group, in the words of ranks_key -> what wrappers and DTensors claim of it."""
    issued: tuple[Issued, ...]
    """What the rank issued over each group."""
    idle: tuple[str, ...]
    """Groups over which nothing ran, in the words of ranks_key."""
    own: tuple[OwnGroup, ...] = field(metadata=stored_as("own_groups"))
    """Process groups that the trainer made itself, of which torch has no ranks."""
    beside: tuple[Beside, ...]
    """What other threads issued over groups of the thread that trains."""


@dataclass(frozen=True)
class Resources:
    """Time and memory."""

    seconds: dict[int, float]
    """Step -> seconds until the next one began."""
    peak: int
    """Most bytes of memory that were in use."""
    memory: dict[str, int]
    """Kind -> bytes between steps, of the step that is shown."""
    after_forward: int = field(metadata=stored_as("kept"))
    """Bytes of parameters that are in memory as forward ends, in the step that is shown."""


@dataclass(frozen=True)
class RankClass:
    """Which ranks left alike records: those with the same number."""

    number: int = field(metadata=stored_as("kind"))
    """Number that ranks with alike records have in common, as in evidence.alike; 0 where it was not computed."""
    groups: tuple[tuple[str, str], ...] = field(metadata=stored_as("places"))
    """Groups that the record names, as in evidence.alike."""
