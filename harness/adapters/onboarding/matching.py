"""A trainer's parameters, matched to the reference's by shape and order. Among parameters of one shape, names decide first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.adapters.onboarding.spellings import KNOWN, TOGETHER
from harness.reference.config import ModelConfig

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
MODULES = dict.fromkeys(("wq", "wk", "wv", "wo"), "attention") | dict.fromkeys(("w1", "w2", "w3"), "feed_forward")


@dataclass(frozen=True)
class Match:
    names: dict[str, str]
    """The reference's name by the trainer's; a fused tensor has its module's name and its own last part."""
    fused: dict[str, tuple[str, ...]]
    """The trainer's name of a tensor -> the reference's weights in it: ("wk", "wv")."""
    sizes: dict[str, Any]
    """Fields of the model, as these shapes have them."""

    def other_sizes(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields that differ from this model's; none if no such model exists."""
        told = {field: size for field, size in self.sizes.items() if size != getattr(model, field)}
        try:
            replace(model, **told)
        except ValueError:
            return {}
        return told

    @property
    def declarations(self) -> tuple[str, ...]:
        """The words of an adapter's `fused`, as `in_one` takes them."""
        inside = {name: ".".join(_around_layer(self.names[name])[1]) for name in self.fused}
        found = (f"{inside[name]}={'+'.join(parts)}" for name, parts in self.fused.items())
        return tuple(dict.fromkeys(found))


def match(
    shapes: Shapes,
    heads: int,
    fqn: Callable[[str], str] = lambda name: name,
    declared: Mapping[str, tuple[str, ...]] | None = None,
) -> Match:
    """Match whole tensors. A name that `fqn` already gives is kept if the shape fits. heads: those of attention.
    declared: an adapter's `fused`."""
    if not shapes:
        return Match({}, {}, {})
    layers = dict[int | None, dict[str, Shape]]()
    for name, shape in shapes.items():
        layers.setdefault(layer_of(name), {})[name] = shape
    numbers, told = [number for number in layers if number is not None], declared or {}
    dim = Counter(shape[-1] for shape in shapes.values() if shape).most_common(1)[0][0]
    first = layers[numbers[0]] if numbers else {}
    fused = ((name, _fused(name, shape, dim, first, told.get(fqn(name)))) for name, shape in shapes.items())
    in_one = {name: parts for name, parts in fused if parts}
    sizes: dict[str, Any] = _sizes(layers.get(None, {}), first, in_one, dim)
    names = dict[str, str]()
    for number, theirs in layers.items():
        start = "" if number is None else f"layers.{number}."
        left = {name: shape for name, shape in theirs.items() if name not in in_one}
        taken = {part for name in theirs for part in in_one.get(name, ())}
        options = {ours: one for ours, one in _options(sizes, number is not None).items() if _leaf(ours) not in taken}
        found = _assigned(left, options, {name: fqn(name).removeprefix(start) for name in left})
        names |= {name: start + ours for name, ours in found.items()}
        for name in theirs.keys() & in_one.keys():
            home = f"{start}{MODULES[in_one[name][0]]}."
            leaf = next(part for part in reversed(name.split(".")) if KNOWN.get(part.lower()) != "weight")
            names[name] = fqn(name) if fqn(name) in told or fqn(name).startswith(home) else f"{home}{leaf}.weight"
    kv, ours = sizes.pop("kv", dim), set(names.values())
    sizes |= {"n_heads": heads, "n_layers": len(numbers)} if numbers else {}
    sizes |= {"n_kv_heads": kv * heads // dim} if numbers and not kv * heads % dim else {}
    sizes |= {"tied_embeddings": "output.weight" not in ours} if "tok_embeddings.weight" in ours else {}
    return Match({name: names[name] for name in shapes if name in names}, in_one, sizes)


def _fused(name: str, shape: Shape, dim: int, layer: Shapes, declared: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return which weights lie in this tensor: as declared, by its name, or by its rows."""
    if declared:
        return tuple(dict.fromkeys(map(_leaf, declared)))
    if len(shape) != 2 or layer_of(name) is None:
        return ()
    if said := [TOGETHER[part] for part in name.lower().split(".") if part in TOGETHER]:
        return tuple(said[-1].split())
    ffn, rows = _ffn(layer, dim), [one[0] for one in layer.values() if len(one) == 2 and one[1] == dim]
    if shape[1] != dim or shape[0] <= dim or rows.count(shape[0]) > 1 or any(_says(name, one) for one in MODULES):
        return ()
    if shape[0] == 2 * ffn and ffn not in rows:
        return ("w1", "w3")
    return ("wq", "wk", "wv") if shape[0] != ffn and rows.count(dim) == 1 else ()


def _ffn(layer: Shapes, dim: int) -> int:
    return next((one[1] for one in layer.values() if len(one) == 2 and one[1] != dim), dim)


def _sizes(outside: Shapes, layer: Shapes, fused: Mapping[str, tuple[str, ...]], dim: int) -> dict[str, int]:
    """Return sizes of the model; kv is the number of rows of wk."""
    sizes = {"dim": dim, "vocab_size": next((one[0] for one in outside.values() if len(one) == 2), 0)}
    if not layer:
        return sizes
    sizes |= {"ffn_dim": _ffn(layer, dim), "kv": dim}
    for name, shape in layer.items():
        if len(shape) == 2 and "wk" in fused.get(name, ()):
            sizes["kv"] = (shape[0] - dim * ("wq" in fused[name])) // 2
    rows = Counter(one[0] for name, one in layer.items() if len(one) == 2 and one[1] == dim and name not in fused)
    rows.subtract({sizes["ffn_dim"]: 2})
    fewer = [size for size, count in rows.items() if size < dim and count >= 2]
    return sizes | ({"kv": fewer[0]} if fewer else {})


def _options(sizes: Mapping[str, int], in_layer: bool) -> dict[str, Shape]:
    """Return the reference's parameters outside of layers, or in one, for these sizes."""
    dim, ffn, kv = sizes["dim"], sizes.get("ffn_dim", 0), sizes.get("kv", 0)
    if not in_layer:
        ends = (sizes["vocab_size"], dim)
        return {"tok_embeddings.weight": ends, "norm.weight": (dim,), "output.weight": ends}
    rows = {"wq": (dim, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, dim)}
    rows |= {"w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim)}
    matrices = {f"{MODULES[name]}.{name}.weight": shape for name, shape in rows.items()}
    return matrices | {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}


def _assigned(theirs: Shapes, options: Mapping[str, Shape], known: Mapping[str, str]) -> dict[str, str]:
    """Return the reference's name for each: the one known, else the one spelled so, else the first left of its shape."""
    found = {name: known[name] for name, shape in theirs.items() if options.get(known[name]) == shape}
    for spelled in (True, False):
        for name, shape in theirs.items():
            left = [one for one in options if options[one] == shape and one not in found.values()]
            said = [one for one in left if _says(name, _leaf(one))]
            left = [one for one in left if not _refuted(name, one)]
            if name not in found and (chosen := said if spelled else left) and (len(chosen) == 1 or not spelled):
                found[name] = chosen[0]
    return found


def _leaf(ours: str) -> str:
    return ours.removesuffix(".weight").rpartition(".")[2]


def _says(name: str, ours: str) -> bool:
    return any(KNOWN.get(part, part) == ours for part in name.lower().split("."))


def _refuted(name: str, ours: str) -> bool:
    """Return whether the name says attention and the parameter is feed_forward's, or the other way round."""
    said = {module for module in MODULES.values() if _says(name, module)}
    return bool(said) and ours.partition(".")[0] in MODULES.values() and ours.partition(".")[0] not in said


# ---- names


def layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def table(found: Mapping[str, str]) -> dict[str, str]:
    """Return theirs=ours by parts of names, as `renamed` takes it; by several parts if one part has two meanings."""
    pairs = dict[str, str]()
    for theirs, ours in found.items():
        for own, wanted in zip(_around_layer(theirs), _around_layer(ours), strict=True):
            aligned = list(_aligned(own, wanted))
            for part, value in aligned:
                pairs.setdefault(part, part if part.isdigit() else value)
            if any(pairs[part] != value for part, value in aligned):
                body = dict(aligned[:-1] if aligned[-1][1] == "weight" else aligned)
                pairs.setdefault(".".join(body), ".".join(filter(None, body.values())))
    return {theirs: ours for theirs, ours in pairs.items() if theirs != ours}


def _around_layer(name: str) -> tuple[list[str], list[str]]:
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return (parts, []) if at is None else (parts[:at], parts[at + 1 :])


def _aligned(theirs: list[str], ours: list[str]) -> Iterator[tuple[str, str]]:
    """Align from the last part to the first; what is left of ours goes to the first of theirs, of theirs to nothing."""
    if theirs and ours and ours[-1] == "weight" and KNOWN.get(theirs[-1].lower()) != "weight":
        ours = [*ours[:-2], ".".join(ours[-2:])]
    more = max(len(ours) - len(theirs), 0)
    ours = [".".join(ours[: more + 1]), *ours[more + 1 :]] if ours else []
    yield from zip(theirs, [""] * (len(theirs) - len(ours)) + ours, strict=True)
