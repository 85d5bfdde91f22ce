"""The records a rank leaves behind, and how they are saved and loaded.

Every record is a frozen dataclass of plain values; arrays are numpy. A rank's evidence is one file, complete or absent:
it is written under another name, flushed to disk and renamed. Its parts carry checksums (zip), so damage is noticed.

bfloat16 has no numpy dtype: such values are stored as float32, which holds every bfloat16 exactly; the field `dtype`
keeps the true one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.checkpoint import Checkpoint
from harness.format import other_version, version_of

T = TypeVar("T")


class EvidenceError(Exception):
    """An evidence file is missing, damaged or of another version. The message names the file and the remedy."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective (or a send or receive), as one rank issued it.

    op: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, scatter, gather, reduce, barrier, send, recv.
    ranks: global ranks of the group it really ran over, ascending as the group lists them.
    bytes: size of the unsharded tensor: all_gather's output, reduce_scatter's input, otherwise what this rank passed.
    phase: "forward", "backward", "pipeline" (inside a schedule, between the two), "optimizer", "evaluation" (inside a pass
    that trains nothing) or "other".
    step: 0 before the first step; in evaluation that before it.
    seq: position among this rank's collectives of this group, from 0; of a send or receive, among those to or from `peer`,
    which is the other side.
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
    storage_bytes: size of the storage that backs the local tensor.
    """

    fqn: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    mesh: Any
    placements: tuple[str, ...]
    storage_bytes: int
    value: np.ndarray


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass of this rank was fed, and the loss it computed from it.

    tokens, labels: int64 [samples, positions], None if never seen: a pipeline's first stage is fed tokens, its last
    labels (as they came, where they do not fit the tokens or there are none), -100 those that do not count. loss_sum: over
    this rank's valid tokens. chunks: how many labels each part had, where the loss was computed in several, in order.
    """

    tokens: np.ndarray | None
    labels: np.ndarray | None
    loss_sum: float | None
    valid_tokens: int | None
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Activity:
    """What a rank computed in a step, counted. Keys are words with a blank between them.

    calls: "phase fqn", forward calls of a module from Python; "backward layers.0" is its recomputation.
    products: "phase dtype", matrix products of that dtype. attention: "phase kind", fused attention ("attention"), its
    backward ("attention_backward") and batched products ("batched product").
    quantized: "phase fqn format", products of a module's that ran in 8 bits: "forward layers.0.attention.wq float8_rowwise".
    random: "phase", operators that drew random numbers, and "other state fqn", recomputations that began with another state
    of the generator than forward.
    inputs: by fqn, of step 1 only, the sum of the squares of what went into a module in forward, and how many numbers it was.
    saved: "phase owner", how often hooks were put on the tensors that autograd saves for backward, by the module and class
    or function that they come from: "forward torch.utils.checkpoint _checkpoint_hook".
    """

    calls: dict[str, int] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    attention: dict[str, int] = field(default_factory=dict)
    random: dict[str, int] = field(default_factory=dict)
    quantized: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AfterForward:
    """What a rank had in memory of the parameters of one model part at the moment when its forward pass ended.

    bytes: by fqn, of as much of the parameter as is there. storage: of all distinct storages behind that.
    """

    bytes: dict[str, int]
    storage: int


@dataclass(frozen=True)
class AfterEvaluation:
    """The same when the next step began, or training ended, after passes that trained nothing. step: the last one before."""

    step: int
    bytes: dict[str, int]
    storage: int


