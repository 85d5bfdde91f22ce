"""What bisecting found, as a person reads it: the commit, what it broke, and what was seen before and after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.core.evidence.store import EvidenceError
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.assembly import gradient_distance
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.tolerance import NoBound
from harness.core.judge.trial import Trial
from harness.core.plan.slices import slice_text
from harness.nights.bisect.search import Found, Judged


def bisect_data(found: Found) -> dict[str, Any]:
    """Return what was judged, and of what was found what was seen on both sides."""
    data = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    seen = [_seen(case, found.before, found.first) for case in _shown_cases(found)] if found.before else []
    return data | {"side_by_side": seen}


def _seen(case: str, before: Judged, first: Judged | None) -> dict[str, Any]:
    sides = {"before": before, "first": first}
    try:
        return {"case": case} | {name: facts(load_trial(one.folders[case])) for name, one in sides.items() if one}
    except EvidenceError as error:
        return {"case": case, "problem": str(error)}


def _shown_cases(found: Found) -> list[str]:
    """Return one case of each cause."""
    if found.first is None or found.before is None:
        return []
    bad, good = _sides(found)
    cases = dict.fromkeys(case for case, _ in sorted(bad.broken - good.broken))
    return sorted({bad.causes[case]: case for case in reversed(cases)}.values())


def bisect_report(found: Found) -> str:
    judged = [one for one in found.judged if one.verdict != "skip"]
    skipped = [one for one in found.judged if one.verdict == "skip"]
    lines = [
        *_who(found),
        "",
        f"  {len(judged)} {found.what}s judged, {len(skipped)} skipped, in {found.seconds:.0f} s",
    ]
    noted = [one for one in found.judged if one.note]
    lines += [f"  {len(noted)} of them {noted[0].note}"] if noted else []
    lines += [line for one in skipped for line in (f"  skipped  {one.name}", f"           {one.problem}")]
    return "\n".join(lines)


def _who(found: Found) -> list[str]:
    if found.first is None or found.before is None:
        return _nobody(found)
    bad, good = _sides(found)
    checks = sorted(bad.broken - good.broken)
    lines = [f"first {'good' if found.fixed else 'bad'} {found.what:<{8 - found.fixed}}{found.first.name}"]
    cases = dict.fromkeys(case for case, _ in checks)
    for case in cases:
        lines.append(f"  {_did(found):<14}  {', '.join(check for name, check in checks if name == case)} of {case}")
        lines.append(f"  {'it was' if found.fixed else 'diagnosis':<14}  {_cause(good, bad, case)}")
    lines.append(f"  {'last bad' if found.fixed else 'last good':<14}  {found.before.name}")
    for case in _shown_cases(found):
        lines += ["", *_side_by_side(found.before, found.first, case)]
    return lines


def _nobody(found: Found) -> list[str]:
    which = "good" if found.fixed else "bad"
    if found.unfinished and found.before:
        return [
            f"time was up before the first {which} {found.what} was found",
            f"  after           {found.before.name}",
            f"  it is among     {found.unfinished}",
        ]
    between = f"the last {'bad' if found.fixed else 'good'} and it"
    lines = [f"the first {which} {found.what} is one of these; those between {between} could not be judged"]
    return lines + [f"  {name}" for name in found.candidates]


def _sides(found: Found) -> tuple[Judged, Judged]:
    """The bad one and the good one, whichever is the later."""
    assert found.first and found.before
    return (found.before, found.first) if found.fixed else (found.first, found.before)


def _did(found: Found) -> str:
    return "fixes" if found.fixed else "breaks"


def _cause(good: Judged, bad: Judged, case: str) -> str:
    """A cause that is older than the commit is not the commit's."""
    cause = bad.causes[case]
    return f"{cause} (so it was before: look at the checks)" if good.causes.get(case) == cause else cause


def _side_by_side(one: Judged, other: Judged, case: str) -> list[str]:
    try:
        before, after = (facts(load_trial(each.folders[case])) for each in (one, other))
    except EvidenceError as error:
        return [f"  {case}: nothing is shown side by side: {error}"]
    rows = [(case, one.label, other.label)]
    rows += [(name, before.get(name, "none"), after.get(name, "none")) for name in dict.fromkeys([*before, *after])]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    marks = ["", *("" if was == now else "! " for _, was, now in rows[1:])]
    lines = [
        f"  {name:<{first}}  {was:<{second}}  {mark}{now}".rstrip()
        for (name, was, now), mark in zip(rows, marks, strict=True)
    ]
    return [*lines, f"  evidence: {_shown(one, case)} and {_shown(other, case)}"]


def _shown(one: Judged, case: str) -> Path:
    return one.folders[case]


def facts(trial: Trial) -> dict[str, str]:
    """Return what rank 0 holds and moved in its first step, and over which ranks. Added are how far all ranks' gradients are
    off, and what a weaker test would look at."""
    evidence = trial.ranks.get(0)
    if evidence is None or not evidence.steps:
        return {"rank 0": "left no evidence" if evidence is None else "finished no step"}
    step = evidence.steps[0]
    found = {"process groups of rank 0": " ".join(sorted({ranks_text(g.ranks) for g in evidence.groups}))}
    for wrapper in list(evidence.structure.values())[:1]:
        over = {"it shards over": wrapper.shard_ranks, "it replicates over": wrapper.replicate_ranks}
        found |= {axis: ranks_text(ranks) for axis, ranks in over.items() if ranks}
    first = evidence.parameters[0]
    part, shape = trial.holdings[0][first.fqn], trial.plan.shapes.get(first.fqn, first.global_shape)
    found[f"its {first.fqn}"] = slice_text(part, shape, flat=bool(trial.plan.flat)) if part else "found nowhere"
    moved: dict[str, int] = {}
    for call in evidence.collectives:
        if call.step == step.step and call.phase in ("forward", "backward"):
            key = f"{call.phase} {call.op} over {ranks_text(call.ranks)}"
            moved[key] = moved.get(key, 0) + call.bytes
    found |= {key: bytes_text(count) for key, count in sorted(moved.items())}
    found["parameters kept"] = bytes_text(step.memory.get("parameters", 0))
    found["gradients of all ranks"] = _gradients(trial)
    found["losses reported"] = _curve(s.reported_loss for s in evidence.steps)
    found["norms reported"] = _curve(s.grad_norm for s in evidence.steps)
    return found


def _curve(numbers: Iterable[float | None]) -> str:
    return " ".join(f"{number:.12g}" for number in numbers if number is not None) or "none"


def _gradients(trial: Trial) -> str:
    """What differs is decided by a bound: rounding differs from commit to commit."""
    apart = [
        (gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn]), rank, step.step, fqn)
        for rank, step, reference in trial.steps()
        for fqn, gradient in step.gradients.items()
        if fqn in reference.gradients
    ]
    if not apart:
        return "none"
    off, rank, step, fqn = max(apart, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
    where = f"off by {off:.1e} at worst: rank {rank}, step {step}, {fqn}"
    try:
        bound = trial.bounds.gradient[step]
    except NoBound:
        return where
    return f"the reference's, within {bound:.1e}" if off <= bound else where
