"""Trainers under test: what the harness asks of one, on this page, and finding it.

A trainer of your own is one file with an `adapter`, wherever it lies: `harness run fsdp_4 --trainer path/to/mine.py`,
and likewise pytest, matrix and bisect. (One in this folder goes by its name.) The trainer itself is not edited and need
not tell the harness anything: the probe watches torch. An adapter says how to build it for a case, how it is told to go
on, what it cannot do, and how its parameters are called. The whole of it, for a trainer `mine`:

    from harness.trainers import Adapter, StartedTrainer
    from harness.trainers.support.names import pairs, renamed
    from harness.trainers.support.requests import beyond

    NAMES = pairs("embed=tok_embeddings q=attention.wq k=attention.wk ..")       theirs=ours, a part of a name each

    class Mine(Adapter):
        name = "mine"

        def unsupported(self, case):
            return next(beyond(case, {"dp_shard": ..., "wrapper": ("fsdp2",), "accumulation": ...}, self.name), None)

        def fqn(self, name):
            return renamed(name, NAMES)

        def start(self, case, weights, device):
            return Started(case, weights, device)

    class Started(StartedTrainer):
        def __init__(self, case, weights, device):
            self.metrics = []
            ..              join the process group, build, wrap, copy the weights in: all but the first step
            self.model_parts = [model]

        def train(self, last_step):
            ..              append Metrics(step, loss, grad_norm, lr) to metrics after each step

    adapter = Mine()

What a case requests is in `harness.spec.case.Case`; weights are an .npz of whole float64 tensors by the reference's fqn, of the
shapes in `case.model.parameter_shapes()`. Every data-parallel rank reads its share of `step_samples(training, len(dataset),
step)`, samples of `build_dataset(training, model)`, both in `harness.reference.data`; the learning rate is
`harness.reference.train.lr_factor`. What brings these to a trainer, ready-made, is in `harness/trainers/support/`. All numbers
are compared in the recipe's dtype, mostly float64: a cast to float32 inside the trainer is seen as what it is. One
that can do no other says `dtypes = ("float32",)` and is judged by `harness matrix --dtype float32` (docs/adapters.md).

The mapping is data, and is itself judged: the checks `initial_weights` and `shard_contents` compare bytes, so that a name or a
row in the wrong place is a finding. Where a parameter's rows have another order than the reference's (rotary embeddings that
turn halves of a head instead of neighbours permute wq and wk), `rows` says so, and the reference is put in that order
before anything is compared. A tied output is no parameter. Weights fused into one (wq, wk and wv) are taken apart as `fused`
says, where ranks hold them whole, or whole blocks of them. A case in which FSDP cuts them otherwise is skipped: the plan cuts
each alone.

Examples: `transformers.py` in this folder (transformers' Trainer under accelerate), `tests/own_trainer.py` (the least).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from harness.evidence.errors import error_in
from harness.spec.trainer_spec import TrainerSpec
from harness.spec.traits import USUAL, TrainerTraits

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from harness.spec.case import Case


@dataclass(frozen=True)
class Metrics:
    """What a trainer reports of a step (counted from 1), None where it does not. grad_norm: global, before clipping. lr: the
    one that the step was made with. largest: of the mean losses of parts of the batch, as those of ranks, the largest."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    largest: float | None = None


class StartedTrainer(Protocol):
    """A trainer on one rank, built and holding its weights. `metrics` grows by one entry a step that is reported. Where what it
    shows its user depends on the case, it has `reports` in place of the adapter's."""

    model_parts: list[nn.Module]
    metrics: list[Metrics]

    def train(self, last_step: int) -> None:
        """Up to and with that step, from the one after the last that was finished; the schedule is the recipe's."""
        ...

    def save(self, folder: Path) -> object:
        """Leave a checkpoint in this folder, in which older ones may lie. Only for cases with `resume`."""
        raise ValueError("this trainer writes no checkpoints")

    def resume(self, folder: Path) -> None:
        """Before the first step: continue from the latest complete checkpoint in this folder, whatever layout wrote it.
        Only for cases with `resume`. Raises ValueError if there is none."""
        raise ValueError("this trainer writes no checkpoints")


