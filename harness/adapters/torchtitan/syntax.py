"""Facts about what a file of torchtitan's defines and calls, by its syntax: nothing of it is imported.

A function `a_..` or `an_..` returns a fact: a predicate of a parsed file.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

Fact = Callable[[ast.Module], bool]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.lru_cache(maxsize=256)
def holds(fact: Fact, text: str) -> bool:
    """Return whether a fact holds of a file's text. Raises SyntaxError."""
    return fact(_parse_cached(text))


@functools.lru_cache(maxsize=64)
def _parse_cached(text: str) -> ast.Module:
    return ast.parse(text)


def a_function(name: str, parameter: str) -> Fact:
    """Return the fact that a file defines a function of that name with that parameter."""
    return lambda tree: any(
        each.name == name and parameter in _parameters(each) for each in _nodes_of_kinds(tree, *FUNCTIONS)
    )


def a_parameter(name: str) -> Fact:
    return lambda tree: any(name in _parameters(each) for each in _nodes_of_kinds(tree, *FUNCTIONS))


def a_class(name: str) -> Fact:
    return lambda tree: any(each.name == name for each in _nodes_of_kinds(tree, ast.ClassDef))


def a_field(name: str) -> Fact:
    """Return the fact that a class has an annotated attribute of that name."""
    return lambda tree: any(
        isinstance(node, ast.AnnAssign) and _dotted_name(node.target) == name for node in _bodies(tree, ast.ClassDef)
    )


def a_name(name: str) -> Fact:
    """Return the fact that a file uses a variable of that name."""
    return lambda tree: any(each.id == name for each in _nodes_of_kinds(tree, ast.Name))


def an_attribute(name: str) -> Fact:
    """Return the fact that a file looks up an attribute of that name."""
    return lambda tree: any(each.attr == name for each in _nodes_of_kinds(tree, ast.Attribute))


def an_import(name: str) -> Fact:
    return lambda tree: any(each.name == name for each in _nodes_of_kinds(tree, ast.alias))


def a_call(name: str) -> Fact:
    """Return the fact that a file calls something by that name, dots included."""
    return lambda tree: any(_dotted_name(each.func) == name for each in _nodes_of_kinds(tree, ast.Call))


def a_keyword(name: str) -> Fact:
    """Return the fact that a file passes an argument by that name."""
    return lambda tree: any(each.arg == name for each in _nodes_of_kinds(tree, ast.keyword))


def an_option(name: str) -> Fact:
    """Return the fact that a file adds an option of that name to a parser of command lines."""
    return lambda tree: any(
        _dotted_name(each.func).endswith(".add_argument") and _first_constant(each) == name
        for each in _nodes_of_kinds(tree, ast.Call)
    )


def a_key(name: str) -> Fact:
    """Return the fact that a file writes a dict with that key."""
    return lambda tree: any(isinstance(key, ast.Constant) and key.value == name for key in _keys_of_dicts(tree))


def a_list(*items: str) -> Fact:
    return lambda tree: any(tuple(map(_dotted_name, each.elts)) == items for each in _nodes_of_kinds(tree, ast.List))


def a_certain_call(*names: str) -> Fact:
    """Return the fact that a function calls one of these names in its body itself, below no condition."""
    return lambda tree: any(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _dotted_name(node.value.func) in names
        for node in _bodies(tree, *FUNCTIONS)
    )


def _first_constant(call: ast.Call) -> object:
    """Return the value of a call's first argument if it is a constant, else None."""
    return call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None


def _dotted_name(node: ast.AST) -> str:
    """Return "a.b.c" for a name or an attribute of one. Empty, or with an empty beginning, for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _parameters(function: Any) -> set[str]:
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _nodes_of_kinds(tree: ast.Module, *kinds: type[ast.AST]) -> Iterator[Any]:
    """Return all nodes of these kinds."""
    return (node for node in _nodes(tree) if isinstance(node, kinds))


def _bodies(tree: ast.Module, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements in the bodies of all nodes of these kinds."""
    for owner in _nodes_of_kinds(tree, *kinds):
        yield from owner.body


def _keys_of_dicts(tree: ast.Module) -> Iterator[ast.AST | None]:
    """Yield the keys of all dicts that are written out; None for an unpacked one."""
    for node in _nodes_of_kinds(tree, ast.Dict):
        yield from node.keys


@functools.lru_cache(maxsize=64)
def _nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))
