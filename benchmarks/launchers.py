"""The same cases through this launcher and through one torchrun a case, side by side in one run.

    python benchmarks/launchers.py [--only hsdp_2x8 ...] [--sgd] [--trainer torchtitan] [--cases FOLDER] [--dtype float32]

Both run each case, one after the other, so a drift of the machine affects both. Evidence, checks and verdicts are the same;
what differs is how the ranks come to life. Prints seconds for every case, the sum of each, and the ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from harness.core import trainers
from harness.core.case import case_files
from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.variants import with_dtype
from harness.core.judge.result import Verdict
from harness.core.launch import default_server
from harness.core.run.options import Options
from harness.core.run.run_case import run_case

DATA = ["single", "ddp_2", "ddp_4", "fsdp_2", "fsdp_4", "fsdp_8", "hsdp_2x2", "hsdp_2x4", "hsdp_4x2", "hsdp_2x8"]
TENSOR = ["tp_2", "tp_4", "fsdp_2_tp_2", "fsdp_4_tp_2", "hsdp_2x2_tp_2"]
LISTED = DATA + TENSOR


def seconds(case: Case, options: Options) -> float:
    """Return the seconds that the case takes with these options. SystemExit unless it passes."""
    started = time.monotonic()
    judgement = run_case(case, options)
    if judgement.verdict is not Verdict.PASS:
        raise SystemExit(f"{case.name} through {options.launcher}: {judgement.verdict}; see {judgement.folder}")
    return time.monotonic() - started


def main() -> None:
    """Run each case through both launchers and print seconds and ratios."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sgd", action="store_true", help="the SGD half of the list too")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--trainer", default="llama3")
    parser.add_argument("--cases", default="builtin", metavar="FOLDER")
    parser.add_argument("--dtype", help="run all cases in it")
    chosen = parser.parse_args()
    default_server(trainers.load_adapter(chosen.trainer).preload)
    names = chosen.only or [*LISTED, *(f"{name}_sgd" for name in LISTED if chosen.sgd)]
    found = load_all(case_files.folder_of(chosen.cases))
    cases = [with_dtype(case, chosen.dtype) for case in found if case.name in names]
    with tempfile.TemporaryDirectory() as folder:
        local = Options(out=Path(folder), trainer=chosen.trainer)
        run_case(cases[0], local)  # starts the server and computes the reference, for both
        totals = {"local": 0.0, "torchrun": 0.0}
        print(f"{'case':<20}{'forked':>10}{'torchrun':>10}{'ratio':>8}")
        for case in cases:
            took = {launcher: seconds(case, replace(local, launcher=launcher)) for launcher in totals}
            for launcher in totals:
                totals[launcher] += took[launcher]
            row = f"{took['local']:>9.2f}s{took['torchrun']:>9.2f}s{took['torchrun'] / took['local']:>8.1f}"
            print(f"{case.name:<20}{row}", flush=True)
    print(f"{'all':<20}{totals['local']:>9.2f}s{totals['torchrun']:>9.2f}s{totals['torchrun'] / totals['local']:>8.1f}")


if __name__ == "__main__":
    main()
