"""Checks of which digests tell enough."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from checked import where
from literal_recording import GATHER, SUM, hsdp, judged_of, summary, with_changes

from harness.core.case.dims import ParallelDims
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Outside, Use
from harness.core.judge.result import Result, Verdict

FOUR = ParallelDims(dp_shard=4)
CHECKS = ("exchange", "replica_agreement", "samples", "finite")
exchange, replica_agreement, samples, finite = (partial(judged_of, name) for name in CHECKS)


def of_all(ranks: list[Summary], dims: ParallelDims) -> list[Result]:
    return [judged_of(name, ranks, dims) for name in CHECKS]


def test_data_parallel_ranks_that_are_fed_the_same_in_every_step_are_named() -> None:
    fed = [summary(rank, fed={1: rank, 2: 7}) for rank in range(3)] + [summary(3, fed={1: 0, 2: 7})]
    (finding,) = samples(fed, FOUR).findings
    assert finding.ranks == (0, 3)


def fed_in_part(*inputs: Sequence[tuple[int, ...]], tokens: bool = False) -> Verdict:
    """inputs: by rank, of each step what a forward pass was called with, the samples first."""
    ranks = []
    for rank, steps in enumerate(inputs):
        told = {step: one for step, one in enumerate(steps, start=1)}
        first = {step: one[0] for step, one in told.items()}
        ranks.append(summary(rank, len(inputs), inputs=told, fed=first, tokens=first if tokens else {}))
    return samples(ranks, ParallelDims(dp_replicate=len(inputs))).verdict


def test_where_noise_of_a_ranks_own_may_hide_equal_samples_nobody_knows() -> None:
    """As a diffusion model is called: with noise, times and labels."""
    assert fed_in_part([(1, 5, 8), (2, 6, 9)], [(3, 7, 8), (4, 5, 9)]) == Verdict.UNKNOWN
    assert fed_in_part([(1, 5, 8), (2, 6, 9)], [(3, 7, 1), (4, 5, 9)]) == Verdict.PASS
    assert fed_in_part([(1, 5, 8), (2, 6, 9)], [(1, 7, 3), (2, 5, 4)]) == Verdict.UNKNOWN
    assert fed_in_part([(1, 5, 8), (2, 6, 9)], [(1, 5, 8), (2, 6, 9)]) == Verdict.FAIL


def test_what_is_the_same_in_every_step_or_beside_tokens_that_differ_is_no_sample() -> None:
    assert fed_in_part([(1, 8), (2, 8)], [(3, 8), (4, 8)]) == Verdict.PASS
    assert fed_in_part([(1, 8), (2, 9)], [(3, 8), (4, 9)], tokens=True) == Verdict.PASS


def test_where_loaders_draw_the_same_indices_augmentation_may_hide_equal_samples() -> None:
    def drawing(*drawn: tuple[int, ...], **told: Any) -> Verdict:
        ranks = [summary(rank, len(drawn), fed={1: rank}, drawn=one, **told) for rank, one in enumerate(drawn)]
        return samples(ranks, ParallelDims(dp_replicate=len(drawn))).verdict

    assert drawing((5, 6), (5, 6)) == Verdict.UNKNOWN
    assert drawing((5, 6), (7, 8), (5, 6)) == Verdict.UNKNOWN
    assert drawing((5, 6), (5, 7)) == Verdict.PASS
    assert drawing((), ()) == Verdict.PASS
    assert drawing((5, 6), (5, 6), tokens={1: 3}) == Verdict.PASS


def test_ranks_that_shuffle_the_same_samples_each_by_itself_are_fed_some_of_them_alike_in_every_step() -> None:
    def shuffling(*told: dict[int, tuple[int, ...]]) -> Verdict:
        ranks = [summary(rank, len(told), fed={1: rank}, samples=one) for rank, one in enumerate(told)]
        return samples(ranks, ParallelDims(dp_replicate=len(told))).verdict

    first, second = {1: tuple(range(16)), 2: tuple(range(16, 32))}, {1: tuple(range(8, 24)), 2: tuple(range(12, 28))}
    assert shuffling(first, second) == shuffling(first, {3: (), 1: (40,)}, second) == Verdict.UNKNOWN
    assert shuffling(first, {1: second[1], 2: tuple(range(32, 48))}) == Verdict.PASS  # an epoch that was filled up
    assert shuffling(first, {1: tuple(range(13, 29)), 2: second[2]}) == Verdict.UNKNOWN  # 3 and 12 of them
    assert shuffling(first, {1: tuple(range(13, 29)), 2: tuple(range(12, 20))}) == Verdict.PASS  # 3 and 4, by chance
    assert shuffling({1: tuple(range(32))}, {1: tuple(range(28, 60))}) == Verdict.UNKNOWN  # larger ones may be equal


def test_the_same_batch_once_is_no_finding() -> None:
    assert samples([summary(rank, fed={1: 7, 2: rank}) for rank in range(4)], FOUR).verdict == Verdict.PASS


def test_tensor_parallel_peers_may_be_fed_the_same() -> None:
    ranks = [summary(rank, fed={1: rank // 2}) for rank in range(4)]
    assert samples(ranks, ParallelDims(dp_shard=2, tp=2)).verdict == Verdict.PASS
    assert samples(ranks, FOUR).verdict == Verdict.FAIL


def test_a_tp_rank_that_is_fed_other_tokens_than_its_peer_is_named() -> None:
    dims = ParallelDims(dp_shard=2, tp=2)
    right = [summary(rank, fed={1: rank // 2}, tokens={1: rank // 2, 2: 5 + rank // 2}) for rank in range(4)]
    wrong = [*right[:3], summary(3, fed={1: 3}, tokens={1: 1, 2: 9})]
    assert samples(right, dims).verdict == Verdict.PASS
    (finding,) = samples(wrong, dims).findings
    assert (finding.ranks, finding.step, finding.quantity) == ((3,), 2, "tokens")
    alone = ParallelDims(tp=4)
    assert samples([summary(rank, tokens={1: 7}) for rank in range(4)], alone).verdict == Verdict.PASS
    assert samples([summary(rank, tokens={1: rank}) for rank in range(4)], alone).verdict == Verdict.FAIL
    assert samples([summary(rank, tokens={1: rank}) for rank in range(4)], ParallelDims(cp=4)).findings == ()


def test_activations_may_be_cut_over_tp_ranks() -> None:
    cut = [summary(rank, fed={1: rank}) for rank in range(4)]
    assert samples(cut, ParallelDims(dp_shard=2, tp=2)).verdict == Verdict.PASS
    assert samples(cut, ParallelDims(tp=4)).verdict == Verdict.NOT_APPLICABLE


def test_without_a_tensor_that_was_fed_nobody_knows() -> None:
    assert samples([summary(rank) for rank in range(4)], FOUR).verdict == Verdict.UNKNOWN


def test_before_a_step_has_ended_inputs_are_not_said_to_be_absent() -> None:
    begun, ended = ([summary(rank, steps_seen=steps) for rank in range(4)] for steps in (0, 1))
    notes = [samples(ranks, FOUR).note for ranks in (begun, ended)]
    assert "no step has ended" in notes[0] and "no step has ended" not in notes[1]
    some = samples([summary(rank, steps_seen=1, fed={1: rank + 1} if rank else {}) for rank in range(4)], FOUR)
    assert some.verdict == Verdict.UNKNOWN and some.note.endswith("[0]")


def test_a_replica_that_differs_breaks_agreement_and_shards_alone_have_nothing_to_agree_on() -> None:
    assert replica_agreement([hsdp(rank) for rank in range(4)], FOUR).verdict == Verdict.PASS
    assert replica_agreement([*map(hsdp, range(3)), hsdp(3, contents={1: 5})], FOUR).verdict == Verdict.FAIL
    cut = [summary(rank, slices=rank + 1) for rank in range(4)]
    assert replica_agreement(cut, FOUR).verdict == Verdict.NOT_APPLICABLE


def test_what_fsdp_moves_over_the_ranks_of_a_tp_group_shows_no_tensor_parallelism() -> None:
    told = exchange([hsdp(rank, shown=2) for rank in range(4)], ParallelDims(dp_shard=2, tp=2))
    assert told.verdict == Verdict.UNKNOWN


def test_what_fsdp_moves_over_the_ranks_of_a_cp_group_shows_no_context_parallelism_unless_more_is_gathered() -> None:
    def told(*more: Use, gathered: int = 3 * 2 * 100) -> Verdict:
        moved = (
            Use("0,1", "all_gather", "forward", "bfloat16", 12, gathered),
            Use("0,1", "all_gather", "backward", "bfloat16", 8, 148),
            Use("0,1", "reduce_scatter", "backward", "float32", 12, 4 * 100),
            Use("0,1", "all_reduce", "forward", "float32", 4, 16),
        )
        roles = {"0,1": "sharded by fsdp2"}
        ranks = [summary(rank, 2, shown=2, roles=roles, elements=100, uses=(*moved, *more)) for rank in range(2)]
        return exchange(ranks, ParallelDims(cp=2)).verdict

    assert told() == Verdict.UNKNOWN
    assert told(gathered=3 * 2 * 100 + 64) == Verdict.PASS
    for op, phase, dtype in (
        ("all_to_all", "forward", "bfloat16"),
        ("send", "backward", "bfloat16"),
        ("all_gather", "forward", "float32"),
        ("all_gather", "forward", "int64"),
    ):
        assert told(Use("0,1", op, phase, dtype, 1, 64)) == Verdict.PASS


def test_norms_that_dtensors_copy_over_tensor_parallel_ranks_agree_though_the_rest_is_cut() -> None:
    def tp(rank: int, norms: int) -> Summary:
        return summary(
            rank, slices=rank + 1, contents={0: rank, 1: rank}, copies={"0,1" if rank < 2 else "2,3": {1: norms}}
        )

    dims = ParallelDims(dp_shard=2, tp=2)
    assert replica_agreement([tp(rank, rank // 2) for rank in range(4)], dims).verdict == Verdict.PASS
    broken = replica_agreement([tp(rank, max(rank, 1)) for rank in range(4)], dims)
    assert [(finding.ranks, finding.step) for finding in broken.findings] == [((3,), 1)]


def test_ranks_that_claim_nothing_and_are_replicas_by_the_layout_agree_if_they_began_alike() -> None:
    cp, dp = ParallelDims(cp=2), ParallelDims(dp_replicate=2)
    apart = [summary(rank, 2, contents={0: 7, 1: 8 + rank}) for rank in range(2)]
    alike = [summary(rank, 2, contents={0: 7, 1: 8}) for rank in range(2)]
    for dims in (cp, dp):
        assert replica_agreement(apart, dims).verdict == Verdict.FAIL
        assert replica_agreement(alike, dims).verdict == Verdict.PASS
    assert replica_agreement(apart, ParallelDims(tp=2)).verdict == Verdict.NOT_APPLICABLE
    by_hand = [summary(rank, 2, contents={0: rank, 1: 8 + rank}) for rank in range(2)]
    assert replica_agreement(by_hand, cp).verdict == Verdict.NOT_APPLICABLE


def test_a_replica_that_a_wrapper_was_told_to_ignore_is_named_and_an_expert_of_each_rank_is_none() -> None:
    dims = ParallelDims(dp_replicate=2)
    ranks = [
        summary(rank, 2, slices=1, contents={0: 7, 1: 8}, ignored={"expert": {0: rank, 1: rank}, "wq": {0: 5, 1: rank}})
        for rank in range(2)
    ]
    broken = replica_agreement(ranks, dims)
    assert [where(finding) for finding in broken.findings] == [(1, 1, "wq")]
    experts = [with_changes(one, ignored={"expert": one.contents.ignored["expert"]}) for one in ranks]
    assert replica_agreement(experts, dims).verdict == Verdict.PASS
    assert replica_agreement(ranks, ParallelDims(tp=2)).verdict == Verdict.PASS


def test_parameters_that_nobody_read_since_only_one_rank_stepped_are_not_said_to_be_those_of_zero() -> None:
    told: dict[str, Any] = {"shown": 2, "contents": {0: 7}}
    steps = ([("SGD",), ("SGD",)], [("SGD",), ()], [(), ()])
    found = [[summary(r, 2, optimizers=own, **told) for r, own in enumerate(each)] for each in steps]
    results = [replica_agreement(ranks, ParallelDims(dp_replicate=2)) for ranks in found]
    assert {one.verdict for one in results} == {Verdict.UNKNOWN}
    assert len({one.note for one in results}) == 3 and ["ZeRO" in one.note for one in results] == [True, False, False]


def test_replicas_of_a_model_that_is_not_on_record_may_differ() -> None:
    left, dims = (
        ("Critic, which has a parameter 0.weight as another model has",),
        ParallelDims(dp_replicate=2, dp_shard=2),
    )
    alike = [hsdp(rank, left_out=left) for rank in range(4)]
    apart = [*alike[:3], hsdp(3, left_out=left, contents={1: 5})]
    for ranks, verdict in ((alike, Verdict.UNKNOWN), (apart, Verdict.FAIL)):
        _, agreement, _, numbers = of_all(ranks, dims)
        assert (agreement.verdict, numbers.verdict) == (verdict, Verdict.UNKNOWN)
        assert numbers.note == f"not recorded: {left[0]}"


def test_where_the_recorder_itself_raised_what_is_wrong_is_told_and_nothing_passes() -> None:
    ranks = [hsdp(rank, fed={1: rank}, shown=2) for rank in range(4)]
    ranks[3] = with_changes(ranks[3], failed=("the recorder itself raised KeyError()",), contents={1: 5}, shown=0)
    found = of_all(ranks, ParallelDims(dp_replicate=2, dp_shard=2))
    assert [one.verdict.name for one in found] == ["NOT_APPLICABLE", "FAIL", "UNKNOWN", "UNKNOWN"]
    assert found[2].note == "rank 3 is not recorded to its end: the recorder itself raised KeyError()"


def test_where_optimizers_step_on_other_tensors_it_is_said_why_no_replica_was_compared() -> None:
    once = [summary(rank, 2, shown=1, contents={0: 7}, optimizers=("SGD",)) for rank in range(2)]
    told = replica_agreement(once, ParallelDims(dp_replicate=2))
    assert told.verdict == Verdict.UNKNOWN
    assert told.note.startswith(
        "no parameter was read after a step: optimizers step on tensors that are not the model's"
    )

    raised = [summary(rank, 2, shown=1, contents={0: 7}) for rank in range(2)]
    told = replica_agreement(raised, ParallelDims(dp_replicate=2))
    assert told.note == "no parameter was read after a step: no step of an optimizer was over"


def test_replicas_that_began_apart_and_that_nothing_joins_are_none() -> None:
    """A script that draws its weights after a seed of each rank's own, and forgets DDP."""
    dims = ParallelDims(dp_replicate=2)
    alone = [summary(rank, 2, shown=2, contents={0: rank, 1: 5 + rank}, optimizers=("SGD",)) for rank in range(2)]
    (finding,) = replica_agreement(alone, dims).findings
    assert (finding.ranks, finding.observed) == ((0, 1), None)
    joined = [with_changes(one, uses=(Use("0,1", *SUM),)) for one in alone]
    assert replica_agreement(joined, dims).verdict == Verdict.NOT_APPLICABLE
    assert replica_agreement(alone, ParallelDims(dp_shard=2)).verdict == Verdict.NOT_APPLICABLE


