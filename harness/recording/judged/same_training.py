"""Two recordings read from their folders, and judged: is it the same training?"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from harness.core.evidence.store import EvidenceError
from harness.recording.judged.judge_same_training import SameTraining, compared, why_no_common, why_no_noise
from harness.recording.judged.judge_sketched import Numbers, added_up
from harness.recording.judged.sketch_distances import Bounds, apart
from harness.recording.judged.sketched import diagnose
from harness.recording.judged.stored_recording import load_recording, recorder_failed, started
from harness.recording.sketches import GRADIENT, WEIGHTS, RankSketches, load_sketches

# ---- Gradients of which one recording's are seen before clipping, and the other's after it


def unclipped(one: Numbers, other: Numbers, noise: Numbers | None = None) -> Numbers:
    """Return the second, in steps that torch's functions clip in one alone, with gradients divided by that factor.

    What the optimizer received is judged by its state and updates then. noise: the first, its weights altered by one rounding.
    """
    bounds, whole, factors = Bounds(one, noise), dict(other.whole), dict[int, float]()
    for step in sorted({*one.steps} & {*other.steps}):
        factor = _factor(one, other, bounds, step) if _is_judged(one, other, step) else None
        if factor is None:
            continue
        factors[step] = factor
        for key in (key for key in other.whole if key[:2] == (step, GRADIENT)):
            of = other.whole[key]
            held = {place: [(rank, sums / factor) for rank, sums in ranks] for place, ranks in of.replicas.items()}
            whole[key] = replace(of, sums=of.sums / factor, squares=of.squares / factor**2, replicas=held)
    return replace(other, whole=whole, rescaled=factors) if factors else other


def _is_judged(one: Numbers, other: Numbers, step: int) -> bool:
    """Whether torch's functions clip in one alone, and more than gradients shows the size of what the optimizer receives."""
    if bool(one.norms.get(step)) == bool(other.norms.get(step)):
        return False
    keys = {key for key in one.whole.keys() & other.whole.keys() if key[0] == step}
    updated = all(of.startswith("SGD(") for of in one.optimizers) and any(key[1] == WEIGHTS for key in keys)
    return updated or any(key[1] not in (GRADIENT, WEIGHTS) for key in keys)


def _factor(one: Numbers, other: Numbers, bounds: Bounds, step: int) -> float | None:
    """Return the factor between all gradients of a step; None where they have none, or have one that clipping cannot make."""
    keys = [key for key in one.whole.keys() & other.whole.keys() if key[:2] == (step, GRADIENT)]
    pairs = [(one.whole[key].sums, other.whole[key].sums, bounds.of(key)) for key in keys if one.whole[key].length]
    fits = [apart(mine, theirs)[1] for mine, theirs, _ in pairs]
    if not fits or not all(map(math.isfinite, fits)):
        return None
    factor, is_after = float(np.median(fits)), not other.norms.get(step)
    makes = 0 < factor < 1 if is_after else factor > 1
    if not makes or all(apart(mine, theirs)[0] <= bound for mine, theirs, bound in pairs):
        return None
    return factor if all(apart(factor * mine, theirs)[0] <= bound for mine, theirs, bound in pairs) else None


# ---- A recording of a job that resumed, judged by one that was not interrupted: steps are counted as the first one counts them


T = TypeVar("T")


def going_on(one: Numbers, other: Numbers, after: int) -> tuple[Numbers, Numbers]:
    """Return both. after: the step of the first from whose checkpoint the second went on; 0 for none.

    Raises EvidenceError where the first did not record that step, or none that follows.
    """
    if not after:
        return one, other
    known = {step for step, kind, _ in (*one.whole, *one.unknown) if kind == WEIGHTS}
    if after not in known or max(known) == after:
        raise EvidenceError(
            f"--after {after}: the first recording has weights of steps {', '.join(map(str, sorted(known - {0})))};"
            f" it has to have step {after} and some that follow: record it with --steps {after}-{after + 3}"
        )
    return replace(one, after=after), _shifted(other, after)


