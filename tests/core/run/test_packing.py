"""The order in which cases fill a machine, and the parts of several machines."""

from __future__ import annotations

import random

import pytest

from harness.core.case.case import Case, CaseError
from harness.core.case.loading import from_json
from harness.core.report.outcome import Outcome
from harness.core.run.packing import (
    CaseLoad,
    cases_of_shard,
    estimate_loads,
    makespan,
    order_for_early_answers,
    order_loads,
    remembered_seconds,
)
from harness.core.run.verdicts import RecordedRun


def case_of(name: str, ranks: int) -> Case:
    return from_json({"name": name, "why": "a test", "dims": {"dp_shard": ranks}})


def run_of(run: str, machine: str, seconds: dict[str, float], trainer: str = "llama3") -> RecordedRun:
    begins = {"trainer": trainer, "device": "cpu", "machine": machine, "cases": {}}
    return RecordedRun(run, None, begins, {name: Outcome(name, "PASS", seconds=s) for name, s in seconds.items()})  # type: ignore[arg-type]


def test_the_wide_cases_go_first_unless_a_long_narrow_one_would_then_end_alone() -> None:
    wide = [CaseLoad(f"wide_{n}", 8, 2.0) for n in range(5)]
    short = [CaseLoad(f"short_{n}", 1, 1.0) for n in range(8)]
    assert [load.name for load in order_loads([*short, *wide], 8)] == [load.name for load in (*wide, *short)]
    long, half = CaseLoad("long", 1, 60.0), [CaseLoad(f"half_{n}", 4, 10.0) for n in range(4)]
    assert order_loads([*short, *half, long], 8)[0].name == "long"


def test_the_makespan_is_that_of_cases_that_begin_in_order_when_their_slots_are_free() -> None:
    a, b, c = CaseLoad("a", 2, 3.0), CaseLoad("b", 3, 1.0), CaseLoad("c", 2, 1.0)
    assert makespan([a, b, c], 4) == 5.0  # b waits for a, c for b
    assert makespan([a, c, b], 4) == 4.0
    assert makespan([], 4) == 0.0


def test_a_matrix_of_many_sizes_leaves_few_slots_idle_until_the_last_cases() -> None:
    draw = random.Random(1)
    found = [CaseLoad(str(n), draw.choice([1, 2, 2, 2, 4, 4, 8]), draw.uniform(1.0, 12.0)) for n in range(140)]
    busy = sum(load.slot_seconds for load in found) / 8 / makespan(order_loads(found, 8), 8)
    assert busy > 0.95


def test_a_case_that_was_never_run_takes_what_the_others_take_by_processes() -> None:
    known, new = case_of("known", 2), case_of("new", 8)
    assert estimate_loads([known, new], {"known": 2.0}, slots=4) == [CaseLoad("known", 2, 2.0), CaseLoad("new", 4, 6.0)]
    assert [load.seconds for load in estimate_loads([known, new], {})] == [3.0, 9.0]


def test_durations_are_those_of_this_machine_and_trainer_and_the_last_ones() -> None:
    runs = [
        run_of("1", "here", {"a": 1.0, "b": 1.0}),
        run_of("2", "here", {"a": 2.0}),
        run_of("3", "there", {"a": 9.0, "c": 9.0}),
        run_of("4", "here", {"a": 8.0}, trainer="mine.py"),
    ]
    assert remembered_seconds(runs, trainer="llama3", device="cpu", machine="here") == {"a": 2.0, "b": 1.0, "c": 9.0}


def test_shards_are_disjoint_complete_and_balanced_wherever_they_are_found() -> None:
    cases = [case_of(f"case_{n}", 2 ** (n % 4)) for n in range(60)]
    seconds = {case.name: 1.0 + (7 * n) % 13 for n, case in enumerate(cases)}
    shards = [cases_of_shard(cases, seconds, f"{part}/3") for part in (1, 2, 3)]
    assert sorted(case.name for shard in shards for case in shard) == sorted(case.name for case in cases)
    areas = [sum(load.slot_seconds for load in estimate_loads(shard, seconds)) for shard in shards]
    assert max(areas) < 1.02 * min(areas)
    assert [case.name for case in cases_of_shard(cases[::-1], seconds, "2/3")] == [case.name for case in shards[1]][
        ::-1
    ]


@pytest.mark.parametrize("shard", ["3/2", "0/2", "2", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_cannot_be_is_named(shard: str) -> None:
    with pytest.raises(CaseError, match=f"--shard {shard}: expected I/N, the I-th of N parts"):
        cases_of_shard([case_of("a", 1)], {}, shard)


def test_small_cases_begin_and_long_references_run_beside_others() -> None:
    order = [CaseLoad(name, 8, 2.0) for name in "abcdefgh"]
    names = [load.name for load in order_for_early_answers(order, ["h", "d"], {"a", "b"})]
    assert names == ["h", "d", "a", "c", "b", "e", "f", "g"]
    assert [load.name for load in order_for_early_answers(order, [], set())] == list("abcdefgh")
    assert [load.name for load in order_for_early_answers(order[:2], [], {"a", "b"})] == ["a", "b"]
