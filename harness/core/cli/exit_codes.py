"""What the process says to scripts. A failing check outweighs what could not be judged, which outweighs a pass."""

from __future__ import annotations

from collections.abc import Iterable

PASSED = 0
BROKEN = 1
NOT_JUDGED = 2
SKIP_COMMIT = 125
INTERRUPTED = 130

EXIT_CODES_HELP = """\
exit codes:
  0    every check passes
  1    a check fails
  2    something could not be judged: bad input, UNKNOWN, all cases skipped,
       a fault that never fired. With --bisect it is 125, which
       `git bisect run` takes as: skip this commit
  130  interrupted
"""


def worst_code(codes: Iterable[int]) -> int:
    """Return the code that outweighs the others: BROKEN before NOT_JUDGED before PASSED. NOT_JUDGED without any code."""
    distinct_codes = set(codes)
    return next((code for code in (BROKEN, NOT_JUDGED, PASSED) if code in distinct_codes), NOT_JUDGED)
