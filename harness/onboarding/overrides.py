"""Flags of a script that has no parser: it executes a file beside it, which sets its globals by `--name=value`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def constants(script: Path, tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Numbers and strings that the script names before such a file runs: name, value, and that file's name."""
    plain: dict[str, str] = {}
    for node in tree.body:
        if file := _executed(node, script.parent):
            yield from ((name, value, file) for name, value in plain.items())
            return
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_plain(node.value):
            plain[node.targets[0].id] = ast.unparse(node.value)


def _executed(node: ast.stmt, folder: Path) -> str:
    """exec(open("FILE.py").read()), of a file that reads --name=value and sets globals; empty if it is none."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "exec"):
        return ""
    named = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return next((name for name in named if name.endswith(".py") and _sets_globals(folder / name)), "")


def _sets_globals(file: Path) -> bool:
    if not file.is_file():
        return False
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Call | ast.Attribute)}
    return {"--", "="} <= strings and {"globals()", "sys.argv"} <= used


def _is_plain(node: ast.expr) -> bool:
    """A number or a string, written so or computed of such: 5 * 8, 'a' if x else 'b'."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float | str)
    if isinstance(node, ast.IfExp):
        return _is_plain(node.body) and _is_plain(node.orelse)
    if isinstance(node, ast.BinOp):
        return _is_plain(node.left) and _is_plain(node.right)
    return isinstance(node, ast.UnaryOp) and _is_plain(node.operand)
