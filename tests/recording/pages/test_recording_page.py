"""The page on a recording: what is odd comes first, and it fits a terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal_recording import hsdp, judged_of, outside, summary, with_changes

from harness.core.case.dims import ParallelDims
from harness.core.evidence.keys import ranks_key
from harness.core.evidence.recording import MAX_OTHER_GROUPS, Last
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Use
from harness.core.evidence.text import some_ranks_text
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.stored_recording import Recording
from harness.recording.pages.recording_layout import layout_report
from harness.recording.pages.recording_page import anomaly_rows, fact_rows, groups_text, recording_text

TOLD: dict[str, Any] = {"parts": ("Model",), "placements": {"Replicate over 2, Shard(0) over 2": 3}, "shown": 2}


def recording(*changed: Any, **told: Any) -> Recording:
    ranks = [hsdp(rank, **TOLD) for rank in range(4)]
    for one in changed:
        ranks[one.rank] = one
    return Recording(Path("run"), {one.rank: one for one in ranks}, **told)


def test_of_a_job_without_oddities_nothing_is_odd_and_the_page_says_what_ran() -> None:
    assert anomaly_rows(recording()) == []
    text = recording_text(recording())
    assert text.startswith("run: 4 of 4 ranks left evidence\n")
    assert "FSDP2 shards parameters: [0,1] [2,3]" in text
    assert "replicas as claimed: 2 sets of 2" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100 and len(text.splitlines()) <= 40


def test_contents_count_the_parameters_that_ddp_ignores_and_those_of_them_that_differ() -> None:
    own, shared = {"expert": {0: 5, 1: 6}}, {"router": {0: 3, 1: 4}}
    ranks = [summary(rank, 2, contents={0: 7, 1: 8}, ignored={**own, **shared}) for rank in range(2)]
    ranks[1].contents.ignored["expert"] = {0: 9, 1: 10}
    text = " ".join(recording_text(Recording(Path("run"), {one.rank: one for one in ranks})).split())
    assert "2 parameters that DDP ignores: 1 differ" in text
    assert "DDP ignores" not in recording_text(recording())


def test_an_input_of_one_rank_is_not_said_to_be_that_of_all() -> None:
    ranks = {0: summary(0, 2, fed={1: 5}), 1: summary(1, 2)}
    assert "1 different input, as far as rank 0 recorded" in recording_text(Recording(Path("run"), ranks))
    assert "of 2 ranks left" in recording_text(Recording(Path("run"), {0: ranks[0], 1: summary(1, 2, fed={1: 6})}))


def test_a_replica_that_differs_is_the_first_thing_said() -> None:
    first = recording_text(recording(hsdp(3, contents={1: 99}))).splitlines()[1]
    assert first.startswith("  REPLICAS DIFFER rank 3 claim")


def test_copies_under_tensor_parallelism_that_differ_are_said_by_their_own_contents_before_the_first_step() -> None:
    cut = {"slices": 1, "contents": {0: 1, 1: 1}}
    apart = [hsdp(r, **cut | {"slices": r + 1}, copies={"0,1": {0: 5, 1: 5 + r}} if r < 2 else {}) for r in range(4)]
    told = " ".join(recording_text(recording(*apart)).split())
    assert (
        "REPLICAS DIFFER rank 1 claims copies of the same parameters as rank 0, and holds other bytes after step 1"
        in told
    )
    assert "before the first step they held the same" in told


def test_replicas_that_differ_from_the_start_are_told_from_those_that_became_so() -> None:
    alike = [hsdp(rank, contents={0: rank % 2, 1: 10 * rank}) for rank in range(4)]
    ((_, text),) = anomaly_rows(recording(*alike))
    assert text.endswith("; before the first step they held the same")
    ((_, text),) = anomaly_rows(recording(*[hsdp(rank, contents={0: rank, 1: rank}) for rank in range(4)]))
    assert "before the first step" in text and "held the same" not in text


def test_who_raised_is_quoted_and_who_only_lost_a_peer_comes_after() -> None:
    lost = hsdp(0, ended="raised", error="DistNetworkError: Connection reset by peer")
    rows = anomaly_rows(recording(lost, hsdp(2, ended="raised", error="TimeoutError: the loader timed out")))
    assert rows == [
        ("RAISED", "rank 2: TimeoutError: the loader timed out"),
        ("RAISED", "rank 0: DistNetworkError: Connection reset by peer"),
    ]


def test_ranks_that_were_killed_are_told_with_the_collective_they_were_in() -> None:
    last = {1: Last("all_gather in step 3, forward", (0, 1), "g", 42)}
    ((label, text),) = anomaly_rows(recording(hsdp(1, ended=""), last=last))
    assert label == "ENDED UNHEARD"
    assert text == (
        "rank 1, killed or still running; last collective: all_gather in step 3, forward over [0,1], number 42 of that group"
    )


def test_a_rank_that_never_said_that_it_ended_after_another_raised_was_most_likely_killed_by_its_launcher() -> None:
    last = {1: Last("all_reduce in step 2, backward", (0, 1), "g", 3)}
    rows = dict(
        anomaly_rows(recording(hsdp(0, ended="raised", error="ValueError: x"), hsdp(1, ended=""), last=last, code=1))
    )
    assert rows["ENDED UNHEARD"].startswith("rank 1, most likely killed by its launcher after another raised; last")


def test_ctrl_c_is_no_mistake_of_the_trainers() -> None:
    (row,) = anomaly_rows(recording(*[hsdp(rank, ended="raised", error="KeyboardInterrupt: ") for rank in range(4)]))
    assert row == ("INTERRUPTED", "ranks 0-3, as by Ctrl-C")


def test_after_ctrl_c_ranks_are_told_apart_by_their_last_collective_for_the_job_may_have_hung() -> None:
    def stopped(rank: int, number: int) -> Summary:
        last = Last("all_reduce in step 2, other", (0, 1, 2, 3), "0", number)
        return hsdp(rank, ended="raised", error="KeyboardInterrupt", last=last)

    text = "as by Ctrl-C; last collective: all_reduce in step 2, other over [0-3], number"
    assert anomaly_rows(recording(*[stopped(rank, 137 if rank == 2 else 138) for rank in range(4)])) == [
        ("INTERRUPTED", f"rank 2, {text} 137 of that group"),
        ("INTERRUPTED", f"ranks 0, 1, 3, {text} 138 of that group"),
        ("WAITED FOR", "rank 2, by ranks 0, 1, 3 in all_reduce in step 2, other over [0-3], number 138 of that group"),
    ]
    assert len(anomaly_rows(recording(*[stopped(rank, 138) for rank in range(4)]))) == 1


def test_after_a_signal_who_issued_less_in_a_group_is_waited_for_and_other_groups_say_nothing() -> None:
    def waited_for(code: int, *lasts: Last) -> list[str]:
        ranks = [hsdp(rank, ended="") for rank in range(4)]
        rows = anomaly_rows(recording(*ranks, last=dict(enumerate(lasts)), code=code))
        return [text.partition(", by ")[0] for label, text in rows if label == "WAITED FOR"]

    def last(number: int, *ranks: int) -> Last:
        return Last("all_reduce in step 2, backward", ranks, "g", number)

    assert waited_for(-2, last(7, 0, 1), last(8, 0, 1), last(3, 2, 3), last(3, 2, 3)) == ["rank 0"]
    assert waited_for(-2, last(7, 0, 1), last(8, 1, 0), last(3, 2, 3), last(2, 2, 3)) == ["rank 3"]
    assert (
        waited_for(1, last(7, 0, 1), last(8, 0, 1), last(3, 2, 3), last(3, 2, 3)) == []
    )  # its own end, and its own row


def test_ranks_that_wait_in_two_groups_are_each_waited_for_in_the_one_of_which_they_issued_less() -> None:
    """A rank without DDP's sync goes on to a sum of its optimizer, over another group of the same ranks."""

    def waited_for(*elsewhere: dict[str, int] | None) -> list[tuple[int, ...]]:
        texts = {"ddp": "all_reduce in step 1, backward", "own": "all_gather in step 1, optimizer"}
        over = [Last(texts[group], (0, 1), group, number) for group, number in (("ddp", 5), ("own", 1))]
        lasts = {rank: replace(one, elsewhere=elsewhere[rank]) for rank, one in enumerate(over)}
        rows = find_anomalies(recording(*[hsdp(rank, ended="") for rank in range(2)], last=lasts, code=-2))
        return [one.ranks for one in rows if one.label == "WAITED FOR"]

    assert waited_for({}, {"ddp": 4}) == [(1,), (0,)]
    assert waited_for({}, {"ddp": 5}) == [(0,)]  # rank 1 is ahead
    assert waited_for(None, None) == []  # as before these counts were on record
    many = {str(number): 1 for number in range(MAX_OTHER_GROUPS)}
    assert waited_for(many, {**many, "ddp": 4}) == [
        (1,)
    ]  # rank 0 may have issued more over a group that it used long ago


