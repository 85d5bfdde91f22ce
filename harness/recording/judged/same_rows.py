"""Rows of samples that ranks of two recordings of one training are fed: the same ones, and tp peers the same as one another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Set
from functools import reduce
from itertools import chain

from harness.core.judge.finding import Finding
from harness.core.judge.received_samples import StepSamples
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.recording.judged.judge_sketched import Numbers, missing_ranks


def judge_rows(baseline: Numbers, candidate: Numbers, steps: list[int]) -> Result:
    """Return whether ranks of two recordings are fed the same rows in these steps, each as often as any other.

    Counts are divided by their common divisor, for tp ranks are fed what their peers are. PASS as well if the same
    tokens are cut into other rows. UNKNOWN if a step has no rows in one recording, if inputs are no integers, or if
    rows are missing that a rank which did not finish may have been fed.
    """
    findings = []
    examined = 0
    doubt = ""
    for step in steps:
        samples = recorded_samples_of_step(baseline, candidate, step)
        expected = _divide_by_gcd(samples.requested)
        observed = _divide_by_gcd(samples.counts)
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


def recorded_samples_of_step(baseline: Numbers, candidate: Numbers, step: int) -> StepSamples:
    """Return the rows of the first recording's step as those requested, and the rows that ranks of the second one were fed.

    A row that is padded in one recording alone counts by what is not padding.
    """
    expected = baseline.rows.get(step, Counter[int]())
    observed = candidate.rows.get(step, Counter[int]())
    requested = Counter[int]()
    rows_without_padding = _rows_without_padding(expected, observed, baseline.bare)
    for row, count in expected.items():
        requested[rows_without_padding.get(row, row)] += count
    passes_by_rank = candidate.passes.get(step, {})
    rows_without_padding = _rows_without_padding(observed, expected, candidate.bare)
    if not rows_without_padding:
        return StepSamples(requested, passes_by_rank)
    microbatches = {}
    for rank, passes in passes_by_rank.items():
        microbatches[rank] = tuple(_replace_rows(rows, rows_without_padding) for rows in passes)
    return StepSamples(requested, microbatches)


def _replace_rows(rows: Iterable[int], replaced: Mapping[int, int]) -> tuple[int, ...]:
    """Return the rows with those that are keys of `replaced` exchanged for its values."""
    return tuple(replaced.get(row, row) for row in rows)


def _rows_without_padding(rows: Iterable[int], wanted: Container[int], bare: Mapping[int, int]) -> dict[int, int]:
    """Return, by row that is among the wanted ones only without its padding, the row without it. bare: the same of all rows."""
    return {row: bare[row] for row in rows if row not in wanted and bare.get(row) in wanted}


def _divide_by_gcd(rows: Counter[int]) -> Counter[int]:
    """Return the counts divided by their greatest common divisor. Empty for none."""
    least = reduce(math.gcd, rows.values(), 0)
    return Counter({row: count // least for row, count in rows.items()}) if least else Counter()


def _token_sum(numbers: tuple[int, ...]) -> int | None:
    """Return the sum of ranks' numbers for their tokens, modulo 2**64. None without any, as of inputs that are no
    integers.
    """
    return sum(numbers) % 2**64 if numbers else None


def _is_multiple(baseline: Numbers, candidate: Numbers, step: int) -> bool:
    """Return whether the second recording's sum of tokens is the first one's, some times: at most as often as it has
    ranks.
    """
    expected = _token_sum(baseline.tokens.get(step, ())) or 0
    observed = _token_sum(candidate.tokens.get(step, ())) or 0
    return any((expected * times - observed) % 2**64 == 0 for times in range(1, max(candidate.world, 1) + 1))


# ---- what tp peers are fed


def peers_with_other_rows(baseline: Numbers, candidate: Numbers, wrong: Set[int]) -> list[Finding]:
    """Return a finding for each tp group and step of the second recording whose ranks are fed different rows of the
    first one's batch.

    wrong: steps in which a gradient, a state or an update is wrong. Empty unless the first step with such rows is the
    first wrong one: peers may be fed such rows by right, where the model itself exchanges them. Pieces of rows and rows
    of no batch, as trainers feed that broadcast those of one rank, are not compared.
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
    """Return the result with these findings before its own, and so FAIL. Unchanged without any."""
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
            rows = [*chain.from_iterable(passes.get(rank, ()))]
            rows_without_padding = _rows_without_padding(rows, batch, candidate.bare)
            rows_of_ranks.append(Counter(_replace_rows(rows, rows_without_padding)))
        are_of_batch = all(rows and rows.keys() <= batch.keys() for rows in rows_of_ranks)
        if are_of_batch and any(rows != rows_of_ranks[0] for rows in rows_of_ranks):
            groups.append(group)
    return groups
