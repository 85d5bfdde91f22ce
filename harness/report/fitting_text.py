"""Layouts that fit, as a table for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.plan.figures.step_time import COMPUTES, SENDS, Fit
from harness.report.columns import columns
from harness.report.text import wrapped

SHOWN = 15
HEAD = (
    *("", "pp", "vpp", "rep", "fsdp", "cp", "tp", "again"),
    *("GB", "s", "MFU", "bubble", "waits", "exposed"),
)


def fitting_text(found: Sequence[Fit], looked: int, names: Mapping[int, str]) -> str:
    """Return the best layouts, a row each, those that were published, and how times are estimated. names: by place."""
    if not found:
        return f"0 of {looked} layouts fit: more GPUs, more memory of each, or shorter samples are needed"
    shown = [place for place in range(len(found)) if place < SHOWN or place in names]
    rows = [HEAD, *(_row(place, found[place]) for place in shown)]
    known = [f"{place + 1} is {name}, but for its schedule" for place, name in names.items()]
    first = found[0].case.training
    of = f", of {first.global_batch:,} samples of {first.seq_len:,} tokens a step"
    spent = f"computing attains {COMPUTES:.0%} of the peak and links {SENDS:.0%} of theirs"
    how = (
        f"s is an estimate of a step: {spent}. tp, cp and pp are waited for, and data parallel is hidden while blocks compute. "
        "GB is what an allocator reserves on the rank that needs most. vpp: stages of a rank; rep: replicas; fsdp: ranks that "
        "parameters are cut over; again: what backward computes again. A microbatch has one sample."
    )
    lines = [f"{len(found)} of {looked} layouts fit{of}", "", *columns(rows), ""]
    return "\n".join([*lines, *(line for text in (*known, how) for line in wrapped(text, "", "  "))])


def _row(place: int, fit: Fit) -> list[str]:
    dims, features, time = fit.case.dims, fit.case.features, fit.time
    degrees = (dims.pp, fit.case.stages_per_rank, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp)
    seconds = (time.seconds, time.bubble, time.waited, time.exposed)
    step, bubble, waited, exposed = (f"{each:.1f}" for each in seconds)
    memory = f"{fit.most.reserved / 1e9:.1f}"
    last = (features.activation_checkpointing, memory, step, f"{time.utilization:.0%}", bubble, waited, exposed)
    return [str(place + 1), *map(str, degrees), *last]