def test_where_fsdp1_replicates_its_vectors_nobody_is_told_that_no_replicas_are_claimed() -> None:
    plain = TOLD | {"slices": 0, "placements": {"plain": 3}}
    vectors = " ".join(recording_text(recording(*[hsdp(rank, **plain) for rank in range(4)])).split())
    assert "which parts these are is not claimed" in vectors and "none claimed" not in vectors
    alone = " ".join(recording_text(recording(*[hsdp(rank, **plain | {"roles": {}}) for rank in range(4)])).split())
    assert "none claimed to be replicas" in alone


def test_a_signal_meets_ranks_in_different_steps_and_that_is_not_said_of_them() -> None:
    ranks = [hsdp(rank, ended="ok", steps_seen=8 + rank // 3) for rank in range(4)]
    assert [what for what, _ in anomaly_rows(recording(*ranks, code=-2))] == ["ENDED"]
    assert [what for what, _ in anomaly_rows(recording(*ranks))] == ["UNLIKE OTHERS"]


def test_what_moved_in_one_step_alone_is_not_said_of_each() -> None:
    once = Use("0-3", "broadcast", "forward", "uint8", 1, 32, "2")
    text = recording_text(recording(*[hsdp(rank, **TOLD | {"uses": (once,)}) for rank in range(4)]))
    assert "broadcast in forward: 32 B uint8 in step 2, once" in text


def test_what_runs_over_groups_that_share_a_rank_is_of_two_axes_and_in_two_lines() -> None:
    """A sum over replicas and a norm over stages, by one collective in one type, of ranks of which nothing is claimed."""
    ranks = [
        summary(
            rank,
            shown=2,
            outside=(
                outside("0,1" if rank < 2 else "2,3", 2, 288, "1-2"),
                outside("0,2" if rank % 2 == 0 else "1,3", 1, 4, "1-2"),
            ),
            whole=(1, 2),
        )
        for rank in range(4)
    ]
    text = recording_text(recording(*ranks))
    assert "all_reduce of float32 over [0,1] [2,3]: 288 B in 2 calls a step" in " ".join(text.split())
    assert "all_reduce of float32 over [0,2] [1,3]: 4 B in 1 call a step" in text


def test_elements_under_fsdp1_are_said_to_be_those_of_a_ranks_own_part() -> None:
    text = " ".join(
        recording_text(recording(*(hsdp(rank, wrappers={"fsdp1": 1}, elements=80) for rank in range(4)))).split()
    )
    assert "of 80 elements in a rank's own part, for FSDP1 cuts them" in text
    assert "own part" not in recording_text(recording(*(hsdp(rank, elements=80) for rank in range(4))))


def test_below_a_layout_that_failed_the_first_check_that_was_broken_says_how_and_how_often_and_only_once() -> None:
    fed = [hsdp(rank, fed={1: rank // 2}) for rank in range(4)]
    results = [judged_of(check, fed, dims := ParallelDims(dp_shard=4)) for check in ("samples", "finite")]
    lines = layout_report(dims, results, None)
    text = " ".join(" ".join(lines).split())
    assert text.startswith("FAIL layout dp_shard 4 samples: ranks [0,1]") and text.count("ranks [0,1]") == 1
    assert "observed the same (in step 1) (and 1 more)" in text


def test_what_a_terminal_does_not_hold_is_one_command_away() -> None:
    many = [hsdp(rank, **TOLD | {"left_out": (), "idle": tuple(f"{n},99" for n in range(rank))}) for rank in range(4)]
    judged = [f"line {n}" for n in range(40)]
    lines = recording_text(recording(*many), judged, layout="dp_replicate=2,dp_shard=2").splitlines()
    assert len(lines) == 40
    assert lines[-1].endswith("more lines: harness report --all --layout dp_replicate=2,dp_shard=2 run")
    assert recording_text(recording(*many), judged, layout="a b.toml").endswith("--layout 'a b.toml' run")


def test_ranks_without_evidence_are_counted() -> None:
    short = recording()
    del short.summaries[2]
    ((label, text),) = anomaly_rows(short)
    assert label == "NO EVIDENCE" and text.startswith("from rank 2: ")


def test_a_recorder_that_failed_is_said() -> None:
    ((label, _),) = anomaly_rows(recording(hsdp(0, failed=("the recorder itself raised KeyError()",))))
    assert label == "NOT RECORDED"


def test_many_ranks_are_written_short() -> None:
    assert some_ranks_text([5]) == "rank 5"
    assert some_ranks_text(range(7)) == "ranks 0-6"
    assert some_ranks_text([0, 2, 4, 6, 8, 10, 12]) == "ranks 0, 2, 4, 6, 8, 10 and 1 more"


def test_of_many_ranks_that_do_not_lie_evenly_it_is_said_how_many_they_are() -> None:
    ranks = (*range(0, 768, 128), 777, *range(896, 16384, 128))
    assert groups_text([ranks_key(ranks)]) == f"[0,128,..,{ranks[-1]}; {len(ranks)} ranks]"


def test_where_no_step_was_recorded_nothing_is_said_of_what_ran() -> None:
    ranks = [hsdp(rank, **TOLD | {"shown": 0, "uses": (), "memory": {}}) for rank in range(4)]
    text = recording_text(recording(*ranks))
    assert "none was recorded from its beginning to its end" in text
    assert "trains alone" not in text and "memory" not in text


def test_a_job_whose_optimizers_never_find_a_gradient_and_change_nothing_trains_nothing() -> None:
    told = {"idle_steps": (1, 2), "contents": {0: 7, 1: 7, 2: 7}}
    ranks = [hsdp(rank, **TOLD | told) for rank in range(4)]
    assert anomaly_rows(recording(*ranks)) == [
        (
            "NOT TRAINED",
            "optimizers found no gradient in steps 1,2, in any parameter of any rank; parameters hold what they held before "
            "the first step",
        )
    ]
    for changed in ({"idle_steps": ()}, {"idle_steps": (1,)}, {"contents": {0: 7, 1: 7, 2: 8}}):
        assert "NOT TRAINED" not in recording_text(recording(*ranks[:3], hsdp(3, **TOLD | told | changed)))


def test_what_a_step_that_raised_in_its_optimizer_did_not_come_to_is_not_shown_as_nothing() -> None:
    ranks = [hsdp(rank, **TOLD | {"memory": {"gradients": 8}, "kept": 16}) for rank in range(4)]
    (row,) = [line for line in recording_text(recording(*ranks)).splitlines() if line.startswith("  memory")]
    assert row.split(maxsplit=1)[1] == "gradients 8 B, parameters as forward ends 16 B"


def test_a_page_with_a_layout_does_not_say_that_a_layout_is_missing() -> None:
    assert "--layout" in recording_text(recording()) and "--layout" not in recording_text(
        recording(), ["PASS layout dp_shard 4"]
    )


def ended_apart(*texts: str, error: str = "RuntimeError: gloo: Connection reset by peer", seq: int = 9) -> Recording:
    last = {rank: Last(text, (0, 1), "g", 9 if rank else seq) for rank, text in enumerate(texts)}
    return recording(hsdp(0, ended="raised", error=error), hsdp(1, ended=""), last=last, code=-2)


REDUCED, LOGGED = "all_reduce in step 1, backward", "all_reduce in step 1, other"


def test_members_that_issued_different_collectives_under_one_number_come_before_what_they_raised() -> None:
    found = find_anomalies(ended_apart(REDUCED, LOGGED))
    assert [(one.label, one.ranks) for one in found[:2]] == [("CALLS DIFFER", (0, 1)), ("RAISED", (0,))]
    beside = recording_text(
        ended_apart(REDUCED, LOGGED), ["FAIL layout dp_replicate 2", "  completed: .."]
    ).splitlines()
    assert beside[1].split()[:2] == ["CALLS", "DIFFER"]


def test_members_that_came_to_unlike_numbers_are_compared_at_the_lowest_that_all_know_and_that_differs() -> None:
    found = ended_apart(REDUCED, LOGGED)
    ahead = Last("broadcast in step 1, other", (0, 1), "g", 10, (REDUCED, LOGGED, REDUCED))
    behind = Last(LOGGED, (0, 1), "g", 9, (LOGGED,))
    for first, number in (
        (ahead, 9),
        (replace(ahead, before=(REDUCED, REDUCED)), 8),
        (replace(ahead, before=()), None),
    ):
        rows = [
            one for one in find_anomalies(replace(found, last={0: first, 1: behind})) if one.label == "CALLS DIFFER"
        ]
        assert [one.ranks for one in rows] == ([(0, 1)] if number else [])
        assert all(f"number {number} " in one.text for one in rows)
    sent = replace(ahead, before=(REDUCED, LOGGED, "send in step 1, pipeline"))
    assert "CALLS DIFFER" not in [one.label for one in find_anomalies(replace(found, last={0: sent, 1: behind}))]


@pytest.mark.parametrize(
    ("left", "right", "seq"),
    [(REDUCED, REDUCED, 9), (REDUCED, LOGGED, 10), ("send in step 1, forward", "recv in step 1, forward", 9)],
)
def test_members_that_issued_the_same_are_ahead_or_are_two_ends_of_a_send_are_not_apart(
    left: str, right: str, seq: int
) -> None:
    assert "CALLS DIFFER" not in [one.label for one in find_anomalies(ended_apart(left, right, seq=seq))]


def test_a_rank_is_not_reported_as_killed_after_another_that_raised_only_because_a_peer_was_gone() -> None:
    def how(error: str) -> str:
        return next(
            one.text
            for one in find_anomalies(ended_apart(REDUCED, LOGGED, error=error))
            if one.label == "ENDED UNHEARD"
        )

    assert how("RuntimeError: gloo: Connection reset by peer").split(",")[1] != how("ValueError: x").split(",")[1]


def test_of_a_rank_that_left_no_step_nothing_is_reported_as_zero_and_others_are_shown() -> None:
    whole = hsdp(1, shown=1, kept=4096, fed={1: 5}, optimizers=("AdamW",), steps_seen=1, memory={"parameters": 4096})
    killed = hsdp(0, shown=0, kept=0, fed={}, optimizers=(), ended="")
    both = Recording(Path("run"), {0: killed, 1: whole}, code=1)
    rows = dict(fact_rows(both, [killed, whole]))
    assert "0 B" not in rows["memory"] and "AdamW" in rows["model"] and "rank 1" in rows["fed in step 1"]


def test_a_peer_that_went_on_without_a_collective_is_named_before_who_waited_in_it() -> None:
    """A rank whose sync is off ends well, and the other loses its peer."""
    lost = "RuntimeError: Connection closed by peer [127.0.0.1]:1"
    at = {"ranks": (0, 1), "group": "0"}
    waits = summary(0, 2, ended="raised", error=lost, last=Last(text="all_reduce in step 1, other", seq=9, **at))
    gone = summary(
        1, 2, shown=2, steps_seen=4, contents={0: 5, 1: 6}, last=Last(text="broadcast in step 0", seq=8, **at)
    )
    found = Recording(Path("run"), {0: waits, 1: gone}, code=1)
    assert [(one.label, one.ranks) for one in find_anomalies(found)][:2] == [("WAITED FOR", (1,)), ("RAISED", (0,))]
    text = recording_text(found, ["FAIL layout dp_replicate 2", "  completed"])
    assert text.splitlines()[1].startswith("  WAITED FOR")
    assert "trains alone" not in text and "no collective ran" not in text
    silent = Recording(Path("run"), {0: waits, 1: with_changes(gone, last=None)}, code=1)
    assert [(one.label, one.ranks) for one in find_anomalies(silent)][:2] == [("WAITED FOR", (1,)), ("RAISED", (0,))]


def test_steps_are_those_of_the_rank_that_came_furthest_and_it_is_named() -> None:
    def steps(*seen: int) -> str:
        ranks = [hsdp(rank, steps_seen=many) for rank, many in enumerate(seen)]
        text = dict(fact_rows(recording(*ranks), ranks))["model"]
        return next(part.strip() for part in text.split(";") if " step" in part and part.strip()[0].isdecimal())

    assert (steps(3, 3, 3, 3), steps(3, 1, 3, 1), steps(0, 1, 0, 0)) == (
        "3 steps",
        "3 steps on ranks 0, 2",
        "1 step on rank 1",
    )


def test_of_a_step_that_never_ended_nothing_is_reported_as_absent() -> None:
    def told(steps_seen: int) -> str:
        ranks = [
            hsdp(rank, **TOLD | {"shown": 1, "uses": (), "idle": ("0-3",), "steps_seen": steps_seen})
            for rank in range(4)
        ]
        return " ".join(recording_text(recording(*ranks)).split())

    for words in ("trains alone", "idle groups"):
        assert words in told(1) and words not in told(0)


def test_what_is_known_of_one_step_alone_is_said_of_that_one() -> None:
    def told(*steps: int) -> str:
        moved = (outside("0-3", 1, 4, ranks_key(steps)), outside("0-3", 1, 0, ranks_key(steps), dtype="uint8"))
        return recording_text(
            recording(*[hsdp(rank, **TOLD | {"uses": (), "outside": moved, "whole": steps}) for rank in range(4)])
        )

    assert ("a step" in told(1), "in step 1" in told(1)) == (False, True)
    assert ("call a step" in told(1, 2), "in steps 1,2" in told(1, 2)) == (True, False)