@dataclass(frozen=True)
class StepEvidence:
    """One optimizer step on one rank. Arrays are this rank's local parts, by fqn.

    gradients: as they were before clipping and before the optimizer. parameters: after the step; optimizer_state:
    likewise, kept for the last step, and for one after which a checkpoint was written.
    reported_loss, grad_norm, reported_lr: what the trainer displays. lr: read from the optimizer as it stepped.
    reported_loss, grad_norm: what the trainer displays. lr: read from the optimizer as it stepped.
    scaled: where no clipping of torch's was seen, the number by which all gradients were multiplied between the end of backward
    and the optimizer; `gradients` are those before. NaN: altered otherwise, and as the optimizer was given them.
    changed: of parameters that were something else when the next step began, or training ended, what they then were;
    None if nobody looked.
    memory: bytes held after the step, by kind (parameters, gradients, optimizer_state).
    positions: int64 [positions] or [samples, positions], the different ones that model parts were told for their tokens.
    actions: what pipeline stages did, in order, as torch writes it: stage, kind (F, B, I, W), microbatch.
    after_forward: one record for each forward pass of each model part.
    graphs: how many torch.compile had made in this process when the optimizer had stepped; None if nobody looked.
    settings: switches of torch by name, and every value that each was seen to have in this step.
    kept: of float tensors besides parameters, gradients and optimizer state, the bytes that lived on when the step was over,
    by "dtype shape". copied: of copies of weights, the most bytes at once, by phase. Both None if nobody looked.
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
class RankEvidence:
    """All that one rank saw. `parameters` is the state before the first step, and before a checkpoint is read.

    structure: what the parallel wrappers claim, by module ({"kind": "fsdp2", "shard_ranks": [...], ...});
    "parameters": those that an FSDP unit gathers together.
    compiler: graphs that torch.compile made ("graphs"), its graph breaks ("graph break: why"), and limits at which it left code
    to run eagerly ("gave up: why").
    fault: None, or whether the deliberate fault's code ran on this rank.
    resumed: None for a launch that starts at step 1. displays: what this trainer shows its user at all;
    reports_every: in which steps, those that this number divides.
    after_evaluation: one record for each model part and time between two steps at which there was any.
    held: tensors kept when training had ended, besides parameters, gradients and optimizer state; None if nobody looked.
    rows: int64 [rows], which row of the reference's parameter each row of this trainer's is, where the order is another.
    settings: switches of torch by name, as the rank was started with them, or as the adapter says that its trainer sets them.
    """

    rank: int
    world_size: int
    parameters: tuple[TensorEvidence, ...]
    groups: tuple[Group, ...]
    collectives: tuple[Collective, ...]
    steps: tuple[StepEvidence, ...]
    structure: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    compiler: dict[str, int] = field(default_factory=dict)
    fault: bool | None = None
    resumed: Resumed | None = None
    displays: tuple[str, ...] = ("loss", "grad_norm")
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    held: tuple[HeldTensor, ...] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    reports_every: int = 1
    after_evaluation: tuple[AfterEvaluation, ...] = ()


AT_WORK = "still at work"
"""In the error of ranks killed at the time limit while collectives went on: the job was slow, and none of them hung."""


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended.

    how: "ok", "raised", "signal", "killed" (by the harness, at the time limit or because others failed) or "lost".
    error: one line. stack: the Python stack where it raised or was stuck. waiting_for: the collective it was in.
    blamed: True for the rank that caused the failure, False for those that only waited for it.
    left: command lines of processes that it started and that outlived it, until they were killed.
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


@dataclass(frozen=True)
class Run:
    """All ranks of one launch: how each ended and what each left. A rank without a file is not in `ranks`; one whose file
    cannot be read is in `unreadable`, with the reason.

    trainer: as harness.trainers.load takes it, NAME, FILE.py or NAME@SOURCE. made: of how it came about what reads well in
    a report, "started", "torch", "commit" of the trainer's sources, "device", "launcher", "replaced" (what of the trainer does
    not run as its users run it, a line each); no law reads it.
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


def renamed(evidence: RankEvidence, fqn: Callable[[str], str]) -> RankEvidence:
    """The same with parameters and modules under the names that `fqn` gives them."""

    def keys(found: dict[str, T]) -> dict[str, T]:
        return {fqn(name): value for name, value in found.items()}

    def counted(counts: dict[str, int], *, at: int = 1) -> dict[str, int]:
        """The name is word `at` of a key that has so many words."""
        told = ((key.split(" "), count) for key, count in counts.items())
        return {" ".join([*w[:at], *map(fqn, w[at : at + 1]), *w[at + 1 :]]): count for w, count in told}

    steps = tuple(
        dataclasses.replace(
            step,
            gradients=keys(step.gradients),
            parameters=keys(step.parameters),
            optimizer_state=keys(step.optimizer_state),
            activity=dataclasses.replace(
                step.activity,
                calls=counted(step.activity.calls),
                quantized=counted(step.activity.quantized),
                random=counted(step.activity.random, at=2),
                inputs=keys(step.activity.inputs),
            ),
            changed=None if step.changed is None else keys(step.changed),
            after_forward=tuple(dataclasses.replace(after, bytes=keys(after.bytes)) for after in step.after_forward),
        )
        for step in evidence.steps
    )
    parameters = tuple(dataclasses.replace(tensor, fqn=fqn(tensor.fqn)) for tensor in evidence.parameters)
    resumed = evidence.resumed and Resumed(keys(evidence.resumed.parameters), keys(evidence.resumed.optimizer_state))
    left = tuple(dataclasses.replace(after, bytes=keys(after.bytes)) for after in evidence.after_evaluation)
    structure = {
        fqn(module): claim | {key: [fqn(name) for name in names] for key, names in claim.items() if key == "parameters"}
        for module, claim in evidence.structure.items()
    }
    return dataclasses.replace(
        evidence, steps=steps, parameters=parameters, resumed=resumed, structure=structure, after_evaluation=left
    )


# ---- saving and loading


def save(path: Path, record: Any) -> None:
    """Writes any of the records above (or another dataclass of plain values and arrays): complete or not at all."""
    arrays: list[np.ndarray] = []
    kind = type(record)
    header = json.dumps({"format": version_of(kind), "type": kind.__name__, "record": _encode(record, arrays)})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            np.savez(file, header=np.frombuffer(header.encode(), np.uint8), blob=_join(arrays))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise EvidenceError(_unwritable(path, error)) from error


