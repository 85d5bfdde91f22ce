"""`harness init TRAINER.py`: an adapter beside the script, and first cases, begun with what the script says of itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.cli.exit_codes import NOT_JUDGED, PASSED
from harness.cli.options import BadInput, add_command
from harness.evidence.store import write_text
from harness.onboarding import skeleton
from harness.onboarding.script_facts import ScriptFacts, read
from harness.report.output import complain, say


def add(commands: Any) -> None:
    parser = add_command(
        commands, "init", command, "begin an adapter for a training script, and its first cases", json=False
    )
    parser.add_argument("script", type=Path, metavar="TRAINER.py", help="it is read, not run, and not edited")
    parser.add_argument("--adapter", type=Path, metavar="FILE.py", help="default TRAINER_adapter.py beside it")
    parser.add_argument("--cases", type=Path, default=Path("cases"), metavar="DIR", help="default cases")


def command(args: argparse.Namespace) -> int:
    facts, file = _facts(args.script), args.adapter or args.script.with_name(f"{args.script.stem}_adapter.py")
    if facts.tell_nothing():
        complain(nothing(facts))
        return NOT_JUDGED
    first = args.cases / "first.yaml"
    for path in (file, first):
        if path.exists():
            raise BadInput(f"{path} is there already; move it away, or name another by --adapter and --cases")
    args.cases.mkdir(parents=True, exist_ok=True)
    write_text(file, skeleton.adapter(facts))
    write_text(first, skeleton.cases(facts))
    say(*told(facts), *other_model(facts), "", f"wrote {file} and {first}; look at the lines with TODO, then:")
    say(f"  harness doctor --trainer {file}" + (f" --cases {args.cases}" if args.cases != Path("cases") else ""))
    return PASSED


def _facts(script: Path) -> ScriptFacts:
    """Raises BadInput."""
    try:
        return read(script)
    except OSError as error:
        raise BadInput(f"{script}: cannot be read: {error.strerror}") from error
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise BadInput(f"{script}: cannot be read as Python: {error or type(error).__name__}") from error


def told(facts: ScriptFacts) -> list[str]:
    """What was found, in a line each."""
    wrappers = ", ".join(sorted(facts.wrappers())) or "none"
    set_by = sorted({flag.set_by for flag in facts.flags if flag.set_by})
    of_globals = f"; {facts.path.name}'s constants, as {set_by[0]} sets them by --name=value" if set_by else ""
    return [
        f"{facts.path}: read, not run",
        f"  model      {', '.join(facts.models[:3]) or 'no class of it was found'}",
        f"  wrappers   {wrappers}",
        f"  flags      {len(facts.flags)}, of which {len(skeleton.passed_on(facts))} mean something to a case{of_globals}",
        f"  written    {', '.join(f'{k} {v}' for k, v in skeleton.written(facts).items()) or 'nothing that a case must say'}",
        f"  data set   {', '.join(name for _, name, _ in facts.data_sets) or 'none was found'}",
    ]


def other_model(facts: ScriptFacts) -> list[str]:
    """Of a model that is seen to be another than the reference's; nothing of one that may be it."""
    if not facts.unlike:
        return []
    return [
        *(f"  {'unlike' * (not number):<11}{phrase}" for number, phrase in enumerate(facts.unlike)),
        "",
        "the reference is Llama 3 (RMSNorm, rotary embedding, SwiGLU). A model with other parts computes other numbers:",
        "`harness doctor` compares with the reference, which cannot hold then. This needs no reference, and no adapter:",
        f"  {_record(facts)}",
    ]


def nothing(facts: ScriptFacts) -> str:
    """Where there is nothing to begin with: what was read, what was looked for, and the way in that needs none of it."""
    alone = f"; {len(facts.flags)} flags alone are no beginning" if facts.flags else ""
    files = ", ".join(str(file) for file in facts.files[:4]) + (" .." if len(facts.files) > 4 else "")
    return "\n".join(
        [
            f"{facts.path}: nothing was found to begin an adapter with, and nothing is written",
            f"  read         {files}; imports are followed inside the repository, not run",
            "  looked for   classes of torch's modules, DDP, FSDP, fully_shard or parallelize_module, an optimizer that is",
            f"               made by its name, a Dataset, a function of batches{alone}",
            "  instead      a job of any kind is recorded as it is, without adapter or reference; `harness record --help`:",
            f"               {_record(facts)}",
            "  or           name the file that has the model and the loop, for an adapter",
        ]
    )


def _record(facts: ScriptFacts) -> str:
    return f"harness record -o out/a -- torchrun --nproc-per-node 2 {facts.path} .."
