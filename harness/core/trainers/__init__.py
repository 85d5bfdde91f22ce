"""Trainers under test: what the harness asks of one, on this page, and finding it.

A trainer of your own is one file with an `adapter`, wherever it lies: `harness run fsdp_4 --trainer path/to/mine.py`,
and likewise pytest, matrix and bisect. (One in this folder goes by its name.) The trainer itself is not edited and needs
no call of the harness: the probe watches torch. An adapter says how to build the trainer for a case, how it goes on, what it
cannot do, and how its parameters are called. Here is a whole one, for a trainer `mine`.

    from harness.adapter import Adapter, StartedTrainer, beyond, pairs, renamed

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

`harness.adapter.Case` has what a case requests. Weights are an .npz of whole float64 tensors by the reference's fqn, of the
shapes in `case.model.parameter_shapes()`. Every data-parallel rank reads its share of `step_samples(training, len(dataset),
step)`, samples of `build_dataset(training, model)`, both in `harness.reference.data`. The learning rate is
`harness.reference.train.lr_factor`. What brings these to a trainer, ready-made, is in `harness/core/trainers/support/`. All
numbers are compared in the recipe's dtype, mostly float64: a cast to float32 inside the trainer is seen as what it is. One
that can do no other says `dtypes = ("float32",)` and is judged by `harness matrix --dtype float32` (docs/adapters.md).

The mapping is data, and is itself judged. The checks `initial_weights` and `shard_contents` compare bytes, so a name or a row
in the wrong place is a finding. `rows` says where a parameter's rows have another order than the reference's. Rotary embeddings
that turn halves of a head, for example, permute wq and wk. The reference is put in that order before anything is compared.
A tied output is no parameter. `fused` says how weights in one tensor (wq, wk and wv) are separated, where ranks hold them
whole, or whole blocks of them. A case in which FSDP cuts a block is skipped, because the plan cuts each weight alone.

What it shows in addition (tokens per second, a validation loss) goes into `Metrics.numbers`, each a `Number` with its meaning.

Examples: `harness/adapters/transformers.py` (transformers' Trainer under accelerate), `tests/own_trainer.py` (the least).
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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from harness.core import rings
from harness.core.case import case_files
from harness.core.case.declared_traits import with_declared
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.case.traits import USUAL_TRAITS, TrainerTraits
from harness.core.evidence.errors import error_text
from harness.core.evidence.numbers import Number as Number

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from harness.core.case.case import Case


@dataclass(frozen=True)
class Metrics:
    """What a trainer reports of a step; None for what it does not report."""

    step: int  # counted from 1
    loss: float | None  # mean over the valid tokens of the global batch
    grad_norm: float | None  # global, before clipping
    lr: float | None  # the one that the step was made with
    largest: float | None = None  # largest mean loss of the batch's parts, such as those of ranks
    numbers: Mapping[str, Number] = field(default_factory=dict)  # all others by name, each with its meaning


class StartedTrainer(Protocol):
    """A trainer on one rank, built and holding its weights.

    `metrics` grows by one entry for each step that is reported. Where the numbers that it shows its user depend on the
    case, it has an attribute `reports`, which replaces the adapter's.
    """

    model_parts: list[nn.Module]
    metrics: list[Metrics]

    def train(self, last_step: int) -> None:
        """Train from the step after the last finished one up to and with `last_step`. The schedule is the recipe's."""
        ...

    def save(self, folder: Path) -> object:
        """Leave a checkpoint in this folder, in which older ones may lie. Called only for cases with `resume`.

        Where it is written in the background (Features.async_save), return its future: `result()` is called at the end.
        ValueError unless overridden.
        """
        raise ValueError("this trainer writes no checkpoints")

    def resume(self, folder: Path) -> None:
        """Continue from the latest complete checkpoint in this folder, whatever layout wrote it; called before the
        first step.

        Called only for cases with `resume`. Raises ValueError if there is no checkpoint.
        """
        raise ValueError("this trainer writes no checkpoints")

    def export(self, folder: Path) -> object:
        """Leave the weights in this folder, as .safetensors, or as .bin, .pt or .pth that torch.load reads.

        Called on every rank after the last step, only for cases with `export`, which says the names and the order of
        rows. ValueError unless overridden.
        """
        raise ValueError("this trainer exports no weights")


