"""What stored runs with faults are named now, beside what was last accepted: `python -m tools.diagnosed OUT [-k WORDS]`.

OUT is a folder that `harness faults --out OUT` wrote. Starts no ranks, so that a diagnosis is tried in a second.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from harness.checks import judge
from harness.diagnosis import diagnose
from harness.faults.attempt import accepted
from harness.judge.stored_trial import load_trial
from harness.report.cause_text import diagnosis_line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("-k", default="", help="a part of the folder's name, or several separated by commas")
    parser.add_argument("--all", action="store_true", help="also what is named as before")
    parser.add_argument("--whole", action="store_true", help="the evidence as well")
    args = parser.parse_args()
    before = {attempt.fault: attempt.cause for attempt in accepted()}
    folders = [f for f in sorted(args.out.glob("*+*")) if any(word in f.name for word in args.k.split(","))]
    changed = 0
    for folder in folders:
        fault = folder.name.partition("+")[2]
        trial = load_trial(folder)
        results = judge(trial)
        began = time.monotonic()
        found = diagnose(trial, results)
        seconds = time.monotonic() - began
        now = diagnosis_line(found)
        changed += now != before.get(fault, "")
        if args.all or args.whole or now != before.get(fault, ""):
            broken = " ".join(result.check for result in results if result.verdict == "FAIL")
            print(
                f"{folder.name}  ({broken}; {seconds:.1f} s)",
                f"  was {before.get(fault, '')}",
                f"  now {now}",
                sep="\n",
            )
            print(f"  kinds {found.kinds if found else ()}")
            for label, text in found.evidence if found and args.whole else ():
                print(f"      {label:18} {text}")
    print(f"{len(folders)} runs, {changed} named otherwise than accepted")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
