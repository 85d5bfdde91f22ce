"""Rows of samples that ranks of two recordings of one training are fed: the same ones, and tp peers the same as one another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from functools import reduce

from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.recording.judged.judge_sketched import Numbers, missing_ranks


def same_rows(one: Numbers, other: Numbers, steps: list[int]) -> Result:
    """The same rows, each as often as any other: tp ranks are fed what their peers are."""
    findings, examined, doubt = [], 0, ""
    for step in steps:
        mine, theirs = map(_reduced, without_padding(one, other, step))
        if not mine or not theirs:
            return Result(
                "samples", Verdict.UNKNOWN, note=f"no samples of step {step} were seen in one of the recordings"
            )
        examined += sum(mine.values())
        if mine == theirs:
            continue
        tokens = [_sum_of(of.tokens.get(step, ())) for of in (one, other)]
        if None in tokens:
            return Result(
                "samples", Verdict.UNKNOWN, note="inputs are no integers, and may be cut or computed in another way"
            )
        if tokens[0] == tokens[1] or _is_multiple(one, other, step):
            note = "the same tokens in all; that they are cut into the same rows was not seen, as under cp"
            return Result("samples", Verdict.PASS, examined, note=note)
        gone, new = sum((mine - theirs).values()), sum((theirs - mine).values())
        reason = "" if new else _why_cut_short(other, step)
        reason = reason or ("" if gone else _why_cut_short(one, step))
        if reason:
            doubt = doubt or reason
            continue
        note = f"{gone} of {sum(mine.values())} rows are missing, {new} are others"
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


def without_padding(one: Numbers, other: Numbers, step: int) -> tuple[Counter[int], Counter[int]]:
    """Return how often each row was fed in a step. One that is padded in one recording alone counts by what is not padding."""
    mine, theirs = (of.rows.get(step, Counter()) for of in (one, other))
    return _as_in(theirs, mine, one.bare), _as_in(mine, theirs, other.bare)


def _as_in(wanted: Counter[int], rows: Counter[int], bare: Mapping[int, int]) -> Counter[int]:
    found = Counter[int]()
    for row, count in rows.items():
        found[bare[row] if row not in wanted and bare.get(row) in wanted else row] += count
    return found


def _reduced(rows: Counter[int]) -> Counter[int]:
    """Divide by how often each was fed at least, if all were fed so often, or a multiple."""
    least = reduce(math.gcd, rows.values(), 0)
    return Counter({row: count // least for row, count in rows.items()}) if least else Counter()


def _sum_of(numbers: tuple[int, ...]) -> int | None:
    return sum(numbers) % 2**64 if numbers else None


def _is_multiple(one: Numbers, other: Numbers, step: int) -> bool:
    """Whether all tokens were fed several times, as tp ranks are fed the same."""
    mine, theirs = (_sum_of(of.tokens.get(step, ())) or 0 for of in (one, other))
    return any((mine * times - theirs) % 2**64 == 0 for times in range(1, max(other.world, 1) + 1))


# ---- what tp peers are fed


def peers_fed_otherwise(one: Numbers, other: Numbers, wrong: Set[int]) -> list[Finding]:
    """Return tp groups of the second recording whose ranks are fed different rows of the first one's batch.

    wrong: steps in which a gradient, a state or an update is wrong. Peers may be fed such rows by right, where the model itself
    exchanges them. Then the first step with such rows has right gradients, and nothing is found. Pieces of rows and rows of no
    batch, as trainers feed that broadcast those of one rank, are not compared.
    """
    steps = {step: groups for step in other.steps if (groups := _fed_otherwise(one, other, step))}
    if not wrong or not steps or min(steps) != min(wrong):
        return []
    return [
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
        for step, groups in steps.items()
        for group in groups
    ]


def with_peers(result: Result, findings: list[Finding]) -> Result:
    """Return the result with these as well."""
    return verdict_of(result.check, [*findings, *result.findings], result.examined) if findings else result


def _fed_otherwise(one: Numbers, other: Numbers, step: int) -> list[tuple[int, ...]]:
    """Return the groups of which each rank is fed whole rows of the first recording's step, and not all the same."""
    mine, passes = one.rows.get(step, Counter[int]()), other.passes.get(step, {})
    mine = mine + Counter({one.bare[row]: 1 for row in mine if row in one.bare})
    found = []
    for group in other.tp:
        fed = [Counter(row for rows in passes.get(rank, ()) for row in rows) for rank in group]
        fed = [_as_in(mine, rows, other.bare) for rows in fed]
        if all(rows and rows.keys() <= mine.keys() for rows in fed) and any(rows != fed[0] for rows in fed):
            found.append(group)
    return found
