"""Diagnoses: what was proven and seen, and what neither explains, as causes and lines of evidence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.core.causes.differences import NUMBER_CHECKS
from harness.core.causes.engine import Explanation
from harness.core.causes.hypothesis import Fact, Hypothesis
from harness.core.causes.localise import UNEXPLAINED, localise
from harness.core.causes.words import Broken
from harness.core.checks import all_checks, run_check
from harness.core.judge.result import EXPLAINS, Cause, Diagnosis, Line, Lines, Result, Verdict
from harness.core.judge.trial import Trial, launch_label

HARMLESS_CHECKS = frozenset({"memory", "traffic"})
"""Checks of what is kept or moved in addition: where more is wrong, that goes first."""


def other_launch_lines(trial: Trial, results: Sequence[Result], diagnosed: Sequence[Result]) -> Lines:
    """Return a line for each check that fails in a launch, and not in the one that is diagnosed: maybe another mistake.

    results: of the launch. diagnosed: the results of the launch that is diagnosed.
    """
    failing_there = {result.check for result in diagnosed if result.verdict is Verdict.FAIL}
    where = launch_label(trial) or "the last launch"
    lines = []
    for result in results:
        if result.verdict is Verdict.FAIL and result.check not in failing_there and result.findings:
            finding = replace(result.findings[0], launch=where)
            lines.append(("also failing", Cause(UNEXPLAINED, "", finding=finding)))
    return tuple(lines)


def build_diagnosis(trial: Trial, results: Sequence[Result], explanation: Explanation) -> Diagnosis:
    """Return the diagnosis: causes that are proven, then those that a check saw, with their evidence.

    What kept ranks from completing comes first. If some checks have no cause, the place where they first go wrong is a
    line of the evidence. It is the first cause if there is no better one.
    """
    proofs = explanation.proofs
    seen_causes = {fact.cause for fact in explanation.facts}
    hypotheses = sorted(
        proofs[0].hypotheses if proofs else (), key=lambda hypothesis: hypothesis.cause not in seen_causes
    )
    facts, symptoms = _causes_and_symptoms(hypotheses, explanation.facts)
    unfinished = [fact for fact in facts if "completed" in fact.checks]  # what did not run explains the most
    all_lines: dict[Cause, Lines] = {fact.cause: fact.lines for fact in unfinished}
    all_lines |= {hypothesis.cause: hypothesis.lines for hypothesis in hypotheses}
    all_lines |= {fact.cause: fact.lines for fact in facts}
    lines_of_causes: dict[Cause, Lines] = {}
    for cause, cause_lines in all_lines.items():
        if not _is_repeated(cause, all_lines):
            lines_of_causes[cause] = cause_lines
    lines: list[Line] = []
    for cause_lines in lines_of_causes.values():
        lines += cause_lines
    lines += [("also seen", fact.cause) for fact in symptoms]
    lines += _other_proofs(explanation)
    unexplained = {
        result.check: result for result in results if result.check in explanation.unexplained and result.findings
    }
    if unexplained:
        is_assumed = bool(proofs) and not proofs[0].renumbers_ranks
        assumed = proofs[0].assumed if is_assumed else trial
        if is_assumed:
            rerun = {name: run_check(name, all_checks()[name].check, assumed) for name in unexplained}
            unexplained = {name: result for name, result in rerun.items() if result.findings} or unexplained
        passing = frozenset(result.check for result in results if result.verdict is Verdict.PASS)
        location, location_lines = _locate(
            assumed, unexplained, explanation.tried_count, passing, bool(lines_of_causes)
        )
        label = "still failing" if is_assumed else "not explained"
        # where only harmless facts are known and numbers are wrong, the place of the wrong numbers is the cause
        only_harmless = all(HARMLESS_CHECKS.issuperset(fact.checks) for fact in facts)
        location_first = not proofs and only_harmless and bool(NUMBER_CHECKS & {*unexplained})
        if lines_of_causes and not location_first:
            lines += [(label, location), *location_lines]
        else:
            lines += location_lines
        if location_first or not lines_of_causes:
            lines_of_causes = {location: (), **lines_of_causes}
    lines += [("not tried", text) for text in explanation.errors]
    if explanation.end_reason:
        lines.append(("not searched further", explanation.end_reason))
    lines = [line for line in dict.fromkeys(lines) if line[1] not in lines_of_causes]
    explained = _checks_by_cause(explanation)
    causes = []
    for cause in lines_of_causes:
        causes.append(_with_extent(cause, explained.get(cause, explanation.unexplained), results))
    return Diagnosis(tuple(causes), (*_assumption_lines(explanation, results), *lines))


def _other_proofs(explanation: Explanation) -> Lines:
    """Return the lines with the causes of the other proofs that explain as much as the first one, each once."""
    causes_of_proofs = []
    for proof in explanation.proofs:
        causes_of_proofs.append(tuple(hypothesis.cause for hypothesis in proof.hypotheses))
    lines: list[Line] = []
    for causes in dict.fromkeys(causes_of_proofs[1:]):
        if causes != causes_of_proofs[0]:
            lines += [("and" if index else "or else", cause) for index, cause in enumerate(causes)]
    return tuple(lines)


def _is_repeated(cause: Cause, causes: Iterable[Cause]) -> bool:
    """Return whether an earlier one of the causes has the same kind and text. False for one without a text."""
    earlier = itertools.takewhile(lambda other: other is not cause, causes)
    return bool(cause.observed) and any(
        (other.kind, other.observed) == (cause.kind, cause.observed) for other in earlier
    )


def _checks_by_cause(explanation: Explanation) -> dict[Cause, tuple[str, ...]]:
    """Return, by cause, the failing checks that it explains."""
    explained = {fact.cause: fact.checks for fact in explanation.facts}
    if explanation.proofs:
        proof = explanation.proofs[0]
        for hypothesis in proof.hypotheses:
            explained[hypothesis.cause] = proof.explained or hypothesis.seen_by
    return explained


def _with_extent(cause: Cause, checks: Sequence[str], results: Sequence[Result]) -> Cause:
    """Return the cause with those of these checks that fail, and the ranks, steps and parameters of their findings."""
    failed = [result for result in results if result.verdict is Verdict.FAIL and result.check in checks]
    findings = list(itertools.chain.from_iterable(result.findings for result in failed))
    ranks = set[int]()
    for finding in findings:
        ranks.update(finding.ranks)
    return replace(
        cause,
        explains=tuple(result.check for result in failed),
        ranks=tuple(sorted(ranks)),
        steps=tuple(sorted({finding.step for finding in findings if finding.step is not None})),
        parameters=tuple(dict.fromkeys(finding.name for finding in findings if finding.kind == "parameter")),
    )


def _causes_and_symptoms(hypotheses: Sequence[Hypothesis], facts: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Return (facts that are causes in addition to what is proven, symptoms that are none).

    If nothing else is a cause, symptoms are the causes. A finding alone adds nothing to a proven cause of its kind and
    is left out.
    """
    proven = {hypothesis.cause.kind for hypothesis in hypotheses}
    new = [fact for fact in facts if fact.cause.observed or fact.cause.kind not in proven]
    named = [fact for fact in new if not fact.is_symptom]
    symptoms = [fact for fact in new if fact.is_symptom]
    return (named, symptoms) if hypotheses or named else (symptoms, [])


