"""Which layouts fit: memory and time by arithmetic, no rank is started."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from json_documents import valid

from harness.clusters import fitting as planner
from harness.clusters.fitting import FittingRequest
from harness.core.case.case import CaseError
from harness.core.case.traits import USUAL_TRAITS
from harness.core.cli import main
from harness.core.plan.figures.gpus import MACHINES
from harness.core.plan.figures.step_time import COMPUTE_EFFICIENCY, bubble_ratio_of, step_time
from harness.core.plan.make_plan import make_plan
from harness.reference.config import PRESETS

fitting = functools.cache(planner.find_fitting_layouts)
"""A search takes seconds, and several tests look at the same one."""
SMALL = FittingRequest(PRESETS["8B"], world=16, memory=80e9, gpus_per_node=8)


def test_those_that_fit_are_sorted_by_time_and_no_larger_than_a_gpu() -> None:
    found = fitting(SMALL).layouts
    assert 0 < len(found) <= fitting(SMALL).examined_count
    assert [fit.time.seconds for fit in found] == sorted(fit.time.seconds for fit in found)
    assert all(fit.peak_rank.reserved <= 80e9 for fit in found)
    assert all(fit.case.dims.world_size == 16 and fit.case.training.global_batch == 16 for fit in found)
    assert all(0 < fit.time.utilization < COMPUTE_EFFICIENCY for fit in found)
    assert {fit.case.dims.tp for fit in found} <= {1, 2, 4, 8}


@pytest.mark.slow("every layout of a world is planned; the first one's are counted in the same way", after=1)
@pytest.mark.parametrize("world", [48, 64])
def test_every_layout_has_all_ranks(world: int) -> None:
    found = fitting(replace(SMALL, world=world)).layouts
    assert {fit.case.dims.world_size for fit in found} == {world}
    assert (2 in {fit.case.dims.dp_replicate for fit in found}) is (world == 64)


def test_less_memory_leaves_fewer_and_none_is_said() -> None:
    most = fitting(SMALL).layouts
    fewer = fitting(replace(SMALL, memory=20e9)).layouts
    kept = {(fit.case.dims, fit.case.features) for fit in fewer}
    assert len(fewer) < len(most)
    assert kept < {(fit.case.dims, fit.case.features) for fit in most}
    assert fitting(replace(SMALL, memory=1e9)).layouts == ()


def test_a_batch_of_any_number_of_microbatches_has_layouts() -> None:
    found = fitting(FittingRequest(PRESETS["1B"], world=2, memory=80e9, gpus_per_node=8, batch=1024)).layouts
    assert max(fit.case.features.accumulation for fit in found) == 1024
    assert max(fit.case.microbatches for fit in found if fit.case.dims.pp == 2) == 1024


def test_a_batch_that_nothing_divides_is_refused() -> None:
    with pytest.raises(CaseError, match="--batch"):
        fitting(replace(SMALL, world=17, batch=3))


def test_an_estimate_is_made_of_what_its_parts_say() -> None:
    found = fitting(SMALL).layouts
    case = next(fit.case for fit in found if fit.case.dims.pp == 2 and fit.case.stages_per_rank == 1)
    plan, machine = make_plan(case, USUAL_TRAITS), MACHINES["H100"]
    bubble = bubble_ratio_of(case)
    assert bubble == pytest.approx(1 / case.microbatches)  # 1F1B's (pp - 1) / microbatches
    time = step_time(case, plan, 0, machine, 8, bubble)
    twice = step_time(
        case, plan, 0, replace(machine, operations_per_second=machine.operations_per_second / 2), 8, bubble
    )
    assert (twice.computing, twice.bubble, twice.waited) == pytest.approx(
        (2 * time.computing, 2 * time.bubble, time.waited)
    )
    assert time.bubble == pytest.approx(bubble * time.computing)


def test_published_layouts_stand_in_the_list_as_they_are_or_it_says_why_not() -> None:
    asked = FittingRequest(PRESETS["8B"], world=8, memory=96e9, gpus_per_node=8, batch=16)
    fits = fitting(asked)
    ((place, name),) = fits.published.items()
    mine = fits.layouts[place].case
    assert (name, mine.dims.dp_shard, mine.features.activation_checkpointing) == ("torchtitan_8b_8", 8, "op")
    assert len({(fit.case.dims, fit.case.features) for fit in fits.layouts}) == len(fits.layouts)
    assert set(fits.unlisted) == {"torchtitan_8b_8_cp8", "megatron_8b_8", "nemo_8b_8"}
    assert "--batch 128" in fits.unlisted["megatron_8b_8"]
    fits = fitting(replace(asked, batch=128, memory=80e9))
    assert (dict(fits.published), "GB" in fits.unlisted["megatron_8b_8"]) == ({}, True)


@pytest.mark.slow("512 ranks; test_published_layouts_stand_in_the_list_as_they_are_or_it_says_why_not has fewer")
def test_a_published_layout_with_its_own_schedule_is_at_its_own_place() -> None:
    fits = fitting(FittingRequest(PRESETS["405B"], world=512, memory=96e9, gpus_per_node=8, batch=256))
    names = {name: fits.layouts[place].case.stages_per_rank for place, name in fits.published.items()}
    assert names == {"torchtitan_405b_512": 1, "torchtitan_405b_512_interleaved": 2}
    (best,) = set(fits.degrees.values())
    assert fits.layouts[best].case.dims == fits.layouts[min(fits.published)].case.dims
    assert best < min(fits.published)


def test_float8_halves_linear_layers_alone_and_changes_nothing_where_a_gpu_has_none() -> None:
    fit = fitting(SMALL).layouts[0]
    time, eight = fit.time, fit.time.in_float8
    assert time.computing / 2 < eight.computing < time.computing
    assert (eight.waited, eight.data) == (time.waited, time.data)
    assert eight.computing == pytest.approx(time.computing - time.spared)
    old = fitting(replace(SMALL, machine=MACHINES["A100"])).layouts[0].time
    assert old.in_float8.seconds == pytest.approx(old.seconds)


def test_the_list_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "8B", "--world", "8", "--batch", "16", "--gpu-memory", "96", "--json"]) == 0
    document = valid(capsys.readouterr().out, "layouts")
    seconds = [one["seconds"] for one in document["layouts"]]
    assert seconds == sorted(seconds) and document["memory"] == 96e9
    assert all(sum(one["parts"].values()) == pytest.approx(one["seconds"]) for one in document["layouts"])
    assert [one["published"] for one in document["layouts"] if "published" in one] == ["torchtitan_8b_8"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--gpu-memory", "80GB", "--nodes-of", "4"], 0),
        (["--gpu-memory", "1"], 2),
        (["--gpu-memory", "much"], 2),
        (["--schedule", "1F1B"], 2),
    ],
)
def test_the_command_lists_or_says_why_not(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "8B", "--world", "8", *words]) == code
    told = capsys.readouterr()
    assert ("layouts fit" in told.out) is (words[0] == "--gpu-memory" and words[1] != "much")


def test_a_list_needs_no_layout() -> None:
    assert main(["plan", "--dims", "tp=2", "--gpu-memory", "80"]) == 2
