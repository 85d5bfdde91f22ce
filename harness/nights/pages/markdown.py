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
    told: Iterable[str] = (),
    since: Mapping[str, str] | None = None,
) -> str:
    """The third argument is what is lacking or doubled in the runs. since: by case, the commit that broke it."""
    head = summary(outcomes, None) if outcomes else "no case came to its end"
    parts = [
        f"## {_plain(head)}",
        *(f"**{_plain(line)}**" for line in told),
        *(_cause(one, since or {}) for one in causes(outcomes)),
    ]
    parts += [_all_cases(outcomes), *(_plain(line) for line in provenance)]
    return _cut("\n\n".join(parts) + "\n")


def _cause(shared: Shared, since: Mapping[str, str]) -> str:
    cases = "\n".join(_case(one, shared.text) for one in shared.cases)
    again = [
        f"    {_one_line(one.again)}" for one in shared.cases[:1] if one.again
    ]  # indented, Markdown shows it as it is
    culprits = dict.fromkeys(since[one.case] for one in shared.cases if one.case in since)
    return "\n\n".join([f"### {_plain(shared.text)}", *(f"Since {_plain(one)}" for one in culprits), cases, *again])


def _case(one: Outcome, cause: str) -> str:
    """Return a line with the checks, and with the case's own cause if its numbers are others."""
    own = why(one) if why(one) != cause else ""
    return (
        f"- {_plain(one.verdict)} {_code(one.case)} {_plain('; '.join(filter(None, (own, checks_text(one)))))}".rstrip()
    )


def _all_cases(outcomes: Sequence[Outcome]) -> str:
    """Folded away. Between the tags Markdown needs an empty line."""
    rows = ["| case | verdict | requested | checks |", "|---|---|---|---|"]
    for one in outcomes:
        cells = [_code(one.case), *map(_plain, (one.verdict, one.layout, checks_text(one) or why(one)))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"<details><summary>all {len(outcomes)} cases</summary>", "", *rows, "", "</details>"])


def _plain(text: str) -> str:
    """Return text in one line in which Markdown finds nothing to do, and GitHub neither a person, a link nor an issue.

    No address is made a link without the colon of its scheme or the dot after www; an entity hides neither from the reader.
    """
    escaped = re.sub(r"[\\`*_\[\]<>|#&@~$!+]|:(?=//)|(?<=www)\.", _entity, _one_line(text))
    return re.sub(
        r"^(\d+)?[-.)=]|^\d+(?=[.)])", lambda found: "".join(f"&#{ord(letter)};" for letter in found[0]), escaped
    )


def _entity(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"


def _code(text: str) -> str:
    """Return text as code. One with a letter that ends code or a cell is plain text."""
    line = _one_line(text)
    return _plain(line) if set(line) & set("`|") or not line else f"`{line}`"


def _one_line(text: str) -> str:
    return " ".join(visible(text).split())


def _cut(text: str) -> str:
    """Causes come first, so that what is cut is the table."""
    whole = text.encode()
    if len(whole) <= MOST:
        return text
    return whole[:MOST].decode(errors="ignore").rpartition("\n")[0] + "\n\nThe rest is cut: a summary has a mebibyte.\n"


def annotated(outcomes: Sequence[Outcome]) -> list[str]:
    """One for each cause, in the words of GitHub's workflow commands."""
    return [_annotation(shared) for shared in causes(outcomes)]


def _annotation(shared: Shared) -> str:
    names = ", ".join(one.case for one in shared.cases)
    again = f"\nagain: {shared.cases[0].again}" if shared.cases[0].again else ""
    kind = "error" if shared.broken else "warning"
    title = _escaped(names if len(names) < 80 else f"{len(shared.cases)} cases", also=":,")
    return f"::{kind} title={title}::{_escaped(f'{shared.text}{again}')}"


def _escaped(text: str, *, also: str = "") -> str:
    for letter in "%\r\n" + also:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