def _shifted(of: Numbers, by: int) -> Numbers:
    """Return it with its steps counted from another one."""
    return replace(
        of,
        after=by,
        whole={(step + by, kind, fqn): whole for (step, kind, fqn), whole in of.whole.items()},
        unknown={(step + by, kind, fqn): why for (step, kind, fqn), why in of.unknown.items()},
        after_pass={(step + by, passes): sums for (step, passes), sums in of.after_pass.items()},
        by_rows={(step + by, fqn): sums for (step, fqn), sums in of.by_rows.items()},
        rows=_later(of.rows, by),
        tokens=_later(of.tokens, by),
        norms=_later(of.norms, by),
        norms_off=_later(of.norms_off, by),
        scales=_later(of.scales, by),
        rates=_later(of.rates, by),
        passes=_later(of.passes, by),
        drawn=_later(of.drawn, by),
        changed=_later(of.changed, by),
    )


def _later(of: Mapping[int, T], by: int) -> dict[int, T]:
    return {step + by: value for step, value in of.items()}


# ---- the same training


def sketch_files(directory: Path) -> list[Path]:
    """Return where ranks left numbers, in the order of ranks."""
    return sorted((directory / "ranks").glob("rank_*.sketches"))


def files_of(directory: Path) -> list[Path]:
    """Return where ranks left numbers. Raises EvidenceError where none did, or the first one's cannot be read."""
    files = sketch_files(directory)
    if not files:
        raise EvidenceError(
            f"{directory}: no numbers were recorded; `harness record -o {directory} -- COMMAND` records them, of a command"
            " that trains a torch model"
        )
    load_sketches(files[0])
    return files


def numbers_of(directory: Path) -> Numbers:
    """Return what all ranks left of numbers. Raises EvidenceError where there is none, or a rank's is of another recording."""
    files = files_of(directory)
    launch = started(directory).get("launch", "")

    def read() -> Iterator[RankSketches]:
        for file in files:
            of = load_sketches(file)
            if of is not None and launch and of.launch != launch:
                raise EvidenceError(f"{file}: belongs to another recording; record the job again")
            if of is not None:
                yield of

    collects = gc.isenabled()
    gc.disable()  # of many ranks, it would walk all that was read over and over
    try:
        return added_up(read())
    finally:
        if collects:
            gc.enable()


def judged_by(one: Path, other: Path, noise: Path | None = None, after: int = 0) -> SameTraining:
    """Judge the second recording by the first. noise: a recording of the first command with altered weights. after:
    step of the first from whose checkpoint the second went on; 0 for none.

    Raises EvidenceError where one of them has no numbers, the noise is not that of the first, or the step was not recorded.
    """
    mine, theirs = numbers_of(one), numbers_of(other)
    of_noise = numbers_of(noise) if noise is not None else None
    if of_noise is not None and (why := why_no_noise(mine, of_noise)):
        raise EvidenceError(f"{noise}: it does not show the noise of {one}: {why}")
    if mine.noise:
        raise EvidenceError(
            f"{one}: its first weights were altered (--noise); give it by --noise-of, and a plain one as A"
        )
    mine, theirs = going_on(mine, theirs, after)
    theirs = unclipped(mine, theirs, of_noise)
    found = compared(mine, theirs, of_noise)
    diagnosis = diagnose(mine, theirs, found)
    why = why_no_common(mine, theirs) or _unproven(one, other)
    common = len(mine.shapes.keys() & theirs.shapes.keys())
    return SameTraining(one, other, found, diagnosis, len(mine.shapes), common, len(mine.steps), why)


def _unproven(one: Path, other: Path) -> str:
    """Why the recordings do not show whole jobs."""
    for folder in (one, other):
        recording = load_recording(folder)
        if recording.code:
            return f"{folder}: its command ended with code {recording.code}"
        if failed := recorder_failed(recording.summaries.values()):
            return f"{folder}: {failed}"
        for rank, summary in sorted(recording.summaries.items()):
            if summary.recorder.left_out:
                return f"{folder}: rank {rank} has a model that is not recorded: {summary.recorder.left_out[0]}"
    return ""
