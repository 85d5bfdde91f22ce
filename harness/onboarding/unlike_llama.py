"""What a script's model is seen to be made of that Llama 3 is not: said where Llama's counterpart is named nowhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TORCHS = r"((torch\.)?nn\.|F\.|((torch\.)?nn\.)?functional\.)?"
POSITIONS = r"wpe|pos(ition(s|al)?)?_?emb\w*|embed_pos\w*"


@dataclass(frozen=True)
class Part:
    """theirs: as it is called, or a class of that name. ours: any word that has it in it."""

    theirs: str
    seen_as: str
    ours: str
    spelled: str


PARTS = (
    Part("LayerNorm", rf"{TORCHS}(LayerNorm|layer_norm)", "RMSNorm", r"rms_?norm"),
    Part("learned positions", "", "rotary embedding", r"rotary|rope|rotate_half|freqs_cis"),
    Part("GELU", rf"{TORCHS}((New|Quick)?GELU|(new_|quick_)?gelu)", "SiLU", r"silu|swish|swiglu"),
    Part("ReLU", rf"{TORCHS}(ReLU|relu)", "SiLU", r"silu|swish|swiglu"),
)


def seen(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """A phrase for each: what, where it is first, and what of Llama's is named nowhere in these files."""
    words = {word for tree in trees.values() for word in _words(tree)}
    for part in PARTS:
        if any(re.search(part.spelled, word, re.IGNORECASE) for word in words):
            continue
        if where := next((f"{file.name}:{line}" for file, tree in trees.items() for line in _lines(tree, part)), ""):
            yield f"{part.theirs} ({where}) and no {part.ours}"


def _lines(tree: ast.Module, part: Part) -> list[int]:
    return sorted(_positions(tree) if not part.seen_as else _of_name(tree, part.seen_as))


def _of_name(tree: ast.Module, pattern: str) -> Iterator[int]:
    """Where it is called or handed over as torch's, or is a class."""
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        name = ast.unparse(node) if isinstance(node, ast.Attribute) and not name else name
        name = node.name if isinstance(node, ast.ClassDef) else name
        if name and re.fullmatch(pattern, name):
            yield node.lineno  # type: ignore[attr-defined]


def _positions(tree: ast.Module) -> Iterator[int]:
    """Where an embedding or a parameter is called so, as an attribute or in a table of modules."""
    for node in ast.walk(tree):
        named = [(node.arg or "", node.value)] if isinstance(node, ast.keyword) else []
        if isinstance(node, ast.Assign):
            named = [(ast.unparse(node.targets[0]).rpartition(".")[2], node.value)]
        for name, value in named:
            made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if re.fullmatch(POSITIONS, name) and re.search(r"(^|\.)(Embedding|Parameter)$", made):
                yield value.lineno


def _words(tree: ast.Module) -> Iterator[str]:
    """All names, and strings without blanks, as tables of activations have them: texts for people speak of other things."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(word := getattr(node, field, None), str):
                yield word
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value):
            yield node.value
