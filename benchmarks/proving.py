"""What it costs to prove a cause, beside what judging costs: `python -m benchmarks.proving FOLDER...`.

Each folder is the evidence of one case that failed. It is judged without a diagnosis, and then diagnosed, in one process.
Prints the CPU seconds of both, which depend little on what else the machine does, and their ratio, which is about the same on
other machines.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge.stored_trial import load_trial
from harness.reference import counterfactual  # noqa: F401  what proving imports is no part of what it costs


def main() -> int:
    """Judge and diagnose each folder of the command line, and print processor seconds, their ratio and the cause;
    return 0."""
    print(f"{'case':48} ranks  judged  proven  ratio  cause")
    for folder in map(Path, sys.argv[1:]):
        trial = load_trial(folder)
        times = [time.process_time()]
        results = judge(trial)
        times.append(time.process_time())
        found = diagnose(trial, results)
        times.append(time.process_time())
        judged, proven = times[1] - times[0], times[2] - times[1]
        cause = ", ".join(found.kinds) if found else ""
        print(f"{folder.name:48} {len(trial.ranks):5} {judged:6.2f}s {proven:6.2f}s {proven / judged:6.1f}  {cause}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
