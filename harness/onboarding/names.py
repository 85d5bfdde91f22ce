"""Parameters of a trainer that are none of the reference's: what each may be, by its shape and the spelling of its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from harness.onboarding import name_table
from harness.onboarding.spellings import PARAMETERS, by_spelling
from harness.spec.case import Case
from harness.trainers.support.names import pairs, renamed
from harness.trainers.support.requests import NOT_PASSED_ON

Shape = tuple[int, ...]
Fused = Mapping[str, tuple[str, ...]]


def unfit(
    shapes: Mapping[str, Shape], case: Case, fqn: Callable[[str], str], fused: Fused = MappingProxyType({})
) -> list[str]:
    """A sentence for each parameter that is none of the reference's, or of another shape, and one for those that lack.
    What is said of one layer is said once for all of them. fused: as the adapter declares it."""
    wanted = case.model.parameter_shapes()
    said = _once(list(_unfit(shapes, wanted, case, fqn, fused)))
    somebodys = {part for theirs in shapes for part in fused.get(fqn(theirs), (fqn(theirs),))}
    if missing := [name for name in wanted if name not in somebodys]:
        said.append(f"of the reference's {len(wanted)} parameters {len(missing)} are nobody's: {_some(missing)}")
    return said


def remedies(
    shapes: Mapping[str, Shape],
    case: Case,
    fqn: Callable[[str], str],
    refused: Callable[[Case], str | None],
    file: str,
    fused: Fused = MappingProxyType({}),
) -> Iterator[tuple[str, str]]:
    """Lines to write, each with its label: names, and sizes of the model. refused: why the adapter runs no such case."""
    if line := name_table.proposed(shapes, case, fqn, fused):
        yield "write", f'NAMES = pairs("""{line[0]}""")'
        yield "", line[1]
    if declaration := _declared(shapes, case, pairs(line[0]) if line else None, fqn, fused):
        yield "write", declaration
        yield "", "from harness.trainers.support.names import in_one"
    found = name_table.targets(shapes, case.model, fqn, fused)
    several = name_table.in_one(shapes, case.model, fqn, fused)
    told = name_table.sizes(found, shapes, case.model, several) if case.dims.world_size == 1 else {}
    if not told:
        return
    has = " and ".join(f"{field} {size}, requested {getattr(case.model, field)}" for field, size in told.items())
    yield "sizes", f"its model has {has}; if a flag of the script tells, pass it on in `arguments`, else"
    yield "", f"case: model: {{{', '.join(f'{field}: {size}' for field, size in told.items())}}}"
    model = name_table.of_sizes(case.model, told)
    if model and (reason := refused(replace(case, model=model))) and NOT_PASSED_ON in reason:
        yield "", to_known(told, file)


def _declared(
    shapes: Mapping[str, Shape], case: Case, names: Mapping[str, str] | None, fqn: Callable[[str], str], fused: Fused
) -> str:
    """`fused` for what lies in one tensor and is not declared; empty where nothing does. names: the table to be written."""
    several = name_table.in_one(shapes, case.model, fqn, fused)
    written = dict[str, None]()
    for theirs, shape in shapes.items():
        known = fqn(theirs) in fused or fqn(theirs) in case.model.parameter_shapes()
        parts = several.get(theirs) or ([] if name_table.says_a_part(theirs, case.model) else _by_rows(shape, case))
        if parts and not known and len(shape) == 2:
            ours = fqn(theirs) if names is None else renamed(theirs, names)
            written[f'"{re.sub(r"^layers.[0-9]+.", "", ours)}={"+".join(parts)}"'] = None
    return f"def fused(self, case): return in_one(case, {', '.join(written)})" if written else ""


def _by_rows(shape: Shape, case: Case) -> list[str]:
    """Which of a layer's weights have as many rows together; empty where none have."""
    rows = [case.model.parameter_shapes()[f"layers.0.attention.{name}.weight"][0] for name in ("wq", "wk", "wv")]
    if len(shape) == 2 and shape[0] == sum(rows) and shape[0] != case.model.vocab_size:
        return ["wq", "wk", "wv"]
    return ["w1", "w3"] if len(shape) == 2 and shape[0] == 2 * case.model.ffn_dim else []


def to_known(values: Mapping[str, object], file: str) -> str:
    """What to write where a case requests these, and the adapter is not known to pass them on."""
    known = ", ".join(f'"{field}": ({value!r},)' for field, value in values.items())
    return (
        f"adapter: add {' and '.join(values)} to KNOWN in {file}: {known}; or ... for any value, if it passes that on"
    )


