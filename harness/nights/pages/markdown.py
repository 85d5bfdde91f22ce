"""A run as CI shows it: Markdown for the summary of a job, and annotations; both begin with the causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from harness.core.evidence.text import escape_control_characters
from harness.core.report.causes import SharedCause, cause_or_reason, checks_text, shared_causes
from harness.core.report.grid import counts_text
from harness.core.report.outcome import Outcome

MAX_SUMMARY_BYTES = 900_000  # bytes; a summary of more than a mebibyte is not shown at all


def markdown_summary(
    outcomes: Sequence[Outcome],
    provenance: Iterable[str],
    notes: Iterable[str] = (),
    since: Mapping[str, str] | None = None,
) -> str:
    """Return the Markdown summary of a CI job: counts, notes, a section for each cause, a folded table of all cases,
    provenance.

    notes: what is lacking or doubled in the runs. since: by case, the commit that broke it. What exceeds
    MAX_SUMMARY_BYTES is cut.
    """
    heading = counts_text(outcomes, None) if outcomes else "no case came to its end"
    parts = [
        f"## {_plain_text(heading)}",
        *(f"**{_plain_text(line)}**" for line in notes),
        *(_cause_section(shared, since or {}) for shared in shared_causes(outcomes)),
    ]
    parts += [_cases_table(outcomes), *(_plain_text(line) for line in provenance)]
    return _cut_to_limit("\n\n".join(parts) + "\n")


def _cause_section(shared: SharedCause, since: Mapping[str, str]) -> str:
    """Return the Markdown section of one cause: the commits that broke it, its cases, and the command that reruns the
    first case.
    """
    sections = [f"### {_plain_text(shared.text)}"]
    culprits = dict.fromkeys(since[outcome.case] for outcome in shared.cases if outcome.case in since)
    sections += [f"Since {_plain_text(culprit)}" for culprit in culprits]
    sections.append("\n".join(_case_line(outcome, shared.text) for outcome in shared.cases))
    if shared.cases and shared.cases[0].again:
        sections.append(f"    {_one_line(shared.cases[0].again)}")  # indented, Markdown shows it as it is
    return "\n\n".join(sections)


def _case_line(outcome: Outcome, cause: str) -> str:
    """Return a list item: verdict, case and checks, with the case's own cause if it differs from `cause`."""
    own_cause = cause_or_reason(outcome) if cause_or_reason(outcome) != cause else ""
    details = "; ".join(filter(None, (own_cause, checks_text(outcome))))
    return f"- {_plain_text(outcome.verdict)} {_code_text(outcome.case)} {_plain_text(details)}".rstrip()


def _cases_table(outcomes: Sequence[Outcome]) -> str:
    """Return the Markdown table of all cases, folded away by HTML tags.

    Between the tags Markdown needs an empty line.
    """
    rows = ["| case | verdict | requested | checks |", "|---|---|---|---|"]
    for outcome in outcomes:
        details = checks_text(outcome) or cause_or_reason(outcome)
        cells = [_code_text(outcome.case), *map(_plain_text, (outcome.verdict, outcome.layout, details))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"<details><summary>all {len(outcomes)} cases</summary>", "", *rows, "", "</details>"])


def _plain_text(text: str) -> str:
    """Return the text in one line, with entities for all that Markdown or GitHub would format, link or take as a mention.

    No address is made a link without the colon of its scheme or the dot after www; an entity hides neither from the
    reader.
    """
    escaped = re.sub(r"[\\`*_\[\]<>|#&@~$!+]|:(?=//)|(?<=www)\.", _entity, _one_line(text))
    return re.sub(
        r"^(\d+)?[-.)=]|^\d+(?=[.)])", lambda match: "".join(f"&#{ord(letter)};" for letter in match[0]), escaped
    )


def _entity(match: re.Match[str]) -> str:
    """Return the HTML entity of the character that matched."""
    return f"&#{ord(match[0])};"


def _code_text(text: str) -> str:
    """Return the text in one line between backticks. A text with a backtick or "|", and an empty one, comes as plain text."""
    line = _one_line(text)
    return _plain_text(line) if set(line) & set("`|") or not line else f"`{line}`"


def _one_line(text: str) -> str:
    """Return the text in one line: control characters are escaped, other white space becomes one space."""
    return " ".join(escape_control_characters(text).split())


def _cut_to_limit(text: str) -> str:
    """Return the text up to the last whole line within MAX_SUMMARY_BYTES, and a sentence that the rest is cut.

    Unchanged if it fits. Causes come first, so that what is cut is the table.
    """
    encoded = text.encode()
    if len(encoded) <= MAX_SUMMARY_BYTES:
        return text
    return (
        encoded[:MAX_SUMMARY_BYTES].decode(errors="ignore").rpartition("\n")[0]
        + "\n\nThe rest is cut: a summary has a mebibyte.\n"
    )


def github_annotations(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a GitHub workflow command ("::error ..") for each cause that failed cases share."""
    return [_annotation(shared) for shared in shared_causes(outcomes)]


def _annotation(shared: SharedCause) -> str:
    """Return the workflow command of one cause: ::error if a case is broken, else ::warning."""
    names = ", ".join(outcome.case for outcome in shared.cases)
    rerun_text = f"\nagain: {shared.cases[0].again}" if shared.cases[0].again else ""
    kind = "error" if shared.broken else "warning"
    title = _escape(names if len(names) < 80 else f"{len(shared.cases)} cases", also=":,")
    return f"::{kind} title={title}::{_escape(f'{shared.text}{rerun_text}')}"


def _escape(text: str, *, also: str = "") -> str:
    """Return the text with "%", line ends and the letters of `also` percent-encoded, as GitHub's workflow commands need it."""
    for letter in "%\r\n" + also:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
