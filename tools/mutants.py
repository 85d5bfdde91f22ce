"""Mutants of the harness's own judgement: does some test notice when a check, the plan or a bound is altered?

    make mutants                                      20 of each module, drawn at random, and the score
    make mutants MODULES=harness/core/checks/loss.py N=0   all mutants of one module
    make mutants MODULES='harness/core/causes/*.py' FAULTS=out    what `harness faults --out out` stored must be named as before

mutmut makes them (installed on demand, beside the environment). This file runs them, not mutmut: it collects the tests once,
and each mutant is a fork. A fork runs only the tests that reach the mutated function. Tests come first that killed its
neighbours, call more of its module and, above all, take less time. Mutants of a message's wording (a literal with a space in
it) are left out: no verdict hangs on it. What survives is shown as a diff.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parent.parent
COPIED = (
    "harness",
    "reference",
    "tests",
    "cases",
    "layouts",
    "golden",
    "upstream_bugs",
    "conftest.py",
    "pyproject.toml",
    "README.md",
    "docs",
)
MODULES = (
    "harness/core/checks/*.py",
    "harness/core/plan/*.py",
    "harness/core/plan/traffic/*.py",
    "harness/core/judge/tolerance.py",
)
SLOW = (  # tests of seconds, which alone notice hardly anything
    "core/judge/test_tolerance.py::test_the_bounds_of_the_debug_model_see_the_smallest_real_mistake",
    "core/plan/test_plan.py::test_the_plan_of_the_largest_model_covers_all_its_parameters",
    "core/plan/test_plan.py::test_groups_are_the_ranks_whose_device_mesh_coordinates_differ_in_one_axis",
    "core/plan/test_plan.py::test_slices_are_those_of_the_dtensors_of_fsdp_over_tensor_parallel",
)
OF_SOURCES = ("core/causes/test_kinds.py",)  # that read the modules' text, in which all mutants stand
TESTS = ("core/checks", "core/causes", "hypotheses", "core/judge", "core/plan", "core/case/test_schedule.py")
LITERAL = re.compile(r"""[rbuf]*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
CPU_SECONDS = 8  # of tests that one mutant gets unless --seconds is given: what lives on after that has survived
ENDLESS = 60  # so much later what has not come to an end never will: it was noticed


@dataclass
class Mutant:
    """An altered function. name: as mutmut's trampolines have it. function: the same of the function that was altered.

    module: path. diff: without its head. killer: the test that failed, or why no answer came; empty while or if it
    survives.
    """

    name: str
    function: str
    module: str
    diff: str
    killer: str = ""


def altered(module: Path) -> tuple[str, list[Mutant]]:
    """Return the module's source with all its mutants in it, and the mutants, without those of wording and of defaults."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    made = mutate_file_contents(str(module), module.read_text())
    lines, bodies = made.code.splitlines(), {}
    for node in ast.walk(ast.parse(made.code)):
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
            bodies[node.name] = lines[node.lineno : node.end_lineno]
    found = []
    for name in made.mutant_names:
        function = name.partition("__mutmut_")[0]
        before, after = bodies[f"{function}__mutmut_orig"], bodies[name]
        if not is_wording(before, after) and not is_default(before, after):
            diff = [
                line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:2] not in ("--", "++")
            ]
            whole = get_mutant_name(module, name)
            found.append(Mutant(whole, whole.partition("__mutmut_")[0], str(module), "\n".join(diff[1:])))
    return made.code, found


def is_wording(before: list[str], after: list[str]) -> bool:
    """Return whether two bodies of lines differ in one literal only, and that has a space, so is a phrase."""
    pairs = [(one, other) for one, other in zip(before, after, strict=False) if one != other]
    if len(before) != len(after) or len(pairs) != 1:
        return False
    one, other = pairs[0]
    literals = [(a, b) for a, b in zip(LITERAL.findall(one), LITERAL.findall(other), strict=False) if a != b]
    return LITERAL.sub("", one) == LITERAL.sub("", other) and len(literals) == 1 and " " in literals[0][0]


def is_default(before: list[str], after: list[str]) -> bool:
    """Return whether two bodies of lines differ only in zip's strict=False, which is its default."""

    def plain(lines: list[str]) -> str:
        return re.sub(r",(strict=(False|None),?)?\)", ")", re.sub(r"\s", "", "".join(lines)))

    return plain(before) == plain(after)


