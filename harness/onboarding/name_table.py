"""NAMES for a trainer's parameters: the table that gives each the reference's name, found by their spelling and their shapes.

Layers are alike: what a name says after the number of its layer is compared with what the reference has in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from harness.onboarding.spellings import FUSED, PARAMETERS, by_spelling
from harness.reference.config import ModelConfig
from harness.spec.case import Case
from harness.trainers.support.names import renamed

Shape = tuple[int, ...]
CONTAINERS = {"attention", "feed_forward"}
KNOWN = by_spelling(PARAMETERS)
TOGETHER = by_spelling(FUSED)
Fused = Mapping[str, Sequence[str]]
"""By a trainer's name of a tensor, which of the reference's weights of a layer lie in it: ("wk", "wv")."""


def in_one(
    shapes: Iterable[str], model: ModelConfig, fqn: Callable[[str], str], declared: Fused
) -> dict[str, list[str]]:
    """Those that the adapter declares as fused, by the reference's names, or whose own name says so and is nobody's."""
    wanted, found = model.parameter_shapes(), dict[str, list[str]]()
    for name in shapes:
        said = [TOGETHER[part].split() for part in name.split(".") if part in TOGETHER]
        if fqn(name) in declared:
            found[name] = list(dict.fromkeys(map(_leaf, declared[fqn(name)])))
        elif said and fqn(name) not in wanted:
            found[name] = said[-1]
    return found


def targets(
    shapes: Mapping[str, Shape], model: ModelConfig, fqn: Callable[[str], str], declared: Fused = MappingProxyType({})
) -> dict[str, str]:
    """The reference's name for each of theirs for which there is one: by `fqn` where that fits, else by spelling, else the
    only one of its shape that is left. Of several in one tensor none is its."""
    found: dict[str, str] = {}
    several = in_one(shapes, model, fqn, declared)
    for layer, theirs in _by_layer(name for name in shapes if name not in several).items():
        options = _options(model, layer is not None)
        start = "" if layer is None else f"layers.{layer}."
        chosen = {name: fqn(name).removeprefix(start) for name in theirs if _fits(name, fqn, start, shapes, options)}
        for name in theirs:
            if name not in chosen and (spelled := by_name(_after(name), options)):
                chosen[name] = spelled
        for name in theirs:
            alike = [o for o in _not_refuted(_after(name), options) if options[o] == shapes[name]]
            if name not in chosen and len(left := [o for o in alike if o not in chosen.values()]) == 1:
                chosen[name] = left[0]
        found |= {name: start + ours for name, ours in chosen.items()}
    return found


def by_name(parts: Sequence[str], options: Iterable[str]) -> str | None:
    """Which of these parameters a name says: a part of it is spelled like the last of theirs."""
    said = [o for o in _not_refuted(parts, options) if _leaf(o) in _spelled(parts)]
    return said[0] if len(said) == 1 else None


def says_a_part(name: str, model: ModelConfig) -> str | None:
    """The parameter of the reference that this name says by itself; None where it says none, or of a layer it has not."""
    layer = _layer(name)
    said = by_name(_after(name), _options(model, layer is not None))
    if said is None or (layer is not None and layer >= model.n_layers):
        return None
    return said if layer is None else f"layers.{layer}.{said}"


def table(found: Mapping[str, str]) -> dict[str, str]:
    """theirs=ours, by parts of names, which `renamed` takes; where two contradict each other the first is kept."""
    pairs: dict[str, str] = {}
    for theirs, ours in found.items():
        parts, wanted, at, to = theirs.split("."), ours.split("."), _number(theirs), _number(ours)
        if at is None or to is None:
            new = _aligned(parts, wanted)
        else:
            new = _aligned(parts[:at], wanted[:to]) | _aligned(parts[at + 1 :], wanted[to + 1 :])
        pairs |= {part: name for part, name in new.items() if part not in pairs}
    return {theirs: ours for theirs, ours in pairs.items() if theirs != ours}


def sizes(
    found: Mapping[str, str], shapes: Mapping[str, Shape], model: ModelConfig, fused: Fused = MappingProxyType({})
) -> dict[str, int]:
    """By field of the model, those that these shapes have otherwise than it. How many heads there are no shape tells."""
    seen: dict[str, set[int]] = {}
    for name, parts in fused.items():
        if len(shapes[name]) == 2:
            height, width = shapes[name]
            own = height - width if "wq" in parts else height  # wq is square, the other two are alike
            seen.setdefault("ffn_dim" if "w1" in parts else "kv", set()).add(own // 2)
    for theirs, ours in found.items():
        for field, size in zip(_fields(ours), shapes[theirs], strict=False):
            seen.setdefault(field, set()).add(size)
    if layers := {_layer(theirs) for theirs in found} - {None}:
        seen["n_layers"] = {len(layers)}
    told = {field: values.pop() for field, values in seen.items() if len(values) == 1}
    rows, head = told.pop("kv", None), told.get("dim", model.dim) / model.n_heads
    if rows is not None and rows % head == 0:
        told["n_kv_heads"] = int(rows // head)
    return {field: size for field, size in told.items() if size != getattr(model, field)}


def of_sizes(model: ModelConfig, told: Mapping[str, int]) -> ModelConfig | None:
    """None where there is no such model."""
    try:
        return replace(model, **told)  # type: ignore[arg-type]
    except ValueError:
        return None


def proposed(
    shapes: Mapping[str, Shape], case: Case, fqn: Callable[[str], str], declared: Fused = MappingProxyType({})
) -> tuple[str, str] | None:
    """The table to write and what becomes of the names by it, which was tried; None where it is no better than `fqn`."""
    found, fused = targets(shapes, case.model, fqn, declared), in_one(shapes, case.model, fqn, declared)
    model = of_sizes(case.model, sizes(found, shapes, case.model, fused)) or case.model
    kept = {name: fqn(name) for name in shapes if fqn(name) in declared}
    wanted, names = model.parameter_shapes(), table(found | kept)
    before = {fqn(theirs) for theirs in shapes} & set(wanted)
    after = {renamed(theirs, names) for theirs in shapes} & set(wanted)
    if len(after) <= len(before):
        return None
    pairs = " ".join(f"{theirs}={ours}" for theirs, ours in names.items())
    return (
        pairs,
        f"by it {len(after)} of its {len(shapes)} parameters have a name of the reference's, now {len(before)}",
    )


def _fits(
    name: str, fqn: Callable[[str], str], start: str, shapes: Mapping[str, Shape], options: Mapping[str, Shape]
) -> bool:
    ours = fqn(name)
    return ours.startswith(start) and options.get(ours.removeprefix(start)) == shapes[name]


def _by_layer(shapes: Iterable[str]) -> dict[int | None, list[str]]:
    layers: dict[int | None, list[str]] = {}
    for name in shapes:
        layers.setdefault(_layer(name), []).append(name)
    return layers


def _options(model: ModelConfig, in_layer: bool) -> dict[str, Shape]:
    """The reference's parameters outside of layers, or in one, without its number."""
    start = "layers.0."
    shapes = model.parameter_shapes()
    if in_layer:
        return {name.removeprefix(start): shape for name, shape in shapes.items() if name.startswith(start)}
    return {name: shape for name, shape in shapes.items() if not name.startswith("layers.")}