class Adapter(Protocol):
    """How the harness starts one trainer on one rank. Inherit from it for what has a usual answer here.

    Importing an adapter must be cheap: `start` imports torch and the trainer's code. A trainer from another repository has also
    a method `of(source)`, for `--trainer NAME --source SOURCE`. It returns the adapter of another checkout, or of the folder of
    the version that pip installed. Such an adapter may have `files`, the paths of its repository that a run needs, and
    `package`, its name on PyPI.
    """

    name: str
    """What `--trainer` and reports call it."""
    preload: tuple[str, ...] = ()
    """Modules that the rank server may import once for all its ranks, where they are installed."""
    reports: tuple[str, ...] = ("loss", "grad_norm")
    """Which of "loss", "grad_norm" and "lr" the trainer shows its user."""
    settings: Mapping[str, str] = MappingProxyType({})
    """Switches of torch that the trainer sets on purpose, as harness/core/probe/settings.py names them: {"threads": "4"}."""
    reports_every: int = 1
    """The trainer reports in steps that this number divides (log_freq), and may report in others."""
    starts_from_weights: bool = False
    """Whether `resume` can read the weights alone, as a case with `model_only` requests (`case.model_of`): the optimizer, the
    schedule, the data and the count of steps are then new."""
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    """What it can compute in. A case in another one is refused, and `--dtype` turns all cases into one of these."""
    backends: tuple[str, ...] = ("nccl",)
    """What it can join on GPUs. An adapter that uses `support/process_group.py` can join gloo too."""

    def traits(self, case: Case) -> TrainerTraits:
        """Return what the plan cannot know of this trainer: its choices, and what it keeps, copies or moves in addition.

        With the usual answer, FSDP2's units are taken as they are observed.
        """
        return USUAL_TRAITS

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        """Return what does not run as users run it, each as "part: what by what (why)". Every verdict says it.

        Starts nothing, imports no torch.
        """
        return ()

    def unsupported(self, case: Case) -> str | None:
        """Return why this trainer cannot run the case, in one sentence; None if it can. Starts nothing, imports no torch."""
        ...

    def importable(self) -> None:
        """Change sys.path so that the code under test is imported: a checkout or release of --source before what is
        installed.

        By default it does nothing. Called before a fault is put in, which imports the modules that it changes.
        """
        return None

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        """Join the process group that the environment describes and build. weights: .npz of full tensors by fqn;
        None means the seed's. device: "cpu" or "cuda". Raises ValueError for a case or world size that does not fit.

        RANK and WORLD_SIZE are those of torchrun, but under the local launcher ranks meet at INIT_METHOD:
        `torch.distributed.init_process_group(.., init_method=os.environ.get("INIT_METHOD", "env://"), rank=.., world_size=..)`.
        """
        ...

    def unsupported_alone(self, case: Case) -> str | None:
        """Return why a rank of the case cannot run alone in pre-flight; None if it can. Starts nothing, imports no torch."""
        return "does not say how a rank of it runs alone: its adapter has no `dry`"

    def dry(self, case: Case) -> StartedTrainer:
        """Do what `start` does, for a rank that runs alone, which has joined a process group without peers already.

        Tensors have no memory (torch's FakeTensorMode is on), so neither weights nor samples can be read.
        """
        raise ValueError(f"{self.name}: {self.unsupported_alone(case)}")

    def stop(self) -> None:
        """Leave the process group, if this process is in one."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def fqn(self, name: str) -> str:
        """Return the reference's spelling of a parameter's or module's name in model_parts, without what wrappers add."""
        return name

    def fused(self, case: Case) -> dict[str, tuple[str, ...]]:
        """Return which weights of the reference lie in one tensor of this trainer, from top to bottom, by the tensor's fqn.

        A weight that is listed n times lies there in n equal blocks of rows: wq, wk and wv of each group of heads. A rank holds
        the tensor whole, or as many whole blocks as its share. Cases in which FSDP cuts a block are skipped.
        """
        return {}

    def rows(self, case: Case) -> dict[str, np.ndarray]:
        """Return the order of rows, int64 [rows], of parameters whose rows are not in the reference's order.

        Each number says which row of the reference a row is. Keys are the reference's fqns.
        """
        return {}


def absolute_spec(name: str, source: str | None, out: Path = Path("out")) -> str:
    """Return NAME or NAME@SOURCE, as `load_adapter` takes it, with absolute paths, for ranks may run in another folder.

    If the source is a version and the trainer has releases, pip installs it into OUT/.environments, and the path of
    that is the source. Raises ValueError.
    """
    name = str(Path(name).resolve()) if name.endswith(".py") else name
    if not source:
        return name
    if re.fullmatch(r"\d+(\.\d+)+\w*", source) and hasattr(load_adapter(name), "of"):
        from harness.core.trainers.support.environments import install_release

        source = str(install_release(getattr(load_adapter(name), "package", name), source, out / ".environments"))
    return str(TrainerSpec(name, str(Path(source).resolve()) if Path(source).exists() else source))