def test_infinite_numbers_are_found_with_their_step() -> None:
    (finding,) = finite([summary(0, 1, contents={1: 1}, not_finite={1: ("w",)})], ParallelDims()).findings
    assert where(finding) == (0, 1, "w")


def test_ranks_that_claim_the_same_and_of_which_no_step_is_recorded_agree_on_nothing() -> None:
    _, agreement, *_ = of_all([hsdp(rank, contents={0: rank % 2}) for rank in range(4)], ParallelDims(2, 2))
    assert (agreement.verdict, agreement.note) == (Verdict.UNKNOWN, "nothing was examined")


def test_tensor_parallelism_that_moves_nothing_over_its_ranks_is_not_there() -> None:
    over_dp = {rank: Use("0,2" if rank % 2 == 0 else "1,3", *SUM) for rank in range(4)}
    over_tp = {rank: Use("0,1" if rank < 2 else "2,3", "all_reduce", "forward", "float32", 1, 8) for rank in range(4)}
    dims = ParallelDims(dp_shard=2, tp=2)
    alone = exchange([summary(rank, shown=2, uses=(over_dp[rank],)) for rank in range(4)], dims)
    assert [(f.rank, f.observed) for f in alone.findings] == [(rank, None) for rank in range(4)]
    assert (alone.findings[0].axis, alone.findings[0].group) == ("tp", (0, 1))
    both = [summary(rank, shown=2, uses=(over_dp[rank], over_tp[rank])) for rank in range(4)]
    assert exchange(both, dims).verdict == Verdict.PASS
    assert exchange(both, FOUR).verdict == Verdict.NOT_APPLICABLE


