"""What the harness says today, as a table that a change of judge, checks or diagnosis is compared with.

    python -m tools.safeguard            compares the default tier and the faults in out/, after `make test faults ALL=1`
    python -m tools.safeguard --drawn    the same; of the faults those that tools.drawn_faults draws for this commit
    python -m tools.safeguard --all      compares the other tiers and the recordings in out/ as well
    python -m tools.safeguard --accept   runs all tiers, all faults and both sets of recordings, and makes the table anew
    python -m tools.safeguard --accept --stored   runs nothing: out/ has to hold all cases and faults, of the sources of today

The table lies in tests/safeguard/. It has verdicts, what was examined, kinds of causes, and where findings are; no wording and
no measured number. Exit code 1: a verdict, a kind, a rank, a step or a parameter differs, or less is examined. 2: an entry of
the table was not there to compare. New entries, and more examined than before, are printed and are no failure.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core.case.loading import load_all
from harness.core.run.options import Options
from harness.core.run.sources import digest_of_run
from harness.faults import all_faults
from tools import drawn_faults

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "safeguard"
CATALOGUE = ROOT / "harness" / "faults"
FILES = CASES, FAULTS, HABITS, RECORDED = ("cases", "faults", "recorded_habits", "recorded_faults")
COMPACT = ("PASS", "NOT APPLICABLE", "UNKNOWN")  # all in a line
VERDICTS = (*COMPACT, "FAIL")
FIRST = 3  # parameters that are written out
VARIES = "varies"
BLANK: dict[str, Any] = {"examined": None, "findings": None, "places": VARIES}


@dataclass(frozen=True)
class Said:
    """The result of one check.

    examined, findings: their numbers; None where they vary. places: where findings are, as text.
    """

    verdict: str
    examined: int | None = 0
    findings: int | None = 0
    places: str = ""


@dataclass(frozen=True)
class Entry:
    """One case, fault or recording of the table.

    about: lines by label that are no check's: causes, tier, odd (a recording's anomalies). checks: by check. varies: by
    check, which fields differ between two runs of one commit, a colon, and why. It is written by hand; --accept keeps
    it.
    """

    verdict: str
    about: dict[str, str] = field(default_factory=dict)
    checks: dict[str, Said] = field(default_factory=dict)
    varies: dict[str, str] = field(default_factory=dict)


Table = dict[str, Entry]


def places(findings: Iterable[Mapping[str, Any]]) -> str:
    """Return the places of findings as text: their ranks, steps and parameters. Empty without any."""
    findings = list(findings)
    ranks = {rank for one in findings for rank in one.get("ranks", one.get("group", ()))}
    steps = {one["step"] for one in findings if "step" in one}
    names = {one["name"] for one in findings if one.get("kind") == "parameter"}
    parts = [f"ranks {ranges(ranks)}" * bool(ranks), f"steps {ranges(steps)}" * bool(steps), some(sorted(names))]
    return "; ".join(filter(None, parts))


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, ascending, runs of them joined: "0-3 8"."""
    runs = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for _, pairs in runs if (run := list(pairs))]
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def some(names: Sequence[str]) -> str:
    """Return a text on parameters: their number and the first ones, and, if there are more, a digest of all.

    Empty for none.
    """
    many = f" .. {hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]}" if len(names) > FIRST else ""
    return f"parameters {len(names)}: {' '.join(names[:FIRST])}{many}" * bool(names)


def entry_of(said: Mapping[str, Any], tier: str = "") -> Entry:
    """Return the table's entry of a judgement. said: a verdict.json, or an item of a list of recordings."""
    kinds = [cause["kind"] for cause in (said.get("diagnosis") or {}).get("causes", ())]
    about = {"causes": ", ".join(kinds), "odd": ", ".join(said.get("odd", ())), "tier": tier}
    checks = {
        one["check"]: Said(
            one["verdict"], one["examined"], len(one.get("findings", ())), places(one.get("findings", ()))
        )
        for one in said["results"]
    }
    return Entry(said["verdict"], {name: text for name, text in about.items() if text}, checks)


def stored(out: Path) -> dict[str, Table]:
    """Return the entries of the verdicts in folder `out`, by file of the table and name.

    Folders of other trainers, seeds, dtypes and devices have other names and are left out. So are faults of other
    catalogues, and runs whose fault was never reached.
    """
    found: dict[str, Table] = {name: {} for name in FILES}
    for path in sorted(out.glob("*/verdict.json")):
        said, folder = read(path), path.parent
        file, _, fault = (said.get("fault") or "").rpartition(":")
        if (file and not Path(file).is_relative_to(CATALOGUE)) or said.get("fired") is False:
            continue  # a fault of somebody's own, or one that did not run
        if folder.name == "+".join(filter(None, (said["case"], fault))):
            tier = "" if fault else read(folder / "case.json")["tier"].removeprefix("default")
            found[FAULTS if fault else CASES][folder.name] = entry_of(said, tier)
    for name in (HABITS, RECORDED):
        if (path := out / f"{name}.json").exists():
            found[name] = {said["name"]: entry_of(said) for said in read(path)}
    return found


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- the table as text


