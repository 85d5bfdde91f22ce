"""Sizes of the model and the sampler's seed that a script has written into it: literals in calls, defaults of what is called.

Read by the syntax tree. What is no literal is told by a flag, or by nobody, and is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from harness.onboarding.spellings import FLAGS, by_spelling

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim")
AMBIGUOUS = ("hidden", "hidden_size", "width")  # the feed-forward's beside a name for the model's


def sizes(trees: Sequence[ast.AST], models: Sequence[str]) -> dict[str, int]:
    """By field of the model: the first model's own, else those of a dataclass Config, Args or the like."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    constants = _constants(trees)
    for node in (one for name in models[:1] for one in classes if one.name == name):
        given = _defaults(node) | _given(trees, node)
        if found := _by_field(given, constants):
            return found
    configs = [node for node in classes if node.name.lower().endswith(("config", "args", "arguments", "params"))]
    written = [_by_field(_fields(node) | _given(trees, node), constants) for node in configs]
    return max(written, key=len, default={})


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


def _constants(trees: Sequence[ast.AST]) -> dict[str, object]:
    """Of modules."""
    found: dict[str, object] = {}
    for tree in trees:
        for node in getattr(tree, "body", ()):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = _literal(node.value, found)
    return found


def _literal(node: ast.expr, constants: Mapping[str, object]) -> object:
    if isinstance(node, ast.Name):
        return constants.get(node.id)
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


def _by_field(given: Mapping[str, ast.expr], constants: Mapping[str, object]) -> dict[str, int]:
    known = by_spelling(FLAGS)
    fields = {name: known.get(name.lower(), "").removeprefix("model.") for name in given}
    if any(field == "dim" and name not in AMBIGUOUS for name, field in fields.items()):
        fields |= {name: "ffn_dim" for name in AMBIGUOUS if name in fields}
    values = {field: _literal(given[name], constants) for name, field in fields.items() if field in SIZES}
    return {field: value for field, value in values.items() if isinstance(value, int) and value > 0}
