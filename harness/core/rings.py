"""The functions that rings add to the core, by name; each is imported when it is needed.

The core imports no ring. A ring is a package beside the core, and `RING` in it is one table of texts. "module:name" is
the object that a module has by that name. No entry points: the project also runs uninstalled, by PYTHONPATH.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NAMES = ("adapters", "recording", "clusters", "nights", "faults", "hypotheses")


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The functions and tables that one ring adds.

    Where several rings add the same, theirs follow each other in the order of NAMES.
    """

    commands: Mapping[str, str] = field(default_factory=dict)
    """Command -> its line of help. The ring has two files of its name: cli/ says what can be typed, cli/work/ does it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Command of the core -> a function (parser) that adds options to it."""
    run_options: Sequence[str] = ()
    """Functions (args, trainer) that return what the ring's own options say of a run, as fields of run.options.Options."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Command of the core -> a function (args) that does what the ring's options ask for: its exit code, else None."""
    selections: Sequence[str] = ()
    """Functions (cases, args) that return the cases to run and a sentence on them; None where nothing asks for it."""
    machines: Sequence[str] = ()
    """Functions (args, options) that return where cases run (run.matrix.Machines); None where that is this machine."""
    rank_wrappers: Mapping[str, str] = field(default_factory=dict)
    """Key of a rank's options -> a function (options, rank) that returns what the rank runs in, a context manager."""
    judged: Sequence[str] = ()
    """Functions (case, options, folder, judgement) that are called when a case was run and judged."""
    trainers: Mapping[str, str] = field(default_factory=dict)
    """Name of a trainer -> module with its `adapter`."""
    suspects: Sequence[str] = ()
    """Functions that propose causes (causes.hypothesis.Suspects), which are judged again."""
    costly: Sequence[str] = ()
    """The same, of those that compute models to propose something."""
    facts: Sequence[str] = ()
    """Functions that say what a check saw directly (causes.hypothesis.Facts)."""
    comparing: Sequence[str] = ()
    """Names of the checks with which the ring compares, as causes refer to them."""
    called: Mapping[str, str] = field(default_factory=dict)
    """Name by which the core asks for one function -> that function."""


@functools.cache
def rings() -> Mapping[str, Ring]:
    """Return the `RING` of each ring that is installed, by name, in the order of NAMES."""
    modules = {name: f"{__name__.split('.')[0]}.{name}" for name in NAMES}
    return {
        name: importlib.import_module(module).RING
        for name, module in modules.items()
        if importlib.util.find_spec(module)
    }


def import_object(spelled_function: str) -> Any:
    """Import and return the object that "module:name" spells."""
    module, _, name = spelled_function.partition(":")
    return getattr(importlib.import_module(module), name)


def functions_of(field: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions of all rings in a field that is a sequence, importing each as it is reached."""
    for ring in rings().values():
        yield from map(import_object, getattr(ring, field))


def entries_of(field: str) -> dict[str, str]:
    """Return the entries of all rings in a field that is a table."""
    entries: dict[str, str] = {}
    for ring in rings().values():
        entries.update(getattr(ring, field))
    return entries


def functions_for(field: str, key: str) -> Iterator[Callable[..., Any]]:
    """Yield the function of each ring that has this key in a field that is a table; nothing if no ring has it."""
    for ring in rings().values():
        if key in getattr(ring, field):
            yield import_object(getattr(ring, field)[key])


def function_for(field: str, key: str) -> Callable[..., Any]:
    """Return the function of the first ring that has this key in a field that is a table.

    LookupError if no ring has it.
    """
    for function in functions_for(field, key):
        return function
    raise LookupError(f"no ring has {key!r} among its {field}")


def commands_of_rings() -> dict[str, tuple[str, str]]:
    """Return, by command, the package that has it (harness.RING.cli) and its line of help."""
    return {
        command: (f"{__name__.split('.')[0]}.{name}.cli", help)
        for name, ring in rings().items()
        for command, help in ring.commands.items()
    }
