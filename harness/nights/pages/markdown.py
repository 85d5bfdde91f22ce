"""A run as CI shows it: Markdown for the summary of a job, and annotations; both begin with the causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from harness.core.evidence.text import escape_control_characters
from harness.core.report.causes import Shared, cause_or_reason, checks_text, shared_causes
from harness.core.report.grid import counts_text
from harness.core.report.outcome import Outcome

MAX_SUMMARY_BYTES = 900_000  # bytes; a summary of more than a mebibyte is not shown at all


def markdown_summary(
    outcomes: Sequence[Outcome],
    provenance: Iterable[str],
    notes: Iterable[str] = (),
    since: Mapping[str, str] | None = None,
) -> str:
    """Return the summary of a job.

    notes: what is lacking or doubled in the runs. since: by case, the commit that broke it.
    """
    heading = counts_text(outcomes, None) if outcomes else "no case came to its end"
    parts = [
        f"## {_plain_text(heading)}",
        *(f"**{_plain_text(line)}**" for line in notes),
        *(_cause_section(shared, since or {}) for shared in shared_causes(outcomes)),
    ]
    parts += [_cases_table(outcomes), *(_plain_text(line) for line in provenance)]
    return _cut_to_limit("\n\n".join(parts) + "\n")


def _cause_section(shared: Shared, since: Mapping[str, str]) -> str:
    """Return the section of one cause: since which commit, its cases, and the command that runs the first one again."""
    sections = [f"### {_plain_text(shared.text)}"]
    culprits = dict.fromkeys(since[outcome.case] for outcome in shared.cases if outcome.case in since)
    sections += [f"Since {_plain_text(culprit)}" for culprit in culprits]
    sections.append("\n".join(_case_line(outcome, shared.text) for outcome in shared.cases))
    if shared.cases and shared.cases[0].again:
        sections.append(f"    {_one_line(shared.cases[0].again)}")  # indented, Markdown shows it as it is
    return "\n\n".join(sections)


def _case_line(outcome: Outcome, cause: str) -> str:
    """Return a line with the checks, and with the case's own cause if its numbers are others."""
    own_cause = cause_or_reason(outcome) if cause_or_reason(outcome) != cause else ""
    details = "; ".join(filter(None, (own_cause, checks_text(outcome))))
    return f"- {_plain_text(outcome.verdict)} {_code_text(outcome.case)} {_plain_text(details)}".rstrip()


def _cases_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all cases, folded away.

    Between the tags Markdown needs an empty line.
    """
    rows = ["| case | verdict | requested | checks |", "|---|---|---|---|"]
    for outcome in outcomes:
        details = checks_text(outcome) or cause_or_reason(outcome)
        cells = [_code_text(outcome.case), *map(_plain_text, (outcome.verdict, outcome.layout, details))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"<details><summary>all {len(outcomes)} cases</summary>", "", *rows, "", "</details>"])


def _plain_text(text: str) -> str:
    """Return text in one line in which Markdown finds nothing to do, and GitHub neither a person, a link nor an issue.

    No address is made a link without the colon of its scheme or the dot after www; an entity hides neither from the reader.
    """
    escaped = re.sub(r"[\\`*_\[\]<>|#&@~$!+]|:(?=//)|(?<=www)\.", _entity, _one_line(text))
    return re.sub(
        r"^(\d+)?[-.)=]|^\d+(?=[.)])", lambda match: "".join(f"&#{ord(letter)};" for letter in match[0]), escaped
    )


def _entity(match: re.Match[str]) -> str:
    """Return the entity of the letter that matched."""
    return f"&#{ord(match[0])};"


def _code_text(text: str) -> str:
    """Return text as code. One with a letter that ends code or a cell is plain text."""
    line = _one_line(text)
    return _plain_text(line) if set(line) & set("`|") or not line else f"`{line}`"


def _one_line(text: str) -> str:
    """Return text in one line."""
    return " ".join(escape_control_characters(text).split())


def _cut_to_limit(text: str) -> str:
    """Return text without what is more than a summary may have. Causes come first, so that what is cut is the table."""
    encoded = text.encode()
    if len(encoded) <= MAX_SUMMARY_BYTES:
        return text
    return (
        encoded[:MAX_SUMMARY_BYTES].decode(errors="ignore").rpartition("\n")[0]
        + "\n\nThe rest is cut: a summary has a mebibyte.\n"
    )


def github_annotations(outcomes: Sequence[Outcome]) -> list[str]:
    """Return an annotation for each cause, in the words of GitHub's workflow commands."""
    return [_annotation(shared) for shared in shared_causes(outcomes)]


def _annotation(shared: Shared) -> str:
    """Return the annotation of one cause: an error if a case is broken, else a warning."""
    names = ", ".join(outcome.case for outcome in shared.cases)
    rerun_text = f"\nagain: {shared.cases[0].again}" if shared.cases[0].again else ""
    kind = "error" if shared.broken else "warning"
    title = _escape(names if len(names) < 80 else f"{len(shared.cases)} cases", also=":,")
    return f"::{kind} title={title}::{_escape(f'{shared.text}{rerun_text}')}"


def _escape(text: str, *, also: str = "") -> str:
    """Return text as GitHub's workflow commands need it. also: more letters to escape."""
    for letter in "%\r\n" + also:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