def test_a_pipeline_sends_and_where_only_sums_run_over_its_stages_nobody_knows() -> None:
    dims = ParallelDims(pp=2)
    silent = [summary(rank, 2, shown=2) for rank in range(2)]
    summed = [summary(rank, 2, shown=2, uses=(Use("0,1", *SUM),)) for rank in range(2)]
    sent = [
        summary(rank, 2, shown=2, outside=(Outside("0,1", "send", "other", "float32", 1, 8, "2"),)) for rank in (0, 1)
    ]
    assert [finding.observed for finding in exchange(silent, dims).findings] == [None, None]
    assert exchange(summed, dims).verdict == Verdict.UNKNOWN
    assert exchange(summed, dims).note.startswith(
        "rank 0, its pp group [0,1]: all_reduce in backward may be of another axis"
    )
    assert exchange(sent, dims).verdict == Verdict.PASS


def test_gradients_that_are_summed_and_buffers_that_are_shared_are_neither_tensor_nor_context_parallelism() -> None:
    shared = ("broadcast", "forward", "float32", 1, 8)
    ddp = [summary(rank, 2, shown=2, uses=(Use("0,1", *SUM), Use("0,1", *shared))) for rank in range(2)]
    keys = [summary(rank, 2, shown=2, uses=(Use("0,1", *SUM), Use("0,1", *GATHER))) for rank in range(2)]
    for dims in (ParallelDims(cp=2), ParallelDims(tp=2)):
        assert exchange(ddp, dims).verdict == Verdict.UNKNOWN
        assert exchange(keys, dims).verdict == Verdict.PASS


