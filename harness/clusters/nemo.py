"""NeMo's configurations as drafts of a layout: its YAML files, and recipes of Python, which are parsed and not run.

Constants that a recipe's functions are called with, or have as defaults, are read. Of a word with several values, none
is chosen.
"""

from __future__ import annotations

import ast
import itertools
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

NEMO_WORDS = {
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
KEY_OF_WORD: dict[str, str] = {}
"""Name in NeMo -> what it is here."""
for _key, _words in NEMO_WORDS.items():
    KEY_OF_WORD |= dict.fromkeys(_words, _key)

USUAL_RECIPE = "pretrain_recipe"
SIZE_OF_CLASS = re.compile(r"Llama3\d*Config(\d+B)$")
"""Classes of a model, which end in its size."""


def is_nemo_document(document: Any) -> bool:
    """Return whether a YAML document is NeMo's: it has the key tensor_model_parallel_size somewhere."""
    return any(key == "tensor_model_parallel_size" for key, _ in _leaves(document))


def draft_of_nemo_yaml(file: str, document: Any, world: int | None) -> Draft:
    """Return the draft of NeMo's YAML document.

    Raises CaseError. world: the number of ranks; None means nodes times devices.
    """
    leaves = list(_leaves(document))
    class_names = [str(value).rpartition(".")[2] for key, value in leaves if key == "_target_"]
    values = ((KEY_OF_WORD[key], value) for key, value in leaves if key in KEY_OF_WORD)
    return _draft(file, _collect_values(file, values, {}), class_names, world)


def draft_of_recipe(recipe: str, world: int | None) -> Draft:
    """Return the draft of a recipe, read from its source. Raises CaseError, also if a degree is computed.

    recipe: FILE.py, of which pretrain_recipe is meant where there is one, or FILE.py:FUNCTION.
    """
    file, _, function = recipe.partition(":")
    try:
        tree = ast.parse(read_text(Path(file)))
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise CaseError(f"{file}: {error}") from error
    parts = _reached_functions(file, tree, function)
    stated = list(_stated_values(parts))
    defaults = list(_default_values(parts))
    if not any(key in ("tp", "pp") for key, _ in [*stated, *defaults]):
        raise CaseError(f"{recipe}: not a NeMo recipe: tensor_model_parallel_size is missing")
    unread = {KEY_OF_WORD[name] for name in _computed_words(parts)} - {key for key, _ in [*stated, *defaults]}
    if missing := sorted(NEMO_WORDS[key][0] for key in unread & {"tp", "pp", "vp", "cp", "micro", "batch", "seq"}):
        raise CaseError(f"{recipe}: {missing[0]} is computed, and recipes are not run; write the number")
    names = [str(getattr(node, "id", getattr(node, "attr", ""))) for node in _nodes(parts)]
    mixed = {"precision": "bf16-mixed"} if any(name.startswith("bf16") for name in names) else {}
    return _draft(recipe, mixed | _collect_values(recipe, stated, _collect_values(recipe, defaults, {})), names, world)


def _reached_functions(file: str, tree: ast.Module, function: str) -> list[ast.AST]:
    """Return the function (pretrain_recipe if none is named) and all functions of the file that it calls, in order of
    discovery.

    Without a pretrain_recipe, the whole file. CaseError if the named function is missing.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function and function not in functions:
        raise CaseError(f"{file}: no function {function}; it has {', '.join(functions)}")
    names = [function or USUAL_RECIPE]
    if names[0] not in functions:
        return [tree]
    for name in names:
        called = (node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name))
        names += dict.fromkeys(
            name_called for name_called in called if name_called in functions and name_called not in names
        )
    return [functions[name] for name in names]


def _nodes(parts: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes of these parts of a file's syntax tree."""
    return itertools.chain.from_iterable(map(ast.walk, parts))


def _leaves(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield key and value of all leaves of a YAML document; bare entries of a list have no key and are left out."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value) if isinstance(value, dict | list) else ((str(key), value),)
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value)


def _stated_values(parts: list[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Yield (key of NEMO_WORDS, constant) for known words that functions are called with, or that are assigned."""
    for node in _nodes(parts):
        if isinstance(node, ast.keyword):
            yield from _known_constant(node.arg, node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _known_constant(getattr(target, "attr", getattr(target, "id", None)), node.value)


def _computed_words(parts: list[ast.AST]) -> Iterator[str]:
    """Yield NeMo's names of known words that functions are called with where the value is no constant."""
    for node in _nodes(parts):
        if isinstance(node, ast.keyword) and node.arg in KEY_OF_WORD and not isinstance(node.value, ast.Constant):
            yield node.arg


def _default_values(parts: list[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Yield (key of NEMO_WORDS, constant) for known words that are functions' arguments with a default."""
    for node in _nodes(parts):
        if isinstance(node, ast.FunctionDef):
            names = [*node.args.posonlyargs, *node.args.args]
            for argument, value in zip(names[len(names) - len(node.args.defaults) :], node.args.defaults, strict=True):
                yield from _known_constant(argument.arg, value)


def _known_constant(name: str | None, value: ast.expr) -> Iterator[tuple[str, Any]]:
    """Yield the key of NEMO_WORDS and the value, if NeMo's name is known and the value a constant; else nothing."""
    if name in KEY_OF_WORD and isinstance(value, ast.Constant):
        yield KEY_OF_WORD[name], value.value


def _collect_values(file: str, pairs: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by key of NEMO_WORDS; a key without a value has its default.

    pairs: (key, value); None values are ignored. Of several values of nodes or devices none is taken, not even the
    default. Raises CaseError for several values of a degree, a length or a number of samples.
    """
    values_by_key: dict[str, list[Any]] = {}
    for key, value in pairs:
        if value is not None and value not in values_by_key.setdefault(key, []):
            values_by_key[key].append(value)
    ambiguous = {key for key in ("nodes", "devices") if len(values_by_key.get(key, [])) > 1}
    values_by_key = {key: values for key, values in values_by_key.items() if key not in ambiguous}
    for key in ("tp", "pp", "vp", "cp", "micro", "batch", "seq"):
        if len(values := values_by_key.get(key, [])) > 1:
            texts = " and ".join(map(str, values))
            raise CaseError(
                f"{file}: {NEMO_WORDS[key][0]} is {texts}:"
                " pass the degrees (--layout dp_shard=8), or a file with a single value"
            )
    value_by_key = {key: values[0] for key, values in values_by_key.items() if values}
    return {key: value for key, value in defaults.items() if key not in ambiguous} | value_by_key


def _draft(file: str, values: Mapping[str, Any], names: list[str], world: int | None) -> Draft:
    """Return the draft of values by key of NEMO_WORDS.

    names: identifiers of the file, among which may be the model's class. Raises CaseError if the degrees do not divide
    the world, or `world` is None and the file does not define it.
    """
    tp, pp, cp = (_number_of(file, values, key, 1) for key in ("tp", "pp", "cp"))
    if world is None:
        if not {"nodes", "devices"} <= values.keys():
            raise CaseError(f"{file}: num_nodes and devices are missing; add --world N")
        world = _number_of(file, values, "nodes", 1) * _number_of(file, values, "devices", 1)
    model_ranks = tp * pp * cp
    if world % model_ranks:
        raise CaseError(
            f"{file}: {model_ranks} ranks of tp {tp}, pp {pp} and cp {cp} do not divide the world size {world}"
        )
    data = world // model_ranks
    zero = values.get("zero", True) is True and data * cp > 1
    dims = ParallelDims(pp=pp, cp=cp, tp=tp, **{"dp_shard" if zero else "dp_replicate": data})
    micro = _number_of(file, values, "micro", 1)
    batch = _number_of(file, values, "batch", 0)
    half = "16" in str(values.get("precision", ""))
    passes = max(1, batch // (data * micro))
    features: dict[str, Any] = {"sequence_parallel": tp == 1 or values.get("sequence") is True}
    if zero:
        features["wrapper"] = "zero1"
    if half:
        features["reduce_dtype"] = "float32" if values.get("reduced", True) else "bfloat16"
    if values.get("recompute") == "full":
        features["activation_checkpointing"] = "full"
    if pp == 1:
        features["accumulation"] = passes
    else:
        chunks = _number_of(file, values, "vp", 1)
        looped = {"stages_per_rank": chunks, "schedule": "Interleaved1F1B"} if chunks > 1 else {}
        features |= {"microbatches": passes, **looped}
    return Draft(
        dims=dims,
        model=_model(file, values, names),
        seq=_number_of(file, values, "seq", 0) or None,
        batch=batch or None,
        local_batch=micro,
        training={"dtype": "float32", "compute_dtype": "bfloat16" if half else None},
        features=features,
        traits=TrainerTraits(master_weights=half, cp_heads="key_value"),
    )


def _model(file: str, values: Mapping[str, Any], names: list[str]) -> ModelConfig | None:
    """Return the published model of the file's class name or sizes.

    None if neither is given, or no published model has the sizes.
    """
    sizes = {match[1] for name in names if (match := SIZE_OF_CLASS.search(name))} & PRESETS.keys()
    if len(sizes) == 1:
        return PRESETS[sizes.pop()]
    if not {"layers", "dim", "heads", "ffn"} <= values.keys():
        return None
    shape = {key: _number_of(file, values, key, 1) for key in ("layers", "dim", "heads", "ffn")}
    presets_of_shape = (preset for preset in PRESETS.values() if shape == _shape(preset))
    return next(presets_of_shape, None)


def _shape(model: ModelConfig) -> dict[str, int]:
    """Return the four sizes by which a published model is recognized, by key of NEMO_WORDS."""
    return {"layers": model.n_layers, "dim": model.dim, "heads": model.n_heads, "ffn": model.ffn_dim}


def _number_of(file: str, values: Mapping[str, Any], key: str, default: int) -> int:
    """Return the whole number of a key, or the default if it is absent. CaseError for anything else."""
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CaseError(
            f"{file}: {NEMO_WORDS[key][0]} must be a number, got {value!r}: give it as an option, or in the file"
        )
    return value
