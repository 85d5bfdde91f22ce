"""The differences of Python sources between two versions: functions, and code that runs when a file is imported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.case.case import CaseError
from harness.core.evidence.git import run_git

Function = ast.FunctionDef | ast.AsyncFunctionDef
PROSE_SUFFIXES = (".md", ".rst", ".png", ".svg", ".jpg", ".gif")
PROSE_PLACES = (".github/", ".ci/", "LICENSE", "CODEOWNERS", ".gitignore", ".gitattributes", ".pre-commit-config.yaml")
"""What no rank reads."""
LINK_MODE = "120000"
"""Git's mode of a symbolic link. What a rank imports through one is recorded as the file that it leads to."""
COMPILING_DECORATORS = {"jit", "njit", "script", "kernel"}
"""Last names of decorators that read a function's source, as triton.jit and torch.jit.script do: it is never called."""


@dataclass
class SourceChanges:
    """Differences between two versions of a repository."""

    functions: dict[str, set[str]] = field(default_factory=dict)  # by file; in a file that both versions have
    whole_files: dict[str, str] = field(default_factory=dict)  # file -> why all of it counts
    other_files: set[str] = field(
        default_factory=set
    )  # files that are no Python, and symbolic links that lead elsewhere
    new_files: set[str] = field(default_factory=set)  # Python files
    gone_files: set[str] = field(default_factory=set)  # Python files

    def add(self, other: SourceChanges) -> None:
        """Add the differences of another pair of versions to these."""
        for file, names in other.functions.items():
            self.functions.setdefault(file, set()).update(names)
        self.whole_files |= other.whole_files
        self.other_files |= other.other_files
        self.new_files |= other.new_files
        self.gone_files |= other.gone_files

    @property
    def python_files(self) -> set[str]:
        """Return every Python file that differs: changed, new or gone."""
        return {*self.functions, *self.whole_files} | self.new_files | self.gone_files


def changes_between(root: Path, old: str, new: str | None) -> SourceChanges:
    """Return what changed from commit `old` to commit `new`, or to the working tree if `new` is None. Prose is left out.

    Raises CaseError if git does not know a commit.
    """
    changes = SourceChanges()
    for status, file, linked in _differing_files(root, old, new):
        if linked or not file.endswith(".py"):
            if not (file.endswith(PROSE_SUFFIXES) or file.startswith(PROSE_PLACES)):
                changes.other_files.add(file)
        elif status in "AD":
            (changes.new_files if status == "A" else changes.gone_files).add(file)
        else:
            names, reason = compare_sources(
                _text_at_commit(root, old, file),
                _text_at_commit(root, new, file),
                lambda name: _is_mentioned(root, old, name),
            )
            if reason:
                changes.whole_files[file] = reason
            if names:
                changes.functions[file] = names
    return changes


def _differing_files(root: Path, old: str, new: str | None) -> Iterator[tuple[str, str, bool]]:
    """Yield (status, file, whether it was a symbolic link or became one) of each file that differs.

    The status is a letter of git's. If `new` is None, files that git does not track yet are yielded too, as "A". Raises
    CaseError if git fails.
    """
    diff = run_git(root, "diff", "--raw", "--no-renames", "-z", old, *([new] if new else []), "--")
    if diff.returncode:
        raise CaseError(f"{root}: git knows no {old}: {diff.stderr.strip()}")
    fields = diff.stdout.split("\0")
    for change_words, file in zip(fields[::2], fields[1::2], strict=False):
        mode_before, mode_after, _, _, status = change_words.removeprefix(":").split(" ")
        yield status, file, status != "A" and LINK_MODE in (mode_before, mode_after)
    if new is None:
        for file in run_git(root, "ls-files", "--others", "--exclude-standard", "-z").stdout.split("\0"):
            if file:
                yield "A", file, False


def _text_at_commit(root: Path, commit: str | None, file: str) -> str:
    """Return the text of a file at a commit, or in the working tree if `commit` is None. Empty if git does not have it.

    A sparse checkout has only some files; the others are read from git's index.
    """
    if commit is None and (root / file).exists():
        return (root / file).read_text(encoding="utf-8", errors="replace")
    return run_git(root, "show", f"{commit or ''}:{file}").stdout


def _is_mentioned(root: Path, commit: str, name: str) -> bool:
    """Return whether any Python file of the commit contains the name as a whole word."""
    return not run_git(
        root, "grep", "--quiet", "--word-regexp", "--fixed-strings", "-e", name, commit, "--", "*.py"
    ).returncode


def compare_sources(old: str, new: str, is_mentioned: Callable[[str], bool] = lambda _: False) -> tuple[set[str], str]:
    """Return the qualified names of functions whose bodies differ, and why more than these counts. Empty where nothing differs.

    Comments, docstrings and positions do not count. A new function of a module is nothing by itself: who calls it
    changed, too. It counts if its name is no new one. is_mentioned: whether other files had the name.

    Whatever else differs (a signature, a class, a constant, an import, a function that is gone) is "code that runs at
    import". A text that cannot be parsed returns no names and that reason.
    """
    try:
        old_parts = _SourceParts(old)
        new_parts = _SourceParts(new)
    except (SyntaxError, ValueError):
        return set(), "it cannot be parsed"
    changed = {
        name for name, body in old_parts.bodies.items() if name in new_parts.bodies and new_parts.bodies[name] != body
    }
    known_names = old_parts.names | old_parts.bodies.keys()
    known_names |= {name for name in new_parts.bodies.keys() - known_names if "." not in name and is_mentioned(name)}
    is_import_changed = old_parts.nodes_run_at_import(known_names) != new_parts.nodes_run_at_import(known_names)
    return changed, "code that runs at import" if is_import_changed else ""


class _SourceParts(ast.NodeTransformer):
    """The parts of one file's source: `bodies` has the outermost functions by qualified name, `tree` what is left
    without bodies.

    `names` has every name that the source reads or assigns.
    """

    def __init__(self, text: str) -> None:
        self.bodies: dict[str, str] = {}
        tree = ast.parse(text)
        self.names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.path: list[str] = []
        self.tree = self.visit(tree)

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Remove the module's docstring and visit all below."""
        node.body = _without_docstring(node.body)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Remove the class' docstring and visit all below, with the class' name in front of theirs."""
        self.path.append(node.name)
        node.body = _without_docstring(node.body)
        self.generic_visit(node)
        self.path.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Function:
        return self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Function:
        return self._visit_function(node)

    def _visit_function(self, node: Function) -> Function:
        """Store the function's body in `bodies`, and return the function with an empty body.

        Functions inside it are not visited. A function with a decorator in COMPILING_DECORATORS is returned whole, so
        that a change counts as run at import.
        """
        if any(_last_name(decorator) in COMPILING_DECORATORS for decorator in node.decorator_list):
            return node
        name = ".".join([*self.path, node.name])
        body = "\n".join(ast.dump(statement) for statement in _without_docstring(node.body))
        self.bodies[name] = self.bodies.get(name, "") + body  # a property and its setter share a name
        node.body = []
        return node

    def nodes_run_at_import(self, known: set[str]) -> list[str]:
        """Return dumps of the module's statements, which run at import.

        Undecorated functions whose names are not `known` are left out.
        """
        return [
            ast.dump(node)
            for node in self.tree.body
            if not isinstance(node, Function) or node.decorator_list or node.name in known
        ]


def _last_name(decorator: ast.expr) -> str:
    """Return the last name of a decorator: "m" for `m`, `a.m` and `a.m(..)`. Empty for any other expression."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body without its docstring, if it has one."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