def traits_by_launch(case: Case, spec: str) -> dict[str, TrainerTraits]:
    """Return the trainer's traits in each launch of a case, by the launch's name. Raises CannotStart."""
    adapter = load_adapter(spec)
    return {name: traits_of(adapter, launched) for name, launched in case.launches.items()}


def traits_of(adapter: Adapter, case: Case) -> TrainerTraits:
    """Return the trainer's traits in this launch: those of its adapter, with those that the case declares in their place."""
    return with_declared(case, adapter.traits(case))


def rows_of_trainer(case: Case, spec: str) -> dict[str, np.ndarray]:
    """Return an adapter's `rows` for a case, by fqn, outside of a rank.

    Raises CannotStart if the adapter cannot be loaded or raises.
    """
    try:
        return load_adapter(spec).rows(case)
    except Exception as error:
        file = Path(TrainerSpec.parse(spec).name)
        raise CannotStart(f"{spec}: the adapter's `rows` cannot be read: {error_text(file, error)}") from error


class CannotStart(ValueError):
    """An adapter, or a module that it imports, cannot be loaded: nothing of its trainer has run, so nothing is known of
    it."""


def load_adapter(spec: str) -> Adapter:
    """Return the adapter of NAME or FILE.py, or of NAME@SOURCE.

    Raises CannotStart, a ValueError, for an unknown name (with the known ones), a broken file, or a source where there
    is none.
    """
    trainer = TrainerSpec.parse(spec)
    name = trainer.name
    known = sorted(trainer_modules())
    if trainer.is_file:
        adapter = adapter_of_file(Path(name))
    elif name in known:
        adapter = importlib.import_module(trainer_modules()[name]).adapter
    else:
        raise CannotStart(f"no trainer is named {name!r}; known: {', '.join(known)}, or the path of a FILE.py")
    if not trainer.source:
        return adapter
    if not hasattr(adapter, "of"):
        raise CannotStart(f"trainer {name} has no other sources; leave out @{trainer.source}")
    return adapter.of(trainer.source)


def trainer_modules() -> dict[str, str]:
    """Return the module that has each trainer's adapter, by the trainer's name: of the core's own, and of those of rings."""
    own_names = {module.name for module in pkgutil.iter_modules(__path__)} - {"support"}
    return {name: f"{__name__}.{name}" for name in own_names} | rings.entries_of("trainers")


def folder_of_cases(name: str) -> Path | None:
    """Return the folder of cases that come with a trainer's adapter; None if the name is unknown, or its package has no
    such folder."""
    module = trainer_modules().get(name, "")
    module_spec = importlib.util.find_spec(module) if module else None
    folder = Path(module_spec.origin).parent / case_files.CASES_FOLDER if module_spec and module_spec.origin else None
    return folder if module_spec and module_spec.submodule_search_locations and folder and folder.is_dir() else None


@contextlib.contextmanager
def raising_cannot_start(spec: str) -> Iterator[None]:
    """Turn an ImportError of the block into CannotStart, with a remedy; other exceptions pass unchanged."""
    try:
        yield
    except ImportError as error:
        raise CannotStart(
            f"{spec} cannot be started: {error}; install what it imports, or name another --trainer"
        ) from error


def reload_adapter(spec: str) -> Adapter:
    """Return the adapter that `spec` names, with all files of adapters loaded again: one may have changed."""
    adapter_of_file.cache_clear()
    return load_adapter(spec)


@functools.cache
def adapter_of_file(path: Path) -> Adapter:
    """Return the adapter of a FILE.py, loaded once.

    Modules beside the file can be imported: its folder is added to sys.path. Raises CannotStart if the file is missing,
    raises, or its `adapter` is missing, outdated or lacks a method.
    """
    if not path.is_file():
        raise CannotStart(f"{path}: no such file; an adapter is given as FILE.py, `harness init train.py` begins one")
    module_spec = importlib.util.spec_from_file_location(f"trainer_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)
    sys.path.append(str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CannotStart(f"{path}: cannot be loaded: {error_text(path, error)}") from error
    adapter: Any = getattr(module, "adapter", None)
    if hasattr(adapter, "own") or hasattr(adapter, "allow"):
        raise CannotStart(
            f"{path}: its `adapter` has `own` or `allow`, which are no longer read; return them from `traits` as TrainerTraits"
        )
    required = ("name", "unsupported", "start", "stop", "fqn", "rows")
    if lacking := [name for name in required if not hasattr(adapter, name)]:
        problem = (
            f"its `adapter` has no {', '.join(lacking)}" if adapter is not None else "no `adapter` is defined there"
        )
        raise CannotStart(f"{path}: {problem}; `harness init TRAINER.py` writes a file with all that an adapter needs")
    return adapter
