"""Commands that start a rank server of their own against commands that find one which stayed, side by side in one run.

    python benchmarks/second_command.py [--only hsdp_2x2 hsdp_2x8] [--times 5]

Each case is run by both in turn, so a machine that drifts drifts for both; the reference is computed before. Prints the
median and the range of seconds of whole commands, from being typed to their end. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from harness import ROOT
from harness.core.case.launching import SERVERS


def seconds(case: str, kind: str, out: str) -> float:
    """Return the seconds of a whole `harness run`. CalledProcessError if it fails."""
    command = [sys.executable, "-m", "harness", "run", case, "--server", kind, "--out", out]
    began = time.monotonic()
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL
    )
    return time.monotonic() - began


def text(found: list[float]) -> str:
    return f"{sorted(found)[len(found) // 2]:.1f} s ({min(found):.1f} to {max(found):.1f})"


def main() -> None:
    """Run each case with both kinds of server in turn, and print medians and ratios."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=["hsdp_2x2", "hsdp_2x8"], help="names of cases")
    parser.add_argument("--times", type=int, default=5)
    chosen = parser.parse_args()
    print(f"{'case':<20}{'its own server':>26}{'one that stayed':>26}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as out:
        for case in chosen.only:
            seconds(case, "resident", out)  # computes the reference, and leaves the server
            took: dict[str, list[float]] = {kind: [] for kind in SERVERS}
            for _ in range(chosen.times):
                for kind in SERVERS:
                    took[kind].append(seconds(case, kind, out))
            own, resident = took["own"], took["resident"]
            ratio = sorted(own)[len(own) // 2] / sorted(resident)[len(resident) // 2]
            print(f"{case:<20}{text(own):>26}{text(resident):>26}{ratio:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
