"""The same evidence with each rank by the number of another. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

from literal import tiny_case, trial_of

from harness.diagnosis.layout import renamed
from harness.evidence.records import Exit


def test_each_rank_is_renamed_wherever_it_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    names = {0: 1, 1: 3, 2: 0, 3: 2}
    wrapper = next(iter(trial.ranks[0].structure.values()))
    structure = {"": replace(wrapper, shard_ranks=(0, 2), replicate_ranks=(1,))}
    call = replace(trial.ranks[0].collectives[0], ranks=(0, 1), peer=3)
    calls = (call, replace(call, ranks=(0, 1, 2), peer=None), replace(call, peer=9))
    tensor = trial.ranks[0].parameters[0]
    tensors = (replace(tensor, mesh=[[0, 1], [2, 3]]), replace(tensor, mesh=None))
    groups = tuple(replace(trial.ranks[0].groups[0], ranks=ranks) for ranks in ((0, 1), (1, 3)))
    first = replace(trial.ranks[0], collectives=calls, structure=structure, parameters=tensors, groups=groups)
    exits = tuple(Exit(rank, "raised", rank) for rank in range(4))
    run = replace(trial.run, ranks={**trial.ranks, 0: first}, exits=exits)
    other = renamed(replace(trial, run=run), names)
    assert [*other.ranks] == [0, 1, 2, 3] and [evidence.rank for evidence in other.ranks.values()] == [0, 1, 2, 3]
    assert [(exit.rank, exit.code) for exit in other.run.exits] == [(0, 2), (1, 0), (2, 3), (3, 1)]
    seen = other.ranks[1]
    assert seen.steps == first.steps
    assert [(one.ranks, one.peer) for one in seen.collectives] == [((1, 3), 2), ((0, 1, 3), None), ((1, 3), 9)]
    assert [one.mesh for one in seen.parameters] == [[[1, 3], [0, 2]], None]
    assert [group.ranks for group in seen.groups] == [(1, 3), (2, 3)]
    assert [(one.shard_ranks, one.replicate_ranks) for one in seen.structure.values()] == [((0, 1), (3,))]
    assert other.repeat is None and [*seen.structure] == [""]
    again = renamed(replace(trial, repeat=run), names)
    assert again.repeat == other.run and again.run == renamed(trial, names).run
