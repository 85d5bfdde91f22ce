"""On a terminal verdicts have a colour and a run of one case a line; elsewhere there is neither."""

from __future__ import annotations

import io
import threading
import time

import pytest

from harness.core.report import progress
from harness.core.report.output import print_lines
from harness.core.report.progress import CLEAR_LINE, show_stages

TEXT = "FAIL hsdp_2x8\n  loss  PASS  PASSAGE x-FAIL\n  grid  UNKNOWN"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(stream: io.StringIO) -> str:
    print_lines(TEXT, to=stream)
    return stream.getvalue().removesuffix("\n")


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(progress, "DRAWING_INTERVAL", 0.01)


def test_verdicts_alone_have_a_colour() -> None:
    text = said(Terminal())
    coloured = {part.partition("\033[0m")[0] for part in text.split("\033[")[1:] if not part.startswith("0m")}
    assert coloured == {"31mFAIL", "32mPASS", "33mUNKNOWN"}
    assert text.count("\033[0m") == 3


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colour_gets_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert said(Terminal()) == TEXT


def test_what_is_piped_has_no_colour_and_no_line() -> None:
    stream = io.StringIO()
    with show_stages("pair", stream) as stage:
        stage("2 ranks")
        time.sleep(0.05)
    assert (stream.getvalue(), said(stream)) == ("", TEXT)


def test_a_line_shows_the_stage_and_goes_also_when_the_run_raises() -> None:
    stream, before = Terminal(), threading.active_count()
    with pytest.raises(KeyboardInterrupt), show_stages("pair", stream) as stage:
        stage("2 ranks")
        until = time.monotonic() + 10
        while "2 ranks" not in stream.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt
    text = stream.getvalue()
    assert "\rpair  0 s  2 ranks" in text and text.endswith(CLEAR_LINE)
    assert threading.active_count() == before
