"""Count what makes code hard to read, beside the same counts of pytest, torchtitan, torch and Hypothesis.

    python -m tools.code_reads [FOLDER..]              counts of folders (default: harness reference)
    python -m tools.code_reads --list S2 [FOLDER..]    the places that one rule finds
    python -m tools.code_reads --folders               one line for each folder, without its subfolders
    python -m tools.code_reads --keep                  write today's counts to tests/code_reads.json, where none may rise

Counts are per 1000 statements, so neither the width of a line nor a longer docstring changes them. A count is a compass: what
it finds is a place to look at, and a place may have its reason. No file is imported or run. Exit code 2 if there is nothing to
count.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

RULES = {
    "S1": "a pronoun, preposition or adverb as a function's name",
    "S2": "a bare participle as a function's name (properties and functions that return bool are exempt)",
    "S5": "a function's docstring begins with It, Its, One, Both, The same, What, Which ..",
    "S6": "a, b = x, y: several assignments in one statement",
    "S7": "a comprehension with two loops, or one inside another",
    "S9": "text * condition, list * condition, for x in (A if c else ())",
    "S11": "a variable or parameter named like a pronoun (one, found, at, of, by, held, told, some, what, most, more, ..)",
}
ANCHORS: dict[str, tuple[float, float, float, float]] = {
    "names": (3.0, 4.0, 3.8, 3.4),
    "S1": (0.1, 0.0, 0.0, 0.1),
    "S2": (0.2, 0.0, 0.1, 0.6),
    "S5": (0.0, 0.0, 1.2, 0.6),
    "S6": (0.7, 2.1, 2.5, 1.7),
    "S7": (0.3, 1.2, 0.4, 0.8),
    "S9": (0.1, 0.1, 0.1, 0.3),
    "S11": (0.2, 0.0, 0.1, 0.7),
}
"""By rule, or "names": pytest, torchtitan without experiments, torch's fully_shard and tensor, Hypothesis."""
PRONOUNS = frozenset(
    {
        "of",
        "beside",
        "besides",
        "alike",
        "some",
        "apart",
        "together",
        "instead",
        "then",
        "else",
        "within",
        "left",
        "told",
    }
    | {"said", "seen", "look", "nothing", "since", "before", "between", "whole", "even", "same", "own", "odd", "what"}
    | {"which", "where", "there", "here", "late", "ahead"}
)
PRONOUN_VARIABLES = frozenset(
    {"one", "found", "at", "of", "by", "held", "told", "some", "what", "most", "more", "there", "place"}
)
PARTICIPLE = re.compile(
    r"(?<!se)(?<!ne)(?<!fe)(?<!pee)ed$|^(told|held|fed|given|taken|chosen|drawn|made|kept|left|seen|said|sent|met|meant|built|thrown|written|broken|"
    r"frozen|known|grown|shown|dealt)$"
)
POOR_OPENING = re.compile(
    r"(It|Its|They|Them|These|Those|That|This|The same|Such|One|Theirs|Others|Each|Both|So|Not|What|Who|Whose|Where|Which|None)"
    r"\b"
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Counts:
    """The counts of some files."""

    statements: int = 0
    names: int = 0
    """Uses of names, attributes and parameters."""
    by_rule: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Rule -> file, line and text of each finding."""

    def rate(self, count: int) -> float:
        """Return a count per 1000 statements."""
        return 1000 * count / max(self.statements, 1)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_exempt_participle(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a participle is a good name there: a property, or a function that returns bool."""
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in function.decorator_list}
    returns_bool = function.returns is not None and ast.unparse(function.returns) == "bool"
    return returns_bool or bool(decorators & {"property", "cached_property", "fault"})