@dataclass
class Runner:
    """A pytest plugin that runs the tests on every mutant, in place of running them once.

    jobs: forks at a time. limit: seconds of processor time for the tests of one mutant. The other fields are by
    function or module: the tests that reach it, kills, depth; or by test: seconds.
    """

    mutants: list[Mutant]
    jobs: int
    limit: float = CPU_SECONDS
    reaching: dict[str, list[pytest.Item]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, float] = field(default_factory=dict)
    kills: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    depth: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # functions, by module and test

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once, then the mutants, each in a fork; set their killers and print the diff of each that
        survives."""
        self._baseline(session.items)
        waiting, running = list(reversed(self.mutants)), {}
        began = done = 0.0
        began = time.monotonic()
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop()
                running[self._start(mutant)] = mutant
            ready, _, _ = select.select(list(running), [], [])
            for pipe in ready:
                mutant, said = running.pop(pipe), os.read(pipe, 4096).decode()
                os.close(pipe)
                os.wait()
                mutant.killer = said or "no answer: killed, or out of time"
                if mutant.killer == "survived":
                    mutant.killer = ""
                    print(f"\n{mutant.name}\n{mutant.diff}", flush=True)
                else:
                    self.kills[mutant.function][said] += 10
                    self.kills[mutant.module][said] += 1
                done += 1
                if done % 50 == 0:
                    print(f"{done:.0f} of {len(self.mutants)} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        return True

    def _baseline(self, items: list[pytest.Item]) -> None:
        """Run every test once, unaltered, and note the functions that it reaches and its seconds.

        SystemExit if one fails.
        """
        from mutmut.mutation import trampoline

        reached: set[str] = set()
        trampoline.record_trampoline_hit = lambda name, caller=None: reached.add(name)
        trampoline.set_mutant_under_test("stats")
        for item in items:
            began = time.process_time()
            if any(report.failed for report in runtestprotocol(item, nextitem=None, log=False)):
                raise SystemExit(f"{item.nodeid} fails without any mutant")
            self.seconds[item.nodeid] = time.process_time() - began
            for name in reached:
                self.reaching[name].append(item)
                self.depth[name.partition(".x")[0]][item.nodeid] += 1
            reached.clear()
        trampoline.set_mutant_under_test("")
        print(f"{len(items)} tests take {sum(self.seconds.values()):.0f} s", file=sys.stderr, flush=True)

    def _start(self, mutant: Mutant) -> int:
        """Fork a process that tests the mutant; return the pipe in which it will write the failing test, or "survived"."""
        reading, writing = os.pipe()
        if os.fork():
            os.close(writing)
            return reading
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (int(self.limit) + ENDLESS,) * 2)
        signal.alarm(4 * (int(self.limit) + ENDLESS))  # one that waits for ever uses no CPU
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(quiet, stream)
        try:
            answer = self._first_failure(mutant)
        except BaseException as error:
            answer = repr(error)
        os.write(writing, answer.encode())
        os._exit(0)

    def _first_failure(self, mutant: Mutant) -> str:
        """Return the id of the first test that fails with this mutant; "survived" if none does within the limit.

        Call it in a fork. Tests that are likely to fail soon come first; caches of the harness are cleared.
        """
        from mutmut.mutation import trampoline

        for module in [module for name, module in sys.modules.items() if name.startswith("harness")]:
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        trampoline.set_mutant_under_test(mutant.name)
        known, began = self.kills[mutant.function] + self.kills[mutant.module], time.process_time()
        depth = self.depth[mutant.function.partition(".x")[0]]  # most tests leave most modules at once

        def worth(item: pytest.Item) -> float:
            return (1 + min(known[item.nodeid], 20)) * depth[item.nodeid] / max(self.seconds[item.nodeid], 0.01) ** 2

        for item in sorted(self.reaching[mutant.function], key=worth, reverse=True):
            if any(report.failed for report in runtestprotocol(item, nextitem=None, log=False)):
                return item.nodeid
            if time.process_time() - began > self.limit:
                break
        return "survived"


def main() -> None:
    """Copy the project into a temporary folder, put the mutants into it, test them there and print the score."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help=f"default: {' '.join(MODULES)}")
    parser.add_argument("-n", type=int, default=0, help="of each module so many, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", type=int, default=os.cpu_count(), help="so many at once")
    parser.add_argument("--seconds", type=float, default=CPU_SECONDS, help="of tests for each mutant (%(default)s)")
    parser.add_argument("-k", default="", help="only mutants whose name holds this, or one of these: a,b")
    parser.add_argument("--faults", type=Path, help="stored runs with faults, which are to be named as before")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="folders and files of tests/")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # a fork of a process whose torch has computed on several threads waits for them
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy(source, target)
        if asked.faults:
            os.environ["FAULTS_OUT"] = str(asked.faults.resolve())
            shutil.copy(ROOT / "tools" / "test_stored_faults.py", Path(folder) / "tests")
            asked.tests = [*asked.tests, "test_stored_faults.py"]
        os.chdir(folder)
        Path("setup.cfg").write_text("[mutmut]\nsource_paths=harness\n")
        sys.path[:] = [
            folder,
            f"{folder}/tests",
            *(p for p in sys.path if Path(p).resolve() not in (ROOT, ROOT / "tests")),
        ]
        run(list(modules(asked.modules or MODULES)), asked)


