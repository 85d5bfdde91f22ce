"""What became of a failing case when it was made again, as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.evidence.text import ranks_text
from harness.core.judge.result import Verdict


def repeats_text(repeats: Mapping[str, Any]) -> str:
    """Return a sentence; nothing for a case that was not made again."""
    if not repeats:
        return ""
    verdicts, alike = repeats["verdicts"], repeats["alike"]
    times, failed = len(verdicts), verdicts.count(Verdict.FAIL)
    unjudged = sum(verdict in (Verdict.UNKNOWN, "ERROR") for verdict in verdicts)
    if failed == unjudged == 0:
        text = f"it failed once in {times + 1} runs: it depends on timing, hardware or random numbers without a seed"
    elif failed == times:
        text = f"made again: it fails in {times} of {times}" + f", otherwise in {times - alike}" * (alike < times)
    else:
        text = f"made again: it fails in {failed} of {times}" + f", {unjudged} could not be judged" * bool(unjudged)
        text += "; it depends on timing, hardware or random numbers without a seed" * (failed + unjudged < times)
    text += f"; they first differ in {_place(repeats['differs'])}" if "differs" in repeats else ""
    return text + f"; evidence of all: {', '.join(repeats['folders'])}" * (failed < times)


def _place(differs: Mapping[str, Any]) -> str:
    first, *others = differs["names"]
    more = f" and {len(others)} more" if others else ""
    ranks = tuple(differs["ranks"])
    where = f"ranks {ranks_text(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"step {differs['step']} on {where}: {differs['quantity']}, {first}{more}"