def _locate(
    trial: Trial, unexplained: Broken, tried: int, passing: frozenset[str], others_explained: bool
) -> tuple[Cause, Lines]:
    """Return (a cause that is only the place where unexplained checks first go wrong, its lines). Never raises.

    If localising raises, the cause is the first finding, and the line is the error.
    """
    try:
        return localise(trial, unexplained, tried, passing, others_explained=others_explained)
    except Exception as error:
        cause = Cause(UNEXPLAINED, "", finding=next(iter(unexplained.values())).findings[0])
        return cause, (("not located", f"{type(error).__name__}: {error}"),)


def _assumption_lines(explanation: Explanation, results: Sequence[Result]) -> Lines:
    """Return the line on how many failing checks pass under the first proof; empty without a proof."""
    if not explanation.proofs:
        return ()
    proof = explanation.proofs[0]
    failed = {result.check for result in results if result.verdict is Verdict.FAIL}
    given = set[str]()
    for hypothesis in proof.hypotheses:
        given.update(hypothesis.given_checks)
    given &= failed
    broken = len(failed - given)
    proven = [check for check in proof.explained if check not in given]
    failed -= {*proven, *given}
    seen_checks: dict[str, None] = {}
    for fact in explanation.facts:
        seen_checks |= dict.fromkeys(check for check in fact.checks if check in failed)
    ending = ""
    if given:
        ending += f"; taken as given: {', '.join(sorted(given))}"
    if seen_checks:
        ending += f"; seen, not proven: {', '.join(seen_checks)}"
    fails = "no passing check fails"
    if proof.tolerated_failures:
        fails += f" but {', '.join(proof.tolerated_failures)}, which is left aside"
    text = f"{len(proven)} of {broken} failing checks: if that is assumed, they pass, and {fails}"
    return ((EXPLAINS, f"{text}{ending}"),)


def weaker_test_lines(results: Sequence[Result]) -> Lines:
    """Return lines on the checks that pass although others fail: results of weaker tests.

    Named are losses and gradients that equal the reference's, and groups that exist. A golden that fails as well has a
    line, too.
    """
    passing = {result.check: result for result in results if result.verdict is Verdict.PASS}
    broken = {result.check for result in results if result.verdict is Verdict.FAIL}
    lines = []
    numbers = [name for name in ("loss", "gradients") if name in passing]
    if numbers and broken != {"golden"}:
        worst = max(passing[name].largest or 0.0 for name in numbers)
        blind = ": a loss-curve test passes here" if "loss" in passing and "reported_loss" not in broken else ""
        close = f"within {worst:.1e}" if worst else "exactly"
        lines.append((", ".join(numbers), f"equal to the reference {close}{blind}"))
    if "process_groups" in passing and ("placements" in broken or _lacks_collective(results)):
        lines.append(("groups", "every group of the plan exists: a listing of process groups passes here"))
    if "golden" in broken and len(broken) > 1:
        lines.append(("golden", "the reference moved as well: model, data, recipe or torch changed"))
    return tuple(lines)


def _lacks_collective(results: Sequence[Result]) -> bool:
    """Return whether the check of traffic has a finding on a planned collective that did not run."""
    findings = [finding for result in results if result.check == "traffic" for finding in result.findings]
    return any(finding.kind == "collective" and finding.observed == 0 for finding in findings)
