"""Matching of a trainer's parameters to the reference's, by shape and order.

Among parameters of one shape, names decide first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.adapters.onboarding.spellings import FUSED_BY_SPELLING, NAMES_BY_SPELLING
from harness.reference.config import ModelConfig

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
MODULES = dict.fromkeys(("wq", "wk", "wv", "wo"), "attention") | dict.fromkeys(("w1", "w2", "w3"), "feed_forward")


@dataclass(frozen=True)
class Match:
    """The result of matching: the reference's names of a trainer's parameters, and sizes of its model."""

    names: dict[str, str]
    """The reference's name by the trainer's; a fused tensor has its module's name and its own last part."""
    fused: dict[str, tuple[str, ...]]
    """The trainer's name of a tensor -> the reference's weights in it: ("wk", "wv")."""
    sizes: dict[str, Any]
    """Fields of the model, as these shapes have them."""

    def other_sizes(self, model: ModelConfig) -> dict[str, Any]:
        """Return the sizes, by field, that differ from this model's. Empty if a model with these sizes cannot exist."""
        differing = {field: size for field, size in self.sizes.items() if size != getattr(model, field)}
        try:
            replace(model, **differing)
        except ValueError:
            return {}
        return differing

    @property
    def declarations(self) -> tuple[str, ...]:
        """Return the texts for `in_one` that declare an adapter's fused tensors, each once: "attention.qkv.weight=wq+wk+wv"."""
        words = []
        for name, parts in self.fused.items():
            name_in_layer = ".".join(_split_at_layer(self.names[name])[1])
            words.append(f"{name_in_layer}={'+'.join(parts)}")
        return tuple(dict.fromkeys(words))


def match(
    shapes: Shapes,
    heads: int,
    fqn: Callable[[str], str] = lambda name: name,
    declared: Mapping[str, tuple[str, ...]] | None = None,
) -> Match:
    """Return the match of whole tensors to the reference's parameters. Parameters without a match are left out.

    A name that `fqn` already gives is kept if the shape fits. heads: number of attention heads, which no shape has.
    declared: an adapter's `fused`. An empty match without shapes.
    """
    if not shapes:
        return Match({}, {}, {})
    layers = dict[int | None, dict[str, Shape]]()
    for name, shape in shapes.items():
        layers.setdefault(layer_of(name), {})[name] = shape
    numbers = [number for number in layers if number is not None]
    declared_fused = declared or {}
    dim = Counter(shape[-1] for shape in shapes.values() if shape).most_common(1)[0][0]
    first_layer = layers[numbers[0]] if numbers else {}
    in_one = {}
    for name, shape in shapes.items():
        if parts := _parts_in_tensor(name, shape, dim, first_layer, declared_fused.get(fqn(name))):
            in_one[name] = parts
    sizes: dict[str, Any] = _model_sizes(layers.get(None, {}), first_layer, in_one, dim)
    names = dict[str, str]()
    for number, layer_shapes in layers.items():
        prefix = "" if number is None else f"layers.{number}."
        unfused = {name: shape for name, shape in layer_shapes.items() if name not in in_one}
        fused_parts = set[str]()
        for name in layer_shapes:
            fused_parts.update(in_one.get(name, ()))
        all_options = _reference_shapes(sizes, number is not None)
        options = {ours: shape for ours, shape in all_options.items() if _leaf_of(ours) not in fused_parts}
        assigned = _assign_names(unfused, options, {name: fqn(name).removeprefix(prefix) for name in unfused})
        names |= {name: prefix + ours for name, ours in assigned.items()}
        for name in layer_shapes.keys() & in_one.keys():
            module_prefix = f"{prefix}{MODULES[in_one[name][0]]}."
            leaf = next(part for part in reversed(name.split(".")) if NAMES_BY_SPELLING.get(part.lower()) != "weight")
            is_named = fqn(name) in declared_fused or fqn(name).startswith(module_prefix)
            names[name] = fqn(name) if is_named else f"{module_prefix}{leaf}.weight"
    kv_rows = sizes.pop("kv", dim)
    ours = set(names.values())
    if numbers:
        sizes |= {"n_heads": heads, "n_layers": len(numbers)}
    if numbers and not kv_rows * heads % dim:
        sizes["n_kv_heads"] = kv_rows * heads // dim
    if "tok_embeddings.weight" in ours:
        sizes["tied_embeddings"] = "output.weight" not in ours
    return Match({name: names[name] for name in shapes if name in names}, in_one, sizes)