def modules(patterns: Any) -> Iterator[Path]:
    """Yield the files that match the patterns, in the order of the patterns."""
    for pattern in patterns:
        yield from sorted(Path().glob(pattern))


def run(chosen: list[Path], asked: argparse.Namespace) -> None:
    """Put the mutants into the chosen modules' files, run the tests on them, and print the table.

    SystemExit if pytest fails.
    """
    draw, mutants, counts = random.Random(asked.seed), [], {}
    for module in chosen:
        code, found = altered(module)
        module.write_text(code)
        found = [mutant for mutant in found if any(part in mutant.name for part in asked.k.split(","))]
        counts[str(module)] = len(found)
        mutants += draw.sample(found, asked.n) if 0 < asked.n < len(found) else found
    if all(
        module.parent.name in ("checks", "causes", "hypotheses") or module.stem == "attribution" for module in chosen
    ):
        keep_trials()
    runner = Runner(mutants, asked.j, asked.seconds)
    tests = [f"tests/{name}" for name in asked.tests]
    sys.dont_write_bytecode = True
    options = ["-q", "-s", "--assert=plain", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += [f"--deselect=tests/{name}" for name in (*SLOW, *OF_SOURCES)]
    code = pytest.main([*options, *tests], plugins=[runner])
    if code:
        raise SystemExit(code)
    print(table(mutants, counts))


def keep_trials() -> None:
    """Patch the tests' `literal` to make each piece of evidence once, not for each mutant.

    Checks take no part in making it, as the plan and bounds do. Evidence of a test with another reference is made each
    time.
    """
    import literal

    usual, make, keep = kept(literal.reference_of), literal.trial_of, kept(literal.trial_of)
    literal.reference_of = usual
    literal.trial_of = lambda *of, **named: (keep if literal.reference_of is usual else make)(*of, **named)


def kept(make: Any) -> Any:
    """Return the function with its results cached by the text of its arguments."""
    made: dict[str, Any] = {}

    def found(*args: Any, **named: Any) -> Any:
        key = repr((args, named))
        if key not in made:
            made[key] = make(*args, **named)
        return made[key]

    return found


def table(mutants: list[Mutant], counts: dict[str, int]) -> str:
    """Return a Markdown table of scores, a row for each module and one for all. counts: all mutants, by module."""
    lines = ["", "| module | mutants | tried | killed | survived | score |", "|---|---|---|---|---|---|"]
    for name, count in counts.items():
        lines.append(_row(name, count, [mutant for mutant in mutants if mutant.module == name]))
    return "\n".join([*lines, _row("all", sum(counts.values()), mutants)])


def _row(name: str, count: int, tried: list[Mutant]) -> str:
    """Return a row of the table: the number of mutants, of those tried, killed and survived, and the share killed ("-"
    if none)."""
    killed = sum(bool(mutant.killer) for mutant in tried)
    score = f"{killed / len(tried):.1%}" if tried else "-"
    return f"| {name} | {count} | {len(tried)} | {killed} | {len(tried) - killed} | {score} |"


if __name__ == "__main__":
    main()
