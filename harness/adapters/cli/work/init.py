"""`harness init TRAINER.py`: an adapter beside the script, and first cases, begun with what one rank of it does."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from harness.adapters.onboarding import skeleton
from harness.adapters.onboarding.observed import Facts, observe
from harness.core.cli.exit_codes import NOT_JUDGED, PASSED
from harness.core.cli.parsing import BadInput
from harness.core.evidence.store import write_text
from harness.core.report.output import print_error, print_lines


def command(args: argparse.Namespace) -> int:
    """Run one rank of the script, write an adapter and first cases begun with what it did, and print what was found.

    Return 0, or 2 if nothing was found; then no file is written. Raises BadInput if a file is there already.
    """
    script = args.script
    file = args.adapter or script.with_name(f"{script.stem}_adapter.py")
    first = args.cases / "first.yaml"
    for path in (file, first):
        if os.path.lexists(path):
            raise BadInput(f"{path} is there already; move it away, or name another by --adapter and --cases")
    facts = _facts(script)
    record = f"harness record -o out/a -- torchrun --nproc-per-node 2 {script} .."
    if facts.is_empty:
        print_error(
            f"{script}: nothing was found to begin an adapter with, and nothing is written\n"
            f"  stopped      {facts.stopped or 'it ended'}\n"
            f"  instead      any job is recorded as it is, without adapter or reference; `harness record --help`:\n"
            f"               {record}\n"
            "  or           name the file that has the model and the loop, for an adapter"
        )
        return NOT_JUDGED
    args.cases.mkdir(parents=True, exist_ok=True)
    write_text(file, skeleton.adapter_text(script, facts, file))
    write_text(first, skeleton.cases_text(facts))
    print_lines(f"{script}: one rank of it ran", *(f"  {label:<11}{text}" for label, text in facts_lines(facts)))
    if other := skeleton.other_parts(facts):
        print_lines(
            "",
            "the reference is Llama 3. A model with other parts computes other numbers, which `harness doctor` reports.",
        )
        print_lines(f"this needs no reference, and no adapter: {record}", *(f"  unlike     {part}" for part in other))
    print_lines("", f"wrote {file} and {first}; look at the lines with TODO, then:")
    print_lines(
        f"  harness doctor --trainer {file}" + (f" --cases {args.cases}" if args.cases != Path("cases") else "")
    )
    return PASSED


def _facts(script: Path) -> Facts:
    """Return the facts observed about a script while one rank of it runs. Raises BadInput if it cannot be read as Python."""
    try:
        return observe(script)
    except OSError as error:
        raise BadInput(f"{script}: cannot be read: {error.strerror}") from error
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise BadInput(f"{script}: cannot be read as Python: {error or type(error).__name__}") from error


def facts_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for each thing that was found, or that was not."""
    match = skeleton.match_facts(facts)
    yield "stopped", facts.stopped or "at the first step of its optimizer, as planned"
    yield (
        "model",
        f"{facts.model or 'none was seen'}; {len(match.names)} of {len(facts.shapes)} parameters are the reference's",
    )
    yield "wrappers", ", ".join(facts.wrappers) or "none"
    yield "flags", f"{len(facts.flags)}, of which {len(skeleton.passed_on_flags(facts))} mean something to a case"
    yield "optimizer", facts.optimizer or "none stepped"
    yield "samples", " ".join(facts.data[:2]) if facts.data else "nothing that makes them was found"
