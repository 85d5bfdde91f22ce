"""Rows of samples that ranks of two recordings of one training are fed: the same ones, and tp peers the same as one another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from functools import reduce
from itertools import chain

from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.recording.judged.judge_sketched import Numbers, missing_ranks


def compare_rows(baseline: Numbers, candidate: Numbers, steps: list[int]) -> Result:
    """Compare the rows that ranks are fed, each as often as any other: tp ranks are fed what their peers are."""
    findings = []
    examined = 0
    doubt = ""
    for step in steps:
        expected, observed = map(_divide_by_gcd, rows_without_padding(baseline, candidate, step))
        if not expected or not observed:
            return Result(
                "samples", Verdict.UNKNOWN, note=f"no samples of step {step} were seen in one of the recordings"
            )
        examined += sum(expected.values())
        if expected == observed:
            continue
        expected_sum = _token_sum(baseline.tokens.get(step, ()))
        observed_sum = _token_sum(candidate.tokens.get(step, ()))
        if expected_sum is None or observed_sum is None:
            return Result(
                "samples", Verdict.UNKNOWN, note="inputs are no integers, and may be cut or computed in another way"
            )
        if expected_sum == observed_sum or _is_multiple(baseline, candidate, step):
            note = "the same tokens in all; that they are cut into the same rows was not seen, as under cp"
            return Result("samples", Verdict.PASS, examined, note=note)
        gone = sum((expected - observed).values())
        new = sum((observed - expected).values())
        reason = "" if new else _why_cut_short(candidate, step)
        reason = reason or ("" if gone else _why_cut_short(baseline, step))
        if reason:
            doubt = doubt or reason
            continue
        note = f"{gone} of {sum(expected.values())} rows are missing, {new} are others"
        findings.append(
            Finding(
                step=step,
                kind="feature",
                name="samples",
                quantity="rows",
                note=note,
                expected="the same",
                observed="others",
            )
        )
    if doubt and not findings:
        return Result("samples", Verdict.UNKNOWN, note=doubt)
    return verdict_of("samples", findings, examined)


def _why_cut_short(numbers: Numbers, step: int) -> str:
    """Return why ranks may have been fed more in this step than was seen; empty if nothing says so."""
    if step in numbers.unfinished:
        return f"not every rank that was fed samples of step {step} finished it"
    return missing_ranks(numbers)


def rows_without_padding(baseline: Numbers, candidate: Numbers, step: int) -> tuple[Counter[int], Counter[int]]:
    """Return how often each row was fed in a step. One that is padded in one recording alone counts by what is not padding."""
    expected = baseline.rows.get(step, Counter())
    observed = candidate.rows.get(step, Counter())
    return _match_padding(observed, expected, baseline.bare), _match_padding(expected, observed, candidate.bare)


def _match_padding(wanted: Counter[int], rows: Counter[int], bare: Mapping[int, int]) -> Counter[int]:
    """Return how often each row was fed; without its padding if it is among the wanted rows only so."""
    counts = Counter[int]()
    for row, count in rows.items():
        counts[bare[row] if row not in wanted and bare.get(row) in wanted else row] += count
    return counts


def _divide_by_gcd(rows: Counter[int]) -> Counter[int]:
    """Divide by how often each was fed at least, if all were fed so often, or a multiple."""
    least = reduce(math.gcd, rows.values(), 0)
    return Counter({row: count // least for row, count in rows.items()}) if least else Counter()


def _token_sum(numbers: tuple[int, ...]) -> int | None:
    return sum(numbers) % 2**64 if numbers else None


def _is_multiple(baseline: Numbers, candidate: Numbers, step: int) -> bool:
    """Return whether all tokens were fed several times, as tp ranks are fed the same."""
    expected = _token_sum(baseline.tokens.get(step, ())) or 0
    observed = _token_sum(candidate.tokens.get(step, ())) or 0
    return any((expected * times - observed) % 2**64 == 0 for times in range(1, max(candidate.world, 1) + 1))


# ---- what tp peers are fed


def peers_with_other_rows(baseline: Numbers, candidate: Numbers, wrong: Set[int]) -> list[Finding]:
    """Return tp groups of the second recording whose ranks are fed different rows of the first one's batch.

    wrong: steps in which a gradient, a state or an update is wrong. Peers may be fed such rows by right, where the model itself
    exchanges them. Then the first step with such rows has right gradients, and nothing is found. Pieces of rows and rows of no
    batch, as trainers feed that broadcast those of one rank, are not compared.
    """
    groups_of_steps = {}
    for step in candidate.steps:
        if groups := _groups_with_other_rows(baseline, candidate, step):
            groups_of_steps[step] = groups
    if not wrong or not groups_of_steps or min(groups_of_steps) != min(wrong):
        return []
    findings = []
    for step, groups in groups_of_steps.items():
        for group in groups:
            findings.append(
                Finding(
                    ranks=group,
                    step=step,
                    kind="feature",
                    name="samples",
                    quantity="rows",
                    axis="tp",
                    group=group,
                    expected="the same on all of them",
                    observed="others",
                )
            )
    return findings


def with_peer_findings(result: Result, findings: list[Finding]) -> Result:
    """Return the result with these as well."""
    return verdict_of(result.check, [*findings, *result.findings], result.examined) if findings else result


def _groups_with_other_rows(baseline: Numbers, candidate: Numbers, step: int) -> list[tuple[int, ...]]:
    """Return the groups of which each rank is fed whole rows of the first recording's step, and not all the same."""
    batch = baseline.rows.get(step, Counter[int]())
    passes = candidate.passes.get(step, {})
    batch = batch + Counter({baseline.bare[row]: 1 for row in batch if row in baseline.bare})
    groups = []
    for group in candidate.tp:
        rows_of_ranks = []
        for rank in group:
            rows = Counter(chain.from_iterable(passes.get(rank, ())))
            rows_of_ranks.append(_match_padding(batch, rows, candidate.bare))
        are_of_batch = all(rows and rows.keys() <= batch.keys() for rows in rows_of_ranks)
        if are_of_batch and any(rows != rows_of_ranks[0] for rows in rows_of_ranks):
            groups.append(group)
    return groups