def text_of(table: Table) -> str:
    return "".join(f"{line}\n" for name, entry in sorted(table.items()) for line in lines_of(name, entry))


def lines_of(name: str, entry: Entry) -> Iterator[str]:
    """Yield the lines of an entry: its verdict, labels, and checks.

    Compact verdicts have one line, each FAIL has its own.
    """
    yield f"{name}: {entry.verdict}"
    yield from (f"  {label}: {text}" for label, text in sorted(entry.about.items()))
    for verdict in VERDICTS:
        texts = [said_text(check, said) for check, said in sorted(entry.checks.items()) if said.verdict == verdict]
        lines = [", ".join(texts)] if verdict in COMPACT and texts else texts
        yield from (f"  {verdict}: {line}" for line in lines)
    yield from (f"  {VARIES}: {check} {fields_and_why}" for check, fields_and_why in sorted(entry.varies.items()))


def said_text(check: str, said: Said) -> str:
    """Return a check's result as text, which said_of reads.

    Such as "completed 2", or with findings "gradients 126; 3 findings; ranks 0-1; steps 2; parameters 1: norm.weight".
    """
    found = (
        [] if said.findings == 0 else [f"{count_text(said.findings)} findings", *([said.places] if said.places else [])]
    )
    return "; ".join([check if said == Said(said.verdict) else f"{check} {count_text(said.examined)}", *found])


def said_of(verdict: str, text: str) -> tuple[str, Said]:
    """Return the check and its result from a text that said_text wrote, with this verdict."""
    head, _, found = text.partition("; ")
    check, _, examined = head.partition(" ")
    findings, _, where = found.partition("; ")
    return check, Said(verdict, count_of(examined or "0"), count_of(findings.partition(" ")[0] or "0"), where)


def count_text(count: int | None) -> str:
    return VARIES if count is None else str(count)


def count_of(text: str) -> int | None:
    return None if text == VARIES else int(text)


def table_of(text: str) -> Table:
    """Return the table from its text, the inverse of text_of."""
    table: Table = {}
    for line in text.splitlines():
        label, _, rest = line.strip().partition(": ")
        if not line.startswith(" "):
            entry = table[label] = Entry(rest, {}, {}, {})
        elif label == VARIES:
            check, _, entry.varies[check] = rest.partition(" ")
        elif label in VERDICTS:
            entry.checks.update(said_of(label, part) for part in (rest.split(", ") if label in COMPACT else [rest]))
        else:
            entry.about[label] = rest
    return table


def load(folder: Path) -> dict[str, Table]:
    """Return the tables in a folder, by file; a table whose file is missing is empty."""
    files = {name: folder / f"{name}.txt" for name in FILES}
    return {name: table_of(path.read_text(encoding="utf-8")) if path.exists() else {} for name, path in files.items()}


def without_varying(entry: Entry, varies: dict[str, str]) -> Entry:
    """Return the entry with `varies`, and with the fields that vary blank in each check."""
    checks = dict(entry.checks)
    for check, fields_and_why in varies.items():
        if check in checks:
            fields = fields_and_why.partition(":")[0].split()
            checks[check] = replace(checks[check], **{name: BLANK[name] for name in fields})
    return replace(entry, checks=checks, varies=varies)


# ---- comparing


def differences(before: Entry, now: Entry) -> Iterator[tuple[bool, str]]:
    """Yield (whether it is a failure, text) for each difference between two entries."""
    if before.verdict != now.verdict:
        yield True, f"verdict: {before.verdict} -> {now.verdict}"
    for label in sorted({*before.about, *now.about}):
        if (was := before.about.get(label, "none")) != (is_ := now.about.get(label, "none")):
            yield True, f"{label}: {was} -> {is_}"
    for check in sorted({*before.checks, *now.checks}):
        if check not in before.checks:
            yield False, f"{check}: new, {now.checks[check].verdict}"
        elif check not in now.checks:
            yield True, f"{check}: {before.checks[check].verdict} -> not judged"
        else:
            yield from ((bad, f"{check}: {text}") for bad, text in of_check(before.checks[check], now.checks[check]))


def of_check(before: Said, now: Said) -> Iterator[tuple[bool, str]]:
    """Yield (whether it is a failure, text) for each difference between two results of a check.

    More examined is no failure.
    """
    if before.verdict != now.verdict:
        yield True, f"{before.verdict} -> {now.verdict}"
    if before.examined != now.examined:
        fell = before.examined is not None and (now.examined or 0) < before.examined
        yield fell, f"examined {count_text(before.examined)} -> {count_text(now.examined)}"
    if before.places != now.places:
        yield True, f"{before.places or 'nowhere'} -> {now.places or 'nowhere'}"
    if before.findings != now.findings:
        yield False, f"{count_text(before.findings)} findings -> {count_text(now.findings)}"


