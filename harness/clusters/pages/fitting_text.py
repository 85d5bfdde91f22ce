"""Layouts that fit, as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.case.case import Case
from harness.core.plan.figures.step_time import COMPUTE_EFFICIENCY, LINK_EFFICIENCY, FittingLayout, FittingLayouts
from harness.core.report.columns import column_lines
from harness.core.report.text import wrap_text

SHOWN_LAYOUTS = 15
TABLE_HEAD = (
    *("", "pp", "vpp", "rep", "fsdp", "cp", "tp", "again"),
    *("GB", "s", "MFU", "bubble", "waits", "exposed", "f8"),
)


def fitting_text(fits: FittingLayouts) -> str:
    """Return a table of the best SHOWN_LAYOUTS layouts and of published ones that fit, notes on published ones, and an
    explanation.

    If no layout fits, a line that says so, with the notes.
    """
    layouts = fits.layouts
    looked = fits.examined_count
    names = fits.published
    unlisted = [f"not on this list: {name} {why}{_degrees_text(fits, name)}" for name, why in fits.unlisted.items()]
    if not layouts:
        text = f"0 of {looked} layouts fit: more GPUs, more memory of each, or shorter samples are needed"
        return "\n".join([text, *_wrapped_lines(unlisted)])
    positions = [position for position in range(len(layouts)) if position < SHOWN_LAYOUTS or position in names]
    rows = [TABLE_HEAD, *(_row(position, layouts[position]) for position in positions)]
    published_texts = [
        f"{position + 1} is {name}{_unlike_candidates_suffix(layouts[position].case)}{_degrees_text(fits, name)}"
        for position, name in names.items()
    ]
    first = layouts[0].case.training
    scope = f", of {first.global_batch:,} samples of {first.seq_len:,} tokens a step"
    spent = f"computing attains {COMPUTE_EFFICIENCY:.0%} of the peak and links {LINK_EFFICIENCY:.0%} of theirs"
    explanation = (
        f"s is an estimate of a step: {spent}. tp, cp and pp are waited for, and data parallel is hidden while blocks compute. "
        "GB is what an allocator reserves on the rank that needs most. vpp: stages of a rank; rep: replicas; fsdp: ranks that "
        "parameters are cut over; again: what backward computes again; f8: s if the linear layers of blocks ran in float8. "
        "A microbatch has one sample, but for published layouts."
    )
    lines = [f"{len(layouts)} of {looked} layouts fit{scope}", "", *column_lines(rows), ""]
    return "\n".join([*lines, *_wrapped_lines([*published_texts, *unlisted, explanation])])


def _wrapped_lines(texts: Sequence[str]) -> list[str]:
    """Return the texts as lines, each wrapped and indented from its second line on."""
    lines: list[str] = []
    for text in texts:
        lines += wrap_text(text, "", "  ")
    return lines


def _degrees_text(fits: FittingLayouts, name: str) -> str:
    """Return a note on the best position of a published layout's degrees; empty if that is its own position, or there
    is none."""
    position = fits.degrees.get(name)
    return "" if position is None or fits.published.get(position) == name else f"; {position + 1} has its degrees"


def _unlike_candidates_suffix(case: Case) -> str:
    """Return a suffix on what published layouts may have unlike candidates, such as ", with 8 microbatches".

    It names the microbatches of a pipeline, and ZeRO of wrapper "zero1". Empty if the layout has neither.
    """
    differences = []
    if case.dims.pp > 1:
        differences.append(f"{case.microbatches} microbatches")
    if case.wrapper == "zero1":
        differences.append("ZeRO 1, which cuts the optimizer's state and not parameters")
    return f", with {' and '.join(differences)}" if differences else ""


def _row(position: int, fit: FittingLayout) -> list[str]:
    """Return the table's row of a layout."""
    dims = fit.case.dims
    features = fit.case.features
    time = fit.time
    degrees = (dims.pp, fit.case.stages_per_rank, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp)
    seconds = (time.seconds, time.bubble, time.waited, time.exposed, time.in_float8.seconds)
    step, bubble, waited, exposed, float8 = (f"{figure:.1f}" for figure in seconds)
    memory = f"{fit.peak_rank.reserved / 1e9:.1f}"
    last = (features.activation_checkpointing, memory, step, f"{time.utilization:.0%}", bubble, waited, exposed, float8)
    return [str(position + 1), *map(str, degrees), *last]
