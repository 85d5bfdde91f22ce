"""Which faults of the catalogue a recording with a layout notices.

    python -m benchmarks.recorded_faults OUT [-k WORDS] [--json FILE]

OUT is a folder that `harness faults --out OUT` wrote. What its ranks left is cut down to what a recording has of a rank: no
values, no recipe and no reference, digests of parameters and of inputs. The checks that judge recordings then judge it, with
the case's degrees as its layout. A fault counts if it changes structure: in the matrix it breaks a check that also judges
recordings. FILE gets the verdicts. Starts no ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.case.case import Case
from harness.core.checks import applicable_checks
from harness.core.evidence.codec import array_without_values
from harness.core.evidence.provided import RECORDED
from harness.core.evidence.recording import Fed, RankRecord, RecordedStep
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.step import Activity, Microbatch, StepEvidence
from harness.core.evidence.store import EvidenceError, load_run
from harness.core.evidence.summary import summary_of
from harness.core.judge.result import Verdict
from harness.core.judge.stored_trial import load_case
from harness.core.report.cause_text import diagnosis_line
from harness.faults.attempt import Attempt, accepted_attempts
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.recorded_layout import judge_records
from harness.recording.judged.stored_recording import Recording
from harness.recording.pages.recording_page import cost_rows
from tools.said import said_of

ADAMW = "AdamW(betas (0.9, 0.95), weight_decay 0.1, amsgrad False)"


def record_of(case: Case, run: Run, rank: int) -> RankRecord:
    """Return the record that the recorder would have left of a rank. KeyError for a rank that left no evidence."""
    evidence, end = run.ranks[rank], next(one for one in run.exits if one.rank == rank)
    ended = {"ok": "ok", "raised": "raised"}.get(end.how, "")
    steps = tuple(_recorded(step) for step in evidence.steps)
    text = ADAMW if case.training.optimizer == "adamw" else "SGD(momentum 0, weight_decay 0)"
    names = tuple(tensor.fqn for tensor in evidence.parameters)
    return RankRecord(
        _cut(evidence),
        steps,
        ("Model",),
        (text,),
        names,
        ended=ended,
        error=end.error,
        steps_seen=max((s.step for s in steps), default=0),
    )


def _cut(evidence: RankEvidence) -> RankEvidence:
    """Return the evidence without the fields that only the matrix sees."""
    bare = tuple(
        dataclasses.replace(t, value=array_without_values(t.value.shape, str(t.value.dtype)))
        for t in evidence.parameters
    )
    steps = tuple(_step(step) for step in evidence.steps)
    return dataclasses.replace(evidence, parameters=bare, steps=steps, held=None)


def _step(step: StepEvidence) -> StepEvidence:
    """Return a step's evidence without the fields that a recording does not have."""
    gone: dict[str, Any] = {
        "gradients": {},
        "parameters": {},
        "optimizer_state": {},
        "microbatches": (),
        "changed": None,
    }
    gone |= dict.fromkeys(
        ("reported_loss", "grad_norm", "kept", "copied", "seconds", "allocator", "unwaited", "scaled")
    )
    return dataclasses.replace(step, **gone, activity=Activity(), positions=())


def _recorded(step: StepEvidence) -> RecordedStep:
    """Return a recorded step: digests of parameters, the names of those that are not finite, and the samples received."""
    digests = {fqn: _digest(value) for fqn, value in step.parameters.items()}
    bad = tuple(fqn for fqn, value in step.parameters.items() if not np.isfinite(value).all())
    return RecordedStep(
        step.step, digests, bad, tuple(_fed(one) for one in step.microbatches if one.tokens is not None)
    )


def _fed(one: Microbatch) -> Fed:
    assert one.tokens is not None
    return Fed(_digest(one.tokens), one.tokens.shape, str(one.tokens.dtype))


def _digest(value: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(value).tobytes())


@dataclasses.dataclass(frozen=True)
class Noticed:
    """The findings that a recording shows of one fault."""

    broken: tuple[str, ...]  # failed checks, and labels of what the page calls anomalous
    unknown: tuple[str, ...]  # checks that could not be judged
    cause: str
    said: dict[str, Any]  # all of it, as data


