"""Limits on the size of a case.

Neither the plan's arithmetic nor a run of a larger one would end: it is refused before any work.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from harness.core.case.case import Case

MOST_RANKS = 2**17  # of a plan
MOST_STARTED_RANKS = 4096  # of one run
MOST_TOKENS = 2**27  # of a step of a plan
MOST_TRAINED_TOKENS = 2**24  # of a step of a run
MOST_NAME_LETTERS = 100  # letters; a file's name has at most 255 bytes, and gets more words
MOST_COMBINATIONS = 10_000  # of one cross product
MOST_YAML_NODES = 100_000  # of a YAML file, whatever an alias stands for counted each time
MOST_BY_KEY = {"steps": 10_000, "warmup_steps": 2**20, "n_layers": 512, "seed": 2**63 - 1}
MOST_BY_KEY |= dict.fromkeys(("dim", "ffn_dim", "vocab_size", "n_heads", "n_kv_heads", "accumulation"), 2**20)
PATH_WORD = re.compile(rf"[\w.-]{{1,{MOST_NAME_LETTERS}}}")


def size_problem(case: Case) -> str:
    """Return a sentence on the first number of a case that is too large, or on a name that cannot be part of a path.

    Empty if all is well. A negative seed and a path with a NUL are refused, too.
    """
    for record in (case.training, case.model, case.features):
        for key, limit in MOST_BY_KEY.items():
            if getattr(record, key, 0) > limit:
                return f"{key} {short_repr(getattr(record, key))} is more than the {limit} that a case may have"
    if case.training.seed < 0:
        return f"seed must be at least 0, got {short_repr(case.training.seed)}"
    if len(case.name) > MOST_NAME_LETTERS:
        return f"a name has at most {MOST_NAME_LETTERS} letters, this one {len(case.name)}"
    if not PATH_WORD.fullmatch(case.model.name):
        return f"model: name {short_repr(case.model.name)}: letters, digits, '_', '.' and '-' only, it becomes part of a path"
    if "\0" in (case.training.data or ""):
        return "training: data: no file has a NUL in its name"
    ranks = case.dims.world_size
    tokens = case.training.global_batch * case.training.seq_len
    if ranks > MOST_RANKS:
        return f"{short_repr(ranks)} ranks, more than {MOST_RANKS}"
    if tokens > MOST_TOKENS:
        return f"global_batch x seq_len = {short_repr(tokens)} tokens a step, more than {MOST_TOKENS}"
    return ""


def start_problem(case: Case) -> str:
    """Return why a run of this case is refused: too many ranks in one of its launches, or too many tokens a step.

    Empty if neither.
    """
    ranks = max(launched.dims.world_size for launched in case.launches.values())
    tokens = case.training.global_batch * case.training.seq_len
    for unit, number, limit in (("ranks", ranks, MOST_STARTED_RANKS), ("tokens a step", tokens, MOST_TRAINED_TOKENS)):
        if number > limit:
            return f"{number} {unit}, more than the {limit} of a run; `harness plan` and `harness preflight` take it"
    return ""


def _product(shape: Iterable[int]) -> int:
    """Return the product of all sizes; 1 without any."""
    count = 1
    for size in shape:
        count *= size
    return count


def combinations_problem(axes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why a cross product is refused; empty if it is not."""
    count = _product(map(len, axes.values()))
    return f"{short_repr(count)} combinations, more than {MOST_COMBINATIONS}" if count > MOST_COMBINATIONS else ""


def refuse_yaml_bombs(node: yaml.Node | None) -> None:
    """Raise YAMLError if a document has more than MOST_YAML_NODES values, what each alias stands for counted each time.

    A few lines of aliases of aliases stand for more than any memory holds. An empty document, None, passes.
    """
    if node is not None and (count := _count_nodes(node, {})) > MOST_YAML_NODES:
        raise yaml.YAMLError(
            f"{short_repr(count)} values, counting what each alias stands for, more than {MOST_YAML_NODES}"
        )


def _count_nodes(node: yaml.Node, count_by_id: dict[int, int]) -> int:
    """Return the number of values in a node, what an alias stands for counted each time. Raises YAMLError for an alias
    to its own node.

    count_by_id: counts of nodes that were counted before, by id of the node. This call adds to it.
    """
    if id(node) not in count_by_id:
        count_by_id[id(node)] = 0  # stands for a node that is being counted: an alias to it would be a loop
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = list(itertools.chain.from_iterable(node.value))
        elif isinstance(node, yaml.CollectionNode):
            children = node.value
        count_by_id[id(node)] = 1 + sum(_count_nodes(child, count_by_id) for child in children)
    elif count_by_id[id(node)] == 0:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: an alias within what it stands for")
    return count_by_id[id(node)]


def short_repr(value: Any) -> str:
    """Return at most 200 letters of a value's repr; "a number of N bits" for an integer that Python refuses to print."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= 200 else f"{text[:197]}..."
