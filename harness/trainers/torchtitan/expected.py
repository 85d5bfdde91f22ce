"""What torchtitan gets wrong in just one way, known and shown without the harness: a case then must fail so.

Of the versions that were tried, the releases that are installed; of others such cases are judged as any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.spec.case import Case, ExpectedFailure
from harness.trainers.torchtitan.eras import Era


@dataclass(frozen=True)
class Wrong:
    """of: in which cases."""

    of: Callable[[Case, Era], bool]
    failure: ExpectedFailure


FAILURES = (
    Wrong(
        lambda case, era: case.dims.tp > 1 and not case.features.sequence_parallel,
        ExpectedFailure(
            because="torchtitan sums, scatters and gathers in each matmul of backward, what one sum a crossing would do",
            script="upstream_bugs/torchtitan_tp_without_sequence_parallel.py",
            laws="traffic",
            named="x",
        ),
    ),
)