def noticed(folder: Path) -> Noticed:
    """Return what the last launch of a case in this folder shows if it is judged as a recording. Raises EvidenceError."""
    case, _ = load_case(folder)
    name, launched = list(case.launches.items())[-1]
    run = load_run(folder / name)
    records = {rank: record_of(launched, run, rank) for rank in sorted(run.ranks)}
    summaries = [summary_of(record) for record in records.values()]
    recording = Recording(folder, {one.rank: one for one in summaries}, requested=run.world_size)
    results, diagnosis = judge_records(recording, launched.dims, records.__getitem__)
    broken = [r.check for r in results if r.verdict is Verdict.FAIL]
    unknown = tuple(r.check for r in results if r.verdict is Verdict.UNKNOWN)
    labels = [*(anomaly.label for anomaly in find_anomalies(recording)), *(label for label, _ in cost_rows(summaries))]
    said = said_of(folder.name, results, diagnosis, labels)
    return Noticed(tuple(dict.fromkeys([*broken, *labels])), unknown, diagnosis_line(diagnosis), said)


def main() -> None:
    """Judge all folders as recordings, print what is noticed, and write it as JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("-k", default="", help="a part of the folder's name, or several separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where verdicts, causes and findings go, as data")
    args = parser.parse_args()
    said: list[dict[str, Any]] = []
    began, count = time.process_time(), Counter[str]()
    folders = [f for f in sorted(args.out.iterdir()) if any(word in f.name for word in args.k.split(","))]
    attempts = {f"{one.case}+{one.fault}": one for one in accepted_attempts()}
    for folder in folders:
        if "+" not in folder.name and (folder / "case.json").exists():
            count[_of_correct(folder)] += 1
        elif folder.name in attempts:
            count[_of_faulty(folder, attempts[folder.name], said)] += 1
    if args.json:
        args.json.write_text(json.dumps(said, indent=1), encoding="utf-8")
    structural = sum(count[key] for key in ("named", "in part", "noticed", "missed"))
    whole, correct = structural - count["missed"], count["false"] + count["right"]
    print(
        f"{structural} faults that change structure: {whole} noticed, {count['named']} of them named as in the matrix and"
    )
    print(f"{count['in part']} by the first of several causes; {count['unread']} others whose ranks left nothing")
    print(f"{count['besides']} faults that change no structure are noticed")
    print(f"{count['false']} of {correct} correct runs with a false word; {time.process_time() - began:.0f} s of CPU")


def _of_correct(folder: Path) -> str:
    """Return "false" if anything is noticed in a correct run, which is printed; else "right", or "unread" without
    evidence."""
    try:
        found = noticed(folder)
    except EvidenceError:
        return "unread"
    if found.broken:
        print(f"FALSE     {folder.name}: {' '.join(found.broken)}\n    {found.cause}")
    return "false" if found.broken else "right"


def _of_faulty(folder: Path, attempt: Attempt, said: list[dict[str, Any]]) -> str:
    """Return in a word what became of a fault, and print it. Its judgement is appended to `said`."""
    try:
        found = noticed(folder)
    except (EvidenceError, ValueError) as error:
        print(f"unread    {folder.name}: {error}")
        said.append({"name": folder.name, "verdict": "unread", "kinds": [], "results": []})
        return "unread"
    said.append(found.said)
    word = _word(found, attempt)
    if word != "neither":
        told = " ".join(found.broken) or f"in the matrix {' '.join(attempt.broken)}"
        print(f"{word:9} {folder.name}: {told}")
    if word in ("noticed", "in part", "besides"):
        print(f"    here   {found.cause}\n    matrix {attempt.cause}")
    return word


STRUCTURE = RECORDED.lacking_words(("contents", "samples", "uses"), "no structure")


def _word(found: Noticed, attempt: Attempt) -> str:
    """Return how well a fault was noticed: named, in part, noticed, missed, unread; besides or neither if it changes no
    structure."""
    structural = bool(applicable_checks(STRUCTURE) & {*attempt.broken})
    if not found.broken:
        return ("unread" if "completed" in found.unknown else "missed") if structural else "neither"
    if not structural:
        return "besides"
    if found.cause and found.cause == attempt.cause:
        return "named"
    return "in part" if found.cause and attempt.cause.startswith(f"{found.cause}; ") else "noticed"


if __name__ == "__main__":
    main()
