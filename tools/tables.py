"""Tables of the README and docs/, made anew from the cases and from what was last measured of the faults.

    python -m tools.tables                    makes them anew
    python -m tools.tables out/faults.json    first puts what `harness faults` measured into harness/faults/results.json

What was measured takes the place of what is stored of the same faults. Nothing is judged here: review `git diff`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from harness import ROOT
from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.options import all_options
from harness.core.checks import all_checks, check_sentence
from harness.core.evidence.store import write_text
from harness.faults import Fault, all_faults
from harness.faults import catalogue_text as catalogue
from harness.faults.attempt import ACCEPTED, Attempt, accepted_attempts, attempts_from_json, attempts_to_json

END = "<!-- end -->"
REFUSED = "(refused on CPU)"


def with_part(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks of this name replaced.

    Raises ValueError if it lacks these marks.
    """
    begin = f"<!-- {name}: python -m tools.tables -->\n"
    head, mark, rest = page.partition(begin)
    _, end, tail = rest.partition(END)
    if not (mark and end):
        raise ValueError(f"no {begin.strip()} .. {END}")
    return f"{head}{begin}{text}\n{END}{tail}"


def methods(page: str) -> str:
    """Return the page with its table of methods, from the accepted faults."""
    return with_part(page, "methods", catalogue.methods_table(accepted_attempts()))


def covered(page: str) -> str:
    """Return the page with its table of options, from all cases."""
    return with_part(page, "covered", options_table(load_all()))


def checks(page: str) -> str:
    """Return the page with both its tables: every check with what it states, and the options that are covered."""
    rows = [f"| `{name}` | {check_sentence(name)} |" for name in all_checks()]
    return with_part(covered(page), "checks", "\n".join(["| check | states |", "|---|---|", *rows]))


PARTS: dict[Path, Callable[[str], str]] = {
    ROOT / "README.md": methods,
    ROOT / "docs" / "checks.md": checks,
}


def options_table(cases: Sequence[Case]) -> str:
    """Return a Markdown table of every option, by kind, with the number of cases that request it.

    With none it is shown as refused.
    """
    rows = ["| kind | options, and in how many cases each is |", "|---|---|"]
    for kind in dict.fromkeys(option.kind for option in all_options()):
        counts = [(o.name, sum(map(o.is_requested_by, cases))) for o in all_options() if o.kind == kind]
        rows.append(f"| {kind} | {'; '.join(f'{name} {count or REFUSED}' for name, count in counts)} |")
    return "\n".join(rows)


def accept(measured: Sequence[Attempt], known: Sequence[Fault], stored: Path = ACCEPTED) -> str:
    """Replace the stored attempts of the measured faults, remove those of faults that are gone, and return a line on
    the count.

    `--checks-only` does not measure weaker tests, so their stored results are kept. known: all faults. stored: the
    file.
    """
    before = {attempt.fault: attempt for attempt in accepted_attempts(stored)}
    now = before | {attempt.fault: _with_weaker(attempt, before.get(attempt.fault)) for attempt in measured}
    attempts = [(fault, now[fault.name]) for fault in known if fault.name in now]
    kept = [replace(attempt, bug=fault.bug, family=fault.family, real=fault.is_real) for fault, attempt in attempts]
    write_text(stored, attempts_to_json(kept))
    return f"{stored.name}: {len(kept)} of {len(known)} faults; review `git diff`"


def _with_weaker(attempt: Attempt, stored: Attempt | None) -> Attempt:
    """Return the attempt with the stored results of weaker tests, if it measured none itself."""
    if attempt.weaker or stored is None:
        return attempt
    return replace(attempt, weaker=stored.weaker, off=stored.off)


def main(argv: Sequence[str] | None = None) -> int:
    """Accept measured faults, write the tables of all pages, and print which changed; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", metavar="OUT/faults.json", nargs="*", type=Path, help="what `harness faults` left")
    for file in parser.parse_args(argv).measured:
        print(accept(attempts_from_json(file.read_text(encoding="utf-8")), all_faults()))
    for page, made_anew in PARTS.items():
        before = page.read_text(encoding="utf-8")
        after = made_anew(before)
        write_text(page, after)
        print(f"{page.relative_to(ROOT)}: {'as it was' if after == before else 'changed; review `git diff`'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
