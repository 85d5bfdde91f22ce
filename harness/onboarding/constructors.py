"""Sizes of the model and the sampler's seed that a script has written into it: literals in calls, defaults of what is called.

Read by the syntax tree. What is no literal is told by a flag, or by nobody, and is left out.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.onboarding.spellings import FLAGS, by_spelling

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim")
AMBIGUOUS = ("hidden", "hidden_size", "width")  # the feed-forward's beside a name for the model's


def sizes(trees: Sequence[ast.AST], models: Sequence[str]) -> dict[str, int]:
    """By field of the model: the first model's own, else those of a dataclass Config, Args or the like; and what neither tells
    by constants of modules, which the model may read itself."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    constants = _constants(trees)
    given: dict[str, ast.expr] = {}
    for node in (one for name in models[:1] for one in classes if one.name == name):
        given = _defaults(node) | _given(trees, node)
    found, told = _by_field(given, constants), set(_fields_of(given))
    if not found:
        configs = [node for node in classes if node.name.lower().endswith(("config", "args", "arguments", "params"))]
        written = [_fields(node) | _given(trees, node) for node in configs]
        found = max((_by_field(one, constants) for one in written), key=len, default={})
        told |= {field for one in written for field in _fields_of(one)}
    read = {name.lower(): value for name, value in constants.items()} if models else {}
    return {field: size for field, size in _by_field(read, constants).items() if field not in told} | found


def sampler(trees: Iterable[ast.AST]) -> dict[str, object] | None:
    """shuffle and seed of the first DistributedSampler; torch's own where they are left out, None where no literal."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("DistributedSampler"):
                names = ("dataset", "num_replicas", "rank", "shuffle", "seed")
                given = dict(zip(names, node.args, strict=False)) | {one.arg: one.value for one in node.keywords}
                usual: dict[str, object] = {"shuffle": True, "seed": 0}
                return usual | {name: _literal(given[name], {}) for name in usual if name in given}
    return None


def _constants(trees: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """Of modules, what each name is; of several of one name the script's, whose tree is the first."""
    found: dict[str, ast.expr] = {}
    for tree in reversed(trees):
        for node in getattr(tree, "body", ()):
            found |= _assigned(node)
    return found


def _assigned(node: ast.stmt) -> dict[str, ast.expr]:
    """DIM = 64; DIM: int = 64; DIM, HEADS = 64, 4; and what an import calls otherwise."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname: ast.Name(alias.name) for alias in node.names if alias.asname not in (None, alias.name)}
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return {ast.unparse(node.target): node.value}
    if not isinstance(node, ast.Assign):
        return {}
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return dict(zip(map(ast.unparse, target.elts), value.elts, strict=False))
    return {ast.unparse(target): value}


ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def _literal(node: ast.expr, constants: Mapping[str, ast.expr]) -> object:
    """What it is, where literals and constants tell: 64, DIM, model.DIM, 4 * DIM, 8 * DIM // 3."""
    name = node.attr if isinstance(node, ast.Attribute) and node.attr.isupper() else ast.unparse(node)
    if name in constants:
        return _literal(constants[name], {key: value for key, value in constants.items() if key != name})
    if isinstance(node, ast.BinOp):
        left, right = _literal(node.left, constants), _literal(node.right, constants)
        if isinstance(left, int) and isinstance(right, int):
            if isinstance(node.op, ast.FloorDiv):
                return left // right if right else None
            return ARITHMETIC[type(node.op)](left, right) if type(node.op) in ARITHMETIC else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _defaults(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Of its __init__; of a parameter without one nothing."""
    for made in (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"):
        arguments = made.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        usual = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
        return usual | {o.arg: d for o, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
    return {}


def _fields(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Of a dataclass."""
    lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
    return {ast.unparse(line.target): line.value for line in lines if line.value}


def _given(trees: Iterable[ast.AST], node: ast.ClassDef) -> dict[str, ast.expr]:
    """In the call that makes it, the first that is seen."""
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    names = [one.arg for one in made[0].args.args[1:]] if made else list(_fields(node))
    for call in (one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.Call)):
        if ast.unparse(call.func).rpartition(".")[2] == node.name:
            return dict(zip(names, call.args, strict=False)) | {one.arg: one.value for one in call.keywords if one.arg}
    return {}


def _by_field(given: Mapping[str, ast.expr], constants: Mapping[str, ast.expr]) -> dict[str, int]:
    values = {field: _literal(node, constants) for field, node in _fields_of(given).items()}
    return {field: value for field, value in values.items() if isinstance(value, int) and value > 0}


def _fields_of(given: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """By what they are spelled like; only sizes of the model."""
    known = by_spelling(FLAGS)
    fields = {name: known.get(name.lower(), "").removeprefix("model.") for name in given}
    if any(field == "dim" and name not in AMBIGUOUS for name, field in fields.items()):
        fields |= {name: "ffn_dim" for name in AMBIGUOUS if name in fields}
    return {field: given[name] for name, field in fields.items() if field in SIZES}