def print_differences(
    table: Mapping[str, Table], now: Mapping[str, Table], *, whole: bool, drawn: Collection[str] | None = None
) -> int:
    """Print the differences and return the exit code: 1 for a failure, 2 if entries are missing or none was compared,
    else 0.

    whole: whether all tiers and recordings are compared. drawn: the faults that were to be made; None: all.
    """
    failed, count, missing = 0, 0, []
    for file in FILES if whole else (CASES, FAULTS):
        wanted = {name: one for name, one in table[file].items() if whole or "tier" not in one.about}
        absent = [name for name in wanted if name not in now[file]]
        if file == FAULTS and drawn is not None:
            absent = [name for name in absent if name.rpartition("+")[2] in drawn]
        missing += [f"{file} {name}" for name in absent]
        for name, entry in now[file].items():
            if name not in table[file]:
                print(f"new        {file} {name}: {entry.verdict}; not in the table")
            elif name in wanted:
                count += 1
                for bad, text in differences(wanted[name], without_varying(entry, wanted[name].varies)):
                    print(f"{'DIFFERENT ' if bad else 'more      '} {file} {name}: {text}")
                    failed += bad
    print(f"{count} entries compared, {failed} differences")
    if missing:
        print(f"{len(missing)} entries of the table were not there to compare: {', '.join(missing[:5])}, ..")
    return 1 if failed else 2 if missing or not count else 0


# ---- making it anew


def run_all(out: Path) -> None:
    """Run all cases, faults and recordings into `out`, printing exit codes.

    Verdicts that lie there are deleted first, so that none of them counts as today's.
    """
    for path in (*out.glob("*/verdict.json"), *out.glob("recorded_*.json")):
        path.unlink()
    for words in (
        ["harness", "matrix", "--tier", "all", "--out", out],
        ["harness", "faults", "--checks-only", "--out", out],
        ["benchmarks.recorded_habits", "--json", out / f"{HABITS}.json"],
        ["benchmarks.recorded_faults", out, "-k", "+", "--json", out / f"{RECORDED}.json"],
    ):
        code = subprocess.run([sys.executable, "-m", *map(str, words)], cwd=ROOT, check=False).returncode
        print(f"exit code {code}: {' '.join(map(str, words))}", flush=True)


def unfit(out: Path, table: Mapping[str, Table]) -> list[str]:
    """Return which entries of cases and faults cannot be accepted, and why. Empty if all can.

    A table is of one state of the sources: each entry of `table` must have been run with those of today.
    """
    found = stored(out)
    names = [(file, name) for file in (CASES, FAULTS) for name in table[file] if _still_there(file, name)]
    absent = [f"{name} was not run" for file, name in names if name not in found[file]]
    return absent + [
        f"{name} was run with other sources"
        for name in (*found[CASES], *found[FAULTS])
        if _made_by(out / name) != digest_of_run(Options(fault=read(out / name / "verdict.json").get("fault")))
    ]


def _still_there(file: str, name: str) -> bool:
    """Return whether the case or the fault is still in the files."""
    if file == FAULTS:
        return name.rpartition("+")[2] in {fault.name for fault in all_faults()}
    return name in {case.name for case in load_all(ROOT / "cases")}


def _made_by(folder: Path) -> str:
    """Return the digest of the sources that a run's evidence depends on; empty if none is stored."""
    made: Mapping[str, str] = read(folder / "verdict.json").get("made", {})
    return made.get("sources", "")


def accept(folder: Path, now: Mapping[str, Table], *, keep: bool) -> None:
    """Write the tables' files from `now`, keeping what is known to vary, and print their lengths.

    keep: whether recordings that were not made stay in their tables.
    """
    before = load(folder)
    for file, table in now.items():
        varying = {name: one.varies for name, one in before[file].items()}
        made = {name: without_varying(entry, varying.get(name, {})) for name, entry in table.items()}
        kept = before[file] if keep and file in (HABITS, RECORDED) else {}
        (folder / f"{file}.txt").write_text(text_of(kept | made), encoding="utf-8")
        print(f"{file}: {len(made)} entries")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or accept, as the command line requests; return the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tools.safeguard", description=__doc__, formatter_class=raw)
    parser.add_argument("--accept", action="store_true", help="make the table anew: review `git diff tests/safeguard`")
    parser.add_argument("--stored", action="store_true", help="with --accept: of what lies in OUT, nothing is run")
    parser.add_argument("--drawn", action="store_true", help="of the faults, those that the gate makes of this commit")
    parser.add_argument("--base", default="HEAD^", metavar="COMMIT", help="with --drawn: where the change begins")
    parser.add_argument("--all", action="store_true", help="compare all tiers and recordings, as far as OUT has them")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    args = parser.parse_args(argv)
    if not args.accept:
        drawn = {fault.name for fault in drawn_faults.draw_faults(args.base)} if args.drawn else None
        return print_differences(load(TABLE), stored(args.out), whole=args.all, drawn=drawn)
    if not args.stored:
        run_all(args.out.resolve())
    elif wrong := unfit(args.out, load(TABLE)):
        print(f"{len(wrong)} entries cannot be accepted: {'; '.join(wrong[:5])}, ..")
        return 2
    accept(TABLE, stored(args.out), keep=args.stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())
