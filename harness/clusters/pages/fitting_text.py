"""Layouts that fit, as a table for a person."""

from __future__ import annotations

from harness.core.case.case import Case
from harness.core.plan.figures.step_time import COMPUTES, SENDS, Fit, Fitting
from harness.core.report.columns import columns
from harness.core.report.text import wrapped

SHOWN = 15
HEAD = (
    *("", "pp", "vpp", "rep", "fsdp", "cp", "tp", "again"),
    *("GB", "s", "MFU", "bubble", "waits", "exposed", "f8"),
)


def fitting_text(fits: Fitting) -> str:
    """Return the best layouts, a row each, those that were published, and how times are estimated."""
    found, looked, names = fits.found, fits.looked, fits.published
    unlisted = [f"not on this list: {name} {why}{_degrees(fits, name)}" for name, why in fits.unlisted.items()]
    if not found:
        text = f"0 of {looked} layouts fit: more GPUs, more memory of each, or shorter samples are needed"
        return "\n".join([text, *(line for each in unlisted for line in wrapped(each, "", "  "))])
    shown = [place for place in range(len(found)) if place < SHOWN or place in names]
    rows = [HEAD, *(_row(place, found[place]) for place in shown)]
    known = [f"{place + 1} is {name}{_how(found[place].case)}{_degrees(fits, name)}" for place, name in names.items()]
    first = found[0].case.training
    of = f", of {first.global_batch:,} samples of {first.seq_len:,} tokens a step"
    spent = f"computing attains {COMPUTES:.0%} of the peak and links {SENDS:.0%} of theirs"
    how = (
        f"s is an estimate of a step: {spent}. tp, cp and pp are waited for, and data parallel is hidden while blocks compute. "
        "GB is what an allocator reserves on the rank that needs most. vpp: stages of a rank; rep: replicas; fsdp: ranks that "
        "parameters are cut over; again: what backward computes again; f8: s if the linear layers of blocks ran in float8. "
        "A microbatch has one sample, but for published layouts."
    )
    lines = [f"{len(found)} of {looked} layouts fit{of}", "", *columns(rows), ""]
    return "\n".join([*lines, *(line for text in (*known, *unlisted, how) for line in wrapped(text, "", "  "))])


def _degrees(fits: Fitting, name: str) -> str:
    """Say where its degrees stand at their best, if that is another place."""
    place = fits.degrees.get(name)
    return "" if place is None or fits.published.get(place) == name else f"; {place + 1} has its degrees"


def _how(case: Case) -> str:
    """Say in what a published layout is not like the others here."""
    own = [f"{case.microbatches} microbatches"] * (case.dims.pp > 1)
    own += ["ZeRO 1, which cuts the optimizer's state and not parameters"] * (case.wrapper == "zero1")
    return f", with {' and '.join(own)}" if own else ""


def _row(place: int, fit: Fit) -> list[str]:
    dims, features, time = fit.case.dims, fit.case.features, fit.time
    degrees = (dims.pp, fit.case.stages_per_rank, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp)
    seconds = (time.seconds, time.bubble, time.waited, time.exposed, time.in_float8.seconds)
    step, bubble, waited, exposed, float8 = (f"{each:.1f}" for each in seconds)
    memory = f"{fit.most.reserved / 1e9:.1f}"
    last = (features.activation_checkpointing, memory, step, f"{time.utilization:.0%}", bubble, waited, exposed, float8)
    return [str(place + 1), *map(str, degrees), *last]
