"""Body of the fixture `same_training`: two commands are recorded, and the second is judged by the first."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path

from harness.core.cli import main


def compare_commands(folder: Path, trusted: str, other: str, *, noise: bool, after: int = 0) -> str:
    """Run and record both commands under `folder`, and compare.

    Return the text of the failure; empty if both are the same training. A trusted command that cannot be recorded is a
    failure, too. noise: whether the trusted one is recorded again with altered weights. after: step from whose
    checkpoint the other command goes on; 0 for none.
    """
    trusted_folder = folder / "one"
    steps_options = ["--steps", f"1-{after + 3}"] if after else []
    trusted_commands = [[*steps_options, "-o", str(trusted_folder), "--", *shlex.split(trusted)]]
    trusted_commands += (
        [[*steps_options, "--noise", "-o", f"{trusted_folder}_noise", "--", *shlex.split(trusted)]] if noise else []
    )
    for words in trusted_commands:
        code, text = _record_command(words)
        if code:
            return f"the trusted command, exit code {code}:\n{text}"
    after_options = ["--after", str(after)] if after else []
    code, text = _record_command(
        ["--same-as", str(trusted_folder), *after_options, "-o", str(folder / "other"), "--", *shlex.split(other)]
    )
    return text if code else ""


def _record_command(words: list[str]) -> tuple[int, str]:
    """Run `harness record` with these words, and return its exit code and what it prints on either stream."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["record", *words])
    return code, printed.getvalue()
