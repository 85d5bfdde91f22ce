"""The outcomes of a failing case's reruns, as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.evidence.text import ranks_text
from harness.core.judge.result import Verdict


def repeats_text(repeats: Mapping[str, Any]) -> str:
    """Return a sentence on the reruns of a failing case, and on what they differ in; empty for a case that was not rerun.

    The folders of all evidence are named only if some rerun did not fail.
    """
    if not repeats:
        return ""
    verdicts = repeats["verdicts"]
    alike = repeats["alike"]
    times = len(verdicts)
    failed = verdicts.count(Verdict.FAIL)
    unjudged = sum(verdict in (Verdict.UNKNOWN, "ERROR") for verdict in verdicts)
    depends = "it depends on timing, hardware or random numbers without a seed"
    if failed == unjudged == 0:
        text = f"it failed once in {times + 1} runs: {depends}"
    elif failed == times:
        text = f"made again: it fails in {times} of {times}"
        if alike < times:
            text += f", otherwise in {times - alike}"
    else:
        text = f"made again: it fails in {failed} of {times}"
        if unjudged:
            text += f", {unjudged} could not be judged"
        if failed + unjudged < times:
            text += f"; {depends}"
    if "differs" in repeats:
        text += f"; they first differ in {_difference_text(repeats['differs'])}"
    folders = ", ".join(repeats["folders"])
    if failed < times:
        text += f"; evidence of all: {folders}"
    return text


def _difference_text(differs: Mapping[str, Any]) -> str:
    """Return a text of the first difference: step, ranks, kind of number and names."""
    names, *others = differs["names"]
    if others:
        names += f" and {len(others)} more"
    ranks = tuple(differs["ranks"])
    where = f"ranks {ranks_text(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"step {differs['step']} on {where}: {differs['quantity']}, {names}"
