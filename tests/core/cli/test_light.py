"""Help and what is mistyped need no more than the standard library: torch and numpy take a second to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness.core.cli import all_commands

COMMANDS = tuple(all_commands())
ROOMS = ("checks", "causes", "judge", "launch", "trainers")
TYPED = {
    0: [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)],
    2: [[], ["nonsense"], ["nonsense", "--json"], ["--nonsense", "run", "--out", "x"], ["show", "x"]]
    + [[name, "--nonsense"] for name in COMMANDS]
    + [["matrix", "--nonsense", "--json"], ["matrix", "--timeout", "5", "--nonsense"], ["run", "--timeout", "0", "x"]],
}
"""Exit code -> what is typed."""
SCRIPT = """
import json, os, sys
from harness.core.cli import main

told = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
answers = []
for words in json.loads(sys.argv[1]):
    code = main(words)
    answers.append([code, sorted({"torch", "numpy", *json.loads(sys.argv[2])} & {*sys.modules})])
os.write(told, json.dumps(answers).encode())
"""


def test_neither_help_nor_a_mistyped_command_imports_torch_numpy_or_the_judge() -> None:
    """In one process, one after the other: what one of them imports, the later ones would have as well."""
    every = [(code, words) for code, lines in TYPED.items() for words in lines]
    rooms = json.dumps([f"harness.core.{room}" for room in ROOMS])
    command = [sys.executable, "-c", SCRIPT, json.dumps([words for _, words in every]), rooms]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "80"})
    answers = json.loads(done.stdout)
    wrong = [(words, got) for (code, words), got in zip(every, answers, strict=True) if got != [code, []]]
    assert wrong == []
