"""A run as CI shows it: Markdown for the summary of a job, and annotations; both begin with the causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from harness.core.evidence.text import visible
from harness.core.report.causes import Shared, causes, checks_text, why
from harness.core.report.grid import summary
from harness.core.report.outcome import Outcome

MOST = 900_000  # bytes; a summary of more than a mebibyte is not shown at all


def markdown(
    outcomes: Sequence[Outcome],
    provenance: Iterable[str],
    notes: Iterable[str] = (),
    since: Mapping[str, str] | None = None,
) -> str:
    """Return the summary of a job.

    notes: what is lacking or doubled in the runs. since: by case, the commit that broke it.
    """
    heading = summary(outcomes, None) if outcomes else "no case came to its end"
    parts = [
        f"## {_plain(heading)}",
        *(f"**{_plain(line)}**" for line in notes),
        *(_cause(shared, since or {}) for shared in causes(outcomes)),
    ]
    parts += [_all_cases(outcomes), *(_plain(line) for line in provenance)]
    return _cut("\n\n".join(parts) + "\n")


def _cause(shared: Shared, since: Mapping[str, str]) -> str:
    """Return the section of one cause: since which commit, its cases, and the command that runs the first one again."""
    sections = [f"### {_plain(shared.text)}"]
    culprits = dict.fromkeys(since[outcome.case] for outcome in shared.cases if outcome.case in since)
    sections += [f"Since {_plain(culprit)}" for culprit in culprits]
    sections.append("\n".join(_case(outcome, shared.text) for outcome in shared.cases))
    if shared.cases and shared.cases[0].again:
        sections.append(f"    {_one_line(shared.cases[0].again)}")  # indented, Markdown shows it as it is
    return "\n\n".join(sections)


def _case(outcome: Outcome, cause: str) -> str:
    """Return a line with the checks, and with the case's own cause if its numbers are others."""
    own_cause = why(outcome) if why(outcome) != cause else ""
    details = "; ".join(filter(None, (own_cause, checks_text(outcome))))
    return f"- {_plain(outcome.verdict)} {_code(outcome.case)} {_plain(details)}".rstrip()


def _all_cases(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all cases, folded away.

    Between the tags Markdown needs an empty line.
    """
    rows = ["| case | verdict | requested | checks |", "|---|---|---|---|"]
    for outcome in outcomes:
        details = checks_text(outcome) or why(outcome)
        cells = [_code(outcome.case), *map(_plain, (outcome.verdict, outcome.layout, details))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"<details><summary>all {len(outcomes)} cases</summary>", "", *rows, "", "</details>"])


def _plain(text: str) -> str:
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


def _code(text: str) -> str:
    """Return text as code. One with a letter that ends code or a cell is plain text."""
    line = _one_line(text)
    return _plain(line) if set(line) & set("`|") or not line else f"`{line}`"


def _one_line(text: str) -> str:
    """Return text in one line."""
    return " ".join(visible(text).split())


def _cut(text: str) -> str:
    """Return text without what is more than a summary may have. Causes come first, so that what is cut is the table."""
    encoded = text.encode()
    if len(encoded) <= MOST:
        return text
    return (
        encoded[:MOST].decode(errors="ignore").rpartition("\n")[0] + "\n\nThe rest is cut: a summary has a mebibyte.\n"
    )


def annotated(outcomes: Sequence[Outcome]) -> list[str]:
    """Return an annotation for each cause, in the words of GitHub's workflow commands."""
    return [_annotation(shared) for shared in causes(outcomes)]


def _annotation(shared: Shared) -> str:
    """Return the annotation of one cause: an error if a case is broken, else a warning."""
    names = ", ".join(outcome.case for outcome in shared.cases)
    rerun_text = f"\nagain: {shared.cases[0].again}" if shared.cases[0].again else ""
    kind = "error" if shared.broken else "warning"
    title = _escaped(names if len(names) < 80 else f"{len(shared.cases)} cases", also=":,")
    return f"::{kind} title={title}::{_escaped(f'{shared.text}{rerun_text}')}"


def _escaped(text: str, *, also: str = "") -> str:
    """Return text as GitHub's workflow commands need it. also: more letters to escape."""
    for letter in "%\r\n" + also:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
