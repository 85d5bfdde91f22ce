"""Which of a script's optimizers trains its model, and what is written into the call that makes it.

A script may have others: of a probe, of a second model, or one that is made and never stepped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence


def of_the_model(trees: Sequence[ast.AST], models: Sequence[str], modules: Sequence[str]) -> dict[str, object] | None:
    """Literal keywords; those that are no literals are told by a flag, or by nobody. modules: all classes of modules.

    Of several the first that is given parameters of the model and is stepped; else one that is given them; else the first.
    """
    calls = [
        call for tree in trees for call in _in_order(tree) if re.search(r"(^|\.)(AdamW|SGD)$", ast.unparse(call.func))
    ]
    if not calls:
        return None
    trained, stepped = _names_of(models[:1], modules, trees), _stepped(trees)

    def likelihood(call: ast.Call) -> tuple[bool, bool]:
        return bool(_names(call) & trained), call in stepped

    return _keywords(max(calls, key=likelihood))


def _in_order(tree: ast.AST) -> list[ast.Call]:
    """As they are written, line by line."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _assignments(tree: ast.AST) -> list[ast.Assign]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return sorted(found, key=lambda node: node.lineno)


def _names_of(models: Sequence[str], modules: Sequence[str], trees: Sequence[ast.AST]) -> set[str]:
    """Of variables that hold the model, what wraps it, or something that was made of it; of other modules none."""
    found, others = set(models), set(modules) - set(models)
    for tree in trees:
        for node in _assignments(tree):
            if _names(node.value) & found and not _names(node.value) & others:
                found |= {ast.unparse(target) for target in node.targets}
    return found


def _names(node: ast.AST) -> set[str]:
    """All names within, and attributes of self."""
    inside = [one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)]
    return {ast.unparse(one) for one in inside}


def _stepped(trees: Sequence[ast.AST]) -> set[ast.Call]:
    """The calls of which something is kept that has its `step` called."""
    steps = {ast.unparse(call.func) for tree in trees for call in _in_order(tree)}
    return {
        call
        for tree in trees
        for node in _assignments(tree)
        if any(f"{ast.unparse(target)}.step" in steps for target in node.targets)
        for call in _in_order(node.value)
    }


def _keywords(call: ast.Call) -> dict[str, object]:
    return {"optimizer": ast.unparse(call.func).rpartition(".")[2].lower(), **dict(_literals(call))}


def _literals(call: ast.Call) -> Iterator[tuple[str, object]]:
    for keyword in call.keywords:
        try:
            yield keyword.arg or "", ast.literal_eval(keyword.value)
        except ValueError:
            yield keyword.arg or "", None
