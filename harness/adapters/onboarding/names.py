"""The lines to write for parameters that do not fit the reference: names, fused tensors, and sizes of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from harness.adapters.onboarding.matching import Match, Shapes, match, table
from harness.adapters.support.requests import NOT_PASSED_ON
from harness.core.case.case import Case
from harness.core.trainers import Adapter
from harness.core.trainers.support.names import in_one, renamed


def unfit(shapes: Shapes, case: Case, adapter: Adapter, found: Match) -> Iterator[str]:
    """Yield a sentence for each parameter that does not fit, once for all layers, and one for those that lack."""
    wanted, fused, said = case.model.parameter_shapes(), adapter.fused(case), dict[str, list[str]]()
    somebodys = {part for name in shapes for part in fused.get(adapter.fqn(name), (adapter.fqn(name),))}
    for theirs, shape in shapes.items():
        ours = adapter.fqn(theirs)
        rows = sum(wanted[part][0] for part in fused.get(ours, (ours,)) if part in wanted)
        if rows == shape[0] and (ours in fused or wanted[ours] == shape):
            continue
        whole = (
            f", which is {list(wanted[ours])}" if ours in wanted else "" if ours in fused else ", which there is not"
        )
        text = f"{theirs} {list(shape)} is mapped to {ours}{whole}: {_instead(theirs, shape, ours, case, found)}"
        said.setdefault(re.sub(r"\.\d+\.", ".N.", text), []).append(text)
    yield from (first + f"; alike in {len(more)} more" * bool(more) for first, *more in said.values())
    if missing := [name for name in wanted if name not in somebodys]:
        some = ", ".join(missing[:3]) + " .." * (len(missing) > 3)
        yield f"of the reference's {len(wanted)} parameters {len(missing)} have no match: {some}"


def _instead(theirs: str, shape: tuple[int, ...], ours: str, case: Case, found: Match) -> str:
    wanted = case.model.parameter_shapes().get(ours, ())
    if parts := found.fused.get(theirs):
        return f"{', '.join(parts[:-1])} and {parts[-1]} lie in it"
    if len(shape) == 2 and shape == wanted[::-1]:
        return "it is the transpose; no check covers transposed slices"
    if wanted and len(shape) == 1 < len(wanted):
        return "a part of it, flat: let weights be copied before FSDP1 wraps"
    cut = [whole == has * case.dims.tp for has, whole in zip(shape, wanted, strict=False)]
    if case.dims.tp > 1 and any(cut):
        return "the tp rank's part: give load_weights(.., cut=tensor_parallel(rank, degree))"
    other = found.names.get(theirs, "")
    nothing = "it is of another size" if wanted else "by shape and name it is no part of Llama 3"
    return nothing if other in ("", ours) else f"by shape, order and name it is {other}"


def remedies(shapes: Shapes, case: Case, adapter: Adapter, file: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and the lines to write, each with its label."""
    found = match(shapes, case.model.n_heads, adapter.fqn, adapter.fused(case))
    yield from (("names", text) for text in unfit(shapes, case, adapter, found))
    names, fqn = table(found.names), adapter.fqn
    after = [theirs for theirs, ours in found.names.items() if renamed(theirs, names) == ours]
    before = [theirs for theirs, ours in found.names.items() if fqn(theirs) == ours]
    if len(after) > len(before):
        pairs = " ".join(f"{theirs}={ours}" for theirs, ours in names.items())
        yield "write", f'NAMES = pairs("""{pairs}""")'
        yield (
            "",
            f"by it {len(after)} of its {len(shapes)} parameters have a name of the reference's, now {len(before)}",
        )
    if in_one(case, *found.declarations).keys() - adapter.fused(case).keys():
        told = ", ".join(f'"{one}"' for one in found.declarations)
        yield "write", f"def fused(self, case): return in_one(case, {told})"
        yield "", "from harness.core.trainers.support.names import in_one"
    if case.dims.world_size == 1 and (sizes := found.other_sizes(case.model)):
        yield from _other_sizes(sizes, case, adapter, file)


def _other_sizes(told: Mapping[str, object], case: Case, adapter: Adapter, file: str) -> Iterator[tuple[str, str]]:
    has = " and ".join(f"{field} {size}, requested {getattr(case.model, field)}" for field, size in told.items())
    yield "sizes", f"its model has {has}; if a flag of the script sets it, pass it on in `arguments`, else"
    yield "", f"case: model: {{{', '.join(f'{field}: {str(size).lower()}' for field, size in told.items())}}}"
    reason = adapter.unsupported(replace(case, model=replace(case.model, **told)))  # type: ignore[arg-type]
    if reason and NOT_PASSED_ON in reason:
        yield "", to_known(told, file)


def to_known(values: Mapping[str, object], file: str) -> str:
    """Return the line for a case that requests these, if the adapter is not known to pass them on."""
    known = ", ".join(f'"{field}": ({value!r},)' for field, value in values.items())
    return (
        f"adapter: add {' and '.join(values)} to KNOWN in {file}: {known}; or ... for any value, if it passes that on"
    )
