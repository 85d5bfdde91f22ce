"""A whole run as one HTML file: causes first, each with its smallest case, then every case, then the measures of layouts.

The file holds its styles and drawings and loads nothing. Colours only repeat what a word says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.core.evidence.text import bytes_text, count_text, escape_control_characters
from harness.core.judge.measures import BLOCKED, HELD, MOVED, PARAMETERS, PEAK, SECONDS
from harness.core.judge.result import Verdict
from harness.core.report.causes import cause_or_reason, checks_text, shared_causes
from harness.core.report.drawings import CaseDrawings, Section
from harness.core.report.grid import counts_text, not_applicable_text
from harness.core.report.outcome import ERROR, SKIPPED, Outcome
from harness.core.report.svg import spark_svg
from harness.core.report.text import MARKS

TOKENS_PER_SECOND = "tokens per second"
LETTERS = {**{str(verdict): letter for verdict, letter in MARKS.items()}, "XFAIL": "X", SKIPPED: "S", ERROR: "E"}
"""The letter of each verdict, where many stand in a row."""


@dataclass(frozen=True)
class PastVerdict:
    """A case's verdict in an earlier run."""

    began: str
    """When that run began."""
    commit: str
    """The commit of that run, or "unknown"."""
    verdict: str
    """The verdict."""

    @property
    def letter(self) -> str:
        """Return the letter of the verdict."""
        return LETTERS.get(self.verdict, "?")


@dataclass(frozen=True)
class ShownEvidence:
    """The stored evidence of a case that failed, as a page links and draws it."""

    evidence: str = ""
    """Relative link to its folder; empty if that is not beside the page or below, because a page moves with its folder."""
    drawn: CaseDrawings | None = None
    """Its drawings; None if they could not be made."""
    problem: str = ""
    """Why there are no drawings; empty if there are."""
    place: str = ""
    """The machine and folder where it was left."""


@dataclass(frozen=True)
class MeasureTable:
    """A table of the measures of all cases with one recipe."""

    recipe: str
    """The recipe, in words."""
    columns: tuple[str, ...]
    """The names of the measures."""
    rows: tuple[tuple[str, ...], ...]
    """Case, layout, ranks, and a text of each measure."""


@dataclass(frozen=True)
class Trend:
    """A measure of a case from night to night."""

    case: str
    """The case."""
    measure: str
    """Name of the measure."""
    values: tuple[float | None, ...]
    """A value for each night, the oldest first; None where there is none to compare."""

    @property
    def svg(self) -> str:
        """Return the drawing of the values."""
        return spark_svg(f"{self.case}: {self.measure}", self.values)

    @property
    def cells(self) -> tuple[str, str, str]:
        """Return the texts of the first value, of the last but one, and of the last. At least two values must be known."""
        known = [value for value in self.values if value is not None]
        return (
            _measure_text(self.measure, known[0]),
            _measure_text(self.measure, known[-2]),
            _measure_text(self.measure, known[-1]),
        )


@dataclass(frozen=True)
class Page:
    """All that one page shows."""

    outcomes: Sequence[Outcome]
    """The cases, in the order of the run."""
    provenance: Sequence[str]
    """When, where and with which versions they ran."""
    device: str = "cpu"
    """All devices on which they ran."""
    trainer: str = ""
    """The trainer's name, or several; empty if it was not recorded."""
    repository: str = ""
    """The name of the repository in which the commands are typed, or several; empty outside of one."""
    told: Sequence[str] = ()
    """What is lacking or doubled in the runs."""
    past: Mapping[str, Sequence[PastVerdict]] = field(default_factory=dict)
    """Case -> its earlier verdicts, the oldest first."""
    shown: Mapping[str, ShownEvidence] = field(default_factory=dict)
    """Case that failed -> its evidence."""
    since: Mapping[str, str] = field(default_factory=dict)
    """Case -> the commit that broke it."""
    trends: Sequence[Trend] = ()
    """Measures that were not the same in all nights, the largest change of the last night first."""
    title: str = ""
    """What the page is of, where it is of no cases."""
    sections: Sequence[Section] = ()
    """What is shown of that."""

    @property
    def names(self) -> str:
        """Return "trainer X, repository Y" as far as they are known; empty if neither is."""
        trainer = self.trainer and f"trainer {self.trainer}"
        return ", ".join(filter(None, (trainer, self.repository and f"repository {self.repository}")))


def is_page(text: str) -> bool:
    """Return whether a text is a page of this harness, of any version: by its head, and the first of its styles."""
    head, _, styles = text.partition("</title>\n<style>\n:root {\n")
    return head.startswith('<!doctype html>\n<html lang="en">') and styles.startswith(
        "  --paper: #ffffff; --ink: #1b1f24"
    )


