"""A whole run as one HTML file: causes first, each failure with its drawings, then every case, then what each layout took.

Nothing is loaded from anywhere: styles and drawings are in the file. Colours only repeat what a word says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.evidence.text import bytes_text, visible
from harness.judge.measures import HELD, MOVED, PARAMETERS, PEAK, SECONDS
from harness.judge.result import Verdict
from harness.report.causes import causes, checks_text, why
from harness.report.drawings import Drawn
from harness.report.grid import not_applicable, summary
from harness.report.outcome import ERROR, SKIPPED, Outcome
from harness.report.text import MARKS

TOKENS = "tokens per second"
LETTERS = {**{str(verdict): letter for verdict, letter in MARKS.items()}, "XFAIL": "X", SKIPPED: "S", ERROR: "E"}
"""Of verdicts, where many stand in a row."""


@dataclass(frozen=True)
class Past:
    """A verdict that a case had in an earlier run."""

    began: str
    commit: str
    verdict: str

    @property
    def letter(self) -> str:
        return LETTERS.get(self.verdict, "?")


@dataclass(frozen=True)
class Shown:
    """evidence: where it lies, as a link; empty if it is not at the page or below it, for a page is moved with its folder.
    place: where it lies, or was left, in words. problem: why nothing is drawn of it."""

    evidence: str = ""
    drawn: Drawn | None = None
    problem: str = ""
    place: str = ""


@dataclass(frozen=True)
class Measured:
    """A table of cases with one recipe. columns: names of measures. rows: case, layout, ranks, and a text of each measure."""

    recipe: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """past: by case, the oldest first. shown: by case, of those that failed. told: what is lacking or doubled in the runs.
    since: by case, the commit that broke it."""

    outcomes: Sequence[Outcome]
    provenance: Sequence[str]
    device: str = "cpu"
    told: Sequence[str] = ()
    past: Mapping[str, Sequence[Past]] = field(default_factory=dict)
    shown: Mapping[str, Shown] = field(default_factory=dict)
    since: Mapping[str, str] = field(default_factory=dict)


def html(page: Page) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"svg": Markup, "why": why, "checks": checks_text, "kind": kind}
    judged = [outcome for outcome in page.outcomes if outcome.checks]
    return environment.get_template("page.html").render(
        page=page,
        title=summary(page.outcomes, None) if page.outcomes else "no case came to its end",
        causes=causes(page.outcomes),
        tables=measured(page.outcomes, page.device),
        not_applicable=not_applicable(judged) if judged else "",
        letters=[(letter, verdict) for verdict, letter in LETTERS.items() if verdict != Verdict.NOT_APPLICABLE],
        nothing=Shown(),
        on_gpu=page.device == "cuda",
    )


def kind(verdict: str) -> str:
    """The class of a verdict, which a colour repeats."""
    return {"PASS": "good", "XFAIL": "good", "FAIL": "bad"}.get(verdict, "open")


def measured(outcomes: Sequence[Outcome], device: str) -> list[Measured]:
    """Of cases that passed, by recipe; the same ranks stand together. Times and peaks are shown, and the best is marked, where
    they are a GPU's."""
    by_recipe: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.measures and outcome.verdict == Verdict.PASS:
            by_recipe.setdefault(outcome.recipe, []).append(outcome)
    on_gpu = device == "cuda"
    return [_measured(recipe, sorted(some, key=_by_ranks), on_gpu=on_gpu) for recipe, some in by_recipe.items()]


def _by_ranks(outcome: Outcome) -> tuple[int, str]:
    return outcome.ranks, outcome.case


def _measured(recipe: str, outcomes: Sequence[Outcome], *, on_gpu: bool) -> Measured:
    order = (TOKENS, SECONDS, PEAK, HELD, PARAMETERS, MOVED)
    names = dict.fromkeys(name for outcome in outcomes for name in measures(outcome, on_gpu=on_gpu))
    columns = sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))
    rows = []
    for outcome in outcomes:
        peers = [other for other in outcomes if other.ranks == outcome.ranks] if on_gpu else []
        cells = (_cell(name, outcome, peers, on_gpu=on_gpu) for name in columns)
        rows.append((outcome.case, outcome.layout, str(outcome.ranks), *cells))
    return Measured(recipe, tuple(columns), tuple(rows))


def measures(outcome: Outcome, *, on_gpu: bool) -> dict[str, float]:
    """What is worth comparing: bytes on any device; of GPUs also time, and what it makes of the tokens of a step."""
    found = {name: value for name, value in outcome.measures.items() if on_gpu or name not in (SECONDS, PEAK)}
    if on_gpu and outcome.tokens and outcome.measures.get(SECONDS):
        found[TOKENS] = outcome.tokens / outcome.measures[SECONDS]
    return found


def _cell(name: str, outcome: Outcome, peers: Sequence[Outcome], *, on_gpu: bool) -> str:
    """peers: those among which the best is marked."""
    value = measures(outcome, on_gpu=on_gpu).get(name)
    if value is None:
        return "-" if name.startswith(f"{MOVED} ") else "not seen"
    others = [found[name] for peer in peers if name in (found := measures(peer, on_gpu=on_gpu))]
    best, word = (max(others, default=0), "most") if name == TOKENS else (min(others, default=0), "least")
    return f"{_amount(name, value)} ({word})" if value == best and len(set(others)) > 1 else _amount(name, value)


def _amount(name: str, value: float) -> str:
    if name == TOKENS:
        return f"{value:,.0f}"
    return f"{value:.3g} s" if name == SECONDS else bytes_text(value) if value else "0 B"
