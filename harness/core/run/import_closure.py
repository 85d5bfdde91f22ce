"""The harness's own files that a process runs: those of some modules, and of all that these import, however deep.

Sources are read and not run. A module counts as imported wherever the import stands, in a function as well, and if a
text names it, as "harness.core.run.rank_main:rank" does. A module that is loaded by a name put together as the program
runs is not seen: the caller names it.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness import ROOT

ONE_AT_A_TIME = threading.Lock()
"""Cases run in threads. CPython 3.11 counts the depth of syntax trees for all threads together: where two parsed at once it
raised SystemError, "AST constructor recursion depth mismatch"."""


def files_run_by(entries: Iterable[str]) -> list[Path]:
    """Return the sources of these modules or packages, each with all that is in it, and of all that they import; sorted.

    Raises LookupError for an entry that is no module of the harness.
    """
    sources = module_files()
    reached: set[str] = set()
    waiting: list[str] = []
    for entry in entries:
        modules_of_entry = [module for module in sources if module == entry or module.startswith(f"{entry}.")]
        if not modules_of_entry:
            raise LookupError(f"{entry}: no module of the harness")
        waiting += modules_of_entry
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports_of(module)
    return sorted(sources[module] for module in reached)


@functools.cache
def module_files() -> dict[str, Path]:
    """Return the file of each module of the harness, by its name. The reference lies behind a link, which no glob follows."""
    package = ROOT / "harness"
    files = {*package.rglob("*.py"), *(package / "reference").glob("*.py")}
    return {_name_of(file): file for file in files}


def _name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Return the names of the harness's modules that a module imports or names, with the packages around them.

    What a ring's table RING names is left out.
    """
    with ONE_AT_A_TIME:
        tree = ast.parse(module_files()[module].read_bytes())
    package = _package_of(module)
    names: set[str] = set()
    for statement in tree.body:
        if not _is_table_of_ring(statement):
            for node in ast.walk(statement):
                names.update(_names_in(node, package))
    names_with_packages: set[str] = set()
    for name in names:
        parts = name.split(".")
        names_with_packages.update(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return frozenset(names_with_packages & module_files().keys())


def _is_table_of_ring(statement: ast.stmt) -> bool:
    """Return whether a statement assigns RING, the table of what a ring brings.

    The caller names the entries that it loads.
    """
    return isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["RING"]


def _package_of(module: str) -> str:
    return module if module_files()[module].stem == "__init__" else module.rpartition(".")[0]


def _names_in(node: ast.AST, package: str) -> Iterator[str]:
    """Yield what may be names of modules: those of an import, or a text that begins with "harness.". Nothing for other
    nodes.

    package: where a relative import starts.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("harness."):
        yield node.value.partition(":")[0]
