"""Differences between the torch releases that a trainer may run on, and conditions on a release.

Which one ran is evidence.
"""

from __future__ import annotations

import operator
import re

SUMS_IN_REDUCE_DTYPE = ">=2.15"
"""FSDP2 lets autograd keep a gradient in the dtype in which it will be reduced, so what tp sums is in it too: `FSDPParam.
unsharded_grad_dtype` of torch/distributed/fsdp/_fully_shard/_fsdp_param.py in 2.15.0. In 2.13.0 and 2.14.1 a gradient that
is reduced at once is as computed (`to_accumulated_grad_if_needed` there is for those that wait)."""

TESTED_RELEASES = ((2, 11), (2, 15))
"""The oldest and the newest release of torch that the tests, or a trainer under test, were run with."""

COMPARISONS = {"<": operator.lt, ">=": operator.ge}


def parse_release(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release: 2.15.0+cpu -> (2, 15). Raises ValueError if it does not begin with two."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if not match:
        raise ValueError(f"{release!r} is no release: expected two numbers, such as 2.15")
    return int(match[1]), int(match[2])


def parse_condition(condition: str) -> tuple[str, tuple[int, int]]:
    """Return the comparison and the release of a condition: "<2.15" -> ("<", (2, 15)).

    Raises ValueError for any other form.
    """
    match = re.fullmatch(r"\s*(<|>=)\s*(\d+\.\d+)\s*", condition)
    if not match:
        raise ValueError(f'{condition!r}: expected "<" or ">=" and a release, such as "<2.15"')
    return match[1], parse_release(match[2])


def condition_holds(condition: str, release: str) -> bool:
    """Return whether a condition holds for a release. An unknown release (empty) counts as the oldest: only "<" holds."""
    compare, bound = parse_condition(condition)
    return COMPARISONS[compare](parse_release(release), bound) if release else compare == "<"


def untested_text(release: str) -> str:
    """Return a sentence on a release of torch outside of TESTED_RELEASES; empty for one inside, and for a text that is
    no release."""
    try:
        release_numbers = parse_release(release)
    except ValueError:
        return ""
    oldest, newest = (".".join(map(str, each)) for each in TESTED_RELEASES)
    note = f"torch {release} was not tested with this harness, {oldest} to {newest} were"
    return "" if TESTED_RELEASES[0] <= release_numbers <= TESTED_RELEASES[1] else note
