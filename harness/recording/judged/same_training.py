"""Two recordings read from their folders, and judged: is it the same training?"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

from harness.core.evidence.store import EvidenceError
from harness.recording.judged.clipped_by_hand import unclipped
from harness.recording.judged.going_on import going_on
from harness.recording.judged.judge_same_training import SameTraining, compared, why_no_common, why_no_noise
from harness.recording.judged.judge_sketched import Numbers, added_up
from harness.recording.judged.sketched import cause_of
from harness.recording.judged.stored_recording import load_recording, recorder_failed, started
from harness.recording.sketches import RankSketches, load_sketches


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
    cause, why = cause_of(mine, theirs, found), why_no_common(mine, theirs) or _unproven(one, other)
    common = len(mine.shapes.keys() & theirs.shapes.keys())
    return SameTraining(one, other, found, cause, len(mine.shapes), common, len(mine.steps), why)


def _unproven(one: Path, other: Path) -> str:
    """Why the recordings do not show whole jobs."""
    for folder in (one, other):
        recording = load_recording(folder)
        if recording.code:
            return f"{folder}: its command ended with code {recording.code}"
        if failed := recorder_failed(recording.summaries.values()):
            return f"{folder}: {failed}"
        for rank, summary in sorted(recording.summaries.items()):
            if summary.left_out:
                return f"{folder}: rank {rank} has a model that is not recorded: {summary.left_out[0]}"
    return ""
