"""Which faults the default tier notices although nobody says on which case they show, as a developer's mistake does not.

    python -m tools.unaimed_faults -k NAME    searches, and puts what it found into tools/unaimed.json

Of a fault whose own case is nightly the cases of the default tier are tried, those most like its own first, until a check does
not hold that holds without the fault. 0: all those tried are noticed; 1: one is not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from harness.cli.exit_codes import BROKEN, PASSED, worst
from harness.cli.options import Parser, add_cases, add_how_to_run, cases_of, options_of
from harness.faults import Fault, all_faults
from harness.faults.attempt import accepted
from harness.judge.result import Verdict
from harness.run import catalogue
from harness.run.options import Options
from harness.run.run_case import run_case
from harness.spec.case import Case
from tools import noticed
from tools.composition import ranks, values
from tools.noticed import Searched

MOST = 12  # cases that are tried


def elsewhere(faults: Sequence[Fault], cases: Sequence[Case]) -> list[Fault]:
    """The faults whose own case is not in the default tier, and does not wait for a compiler."""
    tiers = {case.name: case.tier for case in cases}
    return [fault for fault in faults if tiers.get(fault.case) == "nightly"]


def likeliest(fault: Fault, cases: Sequence[Case]) -> list[Case]:
    """The default tier's cases: first those that request most of what the fault's own requests, whatever the degree, of
    these the ones that request the least besides, of these the ones that request just the same, of these the smallest."""
    own = _as_requested(next(case for case in cases if case.name == fault.case))

    def unlike(case: Case) -> tuple[int, int, int, int]:
        asked = _as_requested(case)
        both = own.keys() & asked.keys()
        return -len(both), len(asked.keys() - own.keys()), sum(own[key] != asked[key] for key in both), ranks(case)

    return sorted((case for case in cases if case.tier == "default" and not case.expected_failure), key=unlike)


def search(fault: Fault, cases: Sequence[Case], options: Options) -> Searched:
    tried: list[str] = []
    fired = False
    for case in likeliest(fault, cases)[:MOST]:
        judgement = run_case(case, replace(options, fault=catalogue.spec_of(fault)))
        fired = fired or bool(judgement.fired)
        broken = tuple(r.check for r in judgement.results if r.verdict in (Verdict.FAIL, Verdict.UNKNOWN))
        if judgement.fired and broken and run_case(case, options).verdict is Verdict.PASS:
            return Searched(fault.name, case.name, broken, tuple(tried), True)
        tried.append(case.name)
    return Searched(fault.name, "", (), tuple(tried), fired)


def _as_requested(case: Case) -> dict[str, object]:
    """What the launches of a case say besides the usual, by field."""
    usual = values(Case("", ""))
    said = {field: value for launched in case.launches.values() for field, value in values(launched) - usual}
    return said | ({"resume": True} if case.resume else {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tools.unaimed_faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-k", dest="expression", default="", metavar="EXPR", help="as for `harness faults`")
    add_cases(parser)
    add_how_to_run(parser)
    args = parser.parse_args(argv)
    cases, options = cases_of(args), options_of(args)
    faults = elsewhere(catalogue.matching(all_faults(), args.expression), cases)
    found = [search(fault, cases, options) for fault in faults]
    noticed.store(found)
    print(noticed.report(accepted(), cases, found))
    return worst(PASSED if one.case else BROKEN for one in found)


if __name__ == "__main__":
    sys.exit(main())