def load(path: Path, kind: type[T]) -> T:
    """Reads what save wrote. Raises EvidenceError for a missing, damaged or foreign file."""
    try:
        with np.load(path, allow_pickle=False) as parts:
            header, blob = json.loads(parts["header"].tobytes()), parts["blob"].tobytes()
        found, other = str(header["type"]), other_version(str(header["format"]), kind)
        record = _decode(kind, header["record"], blob) if found == kind.__name__ and not other else None
    except FileNotFoundError as error:
        raise EvidenceError(f"{path}: no such evidence; run the case again") from error
    except Exception as error:  # one flipped byte makes zipfile and numpy raise almost anything
        raise EvidenceError(f"{path}: damaged evidence ({error}); delete it and run the case again") from error
    if record is None:
        problem = other if found == kind.__name__ else f"holds {found}, expected {kind.__name__}"
        raise EvidenceError(f"{path}: {problem}; run the case again")
    return record


def _unwritable(path: Path, error: OSError) -> str:
    return f"{path}: cannot be written: {error.strerror or error}; free the disk or choose another --out"


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([a.view(np.uint8).reshape(-1) for a in arrays]) if arrays else np.zeros(0, np.uint8)


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Plain JSON, each array replaced by its place in the blob."""
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name), arrays) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value).reshape(-1))
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, dict):
        return [[key, _encode(item, arrays)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_encode(item, arrays) for item in value]
    return value


def _decode(kind: Any, record: Any, blob: bytes) -> Any:
    return _reader(kind)(record, _Blob(blob))


class _Blob:
    """The arrays of a file, taken in the order in which they were encoded."""

    def __init__(self, blob: bytes) -> None:
        self.blob, self.position = blob, 0

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        count = math.prod(shape)
        array = np.frombuffer(self.blob, dtype, count, self.position) if count else np.zeros(0, dtype)
        self.position += array.nbytes
        return array.reshape(shape)


@functools.cache
def _reader(kind: Any) -> Callable[[Any, _Blob], Any]:
    """How a value of this annotated type is rebuilt; made once a type, for a run has tens of thousands of values."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(a for a in args if a is not type(None)))
        return lambda record, blob: None if record is None else inner(record, blob)
    if dataclasses.is_dataclass(kind):
        readers = {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}
        make: Callable[..., Any] = kind  # type: ignore[assignment]
        return lambda record, blob: make(**{name: readers[name](item, blob) for name, item in record.items()})
    if kind is np.ndarray:
        return lambda record, blob: blob.take(*record)
    if origin is dict:
        read = _reader(args[1])
        return lambda record, blob: {key: read(item, blob) for key, item in record}
    if origin is tuple:
        each = _reader(args[0])
        return lambda record, blob: tuple([each(item, blob) for item in record])
    return lambda record, blob: record


RUN_FILE = "run.json"
CHECKPOINT_FILE = "checkpoint.npz"


def save_run(run: Run) -> None:
    """The part of a Run that is not in the ranks' own files."""
    record: dict[str, Any] = {"format": version_of(Exit), "world_size": run.world_size}
    record |= {"seconds": run.seconds, "fault": run.fault, "trainer": run.trainer, "made": run.made}
    record["exits"] = [dataclasses.asdict(exit) for exit in run.exits]
    write_text(Path(run.directory) / RUN_FILE, json.dumps(record, indent=1))


def load_run(directory: Path) -> Run:
    """A launch as it was stored. A damaged or missing rank file is not fatal: laws judge it; `unreadable` tells the damage."""
    path = directory / RUN_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if other := other_version(str(record["format"]), Exit):
            raise EvidenceError(f"{path}: {other}; run the case again")
        exits = tuple(Exit(**{**exit, "left": tuple(exit.get("left", ()))}) for exit in record["exits"])
        run = Run(str(directory), int(record["world_size"]), exits, {}, record["seconds"], fault=record["fault"])
        run = dataclasses.replace(run, trainer=record.get("trainer", run.trainer), made=record.get("made", run.made))
    except FileNotFoundError as error:
        remedy = "`harness check` wants the folder that `harness run` wrote"
        raise EvidenceError(f"{path}: no such file; {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(f"{path}: damaged ({error}); run the case again") from error
    for rank in filter(lambda rank: rank_file(directory, rank).exists(), range(run.world_size)):
        try:
            run.ranks[rank] = load(rank_file(directory, rank), RankEvidence)
        except EvidenceError as error:
            run.unreadable[rank] = str(error)
    if (directory / CHECKPOINT_FILE).exists():
        run = dataclasses.replace(run, checkpoint=load(directory / CHECKPOINT_FILE, Checkpoint))
    return run


def rank_file(directory: Path, rank: int) -> Path:
    return directory / "ranks" / f"rank_{rank:02d}.npz"


def write_text(path: Path, text: str) -> None:
    """A small text file, complete or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise EvidenceError(_unwritable(path, error)) from error
