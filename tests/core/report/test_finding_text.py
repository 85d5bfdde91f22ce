"""Findings in words: a sentence for each kind of finding, and how many of them are shown."""

from __future__ import annotations

import re

import pytest

from harness.core.judge.finding import Bound, Finding, Limit, Part
from harness.core.judge.result import Result, Verdict
from harness.core.report.finding_text import finding_sentence, finding_text, findings_text

TRAFFIC = Finding.at(
    0,
    1888,
    0,
    step=1,
    phase="backward",
    kind="collective",
    name="reduce_scatter",
    axis="dp_shard",
    group=(0, 1),
    unit="bytes",
)
GRADIENT = Finding.at(
    3,
    "the reference's",
    2.5e-7,
    step=2,
    kind="parameter",
    name="norm.weight",
    quantity="gradient",
    unit="of the largest entry",
    bound=Bound(4e-9, "4 x the spread of 16 repeats of the reference"),
)
SENTENCES = {
    "bytes of a collective": (
        TRAFFIC,
        "rank 0, step 1, reduce_scatter over dp_shard [0,1] in backward: expected 1.888 kB (1888), observed nothing",
    ),
    "collectives that only wait": (
        Finding.at(0, 0, 3, kind="collective", name="barrier", quantity="without data", phase="forward", group=(0, 1)),
        "rank 0, barrier without data over [0,1] in forward: expected 0, observed 3",
    ),
    "a limit outside of passes": (
        Finding.at(
            1, Limit(most=224), 12345, step=2, kind="collective", quantity="bytes moved", phase="outside", unit="bytes"
        ),
        "rank 1, step 2, bytes moved outside forward and backward: expected at most 224 B, observed 12.35 kB (12345)",
    ),
    "a range of two bounds": (
        Finding.at(1, Limit(704, 832), 840, step=1, quantity="parameters", unit="bytes"),
        "rank 1, step 1, parameters: expected 704 B to 832 B, observed 840 B",
    ),
    "ranks of a wrapper": (
        Finding.at(
            2, (0, 1, 2, 3), (2,), kind="wrapper", name="layers.0", quantity="fsdp2 replicate_ranks", unit="ranks"
        ),
        "rank 2, fsdp2 replicate_ranks of layers.0: expected [0-3], observed [2]",
    ),
    "a slice": (
        Finding.at(
            1,
            Part(((4, 8), (0, 4)), (8, 4)),
            Part(((0, 8), (0, 4)), (8, 4)),
            kind="parameter",
            name="wq",
            quantity="slice",
        ),
        "rank 1, slice of wq: expected 1/2 of dim 0 [4:8], observed whole",
    ),
    "a distance with its bound": (
        GRADIENT,
        "rank 3, step 2, gradient of norm.weight: expected the reference's, observed off by 2.50e-07 of the largest entry"
        " (bound 4.0e-09: 4 x the spread of 16 repeats of the reference)",
    ),
    "an earlier launch, with a note": (
        Finding.at(0, 0.5, 1.0, launch="saved_1", step=1, quantity="gradient norm", note="ratio 2"),
        "saved_1, rank 0, step 1, gradient norm: expected 0.5, observed 1 (ratio 2)",
    ),
    "samples of no rank": (
        Finding(step=2, quantity="samples", expected=(0, 1, 2), observed=()),
        "step 2, samples: expected [0, 1, 2], observed none",
    ),
    "a setting of several values": (
        Finding.at(1, ("off",), ("off", "on"), step=3, kind="setting", name="cudnn.benchmark", note="as elsewhere"),
        "rank 1, step 3, cudnn.benchmark: expected off, observed off and on (as elsewhere)",
    ),
    "a switch": (
        Finding.at(0, False, True, kind="feature", quantity="compiled"),
        "rank 0, compiled: expected no, observed yes",
    ),
    "a unit": (
        Finding(ranks=(1, 3), kind="unit", name="wq", expected=9, observed=4, unit="parameters"),
        "ranks [1,3], FSDP unit of wq: expected 9 parameters, observed 4 parameters",
    ),
}


@pytest.mark.parametrize(("finding", "text"), SENTENCES.values(), ids=SENTENCES)
def test_each_kind_of_finding_is_one_sentence_that_says_no_word_twice_in_a_row(finding: Finding, text: str) -> None:
    assert finding_sentence(finding) == text
    assert not re.search(r"\b([a-z]+) \1\b", text)


def test_lines_that_a_rank_left_are_indented_below_the_first() -> None:
    died = Finding.at(1, "exit code 0", "died by SIGKILL\ntrain.py:7 in step\nmain.py:3 in main", kind="process")
    assert finding_text(died, "  ").splitlines() == [
        "  rank 1: expected exit code 0, observed died by SIGKILL",
        "    train.py:7 in step",
        "    main.py:3 in main",
    ]


@pytest.mark.parametrize(("count", "last"), [(8, ""), (9, "and 1 more"), (30, "and 22 more")])
def test_the_first_eight_are_shown_and_the_others_counted(count: int, last: str) -> None:
    found = tuple(Finding.at(rank, 0, 1, quantity="anything") for rank in range(count))
    shown = findings_text(Result("loss", Verdict.FAIL, findings=found), "")
    assert [line.split(",")[0] for line in shown[:8]] == [f"rank {rank}" for rank in range(8)]
    assert shown[8:] == [last] * bool(last)