class Adapter(Protocol):
    """How the harness starts one trainer on one rank. Importing it must be cheap: torch and the trainer's own code are
    imported by `start`. Inherit from it for what has a usual answer here.

    reports: which of "loss", "grad_norm" and "lr" the trainer shows its user. reports_every: in which steps, those that this
    number divides (log_freq); in others it may. settings: switches of torch that the trainer sets on purpose, as
    harness/probe/settings.py names and reads them: {"threads": "4"}. dtypes: those that it can compute in; a case in another
    one is refused, and `--dtype` turns all cases into one of these. backends: those that it can join on GPUs; who takes that of
    `support/process_group.py` can join gloo too. preload: modules that the rank server may import once for
    all its ranks, where they are installed. A trainer that comes from outside has a method `of(source)` besides, which gives
    the adapter of another checkout, or of the folder in which pip laid the version requested:
    `--trainer NAME --source SOURCE`; and may say in `files` which paths of its repository running it needs, and in `package`
    what it is called on PyPI, if not as here.
    """

    name: str
    preload: tuple[str, ...] = ()
    reports: tuple[str, ...] = ("loss", "grad_norm")
    settings: Mapping[str, str] = MappingProxyType({})
    reports_every: int = 1
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    backends: tuple[str, ...] = ("nccl",)

    def traits(self, case: Case) -> TrainerTraits:
        """What this trainer chose where the case leaves the choice to it, and what it keeps, copies or moves besides what the
        plan knows: the plan is made of both. Who says nothing has FSDP2's units taken as they are observed."""
        return USUAL

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        """What of the trainer does not run as its users run it, each as "part: what by what (why)": said with every verdict.
        Starts nothing, imports no torch."""
        return ()

    def unsupported(self, case: Case) -> str | None:
        """Why this trainer cannot run the case, in one sentence; None if it can. Starts nothing, imports no torch."""
        ...

    def importable(self) -> None:
        """From here on an import finds the code under test: a checkout or release that --source named goes before what is
        installed. Called before a fault is put in, which imports what it changes."""
        return None

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        """Join the process group that the environment describes and build. weights: .npz of full tensors by fqn;
        None means the seed's. device: "cpu" or "cuda". Raises ValueError for a case or world size that does not fit.

        RANK and WORLD_SIZE are those of torchrun, but under the local launcher ranks meet at INIT_METHOD:
        `torch.distributed.init_process_group(.., init_method=os.environ.get("INIT_METHOD", "env://"), rank=.., world_size=..)`.
        """
        ...

    def unsupported_alone(self, case: Case) -> str | None:
        """Why a rank of the case cannot run alone, as pre-flight has it; None if it can. Starts nothing, imports no torch."""
        return "does not say how a rank of it runs alone: its adapter has no `dry`"

    def dry(self, case: Case) -> StartedTrainer:
        """`start` of a rank that runs alone: it has joined a process group that leads nowhere, and tensors have no memory
        (torch's FakeTensorMode is on), so there is nothing to read: neither weights nor samples."""
        raise ValueError(f"{self.name}: {self.unsupported_alone(case)}")

    def stop(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def fqn(self, name: str) -> str:
        """The reference's spelling of a parameter's or module's name in one of model_parts, without what wrappers add."""
        return name

    def fused(self, case: Case) -> dict[str, tuple[str, ...]]:
        """Weights that this trainer has in one tensor: by what `fqn` calls it, the reference's that lie one below the other.
        One that comes n times lies there in n equal blocks of rows: wq, wk and wv of each group of heads, w1 and w3 of each
        tp rank. A rank holds it whole, or as many whole blocks as its share; cases in which FSDP cuts it otherwise are skipped.
        """
        return {}

    def rows(self, case: Case) -> dict[str, np.ndarray]:
        """By the reference's fqn, for parameters whose rows have another order: int64 [rows], which row of the reference's
        each one is."""
        return {}


def spec(name: str, source: str | None, out: Path = Path("out")) -> str:
    """As load takes it. What is a path is made absolute: ranks may run elsewhere. A version is a path too, once pip has
    brought it into OUT/.environments. Raises ValueError."""
    name = str(Path(name).resolve()) if name.endswith(".py") else name
    if not source:
        return name
    if re.fullmatch(r"\d+(\.\d+)+\w*", source) and hasattr(load(name), "of"):
        from harness.trainers.support.environments import release

        source = str(release(getattr(load(name), "package", name), source, out / ".environments"))
    return str(TrainerSpec(name, str(Path(source).resolve()) if Path(source).exists() else source))


def traits_by_launch(case: Case, spec: str) -> dict[str, TrainerTraits]:
    """What a trainer chose in each launch of a case."""
    adapter = load(spec)
    return {name: adapter.traits(launched) for name, launched in case.launches.items()}


def rows(case: Case, spec: str) -> dict[str, np.ndarray]:
    """Return a trainer's `rows` outside of a rank. Raise CannotStart if the adapter raises."""
    try:
        return load(spec).rows(case)
    except Exception as error:
        file = Path(TrainerSpec.parse(spec).name)
        raise CannotStart(f"{spec}: the adapter's `rows` cannot be read: {error_in(file, error)}") from error


class CannotStart(ValueError):
    """An adapter, or what it imports, cannot be loaded: nothing of its trainer has run, and nothing can be said of it."""


def load(spec: str) -> Adapter:
    """The adapter of NAME or FILE.py, or of NAME@SOURCE. Raises ValueError with the known ones."""
    wanted = TrainerSpec.parse(spec)
    name = wanted.name
    known = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"support"})
    if wanted.is_file:
        adapter = _of_file(Path(name))
    elif name in known:
        adapter = importlib.import_module(f"{__name__}.{name}").adapter
    else:
        raise CannotStart(f"no trainer is named {name!r}; known: {', '.join(known)}, or the path of a FILE.py")
    if not wanted.source:
        return adapter
    if not hasattr(adapter, "of"):
        raise CannotStart(f"trainer {name} has no other sources; leave out @{wanted.source}")
    return adapter.of(wanted.source)


