"""What others wrote is shown, and is never obeyed by a terminal or a browser."""

from __future__ import annotations

import io

from harness.core.evidence.text import escape_control_characters
from harness.core.report.output import print_lines
from harness.core.report.page import Page, page_html
from harness.core.report.progress import Progress

ORDERS = "\x1b]0;title\x07\x1b[2Jx\r\x9b31m\u202eabc\u2066\x7f\x00"


def obeyed(text: str) -> list[str]:
    return [letter for letter in text if not letter.isprintable() and letter not in "\n\t"]


def test_letters_stay_and_orders_become_their_escapes() -> None:
    assert escape_control_characters("größer · 数\n\tnext") == "größer · 数\n\tnext"
    assert escape_control_characters("a\x1b[31mb\r\u202e\ud800") == "a\\x1b[31mb\\r\\u202e\\ud800"
    assert obeyed(escape_control_characters(ORDERS)) == []


def test_no_order_reaches_a_terminal() -> None:
    stream = io.StringIO()
    print_lines(ORDERS, "second", to=stream)
    assert obeyed(stream.getvalue()) == [] and stream.getvalue().endswith("\nsecond\n")


def test_a_case_with_orders_in_its_name_is_drawn_with_their_escapes() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress({ORDERS: 1.0}, stream)
    progress.note_start(ORDERS)
    progress.draw()
    assert stream.getvalue()[0] == "\r" and obeyed(stream.getvalue()[1:]) == []


def test_no_order_reaches_a_page() -> None:
    assert obeyed(page_html(Page([], [ORDERS], told=[ORDERS]))) == []
