"""NeMo's configurations as drafts of a layout: its YAML files, and recipes of Python, which are read and not run.

Constants that a recipe's functions are called with, or have as defaults, are read. If a word has several values, none is
chosen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.clusters.draft import Draft
from harness.core.case.case import CaseError
from harness.core.case.dims import ParallelDims
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.reading import read_text
from harness.reference.config import PRESETS, ModelConfig

WORDS = {
    "tp": ("tensor_model_parallel_size", "tensor_parallelism"),
    "pp": ("pipeline_model_parallel_size", "pipeline_parallelism"),
    "vp": ("virtual_pipeline_model_parallel_size", "virtual_pipeline_parallelism"),
    "cp": ("context_parallel_size", "context_parallelism"),
    "sequence": ("sequence_parallel", "sequence_parallelism"),
    "nodes": ("num_nodes",),
    "devices": ("devices", "num_gpus_per_node"),
    "micro": ("micro_batch_size",),
    "batch": ("global_batch_size",),
    "seq": ("seq_length", "encoder_seq_length", "seq_len"),
    "precision": ("precision",),
    "reduced": ("grad_reduce_in_fp32",),
    "recompute": ("recompute_granularity", "activations_checkpoint_granularity"),
    "zero": ("use_distributed_optimizer",),
    "layers": ("num_layers",),
    "dim": ("hidden_size",),
    "ffn": ("ffn_hidden_size",),
    "heads": ("num_attention_heads",),
    "kv": ("num_query_groups",),
    "vocabulary": ("vocab_size",),
}
"""What it is here -> its names in NeMo."""
KNOWN = {word: key for key, words in WORDS.items() for word in words}
USUAL_RECIPE = "pretrain_recipe"
SIZE = re.compile(r"Llama3\d*Config(\d+B)$")
"""Classes of a model, which end in its size."""


def is_one(told: Any) -> bool:
    """Whether a YAML file is NeMo's."""
    return any(key == "tensor_model_parallel_size" for key, _ in _leaves(told))


def of_yaml(file: str, told: Any, world: int | None) -> Draft:
    """Raises CaseError."""
    leaves = list(_leaves(told))
    named = [str(value).rpartition(".")[2] for key, value in leaves if key == "_target_"]
    return _draft(file, _collected(file, ((KNOWN[k], v) for k, v in leaves if k in KNOWN), {}), named, world)


def of_recipe(named: str, world: int | None) -> Draft:
    """named: FILE.py, of which pretrain_recipe is meant where there is one, or FILE.py:FUNCTION. Raises CaseError."""
    file, _, function = named.partition(":")
    try:
        tree = ast.parse(read_text(Path(file)))
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise CaseError(f"{file}: {error}") from error
    parts = _reached(file, tree, function)
    said, usual = list(_said(parts)), list(_defaults(parts))
    if not any(key in ("tp", "pp") for key, _ in [*said, *usual]):
        raise CaseError(f"{named}: no recipe of NeMo: it has no tensor_model_parallel_size")
    unread = {KNOWN[name] for name in _computed(parts)} - {key for key, _ in [*said, *usual]}
    if missing := sorted(WORDS[key][0] for key in unread & {"tp", "pp", "vp", "cp", "micro", "batch", "seq"}):
        raise CaseError(f"{named}: {missing[0]} is computed, and recipes are not run: write its number")
    names = [str(getattr(node, "id", getattr(node, "attr", ""))) for node in _nodes(parts)]
    mixed = {"precision": "bf16-mixed"} if any(name.startswith("bf16") for name in names) else {}
    return _draft(named, mixed | _collected(named, said, _collected(named, usual, {})), names, world)


def _reached(file: str, tree: ast.Module, function: str) -> list[ast.AST]:
    """The function, and those of the file that it calls, one after the other; all of the file where none is named."""
    known = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function and function not in known:
        raise CaseError(f"{file}: no function {function}; it has {', '.join(known)}")
    wanted = [function or USUAL_RECIPE]
    if wanted[0] not in known:
        return [tree]
    for name in wanted:
        called = (node.id for node in ast.walk(known[name]) if isinstance(node, ast.Name))
        wanted += dict.fromkeys(one for one in called if one in known and one not in wanted)
    return [known[name] for name in wanted]


