"""Which faults of the catalogue two recordings notice by numbers alone, without an adapter.

    python -m benchmarks.recorded_numbers OUT [-k WORDS]

OUT is a folder that `harness faults --out OUT` wrote. What its ranks left is cut down to the numbers that the recorder leaves.
They are sketches of slices, rows of samples, rates, and the norm by which gradients are clipped. The reference is the first
recording. Faults count that break `gradients` or `update` in the matrix. Starts no ranks.
"""

from __future__ import annotations

import argparse
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from harness.diagnosis.sketched import cause_of
from harness.evidence.records import RankEvidence
from harness.evidence.sketches import GRADIENT, WEIGHTS, Box, RankSketches, Sketch, place_text
from harness.evidence.store import EvidenceError
from harness.faults.attempt import accepted
from harness.judge.result import Verdict
from harness.judge.same_training import compared
from harness.judge.sketched import added_up
from harness.judge.stored_trial import load_trial
from harness.judge.trial import Trial
from harness.plan.slices import Slice
from harness.record.boxes import boxes_of_dims, rows_of_interval
from harness.record.sketching import Sketcher
from harness.report.cause_text import cause_line

OF_NUMBERS = {"gradients", "update"}
SKETCHER = Sketcher()


def reference_of(trial: Trial) -> RankSketches:
    """Return what one device would have left."""
    reference, shapes = trial.reference, {fqn: value.shape for fqn, value in trial.reference.weights.items()}
    found = [_sketch(0, WEIGHTS, fqn, value, _whole(value.shape)) for fqn, value in reference.weights.items()]
    for step in reference.steps:
        of_step = {GRADIENT: step.gradients, WEIGHTS: step.parameters}
        found += [
            _sketch(step.step, kind, fqn, v, _whole(v.shape)) for kind, of in of_step.items() for fqn, v in of.items()
        ]
    at = {id_: place for place, id_ in enumerate(reference.sample_ids)}
    rows = {
        step: Counter(
            _row(reference.tokens[at[id_]][: trial.case.seq_len(step)]) for id_ in reference.samples[step - 1]
        )
        for step in trial.case.steps
    }
    tokens = {
        step: _tokens([reference.tokens[at[i]][: trial.case.seq_len(step)] for i in reference.samples[step - 1]])
        for step in rows
    }
    clips = trial.case.training.max_norm is not None
    return RankSketches(
        0,
        1,
        shapes=shapes,
        dtypes=dict.fromkeys(shapes, trial.case.training.dtype),
        sketches=tuple(found),
        rows={step: dict(of) for step, of in rows.items()},
        tokens=tokens,
        norms={step.step: step.grad_norm for step in reference.steps if clips},
        rates={step.step: step.lr for step in reference.steps},
        optimizers=(trial.case.training.optimizer,),
        computes_in=trial.case.training.compute_dtype or "",
    )


def rank_of(trial: Trial, evidence: RankEvidence) -> RankSketches:
    """Return what the recorder would have left of a rank."""
    rank, shapes = evidence.rank, {fqn: value.shape for fqn, value in trial.reference.weights.items()}
    held = {one.fqn: one.value for one in evidence.parameters}
    found = [*_sketches(trial, rank, 0, WEIGHTS, held)]
    rows, tokens = dict[int, dict[int, int]](), dict[int, int]()
    for step in evidence.steps:
        found += [*_sketches(trial, rank, step.step, GRADIENT, step.gradients)]
        found += [*_sketches(trial, rank, step.step, WEIGHTS, step.parameters)]
        fed = [row for part in step.microbatches if part.tokens is not None for row in part.tokens]
        if fed:
            rows[step.step], tokens[step.step] = dict(Counter(map(_row, fed))), _tokens(fed)
    return RankSketches(
        rank,
        trial.case.dims.world_size,
        shapes={fqn: shapes[fqn] for fqn in held if fqn in shapes},
        sketches=tuple(found),
        rows=rows,
        tokens=tokens,
        norms={s.step: s.grad_norm for s in evidence.steps if s.grad_norm is not None},
        rates={s.step: s.lr for s in evidence.steps if s.lr is not None},
        optimizers=(trial.case.training.optimizer,),
    )


def _sketches(trial: Trial, rank: int, step: int, kind: str, values: dict[str, np.ndarray]) -> Iterator[Sketch]:
    """Yield those of slices whose place is known."""
    for fqn, value in values.items():
        part = trial.slice_of(rank, fqn) or trial.plan.slices[rank].get(fqn)
        boxes = () if part is None else _boxes(part, trial.reference.weights[fqn].shape)
        if sum(np.prod(box.size) for box in boxes) == value.size:
            yield _sketch(step, kind, fqn, value, boxes)


def _boxes(part: Slice, shape: tuple[int, ...]) -> tuple[Box, ...]:
    if len(part) == 1 and len(shape) > 1:
        return rows_of_interval(shape, *part[0])
    return boxes_of_dims(shape, [(interval,) for interval in part])


def _whole(shape: tuple[int, ...]) -> tuple[Box, ...]:
    return boxes_of_dims(shape, [((0, size),) for size in shape])


def _sketch(step: int, kind: str, fqn: str, value: np.ndarray, boxes: tuple[Box, ...]) -> Sketch:
    flat = torch.from_numpy(np.array(value)).reshape(-1)
    squares, *sums = SKETCHER.sketch(flat, fqn, boxes).tolist()
    return Sketch(step, kind, fqn, place_text(boxes), value.size, squares, np.array(sums))


def _row(tokens: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, np.int64).tobytes())


def _tokens(rows: list[np.ndarray]) -> int:
    return sum(int(token) * int(token) for row in rows for token in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("-k", default="", help="a part of the folder's name")
    args = parser.parse_args()
    attempts, count = {f"{one.case}+{one.fault}": one for one in accepted()}, Counter[str]()
    for folder in sorted(args.out.iterdir()):
        attempt = attempts.get(folder.name)
        right = "+" not in folder.name and (folder / "case.json").exists()
        if args.k not in folder.name or not (right or (attempt and OF_NUMBERS & {*attempt.broken})):
            continue
        try:
            trial = load_trial(folder)
            if trial.run.unreadable:
                raise EvidenceError(next(iter(trial.run.unreadable.values())))
            if trial.saved or not trial.reference.steps or trial.case.training.quantize:
                continue
            one = added_up([reference_of(trial)])
            other = added_up([rank_of(trial, evidence) for evidence in trial.ranks.values()])
        except EvidenceError:
            count["unread"] += 1
            continue
        found = compared(one, other)
        cause = cause_of(one, other, found)
        word = str(found.verdict) if right else f"fault {found.verdict}"
        count[word] += 1
        if attempt is not None and cause is not None:
            count["named alike"] += cause.kind in attempt.kinds
        if (attempt is not None) or found.verdict is not Verdict.PASS:
            broken = " ".join(r.check for r in found.results if r.verdict is Verdict.FAIL)
            notes = " ".join(f"{r.check}: {r.note}" for r in found.results if r.verdict is Verdict.UNKNOWN)
            print(f"{word:14} {folder.name}: {broken or notes}", flush=True)
            print(f"    here   {cause_line(cause) if cause else ''}\n    matrix {attempt.cause if attempt else ''}")
    print(dict(count))


if __name__ == "__main__":
    main()