def _unfit(
    shapes: Mapping[str, Shape], wanted: Mapping[str, Shape], case: Case, fqn: Callable[[str], str], fused: Fused
) -> Iterator[str]:
    several = name_table.in_one(shapes, case.model, fqn, fused)
    for theirs, shape in shapes.items():
        ours = fqn(theirs)
        if theirs in several:
            if sentence := _in_one(shape, several[theirs], case, declared=ours in fused):
                yield f"{theirs} {list(shape)} is mapped to {ours}: {sentence}"
        elif ours not in wanted:
            yield f"{theirs} {list(shape)} is mapped to {ours}, which there is not: {_instead(theirs, shape, wanted, case)}"
        elif shape != wanted[ours]:
            otherwise = _otherwise(theirs, ours, shape, case)
            yield f"{theirs} {list(shape)} is mapped to {ours} {list(wanted[ours])}: {otherwise}"


def _in_one(shape: Shape, parts: Sequence[str], case: Case, *, declared: bool) -> str:
    """Empty where it is declared and fits."""
    module = "feed_forward" if "w1" in parts else "attention"
    sizes = [case.model.parameter_shapes()[f"layers.0.{module}.{part}.weight"] for part in parts]
    wanted, told = (sum(rows for rows, _ in sizes), sizes[0][1]), "by `fused`" if declared else "by its name"
    whole = f"{told} it is {', '.join(parts[:-1])} and {parts[-1]} in one"
    if len(shape) != 2:
        return f"{whole}, of {len(shape)} dims; `fused` takes rows of a matrix apart"
    if shape == wanted:
        return "" if declared else f"{whole}: say so in `fused`, where it is not sharded"
    field = "ffn_dim" if "w1" in parts else "dim, n_heads or n_kv_heads"
    return f"{whole}, which are {list(wanted)} in this case: its {field} is another"


def _once(said: list[str]) -> list[str]:
    layers: dict[str, list[str]] = {}
    for sentence in said:
        layers.setdefault(re.sub(r"\.\d+\.", ".N.", sentence), []).append(sentence)
    return [first + (f"; alike in {len(more)} more" if more else "") for first, *more in layers.values()]


def _otherwise(theirs: str, ours: str, shape: Shape, case: Case) -> str:
    wanted = case.model.parameter_shapes()[ours]
    if shape == wanted[::-1]:
        return "it is the transpose; no check covers transposed slices"
    if len(shape) == 1 and shape[0] * 1 < _numel(wanted):
        return "a part of it, flat: let weights be copied before FSDP1 wraps"
    parts = [dim for dim, (has, whole) in enumerate(zip(shape, wanted, strict=False)) if whole == has * case.dims.tp]
    if len(shape) == len(wanted) and case.dims.tp > 1 and parts:
        return "the tp rank's part: give load_weights(.., cut=tensor_parallel(rank, degree))"
    alike = [] if name_table.says_a_part(theirs, case.model) else _of_shape(shape, case)
    return f"is it {' or '.join(alike)}?" if alike else "it is of another size"


def _instead(theirs: str, shape: Shape, wanted: Mapping[str, Shape], case: Case) -> str:
    """Of this shape, that whose spelling is nearest first."""
    if own := name_table.says_a_part(theirs, case.model):
        same = wanted[own] == shape
        return f"by its name{' and shape' * same} it is {own}" + ("" if same else f", which is {list(wanted[own])}")
    if parts := _by_rows(shape, case):
        whole = f"{', '.join(parts[:-1])} and {parts[-1]}"
        return f"as many rows as {whole} together: say so in `fused`, where it is not sharded"
    spelled = renamed(theirs, by_spelling(PARAMETERS))
    layer = spelled[: len("layers.0.")] if spelled.startswith("layers.") else ""
    alike = [name for name, size in wanted.items() if size == shape and name.startswith(layer)]
    near = difflib.get_close_matches(spelled, alike, n=2, cutoff=0.3) or alike[:2]
    transposed = [name for name, size in wanted.items() if len(size) == 2 and size == shape[::-1] != shape]
    if near:
        return f"of its shape {'are' if len(near) > 1 else 'is'} {' and '.join(near)}"
    return f"the transpose of its shape has {_some(transposed)}" if transposed else "no parameter has its shape"


def _of_shape(shape: Shape, case: Case) -> list[str]:
    return [name for name, size in case.model.parameter_shapes().items() if size == shape][:2]


def _numel(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" .." if len(names) > 3 else "")