def test_a_ring_is_no_tensor_parallelism_and_ranks_that_begin_with_the_same_bytes_are_no_sure_stages() -> None:
    ring = (Use("0,1", "send", "forward", "float32", 1, 8),)
    alike = [summary(rank, 2, shown=2, uses=ring, contents={0: 7}) for rank in range(2)]
    apart = [summary(rank, 2, shown=2, uses=ring, contents={0: rank}) for rank in range(2)]
    assert exchange(apart, ParallelDims(tp=2)).verdict == Verdict.UNKNOWN
    assert exchange(alike, ParallelDims(pp=2)).verdict == Verdict.UNKNOWN
    assert exchange(apart, ParallelDims(pp=2)).verdict == Verdict.PASS
    assert exchange(alike, ParallelDims(cp=2)).verdict == Verdict.PASS


def test_replicas_by_the_layout_that_have_other_parameters_may_be_stages() -> None:
    stages = [summary(rank, 2, model=rank, contents={0: rank, 1: 8 + rank}) for rank in range(2)]
    assert replica_agreement(stages, ParallelDims(dp_replicate=2)).verdict == Verdict.UNKNOWN
    assert replica_agreement(stages, ParallelDims(pp=2)).verdict == Verdict.NOT_APPLICABLE


def test_a_pipeline_inside_of_data_parallel_ranks_says_how_the_mesh_has_to_lie() -> None:
    def ranks(pipeline: str, replicas: str) -> list[Summary]:
        both = {0: ("0,1", "0,2"), 1: ("0,1", "1,3"), 2: ("2,3", "0,2"), 3: ("2,3", "1,3")}
        order = [pipeline, replicas].index
        return [
            summary(
                rank,
                shown=2,
                uses=(
                    Use(lines[order("inner")], "send", "pipeline", "float32", 1, 128),
                    Use(lines[order("outer")], *SUM),
                ),
            )
            for rank, lines in both.items()
        ]

    dims = ParallelDims(pp=2, dp_replicate=2)
    inside = exchange(ranks("inner", "outer"), dims)
    assert inside.verdict == Verdict.UNKNOWN
    assert inside.note == (
        "the layout counts ranks in the order pp, dp_replicate: pp groups [0,2] [1,3]; sends and receives run over [0,1] [2,3],"
        " as in the order dp_replicate, pp, which is not judged: make the script's mesh with pp first (init_device_mesh with"
        " mesh_dim_names ('pp', 'dp_replicate')), or leave out --layout"
    )
    assert exchange(ranks("outer", "inner"), dims).verdict == Verdict.PASS