def _not_refuted(parts: Sequence[str], options: Iterable[str]) -> list[str]:
    """Those that are not in feed_forward where the name says attention, nor the other way round."""
    said = CONTAINERS & set(_spelled(parts))
    return [o for o in options if not said or not CONTAINERS & set(o.split(".")) or said & set(o.split("."))]


def _fields(ours: str) -> tuple[str, ...]:
    """What of the model each dim of a parameter is."""
    outside = {"tok_embeddings": ("vocab_size", "dim"), "output": ("vocab_size", "dim")}
    matrices = {"wq": ("dim", "dim"), "wo": ("dim", "dim"), "wk": ("kv", "dim"), "wv": ("kv", "dim")}
    feed_forward = {"w1": ("ffn_dim", "dim"), "w2": ("dim", "ffn_dim"), "w3": ("ffn_dim", "dim")}
    return (outside | matrices | feed_forward).get(_leaf(ours), ("dim",))


def _aligned(theirs: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """From the last part to the first. A part that is known takes its own, one that is not the next that no other says."""
    left, pairs = list(ours), dict[str, str]()
    for at in reversed(range(len(theirs))):
        spelled = KNOWN.get(theirs[at], theirs[at])
        if spelled in left:
            start = left.index(spelled)
        elif left and left[-1] not in _spelled(theirs[:at]):
            start = len(left) - 1
        else:
            start = len(left)
        pairs[theirs[at]], left = ".".join(left[start:]), left[:start]
    if left and theirs:
        pairs[theirs[0]] = ".".join(filter(None, [*left, pairs[theirs[0]]]))
    return {part: pairs[part] for part in theirs}


def _spelled(parts: Sequence[str]) -> list[str]:
    return [KNOWN.get(part, part) for part in parts]


def _leaf(ours: str) -> str:
    return ours.removesuffix(".weight").rpartition(".")[2]


def _number(name: str) -> int | None:
    """Where in a name its layer's number stands."""
    return next((at for at, part in enumerate(name.split(".")) if part.isdigit()), None)


def _layer(name: str) -> int | None:
    at = _number(name)
    return None if at is None else int(name.split(".")[at])


def _after(name: str) -> list[str]:
    at, parts = _number(name), name.split(".")
    return parts if at is None else parts[at + 1 :]
