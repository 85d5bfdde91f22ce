"""The report of a bisection: the commit, what it broke, and facts of the evidence before and after it."""

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
from harness.nights.bisect.search import JudgedRevision, SearchResult


def bisect_data(search_result: SearchResult) -> dict[str, Any]:
    """Return the fields of the search as a mapping, and in "side_by_side" the facts of both sides for one case of each
    cause.
    """
    data = {field.name: getattr(search_result, field.name) for field in dataclasses.fields(search_result)}
    facts_of_cases = []
    if search_result.before:
        for case in _one_case_per_cause(search_result):
            facts_of_cases.append(_facts_data(case, search_result.before, search_result.first))
    return data | {"side_by_side": facts_of_cases}


def _facts_data(case: str, before: JudgedRevision, first: JudgedRevision | None) -> dict[str, Any]:
    """Return {"case", "before", "first"}, with the facts of the case on each side, or {"case", "problem"} if evidence
    cannot be read.

    first: None leaves it out.
    """
    sides = {"before": before, "first": first}
    data: dict[str, Any] = {"case": case}
    try:
        data |= {
            name: first_step_facts(load_trial(revision.folders[case])) for name, revision in sides.items() if revision
        }
    except EvidenceError as error:
        return {"case": case, "problem": str(error)}
    return data


def _one_case_per_cause(search_result: SearchResult) -> list[str]:
    """Return the names of cases that the commit broke or fixed, one for each cause, sorted. Empty if no commit was found."""
    if search_result.first is None or search_result.before is None:
        return []
    bad, good = _bad_and_good(search_result)
    cases = dict.fromkeys(case for case, _ in sorted(bad.broken - good.broken))
    return sorted({bad.causes[case]: case for case in reversed(cases)}.values())


def bisect_report(search_result: SearchResult) -> str:
    """Return the report as text: the commit, what it broke or fixed, facts of both sides, counts, and what was skipped."""
    judged = [revision for revision in search_result.judged if revision.verdict != "skip"]
    skipped = [revision for revision in search_result.judged if revision.verdict == "skip"]
    lines = [
        *_result_lines(search_result),
        "",
        f"  {len(judged)} {search_result.what}s judged, {len(skipped)} skipped, in {search_result.seconds:.0f} s",
    ]
    noted = [revision for revision in search_result.judged if revision.note]
    if noted:
        lines.append(f"  {len(noted)} of them {noted[0].note}")
    for revision in skipped:
        lines += [f"  skipped  {revision.name}", f"           {revision.problem}"]
    return "\n".join(lines)


def _result_lines(search_result: SearchResult) -> list[str]:
    """Return the lines on the commit that was found: checks, causes, the commit before, and facts of both.

    If none was found, they are the lines on the candidates.
    """
    if search_result.first is None or search_result.before is None:
        return _candidate_lines(search_result)
    fixed = search_result.fixed
    bad, good = _bad_and_good(search_result)
    broken_checks = sorted(bad.broken - good.broken)
    lines = [f"first {'good' if fixed else 'bad'} {search_result.what:<{8 - fixed}}{search_result.first.name}"]
    for case in dict.fromkeys(case for case, _ in broken_checks):
        checks = ", ".join(check for name, check in broken_checks if name == case)
        lines.append(f"  {_verb(search_result):<14}  {checks} of {case}")
        lines.append(f"  {'it was' if fixed else 'diagnosis':<14}  {_cause_text(good, bad, case)}")
    lines.append(f"  {'last bad' if fixed else 'last good':<14}  {search_result.before.name}")
    for case in _one_case_per_cause(search_result):
        lines += ["", *_facts_table(search_result.before, search_result.first, case)]
    return lines


def _candidate_lines(search_result: SearchResult) -> list[str]:
    """Return the lines on a search that found no commit: its candidates, or, if time was up, how much is left to search."""
    verdict = "good" if search_result.fixed else "bad"
    if search_result.unfinished and search_result.before:
        return [
            f"time was up before the first {verdict} {search_result.what} was found",
            f"  after           {search_result.before.name}",
            f"  it is among     {search_result.unfinished}",
        ]
    between = f"the last {'bad' if search_result.fixed else 'good'} and it"
    lines = [f"the first {verdict} {search_result.what} is one of these; those between {between} could not be judged"]
    return lines + [f"  {name}" for name in search_result.candidates]


def _bad_and_good(search_result: SearchResult) -> tuple[JudgedRevision, JudgedRevision]:
    """Return (bad revision, good revision) of the pair that was found, whichever is the later. Both must have been found."""
    assert search_result.first and search_result.before
    if search_result.fixed:
        return search_result.before, search_result.first
    return search_result.first, search_result.before


def _verb(search_result: SearchResult) -> str:
    """Return the verb for what the commit did to a check: "fixes" or "breaks"."""
    return "fixes" if search_result.fixed else "breaks"


