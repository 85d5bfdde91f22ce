"""Ranks that lost a link or timed out on what all had issued: whom that blames."""

from dataclasses import replace

from test_launch_blame import LIMIT, RESET, TIMED_OUT, WAITING, WAITING_FOR_A_QUEUE, all_reduce, blamed, failure, p2p

from harness.core.blame.culprits import assign_blame, exception_text
from harness.core.blame.rank_exit import RankExit


def test_of_a_message_that_quotes_tracebacks_what_each_rank_raised_is_told() -> None:
    quoted = (
        "CheckpointException ranks:dict_keys([0, 1])\nTraceback (most recent call last): (RANK 0)\n"
        '  File "filesystem.py", line 520, in create_stream\n    with path.open(mode) as stream:\n'
        "FileNotFoundError: [Errno 2] No such file or directory: '__1_0.distcp'\n"
        "Traceback (most recent call last): (RANK 1)\n  File x\n"
        "FileNotFoundError: [Errno 2] No such file or directory: '__1_0.distcp'\n"
    )
    told = exception_text({"type": "CheckpointException", "message": quoted})
    assert told == (
        "CheckpointException: CheckpointException ranks:dict_keys([0, 1]): "
        "FileNotFoundError: [Errno 2] No such file or directory: '__1_0.distcp'"
    )


def test_where_all_had_issued_the_collective_that_timed_out_the_network_is_told_and_no_rank_is_blamed() -> None:
    slower = failure(TIMED_OUT, time=9.5)
    fates = [
        RankExit(
            rank, 1, failure=failure(TIMED_OUT) if rank == 2 else slower, issued=(all_reduce(3, range(4)),), host=host
        )
        for rank, host in enumerate(["one", "one", "two", "two"])
    ]
    assert blamed(*fates) == {}
    where = "all_reduce #3 of group [0-3] (step 2, backward, 16 B), which all of them had issued"
    told = f"nothing came through between one (ranks [0,1]) and two (ranks [2,3]) in {where}"
    assert {exit.undelivered for exit in assign_blame(fates)} == {told}
    on_one_host = [replace(fate, host="") for fate in fates]
    assert {e.undelivered for e in assign_blame(on_one_host)} == {f"nothing came through between them in {where}"}


def test_who_still_waits_for_what_all_had_issued_as_the_link_went_down_is_not_blamed_for_lagging() -> None:
    """Rank 1 had received its peer's part of #3, and went on; its own part never arrived."""
    behind = RankExit(0, 1, failure=failure(TIMED_OUT), issued=(all_reduce(3),), host="one")
    ahead = RankExit(1, 1, failure=failure(TIMED_OUT, time=9.5), issued=(all_reduce(3), all_reduce(4)), host="two")
    assert blamed(behind, ahead) == {}
    where = "all_reduce #3 of group [0,1] (step 2, backward, 16 B), which all of them had issued"
    assert assign_blame([behind, ahead])[0].undelivered == (
        f"nothing came through between one (ranks [0]) and two (ranks [1]) in {where}"
    )
    reset = replace(behind, failure=failure(RESET))
    assert list(blamed(reset, replace(ahead, issued=(all_reduce(4),)))) == [0]


def test_who_was_killed_waiting_for_what_all_had_issued_is_not_blamed_where_nothing_is_heard_of_the_others() -> None:
    """The time limit came before the collective's own."""
    waits = RankExit(0, -9, kill_reason=LIMIT, stack=WAITING, issued=(all_reduce(3),), host="one")
    unheard = RankExit(1, None, issued=(all_reduce(3),), host="two")
    assert blamed(waits, unheard) == {}
    where = "all_reduce #3 of group [0,1] (step 2, backward, 16 B), which all of them had issued"
    assert assign_blame([waits, unheard])[0].undelivered == (
        f"nothing came through between one (ranks [0]) and two (ranks [1]) in {where}"
    )
    for otherwise in (replace(waits, stack=""), replace(waits, stack=WAITING_FOR_A_QUEUE)):
        assert list(blamed(otherwise, unheard)) == [0]
    assert list(blamed(waits, replace(unheard, issued=(all_reduce(2),)))) == [1]
    in_receive = replace(waits, issued=(all_reduce(3), p2p("recv", 2, 1)))
    assert list(blamed(in_receive, replace(unheard, issued=(all_reduce(3), p2p("send", 2, 0))))) == [0]


def test_a_rank_that_lags_is_blamed_for_a_time_out_whatever_host_it_is_on() -> None:
    ahead = RankExit(0, 1, failure=failure(TIMED_OUT), issued=(all_reduce(3),), host="one")
    lags = RankExit(1, -9, kill_reason=LIMIT, issued=(all_reduce(2),), host="two")
    assert list(blamed(ahead, lags)) == [1]
    assert assign_blame([ahead, lags])[0].undelivered == ""
