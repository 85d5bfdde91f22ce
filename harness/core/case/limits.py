"""How large a case may be. Neither the plan's arithmetic nor a run of a larger one would end: it is refused before any work."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from harness.core.case.case import Case

RANKS = 2**17  # of a plan
STARTED = 4096  # of one run
TOKENS = 2**27  # of a step of a plan
TRAINED = 2**24  # of a step of a run
NAME = 100  # letters; a file's name has at most 255 bytes, and gets more words
COMBINATIONS = 10_000  # of one cross product
NODES = 100_000  # of a YAML file, whatever an alias stands for counted each time
SIZES = {"steps": 10_000, "warmup_steps": 2**20, "n_layers": 512, "seed": 2**63 - 1}
SIZES |= dict.fromkeys(("dim", "ffn_dim", "vocab_size", "n_heads", "n_kv_heads", "accumulation"), 2**20)
WORD = re.compile(rf"[\w.-]{{1,{NAME}}}")


def too_large(case: Case) -> str:
    """Return which number is too large, or which name cannot be part of a path. Empty if all is well."""
    for record in (case.training, case.model, case.features):
        for key, limit in SIZES.items():
            if getattr(record, key, 0) > limit:
                return f"{key} {shown(getattr(record, key))} is more than the {limit} that a case may have"
    if case.training.seed < 0:
        return f"seed must be at least 0, got {shown(case.training.seed)}"
    if len(case.name) > NAME:
        return f"a name has at most {NAME} letters, this one {len(case.name)}"
    if not WORD.fullmatch(case.model.name):
        return (
            f"model: name {shown(case.model.name)}: letters, digits, '_', '.' and '-' only, it becomes part of a path"
        )
    if "\0" in (case.training.data or ""):
        return "training: data: no file has a NUL in its name"
    ranks = case.dims.world_size
    tokens = case.training.global_batch * case.training.seq_len
    if ranks > RANKS:
        return f"{shown(ranks)} ranks, more than {RANKS}"
    if tokens > TOKENS:
        return f"global_batch x seq_len = {shown(tokens)} tokens a step, more than {TOKENS}"
    return ""


def too_large_to_start(case: Case) -> str:
    """Return why a run of this case is refused; empty if it can be tried."""
    ranks = max(launched.dims.world_size for launched in case.launches.values())
    tokens = case.training.global_batch * case.training.seq_len
    for unit, number, limit in (("ranks", ranks, STARTED), ("tokens a step", tokens, TRAINED)):
        if number > limit:
            return f"{number} {unit}, more than the {limit} of a run; `harness plan` and `harness preflight` take it"
    return ""


def _product(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def too_many(axes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why a cross product is refused; empty if it is not."""
    count = _product(map(len, axes.values()))
    return f"{shown(count)} combinations, more than {COMBINATIONS}" if count > COMBINATIONS else ""


def refuse_bombs(node: yaml.Node | None) -> None:
    """Raise YAMLError if the values of a document, each alias counted, are too many.

    A few lines of aliases of aliases stand for more than any memory holds.
    """
    if node is not None and (count := _nodes(node, {})) > NODES:
        raise yaml.YAMLError(f"{shown(count)} values, counting what each alias stands for, more than {NODES}")


def _nodes(node: yaml.Node, count_by_id: dict[int, int]) -> int:
    """Return the number of values in a node, what an alias stands for counted each time. known: counts by id of a node."""
    if id(node) not in count_by_id:
        count_by_id[id(node)] = 0  # stands for a node that is being counted: an alias to it would be a loop
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = list(itertools.chain.from_iterable(node.value))
        elif isinstance(node, yaml.CollectionNode):
            children = node.value
        count_by_id[id(node)] = 1 + sum(_nodes(child, count_by_id) for child in children)
    elif count_by_id[id(node)] == 0:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: an alias within what it stands for")
    return count_by_id[id(node)]


def shown(value: Any) -> str:
    """Return at most 200 letters of a value's repr."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= 200 else f"{text[:197]}..."
