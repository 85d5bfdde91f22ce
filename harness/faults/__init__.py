"""The catalogue of deliberate mistakes, each modelled on a real bug.

A fault is a name in a file, here or anywhere else, and `does` one wrong thing at a patch point (harness/faults/operators.py).

    hsdp_runs_as_fsdp = fault(
        breaks="...", bug="M01 pytorch/torchtitan #711", case="hsdp_2x2", caught_by="shard_contents", named="another layout",
        does=change_result(".parallelize:data_parallel_mesh", lambda mesh: mesh._flatten("dp")),
    )

Where that needs code, the fault is the function that an operator puts at the patch point:

    @fault(breaks="...", bug="...", case="...", caught_by="...", named="...")
    @partial(instead, ".parallelize:data_parallel_mesh")
    def hsdp_runs_as_fsdp(original, mesh): ...

and what no operator says is a function of `fired` that replaces something itself. It runs on every rank before the trainer is
built, and calls `fired()` each time the wrong thing is really done. A fault whose code never ran on any rank is UNFIRED: a
failure of the catalogue, not of the trainer. `harness faults` runs them all (harness/faults/run_catalogue.py).

`bug` begins with the entry it is modelled on, a letter for the kind of bug and a number, then where that happened. Several
entries are separated by semicolons. A fault of a kind, modelled on no single entry, says "of the family of ...".
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.core.evidence.errors import UserError, error_text
from harness.core.evidence.near_names import did_you_mean
from harness.core.rings import Ring

RING = Ring(
    commands={"faults": "make every deliberate mistake of the catalogue: which are caught?"},
    options={"run": "harness.faults.cli.options:add_fault", "golden": "harness.faults.cli.options:add_plot"},
    run_options=("harness.faults.cli.work.options:fault_of",),
    instead={"golden": "harness.faults.cli.work.options:plotted"},
    called={
        "load_fault": "harness.faults:load_fault",
        "checked_fault": "harness.faults.cli.work.options:checked_fault",
    },
)

Fired = Callable[[], None]

FAMILIES = {
    "M": "mesh",
    "G": "gradient reduction",
    "L": "loss and metrics",
    "C": "clipping",
    "T": "tensor and sequence parallel",
    "P": "pipeline",
    "X": "context parallel",
    "K": "masks and labels",
    "D": "data",
    "R": "random numbers and initialisation",
    "A": "activation checkpointing",
    "N": "precision",
    "H": "resharding",
    "F": "float8",
    "O": "compile",
    "S": "checkpoints and placement",
    "E": "optimizer and learning rate",
    "Z": "hangs and crashes",
}


class FaultError(UserError, ValueError):
    """The fault requested does not exist or cannot be loaded. The message is for the person who typed it."""


@dataclass(frozen=True)
class Fault:
    """A deliberate mistake: how a rank makes it, and what the harness must say then."""

    name: str
    file: str
    breaks: str
    """What goes wrong, in one sentence."""
    bug: str
    """The entry it is modelled on, and where that happened."""
    case: str
    """The smallest case that shows it."""
    caught_by: tuple[str, ...]
    """The checks that must fail."""
    named: str
    """The kind of its cause (docs/causes.md)."""
    apply: Callable[[Fired], None]
    """Makes the mistake on a rank, before the trainer is built."""
    hangs: bool = False
    """Only a time limit of the harness ends it: that of the launch, or that of what a rank leaves behind."""

    @property
    def family(self) -> str:
        """Return the kind of bug in words, "mesh" or "data", by the letter of the first entry in `bug`, such as "M01"
        or "Z-class".

        Empty if `bug` has no such entry.
        """
        match = re.search(r"\b([A-Z])(\d\d|-class)\b", self.bug)
        return FAMILIES.get(match[1], "") if match else ""

    @property
    def is_real(self) -> bool:
        """Return whether it is modelled on a bug that happened in one place (`bug` begins like "M01"), rather than on a
        kind of bug.
        """
        return re.match(r"[A-Z]\d\d\b", self.bug) is not None

    @property
    def spec(self) -> str:
        """Return FILE.py:NAME, by which the fault is loaded."""
        return f"{self.file}:{self.name}"


def fault(
    *,
    breaks: str,
    bug: str,
    case: str,
    caught_by: str,
    named: str,
    hangs: bool = False,
    does: Callable[[Fired], None] | None = None,
) -> Any:
    """Return a Fault that makes the mistake `does`; without `does`, a decorator that makes a Fault of a function.

    caught_by: checks, separated by blanks. The fault has no name yet: load_fault and all_faults set its name in its
    file.
    """
    file = sys._getframe(1).f_code.co_filename

    def make_fault(apply: Callable[[Fired], None]) -> Fault:
        return Fault("", file, breaks, bug, case, tuple(caught_by.split()), named, apply, hangs)

    return make_fault if does is None else make_fault(does)


def load_fault(spec: str) -> Fault:
    """Return the fault "FILE.py:NAME", or "NAME" of the catalogue. Runs FILE.py, and raises what that raises.

    Raises FaultError if there is no such file or fault, with the nearest name of the catalogue.
    """
    path, _, name = spec.rpartition(":")
    if not path:
        known = {fault.name: fault for fault in all_faults()}
        if name not in known:
            raise FaultError(
                f"no fault is named {name!r}{did_you_mean(name, known)};"
                " `harness faults --list` lists them; your own: FILE.py:NAME"
            )
        return known[name]
    loaded = getattr(_import_file(Path(path)), name, None)
    if not isinstance(loaded, Fault):
        raise FaultError(f"{path}: no fault named {name!r} (made by harness.faults.fault)")
    return dataclasses.replace(loaded, name=name)


def all_faults() -> list[Fault]:
    """Return every fault of the catalogue, with its name, by file and in the order written."""
    from harness.faults import catalogue

    names = [info.name for info in pkgutil.iter_modules(catalogue.__path__)]
    modules = [importlib.import_module(f"{catalogue.__name__}.{name}") for name in names]
    faults = []
    for module in modules:
        faults += _faults_of(module)
    return faults


def faults_of_file(path: Path) -> list[Fault]:
    """Return every fault of one file, in the order written. Raises FaultError if the file cannot be loaded or has none."""
    try:
        faults = _faults_of(_import_file(path))
    except FaultError:
        raise
    except (Exception, SystemExit) as error:
        raise FaultError(f"{path}: cannot be loaded: {error_text(path, error)}") from error
    if not faults:
        raise FaultError(f"{path}: no fault in it (made by harness.faults.fault)")
    return faults


def _faults_of(module: ModuleType) -> list[Fault]:
    """Return the faults, with their names, that are written in the module. Those that it imports are left out."""
    named_faults = [
        (name, fault)
        for name, fault in vars(module).items()
        if isinstance(fault, Fault) and fault.file == module.__file__
    ]
    return [dataclasses.replace(fault, name=name) for name, fault in named_faults]


def _import_file(path: Path) -> ModuleType:
    """Return the module of a file, imported anew under a name of its own. Raises FaultError if there is no such file."""
    if not path.is_file():
        raise FaultError(f"{path}: no such file; a fault is given as FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(f"fault_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set owner.name to make(original)."""
    setattr(owner, name, make(getattr(owner, name)))
