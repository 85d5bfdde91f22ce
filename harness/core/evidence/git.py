"""git of somebody else's repository, read without running any program that its configuration names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HARMLESS_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.pager": "cat",
    "log.showSignature": "false",
    "diff.external": "",
    "protocol.ext.allow": "never",
}
FILTER_PATTERN = r"^filter\..*\.(clean|smudge|process|required)$"


def run_git(folder: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, in English, with no filter, hook or fsmonitor of that repository. Return the ended process.

    Output is text; no exit code raises. Raises OSError without git.
    """
    return _run_git_with(folder, HARMLESS_SETTINGS | _filters_switched_off(folder), arguments)


def _filters_switched_off(folder: Path | str) -> dict[str, str]:
    """Return settings that switch off each filter that is configured there. Reading the configuration runs nothing.

    Empty where no filter is configured.
    """
    listed = _run_git_with(folder, {}, ("config", "--null", "--name-only", "--get-regexp", FILTER_PATTERN))
    names = {name for name in listed.stdout.split("\0") if name}
    return {name: "false" if name.endswith(".required") else "" for name in names}


def _run_git_with(
    folder: Path | str, settings: dict[str, str], arguments: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Run git with additional settings, and return the ended process; no exit code raises.

    Settings go through the environment: on the command line a "=" in a filter's name would end the name.
    """
    environment = os.environ | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    environment["GIT_CONFIG_COUNT"] = str(len(settings))
    for number, (key, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    words = ["git", "-C", str(folder), *arguments]
    return subprocess.run(words, env=environment, capture_output=True, encoding="utf-8", errors="replace", check=False)