def _cause_text(good: JudgedRevision, bad: JudgedRevision, case: str) -> str:
    """Return the cause of a case's failure in the bad revision, with a remark if the good one fails by the same cause."""
    cause = bad.causes[case]
    return f"{cause} (so it was before: look at the checks)" if good.causes.get(case) == cause else cause


def _facts_table(earlier: JudgedRevision, later: JudgedRevision, case: str) -> list[str]:
    """Return the lines of a table: a fact of the case's evidence a row, a revision a column. "!" marks facts that differ.

    One line with the problem if evidence cannot be read.
    """
    try:
        earlier_facts, later_facts = (
            first_step_facts(load_trial(revision.folders[case])) for revision in (earlier, later)
        )
    except EvidenceError as error:
        return [f"  {case}: nothing is shown side by side: {error}"]
    rows = [(case, earlier.label, later.label)]
    for name in dict.fromkeys([*earlier_facts, *later_facts]):
        earlier_text = earlier_facts.get(name, "none")
        later_text = later_facts.get(name, "none")
        rows.append((name, earlier_text, later_text if earlier_text == later_text else f"! {later_text}"))
    first_width = max(len(name) for name, _, _ in rows)
    second_width = max(len(earlier_text) for _, earlier_text, _ in rows)
    lines = [
        f"  {name:<{first_width}}  {earlier_text:<{second_width}}  {later_text}".rstrip()
        for name, earlier_text, later_text in rows
    ]
    return [*lines, f"  evidence: {_evidence_folder(earlier, case)} and {_evidence_folder(later, case)}"]


def _evidence_folder(revision: JudgedRevision, case: str) -> Path:
    """Return the folder with the evidence of the case."""
    return revision.folders[case]


def first_step_facts(trial: Trial) -> dict[str, str]:
    """Return facts on rank 0 in its first step, text by name: its groups, first parameter's slice, bytes moved and kept.

    Further facts are how far all ranks' gradients are from the reference, and rank 0's losses and norms of all steps.
    Without evidence of a step there is one fact that says so.
    """
    evidence = trial.ranks.get(0)
    if evidence is None or not evidence.steps:
        return {"rank 0": "left no evidence" if evidence is None else "finished no step"}
    step = evidence.steps[0]
    text_by_fact = {
        "process groups of rank 0": " ".join(sorted({ranks_text(group.ranks) for group in evidence.groups}))
    }
    for wrapper in list(evidence.structure.values())[:1]:
        ranks_by_fact = {"it shards over": wrapper.shard_ranks, "it replicates over": wrapper.replicate_ranks}
        text_by_fact |= {fact: ranks_text(ranks) for fact, ranks in ranks_by_fact.items() if ranks}
    parameter = evidence.parameters[0]
    local_slice = trial.local_slices[0][parameter.fqn]
    shape = trial.plan.shapes.get(parameter.fqn, parameter.global_shape)
    text_by_fact[f"its {parameter.fqn}"] = "found nowhere"
    if local_slice:
        text_by_fact[f"its {parameter.fqn}"] = slice_text(local_slice, shape, flat=bool(trial.plan.flat))
    bytes_by_call: dict[str, int] = {}
    for call in evidence.collectives:
        if call.step == step.step and call.phase in ("forward", "backward"):
            key = f"{call.phase} {call.op} over {ranks_text(call.ranks)}"
            bytes_by_call[key] = bytes_by_call.get(key, 0) + call.bytes
    text_by_fact |= {key: bytes_text(count) for key, count in sorted(bytes_by_call.items())}
    text_by_fact["parameters kept"] = bytes_text(step.memory.get("parameters", 0))
    text_by_fact["gradients of all ranks"] = _gradient_text(trial)
    text_by_fact["losses reported"] = _numbers_text(each_step.reported_loss for each_step in evidence.steps)
    text_by_fact["norms reported"] = _numbers_text(each_step.grad_norm for each_step in evidence.steps)
    return text_by_fact


def _numbers_text(numbers: Iterable[float | None]) -> str:
    """Return the numbers in one line, with 12 digits; "none" if there are none."""
    return " ".join(f"{number:.12g}" for number in numbers if number is not None) or "none"


def _gradient_text(trial: Trial) -> str:
    """Return a text on the gradient that differs most from the reference's, over all ranks and steps; "none" without gradients.

    Within the bound of its step it says so: rounding differs from commit to commit. Without a bound it gives the
    difference.
    """
    distances: list[tuple[float, int, int, str]] = []
    for rank, step, reference in trial.steps_with_reference():
        for fqn, gradient in step.gradients.items():
            if fqn in reference.gradients:
                distance = gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn])
                distances.append((distance, rank, step.step, fqn))
    if not distances:
        return "none"
    worst, rank, step_number, fqn = max(distances, key=lambda row: math.inf if math.isnan(row[0]) else row[0])
    text = f"off by {worst:.1e} at worst: rank {rank}, step {step_number}, {fqn}"
    try:
        bound = trial.bounds.gradient[step_number]
    except NoBound:
        return text
    return f"the reference's, within {bound:.1e}" if worst <= bound else text