def _nodes(parts: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (node for part in parts for node in ast.walk(part))


def _leaves(told: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(told, dict):
        for key, value in told.items():
            yield from _leaves(value) if isinstance(value, dict | list) else ((str(key), value),)
    elif isinstance(told, list):
        for value in told:
            yield from _leaves(value)


def _said(parts: list[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Constants that a function is called with, or that are assigned to an attribute or a key."""
    for node in _nodes(parts):
        if isinstance(node, ast.keyword):
            yield from _constant(node.arg, node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _constant(getattr(target, "attr", getattr(target, "id", None)), node.value)


def _computed(parts: list[ast.AST]) -> Iterator[str]:
    """Words that functions are called with and that are no constants."""
    for node in _nodes(parts):
        if isinstance(node, ast.keyword) and node.arg in KNOWN and not isinstance(node.value, ast.Constant):
            yield node.arg


def _defaults(parts: list[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Constants that functions take by themselves."""
    for node in _nodes(parts):
        if isinstance(node, ast.FunctionDef):
            names = [*node.args.posonlyargs, *node.args.args]
            for argument, value in zip(names[len(names) - len(node.args.defaults) :], node.args.defaults, strict=True):
                yield from _constant(argument.arg, value)


def _constant(name: str | None, value: ast.expr) -> Iterator[tuple[str, Any]]:
    if name in KNOWN and isinstance(value, ast.Constant):
        yield KNOWN[name], value.value


def _collected(file: str, said: Any, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by what they are. Two values of a degree or of samples are refused; of nodes or devices none is taken.
    usual: defaults."""
    found: dict[str, list[Any]] = {}
    for key, value in said:
        if value is not None and value not in found.setdefault(key, []):
            found[key].append(value)
    of_ranks = {key for key in ("nodes", "devices") if len(found.get(key, [])) > 1}
    found = {key: values for key, values in found.items() if key not in of_ranks}
    for key in ("tp", "pp", "vp", "cp", "micro", "batch", "seq"):
        if len(values := found.get(key, [])) > 1:
            shown = " and ".join(map(str, values))
            raise CaseError(
                f"{file}: {WORDS[key][0]} is {shown}: give the degrees themselves, or a file with one of them"
            )
    said_once = {key: values[0] for key, values in found.items() if values}
    return {key: value for key, value in usual.items() if key not in of_ranks} | said_once


def _draft(file: str, said: Mapping[str, Any], named: list[str], world: int | None) -> Draft:
    tp, pp, cp = (_number(file, said, key, 1) for key in ("tp", "pp", "cp"))
    if world is None:
        if not {"nodes", "devices"} <= said.keys():
            raise CaseError(f"{file}: it does not say num_nodes and devices, of how many ranks it is: add --world N")
        world = _number(file, said, "nodes", 1) * _number(file, said, "devices", 1)
    others = tp * pp * cp
    if world % others:
        raise CaseError(
            f"{file}: {others} ranks of tp {tp}, pp {pp} and cp {cp} do not divide the {world} of the world"
        )
    data = world // others
    zero = said.get("zero", True) is True and data * cp > 1
    dims = ParallelDims(pp=pp, cp=cp, tp=tp, **{"dp_shard" if zero else "dp_replicate": data})
    micro, batch = _number(file, said, "micro", 1), _number(file, said, "batch", 0)
    half = "16" in str(said.get("precision", ""))
    passes = max(1, batch // (data * micro))
    features: dict[str, Any] = {"sequence_parallel": tp == 1 or said.get("sequence") is True}
    features |= {"wrapper": "zero1"} if zero else {}
    features |= {"reduce_dtype": "float32" if said.get("reduced", True) else "bfloat16"} if half else {}
    features |= {"activation_checkpointing": "full"} if said.get("recompute") == "full" else {}
    if pp == 1:
        features["accumulation"] = passes
    else:
        chunks = _number(file, said, "vp", 1)
        looped = {"stages_per_rank": chunks, "schedule": "Interleaved1F1B"} if chunks > 1 else {}
        features |= {"microbatches": passes, **looped}
    return Draft(
        dims=dims,
        model=_model(file, said, named),
        seq=_number(file, said, "seq", 0) or None,
        batch=batch or None,
        local=micro,
        training={"dtype": "float32", "compute_dtype": "bfloat16" if half else None},
        features=features,
        traits=TrainerTraits(master_weights=half, cp_heads="key_value"),
    )


def _model(file: str, said: Mapping[str, Any], named: list[str]) -> ModelConfig | None:
    """Return the model by its class, or by its sizes; None where it says neither."""
    sizes = {found[1] for name in named if (found := SIZE.search(name))} & PRESETS.keys()
    if len(sizes) == 1:
        return PRESETS[sizes.pop()]
    if not {"layers", "dim", "heads", "ffn"} <= said.keys():
        return None
    shape = {key: _number(file, said, key, 1) for key in ("layers", "dim", "heads", "ffn")}
    same = (one for one in PRESETS.values() if shape == _shape(one))
    return next(same, None)


def _shape(model: ModelConfig) -> dict[str, int]:
    return {"layers": model.n_layers, "dim": model.dim, "heads": model.n_heads, "ffn": model.ffn_dim}


def _number(file: str, said: Mapping[str, Any], key: str, usual: int) -> int:
    given = said.get(key, usual)
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise CaseError(f"{file}: {WORDS[key][0]} is {given!r}, and no number: give it as an option, or in the file")
    return given
