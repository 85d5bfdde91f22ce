"""Judgement of one recording by another, both read from their folders: is it the same training?"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from harness.core.evidence.store import EvidenceError
from harness.recording.judged.judge_same_training import SameTraining, compare_numbers, why_no_common, why_no_noise
from harness.recording.judged.judge_sketched import Numbers, Whole, sum_sketches
from harness.recording.judged.sketch_distances import Bounds, distance_and_fit
from harness.recording.judged.sketched import diagnose
from harness.recording.judged.stored_recording import load_command_info, load_recording, recorder_failure_text
from harness.recording.sketches import GRADIENT, WEIGHTS, RankSketches, load_sketches

# ---- Gradients of which one recording's are seen before clipping, and the other's after it


def undo_clipping(baseline: Numbers, candidate: Numbers, noise: Numbers | None = None) -> Numbers:
    """Return the second, with gradients divided by the clipping factor in steps that torch's functions clip in one
    recording alone.

    Steps in which no one factor explains all gradients stay as they are; if all do, it is `candidate` itself. What the
    optimizer received is judged by its state and updates then. noise: the first, its weights altered by one rounding.
    """
    bounds = Bounds(baseline, noise)
    whole = dict(candidate.whole)
    factors = dict[int, float]()
    for step in sorted({*baseline.steps} & {*candidate.steps}):
        if not _can_undo_clipping(baseline, candidate, step):
            continue
        factor = _clipping_factor(baseline, candidate, bounds, step)
        if factor is None:
            continue
        factors[step] = factor
        for key, tensor in candidate.whole.items():
            if key[:2] == (step, GRADIENT):
                whole[key] = _divide_tensor(tensor, factor)
    return replace(candidate, whole=whole, rescaled=factors) if factors else candidate


def _divide_tensor(tensor: Whole, factor: float) -> Whole:
    """Return a tensor divided by a factor, with all differing copies of its slices."""
    replicas = {}
    for slice_text, copies in tensor.replicas.items():
        replicas[slice_text] = [(rank, sums / factor) for rank, sums in copies]
    return replace(tensor, sums=tensor.sums / factor, squares=tensor.squares / factor**2, replicas=replicas)


def _can_undo_clipping(baseline: Numbers, candidate: Numbers, step: int) -> bool:
    """Return whether torch's functions clip in one alone, and something besides gradients shows what the optimizer
    received.

    That is its state, or weights that SGD stepped.
    """
    if bool(baseline.norms.get(step)) == bool(candidate.norms.get(step)):
        return False
    keys = {key for key in baseline.whole.keys() & candidate.whole.keys() if key[0] == step}
    is_sgd = all(optimizer.startswith("SGD(") for optimizer in baseline.optimizers)
    updated = is_sgd and any(key[1] == WEIGHTS for key in keys)
    return updated or any(key[1] not in (GRADIENT, WEIGHTS) for key in keys)


def _clipping_factor(baseline: Numbers, candidate: Numbers, bounds: Bounds, step: int) -> float | None:
    """Return the factor between all gradients of a step, second to first, as clipping in one of them makes it.

    None if there are no gradients, they agree without a factor, no one factor fits all, or clipping cannot make it.
    Clipping only makes gradients smaller.
    """
    pairs = []
    for key in baseline.whole.keys() & candidate.whole.keys():
        if key[:2] == (step, GRADIENT) and baseline.whole[key].length:
            pairs.append((baseline.whole[key].sums, candidate.whole[key].sums, bounds.bound(key)))
    fits = [distance_and_fit(expected, observed)[1] for expected, observed, _ in pairs]
    if not fits or not all(map(math.isfinite, fits)):
        return None
    factor = float(np.median(fits))
    is_after = not candidate.norms.get(step)
    makes = 0 < factor < 1 if is_after else factor > 1
    if not makes or all(distance_and_fit(expected, observed)[0] <= bound for expected, observed, bound in pairs):
        return None
    is_factor_of_all = all(
        distance_and_fit(factor * expected, observed)[0] <= bound for expected, observed, bound in pairs
    )
    return factor if is_factor_of_all else None


# ---- A recording of a job that resumed, judged by one that was not interrupted: steps are counted as the first one counts them


T = TypeVar("T")


def count_resumed_steps(baseline: Numbers, candidate: Numbers, after: int) -> tuple[Numbers, Numbers]:
    """Return both, with steps of the second counted as the first one counts them.

    after: the step of the first from whose checkpoint the second went on; 0 for none. Raises EvidenceError where the first did
    not record that step, or none that follows.
    """
    if not after:
        return baseline, candidate
    known = {step for step, kind, _ in (*baseline.whole, *baseline.unknown) if kind == WEIGHTS}
    if after not in known or max(known) == after:
        raise EvidenceError(
            f"--after {after}: the first recording has weights of steps {', '.join(map(str, sorted(known - {0})))};"
            f" it has to have step {after} and some that follow: record it with --steps {after}-{after + 3}"
        )
    return replace(baseline, after=after), _shift_steps(candidate, after)


def _shift_steps(numbers: Numbers, offset: int) -> Numbers:
    """Return the numbers with this offset added to each step. `after` is the offset, too."""
    return replace(
        numbers,
        after=offset,
        whole={(step + offset, kind, fqn): whole for (step, kind, fqn), whole in numbers.whole.items()},
        unknown={(step + offset, kind, fqn): why for (step, kind, fqn), why in numbers.unknown.items()},
        after_pass={(step + offset, passes): sums for (step, passes), sums in numbers.after_pass.items()},
        by_rows={(step + offset, fqn): sums for (step, fqn), sums in numbers.by_rows.items()},
        tokens=_shift_keys(numbers.tokens, offset),
        norms=_shift_keys(numbers.norms, offset),
        norms_off=_shift_keys(numbers.norms_off, offset),
        scales=_shift_keys(numbers.scales, offset),
        rates=_shift_keys(numbers.rates, offset),
        passes=_shift_keys(numbers.passes, offset),
        drawn=_shift_keys(numbers.drawn, offset),
        changed=_shift_keys(numbers.changed, offset),
    )


def _shift_keys(by_step: Mapping[int, T], offset: int) -> dict[int, T]:
    return {step + offset: value for step, value in by_step.items()}


# ---- the same training


def sketch_files(directory: Path) -> list[Path]:
    """Return where ranks left numbers, in the order of ranks."""
    return sorted((directory / "ranks").glob("rank_*.sketches"))


def require_sketch_files(directory: Path) -> list[Path]:
    """Return the files in which ranks left numbers, in the order of ranks.

    Raises EvidenceError if there is none, or the first one cannot be read.
    """
    files = sketch_files(directory)
    if not files:
        raise EvidenceError(
            f"{directory}: no numbers were recorded; `harness record -o {directory} -- COMMAND` records them, of a command"
            " that trains a torch model"
        )
    load_sketches(files[0])
    return files


def load_numbers(directory: Path) -> Numbers:
    """Return the numbers of all ranks of a recording, each distinct slice counted once.

    Raises EvidenceError if no rank left any, a file is damaged, or a rank's file is of another recording.
    """
    files = require_sketch_files(directory)
    launch = load_command_info(directory).get("launch", "")

    def read() -> Iterator[RankSketches]:
        for file in files:
            rank_sketches = load_sketches(file)
            if rank_sketches is not None and launch and rank_sketches.launch != launch:
                raise EvidenceError(f"{file}: belongs to another recording; record the job again")
            if rank_sketches is not None:
                yield rank_sketches

    collects = gc.isenabled()
    gc.disable()  # of many ranks, it would walk all that was read over and over
    try:
        return sum_sketches(read())
    finally:
        if collects:
            gc.enable()


def judge_training(baseline: Path, candidate: Path, noise: Path | None = None, after: int = 0) -> SameTraining:
    """Return the judgement of the second recording by the first, with the diagnosis of what differs.

    noise: a recording of the first command with altered weights. after: step of the first from whose checkpoint the
    second went on; 0 for none.

    Raises EvidenceError where one of them has no numbers, or the step was not recorded. It also does so where the first
    has altered weights, or the noise is not that of the first.
    """
    expected = load_numbers(baseline)
    observed = load_numbers(candidate)
    of_noise = load_numbers(noise) if noise is not None else None
    if of_noise is not None and (why := why_no_noise(expected, of_noise)):
        raise EvidenceError(f"{noise}: it does not show the noise of {baseline}: {why}")
    if expected.noise:
        raise EvidenceError(
            f"{baseline}: its first weights were altered (--noise); give it by --noise-of, and a plain one as A"
        )
    expected, observed = count_resumed_steps(expected, observed, after)
    observed = undo_clipping(expected, observed, of_noise)
    comparison = compare_numbers(expected, observed, of_noise)
    diagnosis = diagnose(expected, observed, comparison)
    why = why_no_common(expected, observed) or _why_unproven(baseline, candidate)
    common = len(expected.shapes.keys() & observed.shapes.keys())
    return SameTraining(
        baseline, candidate, comparison, diagnosis, len(expected.shapes), common, len(expected.steps), why
    )


def _why_unproven(baseline: Path, candidate: Path) -> str:
    """Return why one of the recordings does not show its whole job; empty if both do.

    That is a command that failed, a recorder that raised, or a model that is not recorded.
    """
    for folder in (baseline, candidate):
        recording = load_recording(folder)
        if recording.code:
            return f"{folder}: its command ended with code {recording.code}"
        if failed := recorder_failure_text(recording.summaries.values()):
            return f"{folder}: {failed}"
        for rank, summary in sorted(recording.summaries.items()):
            if summary.recorder.left_out:
                return f"{folder}: rank {rank} has a model that is not recorded: {summary.recorder.left_out[0]}"
    return ""
