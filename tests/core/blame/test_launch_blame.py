"""Who is to blame, from literal records of how the ranks of a job ended."""

import pytest
from torch import nn

from harness.core.blame.calls import Issued, describe_call
from harness.core.blame.culprits import assign_blame, last_log_line
from harness.core.blame.rank_exit import RankExit, parse_stack, stack_text, useful_frames
from harness.core.evidence.records import Exit
from harness.core.launch.rank import module_of_exception
from harness.core.launch.supervise import log_tail

RESET = {"type": "RuntimeError", "message": "[/x/gloo/tcp/pair.cc:5] Connection reset by peer [::1]", "time": 2.0}
TIMED_OUT = {"type": "RuntimeError", "message": "[/x/gloo/tcp/unbound_buffer.cc:78] Timed out waiting", "time": 9.0}
LIMIT = "killed by the harness at the time limit of 5 s"


def failure(told: dict, **changes) -> dict:
    return {**told, "inside": [["/t/train.py", 7, "step"]], **changes}


def all_reduce(seq: int, ranks=(0, 1), size=16, op="all_reduce", **more) -> Issued:
    return Issued("g" + "".join(map(str, ranks)), tuple(ranks), seq, op, size, 2, "backward", **more)


def dump(*frames: str) -> str:
    """A faulthandler dump, innermost frame first: "file:line:function"."""
    lines = [frame.split(":") for frame in frames]
    text = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in lines)
    return f"main thread 0x00000000000000aa\nThread 0x00000000000000aa (most recent call first):\n{text}"


SLEEPING = dump("/t/train.py:3:sleepy", "/t/train.py:9:main")
WAITING = dump("/v/site-packages/torch/distributed/distributed_c10d.py:3252:all_reduce", "/t/train.py:7:step")
WAITING_FOR_A_QUEUE = dump("/usr/lib/python3.11/threading.py:327:wait", "/t/data.py:7:get")


def blamed(*fates: RankExit) -> dict[int, str]:
    return {
        exit.rank: "; ".join(filter(None, (exit.error, exit.reason))) for exit in assign_blame(fates) if exit.blamed
    }


def test_nobody_is_blamed_when_all_is_well():
    assert assign_blame([RankExit(0, 0, log="a"), RankExit(1, 0, log="b")]) == [
        Exit(0, "ok", 0, log="a"),
        Exit(1, "ok", 0, log="b"),
    ]


def test_a_rank_that_raised_by_itself_is_blamed_and_those_that_lost_it_are_not():
    own = failure({"type": "ValueError", "message": "no such\n layer", "time": 3.0})
    assert assign_blame([RankExit(0, 1, failure=failure(RESET)), RankExit(1, 1, failure=own)]) == [
        Exit(0, "raised", 1, error="RuntimeError: gloo/tcp/pair.cc:5 Connection reset by peer [::1]",
             stack="/t/train.py:7 in step"),
        Exit(1, "raised", 1, error="ValueError: no such layer", stack="/t/train.py:7 in step", blamed=True),
    ]  # fmt: skip


def test_what_was_raised_in_a_models_forward_is_told_with_the_module():
    own = failure({"type": "ValueError", "message": "no such layer", "time": 3.0}, module="layers.0.attention.wk")
    assert blamed(RankExit(0, 1, failure=own), RankExit(1, 1, failure=failure(RESET))) == {
        0: "ValueError: no such layer (in layers.0.attention.wk)"
    }


