"""The lines to write for parameters that do not fit the reference: names, fused tensors, and sizes of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from harness.adapters.onboarding.matching import Match, Shapes, match, name_table
from harness.adapters.support.requests import NOT_PASSED_ON
from harness.core.case.case import Case
from harness.core.trainers import Adapter
from harness.core.trainers.support.names import in_one, renamed


def unfit_lines(shapes: Shapes, case: Case, adapter: Adapter, found_match: Match) -> Iterator[str]:
    """Yield a sentence for each parameter that does not fit, once for all layers, and one for reference parameters
    without a match.
    """
    wanted = case.model.parameter_shapes()
    fused = adapter.fused(case)
    texts_by_pattern = dict[str, list[str]]()
    matched_names = set[str]()
    for name in shapes:
        matched_names.update(fused.get(adapter.fqn(name), (adapter.fqn(name),)))
    for theirs, shape in shapes.items():
        ours = adapter.fqn(theirs)
        rows = sum(wanted[part][0] for part in fused.get(ours, (ours,)) if part in wanted)
        if rows == shape[0] and (ours in fused or wanted[ours] == shape):
            continue
        shape_text = "" if ours in fused else ", which there is not"
        if ours in wanted:
            shape_text = f", which is {list(wanted[ours])}"
        reason = _mismatch_text(theirs, shape, ours, case, found_match)
        text = f"{theirs} {list(shape)} is mapped to {ours}{shape_text}: {reason}"
        texts_by_pattern.setdefault(re.sub(r"\.\d+\.", ".N.", text), []).append(text)
    for first, *others in texts_by_pattern.values():
        yield f"{first}; alike in {len(others)} more" if others else first
    if missing := [name for name in wanted if name not in matched_names]:
        first_names = ", ".join(missing[:3])
        if len(missing) > 3:
            first_names += " .."
        yield f"of the reference's {len(wanted)} parameters {len(missing)} have no match: {first_names}"


def _mismatch_text(theirs: str, shape: tuple[int, ...], ours: str, case: Case, found_match: Match) -> str:
    """Return a phrase on what a parameter really is, which is mapped to `ours` and does not fit: transposed, flat, cut,
    another one.
    """
    wanted = case.model.parameter_shapes().get(ours, ())
    if parts := found_match.fused.get(theirs):
        return f"{', '.join(parts[:-1])} and {parts[-1]} lie in it"
    if len(shape) == 2 and shape == wanted[::-1]:
        return "it is the transpose; no check covers transposed slices"
    if wanted and len(shape) == 1 < len(wanted):
        return "a part of it, flat: let weights be copied before FSDP1 wraps"
    is_cut = [whole == own_size * case.dims.tp for own_size, whole in zip(shape, wanted, strict=False)]
    if case.dims.tp > 1 and any(is_cut):
        return "the tp rank's part: give load_weights(.., cut=tensor_parallel(rank, degree))"
    matched_name = found_match.names.get(theirs, "")
    unmatched_text = "it is of another size" if wanted else "by shape and name it is no part of Llama 3"
    return unmatched_text if matched_name in ("", ours) else f"by shape, order and name it is {matched_name}"


def remedies(shapes: Shapes, case: Case, adapter: Adapter, file: str) -> Iterator[tuple[str, str]]:
    """Yield (label, sentence) on what does not fit, and the lines of code to write. file: the adapter's.

    Lines for names are left out if they would not map more parameters than now.
    """
    found_match = match(shapes, case.model.n_heads, adapter.fqn, adapter.fused(case))
    for text in unfit_lines(shapes, case, adapter, found_match):
        yield "names", text
    names = name_table(found_match.names)
    fqn = adapter.fqn
    matched_after = [theirs for theirs, ours in found_match.names.items() if renamed(theirs, names) == ours]
    matched_before = [theirs for theirs, ours in found_match.names.items() if fqn(theirs) == ours]
    if len(matched_after) > len(matched_before):
        pairs = " ".join(f"{theirs}={ours}" for theirs, ours in names.items())
        yield "write", f'NAMES = pairs("""{pairs}""")'
        counts_text = f"{len(matched_after)} of its {len(shapes)} parameters have a name of the reference's"
        yield "", f"by it {counts_text}, now {len(matched_before)}"
    if in_one(case, *found_match.declarations).keys() - adapter.fused(case).keys():
        declared_text = ", ".join(f'"{declaration}"' for declaration in found_match.declarations)
        yield "write", f"def fused(self, case): return in_one(case, {declared_text})"
        yield "", "from harness.core.trainers.support.names import in_one"
    if case.dims.world_size == 1 and (sizes := found_match.other_sizes(case.model)):
        yield from _size_lines(sizes, case, adapter, file)


def _size_lines(sizes: Mapping[str, object], case: Case, adapter: Adapter, file: str) -> Iterator[tuple[str, str]]:
    """Yield (label, sentence) on sizes of the model that are not the case's, with the lines to write. sizes: by field."""
    sizes_text = " and ".join(
        f"{field} {size}, requested {getattr(case.model, field)}" for field, size in sizes.items()
    )
    yield "sizes", f"its model has {sizes_text}; if a flag of the script sets it, pass it on in `arguments`, else"
    yield "", f"case: model: {{{', '.join(f'{field}: {str(size).lower()}' for field, size in sizes.items())}}}"
    reason = adapter.unsupported(replace(case, model=replace(case.model, **sizes)))  # type: ignore[arg-type]
    if reason and NOT_PASSED_ON in reason:
        yield "", known_line(sizes, file)


def known_line(values: Mapping[str, object], file: str) -> str:
    """Return the line that adds values to KNOWN in an adapter's file, for options that it is not known to pass on."""
    known = ", ".join(f'"{field}": ({value!r},)' for field, value in values.items())
    return (
        f"adapter: add {' and '.join(values)} to KNOWN in {file}: {known}; or ... for any value, if it passes that on"
    )
