"""What the process says to scripts. A failing check outweighs what could not be judged, which outweighs a pass."""

from __future__ import annotations

from collections.abc import Iterable

PASSED, BROKEN, NOT_JUDGED, SKIP_COMMIT, INTERRUPTED = 0, 1, 2, 125, 130

SAID = """\
exit codes:
  0    every check passes
  1    a check fails
  2    something could not be judged: bad input, UNKNOWN, all cases skipped,
       a fault that never fired. With --bisect it is 125, which
       `git bisect run` takes as: skip this commit
  130  interrupted
"""


def worst(codes: Iterable[int]) -> int:
    """Return the code that outweighs the others. Without any code nothing was judged."""
    found = set(codes)
    return next((code for code in (BROKEN, NOT_JUDGED, PASSED) if code in found), NOT_JUDGED)