def _parts_in_tensor(
    name: str, shape: Shape, dim: int, layer: Shapes, declared: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Return which weights are fused in this tensor, such as ("w1", "w3"): as declared, by its name, or by its rows.

    Empty if none.
    dim: the model's. layer: shapes of one layer. declared: the weights that the adapter says, or None.
    """
    if declared:
        return tuple(dict.fromkeys(map(_leaf_of, declared)))
    if len(shape) != 2 or layer_of(name) is None:
        return ()
    if spelled_parts := [FUSED_BY_SPELLING[part] for part in name.lower().split(".") if part in FUSED_BY_SPELLING]:
        return tuple(spelled_parts[-1].split())
    ffn = _ffn_size(layer, dim)
    rows = [other_shape[0] for other_shape in layer.values() if len(other_shape) == 2 and other_shape[1] == dim]
    if (
        shape[1] != dim
        or shape[0] <= dim
        or rows.count(shape[0]) > 1
        or any(_has_spelling(name, module) for module in MODULES)
    ):
        return ()
    if shape[0] == 2 * ffn and ffn not in rows:
        return ("w1", "w3")
    return ("wq", "wk", "wv") if shape[0] != ffn and rows.count(dim) == 1 else ()


def _ffn_size(layer: Shapes, dim: int) -> int:
    """Return the feed-forward's size, from the shapes of a layer; dim if no matrix has another last dimension."""
    return next((shape[1] for shape in layer.values() if len(shape) == 2 and shape[1] != dim), dim)


def _model_sizes(outside: Shapes, layer: Shapes, fused: Mapping[str, tuple[str, ...]], dim: int) -> dict[str, int]:
    """Return sizes of the model from shapes outside of layers and of one layer. "kv" is the number of rows of wk.

    Without a layer only dim and vocab_size are returned.
    """
    sizes = {"dim": dim, "vocab_size": next((shape[0] for shape in outside.values() if len(shape) == 2), 0)}
    if not layer:
        return sizes
    sizes |= {"ffn_dim": _ffn_size(layer, dim), "kv": dim}
    for name, shape in layer.items():
        if len(shape) == 2 and "wk" in fused.get(name, ()):
            sizes["kv"] = (shape[0] - dim * ("wq" in fused[name])) // 2
    rows = Counter(
        other_shape[0]
        for name, other_shape in layer.items()
        if len(other_shape) == 2 and other_shape[1] == dim and name not in fused
    )
    rows.subtract({sizes["ffn_dim"]: 2})
    fewer_rows = [size for size, count in rows.items() if size < dim and count >= 2]
    return sizes | ({"kv": fewer_rows[0]} if fewer_rows else {})


def _reference_shapes(sizes: Mapping[str, int], in_layer: bool) -> dict[str, Shape]:
    """Return the shapes of the reference's parameters by name, for these sizes: of one layer, or of what is outside of layers.

    Names of a layer's parameters have no prefix "layers.N.".
    """
    dim = sizes["dim"]
    ffn = sizes.get("ffn_dim", 0)
    kv = sizes.get("kv", 0)
    if not in_layer:
        ends = (sizes["vocab_size"], dim)
        return {"tok_embeddings.weight": ends, "norm.weight": (dim,), "output.weight": ends}
    rows = {"wq": (dim, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, dim)}
    rows |= {"w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim)}
    matrices = {f"{MODULES[name]}.{name}.weight": shape for name, shape in rows.items()}
    return matrices | {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}


def _assign_names(shapes: Shapes, options: Mapping[str, Shape], known: Mapping[str, str]) -> dict[str, str]:
    """Return the reference's name for each parameter: the known one, else one spelled so, else the first free of its shape.

    Parameters without a free name are left out. options: shapes by the reference's names. known: what `fqn` says.
    """
    names = {name: known[name] for name, shape in shapes.items() if options.get(known[name]) == shape}
    for spelled in (True, False):
        for name, shape in shapes.items():
            free = [
                candidate for candidate in options if options[candidate] == shape and candidate not in names.values()
            ]
            spelled_so = [candidate for candidate in free if _has_spelling(name, _leaf_of(candidate))]
            free = [candidate for candidate in free if not _is_refuted(name, candidate)]
            candidates = spelled_so if spelled else free
            if name not in names and candidates and (len(candidates) == 1 or not spelled):
                names[name] = candidates[0]
    return names


def _leaf_of(ours: str) -> str:
    """Return the last part of a reference's name before ".weight": "wq"."""
    return ours.removesuffix(".weight").rpartition(".")[2]


def _has_spelling(name: str, ours: str) -> bool:
    """Return whether a part of the trainer's name is a usual spelling of the reference's word `ours`."""
    return any(NAMES_BY_SPELLING.get(part, part) == ours for part in name.lower().split("."))


def _is_refuted(name: str, ours: str) -> bool:
    """Return whether the trainer's name contains attention and the reference's lies in feed_forward, or the other way round.

    Usual spellings count. False if the trainer's name contains neither or both, or the reference's lies in neither.
    """
    named_modules = {module for module in MODULES.values() if _has_spelling(name, module)}
    return (
        bool(named_modules)
        and ours.partition(".")[0] in MODULES.values()
        and ours.partition(".")[0] not in named_modules
    )


# ---- names


def layer_of(name: str) -> int | None:
    """Return the first number among the parts of a name; None if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def name_table(names: Mapping[str, str]) -> dict[str, str]:
    """Return, by parts of the trainer's names, the reference's parts, as `renamed` takes it. Equal parts are left out.

    Several parts together are a key if one part has two meanings.
    """
    pairs = dict[str, str]()
    for theirs, ours in names.items():
        for their_parts, our_parts in zip(_split_at_layer(theirs), _split_at_layer(ours), strict=True):
            aligned = list(_aligned_parts(their_parts, our_parts))
            for part, value in aligned:
                pairs.setdefault(part, part if part.isdigit() else value)
            if any(pairs[part] != value for part, value in aligned):
                body = dict(aligned[:-1] if aligned[-1][1] == "weight" else aligned)
                pairs.setdefault(".".join(body), ".".join(filter(None, body.values())))
    return {theirs: ours for theirs, ours in pairs.items() if theirs != ours}


def _split_at_layer(name: str) -> tuple[list[str], list[str]]:
    """Return the parts of a name before and after its layer number; all are before if there is no number."""
    parts = name.split(".")
    index = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return (parts, []) if index is None else (parts[:index], parts[index + 1 :])


def _aligned_parts(theirs: list[str], ours: list[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs (their part, our part), aligned from the last to the first.

    If we have more parts, their first part gets all that is left; if they have more, the rest gets an empty text.
    """
    if theirs and ours and ours[-1] == "weight" and NAMES_BY_SPELLING.get(theirs[-1].lower()) != "weight":
        ours = [*ours[:-2], ".".join(ours[-2:])]
    excess = max(len(ours) - len(theirs), 0)
    ours = [".".join(ours[: excess + 1]), *ours[excess + 1 :]] if ours else []
    yield from zip(theirs, [""] * (len(theirs) - len(ours)) + ours, strict=True)