def test_the_module_is_the_innermost_one_whose_forward_the_first_cause_has_left():
    class Wrong(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    class Again(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError as error:
                raise RuntimeError("something else") from error

    def named(call, *args):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call(*args)
        return module_of_exception(raised.value)

    assert named(nn.Sequential(nn.Identity(), nn.Sequential(Wrong())), 1) == "1.0"
    assert named(Again(nn.Sequential(Wrong())), 1) == "inner.0", (
        "of the first cause, and not of what it was raised again as"
    )
    assert named(Wrong(), 1) == "", "the model itself"
    assert named(int, "x") == "", "no model is at work"


def test_a_runtime_error_of_the_trainer_that_mentions_a_timeout_is_its_own():
    own = failure({"type": "RuntimeError", "message": "the data loader timed out", "time": 1.0})
    assert list(blamed(RankExit(0, 1, failure=own), RankExit(1, 1, failure=failure(RESET)))) == [0]


def test_a_rank_that_died_by_a_signal_is_blamed():
    fates = RankExit(0, -11, log_tail="hello\n"), RankExit(1, 1, failure=failure(RESET))
    assert blamed(*fates) == {0: "died by SIGSEGV, not sent by the harness. hello"}


def test_a_rank_that_exits_with_a_code_and_no_exception_is_blamed():
    assert blamed(RankExit(0, 3), RankExit(1, -9, kill_reason="late")) == {0: "exited with code 3 without an exception"}


def test_in_a_hang_the_rank_whose_sequence_lags_is_blamed():
    ahead, lags = (all_reduce(3),), (all_reduce(1), all_reduce(2))
    exits = assign_blame(
        [RankExit(0, -9, kill_reason=LIMIT, issued=ahead), RankExit(1, -9, kill_reason=LIMIT, issued=lags)]
    )
    assert [(exit.how, exit.signal, exit.blamed, exit.last_collective) for exit in exits] == [
        ("killed", "SIGKILL", False, "all_reduce #3 of group [0,1] (step 2, backward, 16 B)"),
        ("killed", "SIGKILL", True, "all_reduce #2 of group [0,1] (step 2, backward, 16 B)"),
    ]
    waited = "rank 0 waited for it in all_reduce #3 of group [0,1] (step 2, backward, 16 B)"
    assert [(exit.error, exit.reason) for exit in exits] == [(LIMIT, ""), (LIMIT, waited)]


def test_a_rank_that_lags_because_it_waits_for_another_is_a_victim():
    """0 waits for 1 in [0,1]; 1 waits for 2 in [1,2]; 2 sleeps."""
    one_two = (1, 2)
    fates = (
        RankExit(0, -9, kill_reason=LIMIT, issued=(all_reduce(5),)),
        RankExit(1, -9, kill_reason=LIMIT, issued=(all_reduce(4), all_reduce(8, one_two))),
        RankExit(2, -9, kill_reason=LIMIT, issued=(all_reduce(7, one_two),)),
    )
    assert list(blamed(*fates)) == [2]


def test_the_rank_that_others_timed_out_on_is_blamed_though_they_raised_first():
    fates = (
        RankExit(0, 1, failure=failure(TIMED_OUT), issued=(all_reduce(1),)),
        RankExit(1, -9, kill_reason="later", issued=()),
    )
    assert list(blamed(*fates)) == [1]


def test_ranks_that_wait_for_each_other_are_all_blamed_and_both_collectives_named():
    first, second = Issued("a", (0, 1), 0, "all_reduce", 16), Issued("b", (0, 1), 0, "all_gather", 32)
    fates = RankExit(0, -9, kill_reason=LIMIT, issued=(first,)), RankExit(1, -9, kill_reason=LIMIT, issued=(second,))
    told = (
        f"{LIMIT}; each waits for the other: rank 0 in all_reduce #0 of group [0,1] (before the first pass, 16 B) named 'a'; "
        "rank 1 in all_gather #0 of group [0,1] (before the first pass, 32 B) named 'b'"
    )
    assert blamed(*fates) == {0: told, 1: told}


def test_in_a_ring_the_rank_that_computes_is_blamed_alone():
    """Rank 1 issued an asynchronous collective and then fell asleep: it is ahead in a group, but does not wait."""
    first, second = Issued("a", (0, 1), 0, "all_reduce", 16), Issued("b", (0, 1), 0, "all_gather", 32)
    waits = RankExit(0, -9, kill_reason=LIMIT, issued=(first,), stack=WAITING)
    assert list(blamed(waits, RankExit(1, -9, kill_reason=LIMIT, issued=(second,), stack=SLEEPING))) == [1]


def test_another_size_at_the_same_place_blames_the_odd_rank_not_the_one_gloo_aborted():
    three = (0, 1, 2)
    fates = (
        RankExit(0, -6, log_tail="what(): mismatch", issued=(all_reduce(4, three),)),
        RankExit(1, 1, failure=failure(RESET), issued=(all_reduce(4, three, 32),)),
        RankExit(2, 1, failure=failure(RESET), issued=(all_reduce(4, three),)),
    )
    found = blamed(*fates)
    assert list(found) == [1]
    assert found[1].endswith(
        "issued all_reduce #4 of group [0-2] (step 2, backward, 32 B) "
        "where ranks [0,2] issued all_reduce #4 of group [0-2] (step 2, backward, 16 B)"
    )


def test_of_two_ranks_that_issue_different_operators_neither_is_right():
    fates = [
        RankExit(r, -9, kill_reason=LIMIT, issued=(all_reduce(0, op=op),))
        for r, op in enumerate(["all_reduce", "broadcast"])
    ]
    assert list(blamed(*fates)) == [0, 1]


def test_two_groups_of_one_name_with_other_members_are_not_compared():
    issued = [
        Issued("1", ranks, seq, "all_reduce", 16) for ranks, seq in (((0, 1), 3), ((0, 1), 2), ((2, 3), 9), ((2, 3), 9))
    ]
    assert list(blamed(*(RankExit(r, -9, kill_reason=LIMIT, issued=(each,)) for r, each in enumerate(issued)))) == [1]


def test_a_rank_that_exited_0_one_step_early_is_blamed():
    stayed = RankExit(0, 1, failure=failure(RESET), issued=(all_reduce(2),))
    left = assign_blame([stayed, RankExit(1, 0, end_time=1.0, issued=(all_reduce(1),))])[1]
    told = "exited while rank 0 waited for it in all_reduce #2 of group [0,1] (step 2, backward, 16 B)"
    assert (left.how, left.blamed, left.reason) == ("ok", True, told)


def test_a_rank_that_exited_0_early_is_blamed_also_without_a_record_of_collectives():
    assert list(blamed(RankExit(0, 1, failure=failure(RESET)), RankExit(1, 0, end_time=1.0))) == [1]


def test_in_a_pipeline_the_stage_that_computes_is_blamed_whatever_its_counts():
    """Point-to-point calls are not one sequence per group: only who receives from whom, and the stacks, tell."""

    def recv(seq: int, peer: int) -> tuple[Issued, ...]:
        return (all_reduce(seq, (0, 1, 2), op="recv", peer=peer),)

    fates = (
        RankExit(0, -9, kill_reason=LIMIT, issued=recv(9, 1), stack=WAITING),
        RankExit(1, -9, kill_reason=LIMIT, issued=recv(4, 0), stack=SLEEPING),
        RankExit(2, -9, kill_reason=LIMIT, issued=recv(2, 1), stack=WAITING),
    )
    assert list(blamed(*fates)) == [1]


def test_without_any_record_the_stacks_tell_who_computes():
    fates = RankExit(0, -9, kill_reason=LIMIT, stack=WAITING), RankExit(1, -9, kill_reason=LIMIT, stack=SLEEPING)
    assert list(blamed(*fates)) == [1]


def test_nccls_watchdog_abort_is_a_victims_death():
    watchdog = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"
    fates = (
        RankExit(0, -6, log_tail=watchdog, issued=(all_reduce(5),)),
        RankExit(1, -9, kill_reason="later", issued=(all_reduce(4),)),
    )
    assert list(blamed(*fates)) == [1]


def test_ranks_of_a_dead_server_are_lost_and_nobody_is_blamed():
    assert assign_blame([RankExit(0, None, launcher_trouble="the rank server ended")]) == [
        Exit(0, "lost", error="how it ended is unknown. the rank server ended")
    ]


def test_only_the_main_threads_last_dump_is_shown_and_the_launchers_frames_are_not():
    text = (
        dump("/t/old.py:1:old")
        + '\nThread 0x00000000000000bb (most recent call first):\n  File "/t/other.py", line 1 in other\n\n'
        + "Current thread 0x00000000000000aa (most recent call first):\n"
        + "".join(
            f'  File "{file}", line {line} in f\n'
            for file, line in [
                ("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 5),
                ("/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 6),
                ("/t/train.py", 7),
                ("/repo/harness/core/launch/rank.py", 8),
            ]
        )
    )
    assert (
        stack_text(useful_frames(parse_stack(text)))
        == "torch/distributed/distributed_c10d.py:5 in f\n/t/train.py:7 in f"
    )


OF_THREADS = {
    "00bb": (
        ("/t/train.py", 7, "main"),
        ("/repo/harness/adapters/support/training_function.py", 60, "_run"),
        ("/usr/lib/python3.11/threading.py", 975, "run"),
    ),
    "00cc": (("/usr/lib/python3.11/queue.py", 1, "get"), ("/t/loader.py", 2, "work")),
    "00aa": (
        ("/usr/lib/python3.11/threading.py", 327, "wait"),
        ("/repo/harness/adapters/support/training_function.py", 38, "train"),
        ("/t/train_adapter.py", 84, "train"),
    ),
}


@pytest.mark.parametrize(("own", "first"), [(True, "/t/train.py:7"), (False, "/usr/lib/python3.11/threading.py:327")])
def test_a_trainer_in_a_thread_of_its_own_is_shown_where_it_is(own: bool, first: str) -> None:
    parts = []
    for number, stack in OF_THREADS.items():
        frames = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in stack)
        if own or number != "00bb":
            parts.append(f"Thread 0x{number} (most recent call first):\n{frames}")
    shown = stack_text(useful_frames(parse_stack("main thread 0x00aa\n" + "\n".join(parts))))
    assert shown.startswith(first) and "loader" not in shown
    assert ("train_adapter" in shown) is not own


def test_a_collective_is_told_in_one_phrase():
    assert describe_call(all_reduce(12, (0, 1, 2, 3), 16_400)) == (
        "all_reduce #12 of group [0-3] (step 2, backward, 16.4 KB)"
    )
    assert describe_call(all_reduce(1, tuple(range(16)), 8, op="send", peer=3)) == (
        "send #1 to rank 3 of group [0-15] (step 2, backward, 8 B)"
    )
    assert describe_call(Issued("g", (0, 1), 3, "all_reduce", 8, 2, "other")) == (
        "all_reduce #3 of group [0,1] (step 2 or behind it, outside of passes, 8 B)"
    )


def test_a_dying_ranks_words_are_those_before_the_interpreters_list_of_threads_and_modules() -> None:
    words, modules = "what(): [enforce fail at pair.cc:456] 65536 vs 32768", "numpy.random.mtrand, " * 400
    log = f"{words}\nFatal Python error: Aborted\n\nThread 0x7f:\n  File x\n\nExtension modules: {modules}\n"
    assert last_log_line(RankExit(1, -6, log_tail=log_tail(log))) == words
    assert log_tail("x" * 9000) == "x" * 4000


def test_a_lost_connection_that_pipelining_raises_again_as_its_own_error_is_a_victims():
    wrapped = failure(
        {"type": "RuntimeError", "message": "[Stage 0] failed to run forward", "time": 1.9},
        chain=[["RuntimeError", RESET["message"]]], cause=["RuntimeError", RESET["message"]],
    )  # fmt: skip
    malloc = "malloc(): unaligned tcache chunk detected"
    exits = assign_blame([RankExit(0, 1, failure=wrapped), RankExit(1, -6, end_time=2.0, log_tail=malloc)])
    assert [exit.blamed for exit in exits] == [False, True]
    assert exits[0].error == (
        "RuntimeError: gloo/tcp/pair.cc:5 Connection reset by peer [::1]; "
        "raised again as RuntimeError: [Stage 0] failed to run forward"
    )
    assert exits[1].error == f"died by SIGABRT, not sent by the harness. {malloc}"


def test_what_is_raised_after_a_death_is_what_came_of_it_and_what_was_raised_before_is_not():
    early, late = (failure({"type": "ValueError", "message": "no loss", "time": time}) for time in (1.0, 3.0))
    assert list(blamed(RankExit(0, 1, failure=late), RankExit(1, -11, end_time=2.0))) == [1]
    assert list(blamed(RankExit(0, 1, failure=early), RankExit(1, -11, end_time=2.0))) == [0, 1]


def test_an_abort_of_c_plus_plus_for_a_lost_connection_is_a_victims():
    thrown = "terminate called\n  what():  [/x/gloo/tcp/pair.cc:5] Connection closed by peer [::1]"
    assert list(blamed(RankExit(0, -6, log_tail=thrown), RankExit(1, -9, end_time=1.0))) == [1]


def test_a_rank_that_was_stopped_is_blamed_whatever_the_others_raised():
    own = failure({"type": "ValueError", "message": "no such layer", "time": 3.0})
    stopped = RankExit(1, -9, kill_reason=LIMIT, is_stopped=True)
    told = f"{LIMIT}; it had been stopped (SIGSTOP or a debugger) and did not go on"
    assert blamed(RankExit(0, 1, failure=own), stopped) == {1: told}


def p2p(op: str, seq: int, peer: int, size: int = 8, order: int = 0) -> Issued:
    return Issued("pp", (0, 1, 2), seq, op, size, 2, "pipeline", peer, order)


def test_stages_that_issue_different_collectives_over_the_group_that_they_send_over_are_told_so():
    """Each has sent and received another number of times, which says nothing about their collectives."""
    stages = (0, 1, 2)
    sums, shares = (Issued("pp", stages, 3, op, 16, 2, "other") for op in ("all_reduce", "broadcast"))
    fates = (
        RankExit(0, 1, failure=failure(TIMED_OUT), issued=(p2p("send", 4, 1), sums)),
        RankExit(1, 1, failure=failure(TIMED_OUT), issued=(p2p("recv", 4, 0), p2p("send", 4, 2), sums)),
        RankExit(2, 1, failure=failure(TIMED_OUT), issued=(p2p("recv", 4, 1), shares)),
    )
    assert list(blamed(*fates)) == [2]


def test_a_send_and_its_receive_of_different_sizes_blame_both_sides():
    sent = RankExit(0, 1, failure=failure(TIMED_OUT), issued=(p2p("send", 4, 1, 64),))
    received = RankExit(1, 1, failure=failure(TIMED_OUT), issued=(p2p("recv", 4, 0, 32),))
    found = blamed(sent, received)
    assert list(found) == [0, 1]
    assert found[0].endswith(
        "issued send #4 to rank 1 of group [0-2] (step 2, pipeline, 64 B) "
        "where rank 1 issued recv #4 from rank 0 of group [0-2] (step 2, pipeline, 32 B)"
    )


def test_a_stage_whose_receive_has_its_send_waits_for_nobody_though_it_was_its_last():
    """0 waits for the answer of 1; 1 received, and computes for ever without a stack."""
    waits = RankExit(0, -9, kill_reason=LIMIT, issued=(p2p("send", 4, 1, order=1), p2p("recv", 2, 1, order=2)))
    computes = RankExit(1, -9, kill_reason=LIMIT, issued=(p2p("send", 1, 0, order=1), p2p("recv", 4, 0, order=2)))
    assert list(blamed(waits, computes)) == [1]
