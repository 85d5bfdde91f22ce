"""What the fixture `same_training` does: two commands are recorded, and the second is judged by the first."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path

from harness.core.cli import main


def judged(folder: Path, trusted: str, other: str, *, noise: bool, after: int = 0) -> str:
    """Return what to fail with; empty where both are the same training."""
    one = folder / "one"
    steps = ["--steps", f"1-{after + 3}"] if after else []
    before = [[*steps, "-o", str(one), "--", *shlex.split(trusted)]]
    before += [[*steps, "--noise", "-o", f"{one}_noise", "--", *shlex.split(trusted)]] if noise else []
    for words in before:
        code, text = _recorded(words)
        if code:
            return f"the trusted command, exit code {code}:\n{text}"
    resumed = ["--after", str(after)] if after else []
    code, text = _recorded(["--same-as", str(one), *resumed, "-o", str(folder / "other"), "--", *shlex.split(other)])
    return text if code else ""


def _recorded(words: list[str]) -> tuple[int, str]:
    """Return the exit code of `harness record`, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["record", *words])
    return code, printed.getvalue()
