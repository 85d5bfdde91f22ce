"""Two runs of a matrix, case by case: their verdicts, and the structure of what ranks did, where the evidence lies there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from harness.core.evidence.store import EvidenceError, load_run
from harness.core.judge.measures import HELD, MOVED, PEAK, SECONDS
from harness.core.report.outcome import Outcome
from harness.core.run.verdicts import RecordedRun
from harness.nights.merged import merged
from harness.nights.page import places_of
from harness.nights.pages.compared_runs import ComparedCase
from harness.recording.judged.figures import Figures, figures, of_measures, shifts
from harness.recording.judged.run_as_recording import as_recording
from harness.recording.judged.structure import differences, structure

T = TypeVar("T")
Pair = tuple[T, T]
OF_A_RUN = ("trainer", "torch", "commit", "device", "launcher", "machine")
NOT_THERE = Outcome("", "none")


def of_runs(one: RecordedRun, other: RecordedRun) -> list[tuple[str, str, str]]:
    """What they are runs of, and differ in."""
    texts = [
        (name, str(one.begins.get(name) or "unknown"), str(other.begins.get(name) or "unknown")) for name in OF_A_RUN
    ]
    return [text for text in texts if text[1] != text[2]]


def compared_cases(one: RecordedRun, other: RecordedRun) -> list[ComparedCase]:
    """All that either has, but those that both skipped."""
    mine, theirs = ({found.case: found for found in merged([run])} for run in (one, other))
    places = places_of([one]), places_of([other])
    found = []
    for name in dict.fromkeys([*mine, *theirs]):
        pair = mine.get(name, NOT_THERE), theirs.get(name, NOT_THERE)
        if not all(each.skipped for each in pair):
            found.append(_case(name, pair, (places[0].get(name), places[1].get(name))))
    return found


def _case(name: str, pair: Pair[Outcome], places: Pair[Path | None]) -> ComparedCase:
    one, other = pair
    costs = (_costs(one), _costs(other))
    if not (one.checks and other.checks):  # one of them did not run
        return ComparedCase(name, tuple(differences(_verdict(one), _verdict(other))), costs)
    problem = ""
    try:
        found, took = zip(*map(structure_of, places), strict=True)
    except EvidenceError as error:
        problem, found, took = (
            str(error),
            (_sums(one), _sums(other)),
            (of_measures(one.measures), of_measures(other.measures)),
        )
    told = [{**_verdict(each), **more} for each, more in zip(pair, found, strict=True)]
    return ComparedCase(name, tuple(differences(*told)), costs, tuple(shifts(*took)), problem)


def structure_of(folder: Path | None) -> tuple[Mapping[str, Any], Figures]:
    """Return the structure and the figures of the launch that was judged. Raises EvidenceError."""
    if folder is None or not (folder / "case.json").exists():
        raise EvidenceError("the evidence is not beside its verdict")
    recording = as_recording(load_run(folder / "run"))
    if not recording.summaries:
        raise EvidenceError("no rank left evidence")
    return structure(recording), figures(recording)


def _verdict(outcome: Outcome) -> dict[str, Any]:
    why = outcome.cause or outcome.reason
    return {"verdict": f"{outcome.verdict}: {why}" if why else outcome.verdict, "checks": dict(outcome.checks)}


def _sums(outcome: Outcome) -> dict[str, Any]:
    exact = {name: int(value) for name, value in outcome.measures.items() if name == HELD or name.startswith(MOVED)}
    return {"sums": exact}


def _costs(outcome: Outcome) -> dict[str, float]:
    names = {"step time": SECONDS, "peak memory": PEAK}
    return {word: outcome.measures[name] for word, name in names.items() if name in outcome.measures}
