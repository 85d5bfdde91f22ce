"""A trace read in pieces; the ranks of its groups; the step and phase of each collective."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from literal_traces import Rank, ddp_step

from harness.recording.traces import stream
from harness.recording.traces.job import job_of
from harness.recording.traces.kineto import load_trace, operator_of

WORLD = {"world": range(2)}


@pytest.mark.parametrize("piece", [1, 7, 300, 4_000_000])
@pytest.mark.parametrize("indent", [None, 1])
def test_pieces_of_any_size_have_the_same_events(
    piece: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PIECE", piece)
    events = [{"name": "}, {é", "args": {"list": [{"a": 1}, {"b": [n]}]}} for n in range(20)]
    document: dict[str, Any] = {"before": {"x": [1, 2]}, "traceEvents": events, "devices": [{}, {"n": 1}], "last": 12}
    around: dict[str, Any] = {}
    text = json.dumps(document, indent=indent).encode()
    found = [event for batch in stream.event_batches(io.BytesIO(text), around) for event in batch]
    assert (found, around) == (events, {name: document[name] for name in ("before", "devices", "last")})


@pytest.mark.parametrize("text", ["", "{", '{"traceEvents": [', '{"traceEvents": [{}', '{"traceEvents": [{}, ]', "[{}"])
def test_a_text_that_ends_too_early_is_no_trace(text: str) -> None:
    with pytest.raises(stream.NotJson):
        list(stream.event_batches(io.BytesIO(text.encode()), {}))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        *(
            ("_allgather_base", "all_gather"),
            ("allreduce_coalesced", "all_reduce"),
            ("_reduce_scatter_base", "reduce_scatter"),
        ),
        *(("all_to_allv", "all_to_all"), ("reduce", "reduce"), ("wait", ""), ("nccl:recv 0<-1", "recv")),
    ],
)
def test_names_of_collectives(name: str, op: str) -> None:
    assert operator_of(name) == op


def test_ranks_that_torch_abbreviates_follow_from_the_groups_name_or_its_stride(tmp_path: Path) -> None:
    rank = Rank(0, 128, {"wide": range(0, 128, 2)})
    rank.whole_step(lambda rank: rank.collective(("allreduce", "wide", 8, 8)))
    (call,) = load_trace(rank.save(tmp_path)).calls
    assert (call.collective.ranks, call.collective.bytes, call.collective.dtype) == (
        tuple(range(0, 128, 2)),
        32,
        "float32",
    )
    del rank.info["pg_config"]
    assert load_trace(rank.save(tmp_path)).calls == []
    for event in rank.events:
        event["args"] |= {"Global rank start": 0, "Global rank stride": 2}
    (call,) = load_trace(rank.save(tmp_path)).calls
    assert call.collective.ranks == tuple(range(0, 128, 2))


def phases(rank: Rank, folder: Path) -> list[tuple[int, str]]:
    job = job_of([load_trace(rank.save(folder))])
    return [(call.collective.step, call.collective.phase) for call in job.ranks[0].calls]


def test_what_lies_between_passes_follows_from_their_order(tmp_path: Path) -> None:
    one = ("allreduce", "world", 4, 4)

    def did(rank: Rank) -> None:
        for _ in range(2):  # two microbatches
            rank.collective(one)
            rank.forward()
            rank.collective(one)
            rank.backward(one)
        rank.collective(one)
        rank.optimizer()
        rank.collective(one)

    rank = Rank(0, 2, WORLD)
    rank.whole_step(did)
    microbatch = [(1, "forward"), (1, "forward"), (1, "backward")]
    assert phases(rank, tmp_path) == [*microbatch, *microbatch, (1, "other"), (1, "other")]


def test_a_step_lasts_until_an_optimizer_has_stepped(tmp_path: Path) -> None:
    def accumulates(rank: Rank) -> None:
        rank.forward()
        rank.backward()

    rank = Rank(0, 2, WORLD)
    for did in (accumulates, ddp_step, accumulates, ddp_step, accumulates):
        rank.whole_step(did)
    job = job_of([load_trace(rank.save(tmp_path))])
    assert (job.step_numbers, [call.collective.step for call in job.ranks[0].calls]) == ((2, 4), [1, 2])
