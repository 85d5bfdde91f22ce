"""Tables of a trainer's names beside the reference's, and names by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.core.case.case import Case
from harness.core.case.schedule import V_SHAPED

EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"


def pairs(text: str) -> dict[str, str]:
    """Return a table of names that is written as "theirs=ours theirs=ours"."""
    return dict(pair.split("=") for pair in text.split())


def renamed(name: str, table: Mapping[str, str]) -> str:
    """Return a dotted name with its parts replaced by the table; a part that the table maps to nothing is left out.

    Parts that the table lacks stay. It may map several parts at once ("mlp.proj"): the longest such key counts.
    """
    parts = name.split(".")
    new_parts: list[str] = []
    longest = 1 + max((key.count(".") for key in table), default=0)
    while parts:
        keys = (".".join(parts[:length]) for length in range(min(longest, len(parts)), 0, -1))
        key = next((key for key in keys if key in table), parts[0])
        new_parts.append(table.get(key, key))
        parts = parts[key.count(".") + 1 :]
    return ".".join(filter(None, new_parts))


def with_tied_output(case: Case, fqn: Callable[[str], str]) -> Callable[[str], str]:
    """Return an adapter's `fqn`, changed so that a tied output is called tok_embeddings.weight.

    Only in a pipeline with tied embeddings, whose last stage has a copy; otherwise `fqn` itself. A V-shaped schedule
    puts both ends on one rank, which needs no copy.
    """
    if case.dims.pp == 1 or not case.model.tied_embeddings or case.features.schedule in V_SHAPED:
        return fqn
    return lambda name: EMBEDDING if (own_fqn := fqn(name)) == OUTPUT else own_fqn


def in_one(case: Case, *texts: str) -> dict[str, tuple[str, ...]]:
    """Return an adapter's `fused` for every layer: the fused tensor's fqn -> the fqns of the weights in it, from top to
    bottom.

    A text "attention.qkv.weight=wq+wk+wv" says what `fqn` calls the tensor, and which weights of the reference it has.
    A weight written twice counts once.
    """
    fused: dict[str, tuple[str, ...]] = {}
    for layer in range(case.model.n_layers):
        for text in texts:
            name, _, parts = text.partition("=")
            # A part that is written twice counts once.
            module_of = {
                part: "attention" if part in ("wq", "wk", "wv") else "feed_forward" for part in parts.split("+")
            }
            fused[f"layers.{layer}.{name}"] = tuple(
                f"layers.{layer}.{module}.{part}.weight" for part, module in module_of.items()
            )
    return fused