def page_html(page: Page) -> str:
    """Return the text of a page's HTML file, with all values escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: escape_control_characters(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "svg": Markup,
        "why": cause_or_reason,
        "checks": checks_text,
        "kind": verdict_class,
        "ranks": rank_count_text,
    }
    judged = [outcome for outcome in page.outcomes if outcome.checks]
    return environment.get_template("page.html").render(
        page=page,
        title=page.title or (counts_text(page.outcomes, None) if page.outcomes else "no case came to its end"),
        causes=shared_causes(page.outcomes),
        tables=measure_tables(page.outcomes, page.device),
        not_applicable=not_applicable_text(judged) if judged else "",
        letters=[(letter, verdict) for verdict, letter in LETTERS.items() if verdict != Verdict.NOT_APPLICABLE],
        nothing=ShownEvidence(),
        on_gpu=page.device == "cuda",
    )


def verdict_class(verdict: str) -> str:
    """Return the CSS class of a verdict: "good", "bad", or "open" for all that was not judged."""
    return {"PASS": "good", "XFAIL": "good", "FAIL": "bad"}.get(verdict, "open")


def rank_count_text(outcome: Outcome) -> str:
    """Return how many ranks the case has, in words."""
    return count_text(outcome.ranks, "rank")


def measure_tables(outcomes: Sequence[Outcome], device: str) -> list[MeasureTable]:
    """Return a table for each recipe, with the measures of its cases that passed, ordered by ranks.

    device: "cuda" for GPUs. Only there are times and peaks shown, and the best case marked. Cases without measures are
    left out.
    """
    by_recipe: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.measures and outcome.verdict == Verdict.PASS:
            by_recipe.setdefault(outcome.recipe, []).append(outcome)
    on_gpu = device == "cuda"
    return [_measure_table(recipe, sorted(cases, key=_by_ranks), on_gpu=on_gpu) for recipe, cases in by_recipe.items()]


def _by_ranks(outcome: Outcome) -> tuple[int, str]:
    """Return a sort key: by number of ranks, then by name."""
    return outcome.ranks, outcome.case


def _measure_table(recipe: str, outcomes: Sequence[Outcome], *, on_gpu: bool) -> MeasureTable:
    """Return the table of cases with one recipe: a column for each measure that some case has.

    On GPUs the best of the cases with equally many ranks is marked.
    """
    order = (TOKENS_PER_SECOND, SECONDS, PEAK, HELD, PARAMETERS, MOVED)
    names: dict[str, None] = {}
    for outcome in outcomes:
        names |= dict.fromkeys(compared_measures(outcome, on_gpu=on_gpu))
    columns = sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))
    rows = []
    for outcome in outcomes:
        peers = [other for other in outcomes if other.ranks == outcome.ranks] if on_gpu else []
        cells = (_cell_text(name, outcome, peers, on_gpu=on_gpu) for name in columns)
        rows.append((outcome.case, outcome.layout, str(outcome.ranks), *cells))
    return MeasureTable(recipe, tuple(columns), tuple(rows))


def compared_measures(outcome: Outcome, *, on_gpu: bool) -> dict[str, float]:
    """Return the measures that are worth comparing, by name.

    They are bytes on any device; on GPUs also seconds of a step and tokens per second.
    """
    left_out = (BLOCKED,) if on_gpu else (SECONDS, PEAK, BLOCKED)
    compared = {name: value for name, value in outcome.measures.items() if not name.startswith(left_out)}
    if on_gpu and outcome.tokens and outcome.measures.get(SECONDS):
        compared[TOKENS_PER_SECOND] = outcome.tokens / outcome.measures[SECONDS]
    return compared


def _cell_text(name: str, outcome: Outcome, peers: Sequence[Outcome], *, on_gpu: bool) -> str:
    """Return the text of a case's measure. "-" if it moved nothing over that axis, "not observed" if another measure is
    missing.

    peers: the cases among which the best is marked, if they differ.
    """
    value = compared_measures(outcome, on_gpu=on_gpu).get(name)
    if value is None:
        return "-" if name.startswith(f"{MOVED} ") else "not observed"
    peer_values = []
    for peer in peers:
        peer_measures = compared_measures(peer, on_gpu=on_gpu)
        if name in peer_measures:
            peer_values.append(peer_measures[name])
    best = max(peer_values, default=0) if name == TOKENS_PER_SECOND else min(peer_values, default=0)
    if value == best and len(set(peer_values)) > 1:
        return f"{_measure_text(name, value)} ({'most' if name == TOKENS_PER_SECOND else 'least'})"
    return _measure_text(name, value)


def _measure_text(name: str, value: float) -> str:
    """Return a measure with its unit: tokens per second, seconds, or bytes, as its name says."""
    if name == TOKENS_PER_SECOND:
        return f"{value:,.0f}"
    if name == SECONDS or name.startswith(BLOCKED):
        return f"{value:.3g} s"
    return bytes_text(value) if value else "0 B"