def function_findings(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    """Yield (rule, text) for each rule that a function's name, docstring or parameters break."""
    name = function.name.strip("_")
    docstring = ast.get_docstring(function) or ""
    if name in PRONOUNS:
        yield "S1", function.name
    elif "_" not in name and PARTICIPLE.search(name) and not is_exempt_participle(function):
        yield "S2", function.name
    if POOR_OPENING.match(docstring):
        yield "S5", docstring[:70].replace("\n", " ")
    for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        if parameter.arg in PRONOUN_VARIABLES:
            yield "S11", parameter.arg


def is_text_or_list(node: ast.expr) -> bool:
    """Return whether an expression is a text, an f-string, a list or a list comprehension."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, (ast.JoinedStr, ast.List, ast.ListComp))


def expression_findings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (rule, text) for each rule that a node other than a function breaks; the text may be empty."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield "S6", ""
    if isinstance(node, COMPREHENSIONS):
        contains_another = any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node)
        if len(node.generators) > 1 or contains_another:
            yield "S7", ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and is_text_or_list(node.left):
        calls_bool = isinstance(node.right, ast.Call) and ast.unparse(node.right.func) == "bool"
        if calls_bool or isinstance(node.right, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield "S9", ""
    if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.IfExp):
        yield "S9", ""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUN_VARIABLES:
        yield "S11", node.id


def add_file(counts: Counts, file: Path) -> None:
    """Parse a file and add its statements, names and findings to the counts, in place.

    SyntaxError if it cannot be parsed.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not is_docstring(node):
            counts.statements += 1
        if isinstance(node, (ast.Name, ast.Attribute, ast.arg)):
            counts.names += 1
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            findings: Iterable[tuple[str, str]] = () if node.name.startswith("__") else function_findings(node)
        else:
            findings = expression_findings(node)
        for rule, text in findings:
            counts.by_rule[rule] += 1
            line = getattr(node.iter if isinstance(node, ast.comprehension) else node, "lineno", 0)
            counts.places[rule].append(f"{file}:{line}  {text}".rstrip())


def counts_of(files: Iterable[Path]) -> Counts:
    """Return the counts of all files together; those under folders named vendor or experiments are left out."""
    counts = Counts()
    for file in sorted(files):
        if "vendor" not in file.parts and "experiments" not in file.parts:
            add_file(counts, file)
    return counts


KEPT = Path(__file__).resolve().parents[1] / "tests" / "code_reads.json"
"""Counts that may only fall: part of the project -> rule -> count."""
PARTS = ("core", "recording", "clusters", "nights", "adapters", "faults", "hypotheses")


def counts_of_parts(root: Path) -> dict[str, dict[str, int]]:
    """Return the number of findings by part (the core, each ring, the reference) and rule."""
    folders = {part: root / "harness" / part for part in PARTS} | {"reference": root / "reference"}
    found = {part: counts_of(folder.rglob("*.py")) for part, folder in folders.items()}
    return {part: {rule: counts.by_rule[rule] for rule in RULES} for part, counts in found.items()}


def print_folders(root: Path) -> None:
    """Print a line for each folder under `root`, without its subfolders: statements, names, findings by rule."""
    print(f"{'folder':36}{'statements':>11}{'names each':>11}  " + " ".join(f"{rule:>5}" for rule in RULES))
    for folder in [root, *sorted(path for path in root.rglob("*") if path.is_dir())]:
        counts = counts_of(folder.glob("*.py"))
        if counts.statements:
            numbers = " ".join(f"{counts.by_rule[rule]:5}" for rule in RULES)
            print(f"{str(folder):36}{counts.statements:11}{counts.names / counts.statements:11.2f}  {numbers}")


def print_counts(counts: Counts) -> None:
    """Print the counts and the rate per 1000 statements of each rule, beside those of ANCHORS."""
    anchors = ANCHORS.get("names", ())
    each = counts.names / counts.statements
    print(f"{counts.statements} statements, {each:.2f} names a statement ({', '.join(map(str, anchors))})")
    print(f"{'':5}{'count':>6}{'per 1000':>10}   pytest, torchtitan, torch, Hypothesis per 1000")
    for rule, text in RULES.items():
        numbers = ", ".join(map(str, ANCHORS.get(rule, ())))
        print(f"{rule:5}{counts.by_rule[rule]:6}{counts.rate(counts.by_rule[rule]):10.1f}   {numbers:28}{text}")


def main() -> int:
    """Print what the command line requests, or write KEPT; return the exit code: 2 if there is nothing to count, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["harness", "reference"])
    parser.add_argument("--list", metavar="RULE", choices=RULES)
    parser.add_argument("--folders", action="store_true", dest="by_folder")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_intermixed_args()
    if arguments.keep:
        KEPT.write_text(json.dumps(counts_of_parts(KEPT.parents[1]), indent=1) + "\n", encoding="utf-8")
        return 0
    if arguments.by_folder:
        print_folders(Path("harness"))
        return 0
    counts = counts_of(file for folder in arguments.folders for file in Path(folder).rglob("*.py"))
    if not counts.statements:
        print(f"no Python files under {', '.join(arguments.folders)}", file=sys.stderr)
        return 2
    if arguments.list:
        print(f"{arguments.list}: {RULES[arguments.list]}", *counts.places[arguments.list], sep="\n  ")
    else:
        print_counts(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
