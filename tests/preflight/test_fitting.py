"""Which layouts fit: memory and time by arithmetic, no rank is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.cli import main
from harness.plan.figures.step_time import COMPUTES, MACHINES, bubble_of, step_time
from harness.plan.make_plan import make_plan
from harness.preflight.fitting import Wanted, fitting, published
from harness.reference.config import PRESETS
from harness.spec.case import CaseError
from harness.spec.traits import USUAL

SMALL = Wanted(PRESETS["8B"], world=16, memory=80e9, nodes_of=8)


def test_those_that_fit_are_sorted_by_time_and_no_larger_than_a_gpu() -> None:
    found, looked = fitting(SMALL)
    assert 0 < len(found) <= looked
    assert [fit.time.seconds for fit in found] == sorted(fit.time.seconds for fit in found)
    assert all(fit.most.reserved <= 80e9 for fit in found)
    assert all(fit.case.dims.world_size == 16 and fit.case.training.global_batch == 16 for fit in found)
    assert all(0 < fit.time.utilization < COMPUTES for fit in found)
    assert {fit.case.dims.tp for fit in found} <= {1, 2, 4, 8}


@pytest.mark.parametrize("world", [48, 64])
def test_every_layout_has_all_ranks(world: int) -> None:
    found, _ = fitting(replace(SMALL, world=world))
    assert {fit.case.dims.world_size for fit in found} == {world}
    assert (2 in {fit.case.dims.dp_replicate for fit in found}) is (world == 64)


def test_less_memory_leaves_fewer_and_none_is_said() -> None:
    most, _ = fitting(SMALL)
    fewer, _ = fitting(replace(SMALL, memory=20e9))
    kept = {(fit.case.dims, fit.case.features) for fit in fewer}
    assert len(fewer) < len(most)
    assert kept < {(fit.case.dims, fit.case.features) for fit in most}
    assert fitting(replace(SMALL, memory=1e9))[0] == []


def test_a_batch_that_nothing_divides_is_refused() -> None:
    with pytest.raises(CaseError, match="--batch"):
        fitting(replace(SMALL, world=17, batch=3))


def test_an_estimate_is_made_of_what_its_parts_say() -> None:
    found, _ = fitting(SMALL)
    case = next(fit.case for fit in found if fit.case.dims.pp == 2 and fit.case.stages_per_rank == 1)
    plan, machine = make_plan(case, USUAL), MACHINES["H100"]
    bubble = bubble_of(case)
    assert bubble == pytest.approx(1 / case.microbatches)  # 1F1B's (pp - 1) / microbatches
    time = step_time(case, plan, 0, machine, 8, bubble)
    twice = step_time(case, plan, 0, replace(machine, peak=machine.peak / 2), 8, bubble)
    assert (twice.computing, twice.bubble, twice.waited) == pytest.approx(
        (2 * time.computing, 2 * time.bubble, time.waited)
    )
    assert time.bubble == pytest.approx(bubble * time.computing)


def test_a_published_layout_is_named() -> None:
    found, _ = fitting(Wanted(PRESETS["8B"], world=512, memory=80e9, nodes_of=8, batch=128))
    assert set(published(found).values()) <= {"llama3_8b_512"}
    found, _ = fitting(Wanted(PRESETS["70B"], world=512, memory=80e9, nodes_of=8, batch=128))
    (place,) = published(found)
    assert (found[place].case.dims.pp, found[place].case.dims.dp_shard, found[place].case.dims.tp) == (8, 8, 8)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--gpu-memory", "80GB", "--nodes-of", "4"], 0),
        (["--gpu-memory", "1"], 2),
        (["--gpu-memory", "much"], 2),
        (["--schedule", "1F1B"], 2),
        (["--json"], 2),
    ],
)
def test_the_command_lists_or_says_why_not(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "8B", "--world", "8", *words]) == code
    told = capsys.readouterr()
    assert ("layouts fit" in told.out) is (words[0] == "--gpu-memory" and words[1] != "much")


def test_a_list_needs_no_layout() -> None:
    assert main(["plan", "--dims", "tp=2", "--gpu-memory", "80"]) == 2
