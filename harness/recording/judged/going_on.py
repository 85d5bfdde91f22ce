"""A recording of a job that resumed, judged by one that was not interrupted: steps are counted as the first one counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from harness.core.evidence.store import EvidenceError
from harness.recording.judged.judge_sketched import Numbers
from harness.recording.sketches import WEIGHTS

T = TypeVar("T")


def going_on(one: Numbers, other: Numbers, after: int) -> tuple[Numbers, Numbers]:
    """Return both. after: the step of the first from whose checkpoint the second went on; 0 for none.

    Raises EvidenceError where the first did not record that step, or none that follows.
    """
    if not after:
        return one, other
    known = {step for step, kind, _ in (*one.whole, *one.unknown) if kind == WEIGHTS}
    if after not in known or max(known) == after:
        raise EvidenceError(
            f"--after {after}: the first recording has weights of steps {', '.join(map(str, sorted(known - {0})))};"
            f" it has to have step {after} and some that follow: record it with --steps {after}-{after + 3}"
        )
    return replace(one, after=after), _shifted(other, after)


def _shifted(of: Numbers, by: int) -> Numbers:
    """Return it with its steps counted from another one."""
    return replace(
        of,
        after=by,
        whole={(step + by, kind, fqn): whole for (step, kind, fqn), whole in of.whole.items()},
        unknown={(step + by, kind, fqn): why for (step, kind, fqn), why in of.unknown.items()},
        after_pass={(step + by, passes): sums for (step, passes), sums in of.after_pass.items()},
        by_rows={(step + by, fqn): sums for (step, fqn), sums in of.by_rows.items()},
        rows=_later(of.rows, by),
        tokens=_later(of.tokens, by),
        norms=_later(of.norms, by),
        norms_off=_later(of.norms_off, by),
        scales=_later(of.scales, by),
        rates=_later(of.rates, by),
        passes=_later(of.passes, by),
        drawn=_later(of.drawn, by),
        changed=_later(of.changed, by),
    )


def _later(of: Mapping[int, T], by: int) -> dict[int, T]:
    return {step + by: value for step, value in of.items()}