@contextlib.contextmanager
def starting(spec: str) -> Iterator[None]:
    """Raises CannotStart where a module is missing, or an adapter cannot be loaded."""
    try:
        yield
    except ImportError as error:
        raise CannotStart(
            f"{spec} cannot be started: {error}; install what it imports, or name another --trainer"
        ) from error


def reload(spec: str) -> Adapter:
    """Of a FILE.py that is not what it was when it was loaded."""
    _of_file.cache_clear()
    return load(spec)


@functools.cache
def _of_file(path: Path) -> Adapter:
    """What lies beside it can be imported."""
    if not path.is_file():
        raise CannotStart(f"{path}: no such file; an adapter is given as FILE.py, `harness init train.py` begins one")
    found = importlib.util.spec_from_file_location(f"trainer_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    sys.path.append(str(path.parent))
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotStart(f"{path}: cannot be loaded: {error_in(path, error)}") from error
    adapter: Any = getattr(module, "adapter", None)
    if hasattr(adapter, "own") or hasattr(adapter, "allow"):
        raise CannotStart(
            f"{path}: its `adapter` has `own` or `allow`: it says that in `traits`; see harness/spec/traits.py"
        )
    if lacking := [
        name for name in ("name", "unsupported", "start", "stop", "fqn", "rows") if not hasattr(adapter, name)
    ]:
        problem = f"its `adapter` has no {', '.join(lacking)}" if adapter is not None else "has no `adapter`"
        raise CannotStart(f"{path}: {problem}; see harness/trainers/__init__.py")
    return adapter
