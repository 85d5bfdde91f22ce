"""Real ranks: how they start, how they end, and that none is left."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.case.launching import LONGEST_SECONDS
from harness.core.evidence.records import Exit
from harness.core.launch import Inflight, Issued, Job, LaunchError, RankServer, default_server, launch, read_inflight
from harness.core.launch.leftovers import find_leftovers

ROOT = Path(__file__).parents[3]
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for survivors in /proc")


def job(directory: Path, entry: str, world_size: int = 2, **more) -> Job:
    return Job(directory / "job", world_size, f"tests.launch_entries:{entry}", **{"timeout": 30.0, **more})


def summary(exits: list[Exit]) -> list[tuple[str, bool]]:
    return [(exit.how, exit.blamed) for exit in exits]


def line_of(text: str) -> str:
    lines = (ROOT / "tests/launch_entries.py").read_text().splitlines()
    return f"launch_entries.py:{next(number for number, line in enumerate(lines, 1) if text in line)} in "


# --- ends ------------------------------------------------------------------------------------------------------------


def test_two_ranks_reduce_and_exit_ok(tmp_path):
    exits = launch(job(tmp_path, "reduces"))
    assert summary(exits) == [("ok", False)] * 2
    assert [Path(exit.log).read_text() for exit in exits] == [f"the sum is right on rank {rank}\n" for rank in (0, 1)]


def test_a_rank_finds_the_environment_torchrun_would_give_one_thread_and_its_options(tmp_path):
    exits = launch(job(tmp_path, "says_its_environment", options={"a": 1}, env={"COLOUR": "red"}))
    assert [Path(exit.log).read_text() for exit in exits] == [f"{r} {r} 2 2 red 1 {{'a': 1}}\n" for r in (0, 1)]


def test_ranks_do_not_draw_the_same_random_numbers_because_they_were_forked(tmp_path):
    drawn = {Path(exit.log).read_text() for name in ("run", "repeat") for exit in launch(job(tmp_path / name, "draws"))}
    assert len(drawn) == 4


def test_a_rank_that_raises_is_blamed_with_its_line_and_the_other_is_a_victim(tmp_path):
    victim, culprit = launch(job(tmp_path, "raises"))
    assert (culprit.how, culprit.code, culprit.blamed) == ("raised", 1, True)
    assert (culprit.error, victim.how, victim.blamed) == ("ValueError: no such layer", "raised", False)
    assert line_of("the line that must be named") in culprit.stack
    assert victim.last_collective == "all_reduce #1 of group [0,1] (step 1, forward, 16 B)"


def test_a_rank_killed_from_outside_is_blamed(tmp_path):
    culprit, victim = launch(job(tmp_path, "kills_itself"))
    assert (culprit.how, culprit.signal, culprit.blamed) == ("signal", "SIGKILL", True)
    assert culprit.last_collective == "all_reduce #0 of group [0,1] (step 1, forward, 16 B)"
    assert (victim.how, victim.blamed) == ("raised", False)


def test_a_rank_that_hangs_is_blamed_with_its_stack_and_the_other_tells_what_it_waited_in(tmp_path):
    victim, culprit = launch(job(tmp_path, "sleeps", timeout=1.5))
    assert summary([victim, culprit]) == [("killed", False), ("killed", True)]
    assert victim.last_collective == "all_reduce #1 of group [0,1] (step 1, forward, 16 B)"
    assert victim.error == "killed by the harness at the time limit of 1.5 s"
    assert culprit.error == victim.error
    assert culprit.reason == f"rank 0 waited for it in {victim.last_collective}"
    assert culprit.stack.endswith(" in sleeps")
    assert victim.stack.splitlines()[0].endswith("in all_reduce")


def test_ranks_that_are_only_slow_are_told_so_and_none_is_blamed(tmp_path):
    exits = launch(job(tmp_path, "goes_on_and_on", timeout=1.5))
    assert summary(exits) == [("killed", False), ("killed", False)]
    assert exits[0].error == "killed by the harness at the time limit of 1.5 s, still at work: --timeout gives it more"


def test_a_rank_that_never_joins_is_blamed(tmp_path):
    exits = launch(job(tmp_path, "sleeps_before_joining", timeout=1.5))
    assert summary(exits) == [("killed", False), ("killed", True)]


def test_a_rank_that_leaves_the_loop_one_step_early_is_blamed_though_it_exited_0(tmp_path):
    victim, culprit = launch(job(tmp_path, "leaves_early"))
    assert (culprit.how, culprit.blamed, victim.blamed) == ("ok", True, False)
    assert culprit.reason.startswith("exited while rank 0 waited for it in all_reduce #2 of group [0,1]")


def test_two_collectives_in_another_order_blame_both_ranks_and_quote_both(tmp_path):
    exits = launch(job(tmp_path, "disagrees", timeout=2.0))
    assert [exit.blamed for exit in exits] == [True, True]
    assert "issued all_reduce #0 of group [0,1]" in exits[0].reason
    assert "where rank 1 issued broadcast #0 of group [0,1]" in exits[0].reason


def test_two_groups_in_another_order_blame_both_ranks(tmp_path):
    exits = launch(job(tmp_path, "crosses_groups", timeout=2.0))
    assert [exit.blamed for exit in exits] == [True, True]
    assert "each waits for the other" in exits[0].reason


def test_a_collective_of_another_size_quotes_both_sizes(tmp_path):
    exits = launch(job(tmp_path, "differs_in_size"))
    assert [exit.blamed for exit in exits] == [True, True]
    assert "(step 1, forward, 16 B) where rank 1 issued" in exits[0].reason


def test_a_rank_that_hangs_as_it_exits_is_blamed_though_its_work_was_done(tmp_path):
    well, hangs = launch(job(tmp_path, "hangs_at_exit", timeout=3.0))
    assert summary([well, hangs]) == [("ok", False), ("killed", True)]
    assert hangs.reason.endswith(
        "its work was done, and a thread or something registered with atexit kept it from exiting"
    )


@needs_proc
def test_processes_that_outlive_their_rank_are_named_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.core.launch.leftovers.HELPER_PATIENCE", 2.0)
    well, leaves = launch(job(tmp_path, "leaves_processes"))
    assert summary([well, leaves]) == [("ok", False)] * 2
    command = f"{sys.executable} -c import time; time.sleep(600)"
    assert (well.left, sorted(leaves.left)) == ((), [command, "forked from the rank"])
    assert find_leftovers(tmp_path / "job", range(2)) == []


@needs_proc
def test_a_rank_that_was_stopped_is_blamed(tmp_path):
    victim, stopped = launch(job(tmp_path, "is_stopped", timeout=3.0))
    assert summary([victim, stopped]) == [("killed", False), ("killed", True)]
    assert stopped.reason.endswith("it had been stopped (SIGSTOP or a debugger) and did not go on")


# --- limits ----------------------------------------------------------------------------------------------------------


def test_every_group_of_a_mesh_gets_the_group_timeout(tmp_path):
    exits = launch(job(tmp_path, "tells_timeouts", 4, group_timeout=7.0))
    assert [Path(exit.log).read_text() for exit in exits] == ["timeouts [7.0]\n"] * 4


def test_a_group_of_a_mesh_gives_up_after_the_group_timeout_and_the_sleeper_is_blamed(tmp_path):
    exits = launch(job(tmp_path, "subgroup_hangs", 4, group_timeout=1.0))
    assert summary(exits) == [("raised", False), ("killed", True), ("ok", False), ("ok", False)]
    assert exits[1].error == "killed by the harness 3 s after rank 0 failed"
    assert exits[1].reason.startswith("rank 0 waited for it in all_reduce")


def test_jobs_of_two_threads_run_at_the_same_time(tmp_path):
    def both(entry: str) -> list[Exit]:
        return launch(job(tmp_path / entry, entry, timeout=2.0))

    with ThreadPoolExecutor() as threads:
        hangs, works, fails = threads.map(both, ["sleeps", "reduces", "raises"])
    assert (summary(hangs), summary(works)) == ([("killed", False), ("killed", True)], [("ok", False)] * 2)
    assert summary(fails) == [("raised", False), ("raised", True)]


# --- refused before anything starts ----------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_named_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"file/job: cannot write \(Not a directory\): choose a directory"):
        launch(job(tmp_path / "file", "reduces"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_named_before_anything_starts(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(LaunchError, match=r"job: cannot write \(Permission denied\)"):
        launch(job(tmp_path, "reduces"))


def test_a_full_disk_is_named_with_the_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with pytest.raises(LaunchError, match="5 bytes free, 2 ranks need 2000000: make room there"):
        launch(job(tmp_path, "reduces"))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e300])
@pytest.mark.parametrize("name", ["timeout", "group_timeout"])
def test_a_time_limit_that_no_launch_can_have_is_named_before_anything_starts(tmp_path, name, seconds):
    with pytest.raises(LaunchError, match=f"^{name}: .*, got {seconds:g}".replace("+", r"\+")):
        launch(job(tmp_path, "reduces", **{name: seconds}))
    assert not (tmp_path / "job").exists()


def test_the_longest_time_limit_is_one_that_torch_takes(tmp_path):
    longest = {"timeout": 5 * LONGEST_SECONDS, "group_timeout": 5 * LONGEST_SECONDS / 2}  # of a case that compiles
    exits = launch(job(tmp_path, "tells_timeouts", 4, **longest))
    assert [Path(exit.log).read_text() for exit in exits] == [f"timeouts [{5 * LONGEST_SECONDS / 2}]\n"] * 4


def test_a_limit_on_the_size_of_files_is_named_with_the_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (5000, 5000))
    with pytest.raises(LaunchError, match=r"job: a file may have 5000 bytes \(ulimit -f\).* 1000000: raise"):
        launch(job(tmp_path, "reduces"), server=object())


def test_a_directory_of_an_earlier_launch_is_refused(tmp_path):
    launch(job(tmp_path, "says_its_environment"))
    with pytest.raises(LaunchError, match="holds the records of an earlier launch"):
        launch(job(tmp_path, "says_its_environment"))


def test_an_entry_that_does_not_exist_is_the_ranks_failure(tmp_path):
    exits = launch(job(tmp_path, "missing"))
    assert summary(exits) == [("raised", True)] * 2
    assert exits[0].error == "AttributeError: module 'tests.launch_entries' has no attribute 'missing'"


# --- the server ------------------------------------------------------------------------------------------------------


@needs_proc
def test_the_server_has_one_thread_so_that_forking_is_safe():
    default_server().wait_until_ready()
    status = Path(f"/proc/{default_server().pid}/status").read_text()
    assert re.findall(r"Threads:\t(\d+)", status) == ["1"]


def test_when_the_server_is_killed_its_ranks_are_lost_and_the_next_job_gets_another_server(tmp_path):
    server = default_server()
    with ThreadPoolExecutor() as threads:
        (tmp_path / "here").mkdir()
        options = {"here": str(tmp_path / "here")}
        running = threads.submit(launch, job(tmp_path, "starts_a_process_and_sleeps", options=options))
        wait_for(lambda: len(list((tmp_path / "here").iterdir())) == 2)
        pids = list(next(iter(server.jobs.values())).pids.values())
        os.kill(server.pid, signal.SIGKILL)
        assert summary(running.result()) == [("lost", False)] * 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert default_server() is not server
    assert summary(launch(job(tmp_path / "again", "reduces"))) == [("ok", False)] * 2


@pytest.mark.slow(
    "waits for a server; test_when_the_server_is_killed_its_ranks_are_lost_and_the_next_job_gets_another_server kills one"
)
def test_a_server_that_is_stopped_is_killed_and_nobody_is_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["harness.core.launch.supervise"], "KILL_PATIENCE", 1.0)
    with RankServer() as server:
        server.wait_until_ready()
        os.kill(server.pid, signal.SIGSTOP)
        exits = launch(job(tmp_path, "sleeps", timeout=1.0), server=server)
    assert summary(exits) == [("lost", False)] * 2
    assert exits[0].error.endswith(
        f"the rank server (pid {server.pid}) ended: it did not answer (stopped?) and was killed"
    )


def test_a_server_that_cannot_start_says_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemError('broken build')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with RankServer() as server, pytest.raises(LaunchError, match="did not start: SystemError: broken build"):
        launch(job(tmp_path, "reduces"), server=server)


# --- nothing survives ------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from pathlib import Path
from harness.core.launch import Job, launch
options = {"here": sys.argv[1]}
job = Job(Path(sys.argv[1], "job"), 2, "tests.launch_entries:starts_a_process_and_sleeps", options, timeout=60.0)
try:
    launch(job, sys.argv[2])
except KeyboardInterrupt:
    print("interrupted")
"""


def wait_for(condition, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)


def alive_with(mark: str) -> list[str]:
    """Command lines of the processes in whose first environment `mark` is: forks and children inherit it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it ended as we looked
            pass
    return found


numbers = itertools.count()


def heed() -> None:
    """Ctrl-C reaches the child even if this process is a shell's background job, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_driver(directory: Path, launcher: str, number: int) -> str:
    """Start a harness whose two ranks each start a process and sleep; send it a signal; return what it printed."""
    mark = f"LAUNCH_TEST_MARK={os.getpid()}-{next(numbers)}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **dict([mark.split("=")])}
    command = [sys.executable, "-c", DRIVER, str(directory), launcher]
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heed)
    wait_for(lambda: all((directory / name).exists() for name in "01"))
    assert len(alive_with(mark)) >= 8  # the driver, the server or torchrun, two ranks, two processes of each
    driver.send_signal(number)
    printed = driver.communicate(timeout=20)[0]
    wait_for(lambda: not alive_with(mark), 5.0)
    return printed


@pytest.mark.slow("real ranks; the first interrupts the harness in the same way", after=1)
@needs_proc
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_ctrl_c_leaves_no_process(tmp_path, launcher):
    assert stop_driver(tmp_path, launcher, signal.SIGINT) == "interrupted\n"


@pytest.mark.slow("real ranks; the first kills the harness in the same way", after=1)
@needs_proc
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_sigkill_of_the_harness_leaves_no_process(tmp_path, launcher):
    assert stop_driver(tmp_path, launcher, signal.SIGKILL) == ""


# --- torchrun --------------------------------------------------------------------------------------------------------


def test_torchrun_gives_the_same_exits_when_all_is_well(tmp_path):
    local, torchrun = (launch(job(tmp_path / name, "reduces"), name) for name in ("local", "torchrun"))
    assert [exit.log.replace("/torchrun/", "/local/") for exit in torchrun] == [exit.log for exit in local]
    assert [Path(exit.log).read_text() for exit in torchrun] == [Path(exit.log).read_text() for exit in local]
    assert summary(torchrun) == summary(local)


@pytest.mark.slow("a real torchrun; tests/core/launch/test_torchrun_ranks.py reads what each leaves")
def test_torchrun_gives_the_same_exits_when_a_rank_raises(tmp_path):
    local, torchrun = (launch(job(tmp_path / name, "raises"), name) for name in ("local", "torchrun"))
    assert summary(torchrun) == summary(local) == [("raised", False), ("raised", True)]
    assert (torchrun[1].error, torchrun[1].stack) == (local[1].error, local[1].stack)
    assert torchrun[0].last_collective == local[0].last_collective


def test_torchrun_that_cannot_start_is_quoted(tmp_path):
    exits = launch(job(tmp_path, "reduces", torchrun_args=("--no-such-option",)), "torchrun")
    assert summary(exits) == [("lost", False)] * 2
    assert f"torchrun exited with code 2, see {tmp_path}/job/logs/torchrun.log" in exits[0].error


# --- the in-flight record --------------------------------------------------------------------------------------------


def test_the_record_holds_the_last_two_collectives_of_each_group(tmp_path):
    record = Inflight(tmp_path / "rank_00.bin")
    for seq in range(3):
        record.issue("world", [0, 1], seq, "all_reduce", 100 + seq, seq, "backward")
    record.issue("pp", (0, 4), 0, "send", 64, 2, "forward", peer=4)
    record.issue("world", (0, 1), 3, "broadcast", 64, 2, "forward", root=1, dtype="float8_e4m3fn")
    found = read_inflight(tmp_path / "rank_00.bin")
    assert sorted(each.time for each in found) == [each.time for each in found] and found[0].time > 0
    assert [replace(each, time=0.0) for each in found] == [
        Issued("world", (0, 1), 2, "all_reduce", 102, 2, "backward", order=3),
        Issued("pp", (0, 4), 0, "send", 64, 2, "forward", peer=4, order=4),
        Issued("world", (0, 1), 3, "broadcast", 64, 2, "forward", order=5, root=1, dtype="float8_e4m3fn"),
    ]


def test_a_torn_cell_is_skipped_and_the_one_before_it_stands(tmp_path):
    path = tmp_path / "rank_00.bin"
    record = Inflight(path)
    for seq in (0, 1):
        record.issue("world", (0, 1), seq, "all_reduce", 16, 1, "forward")
    stamp = (2).to_bytes(8, "little")
    torn = path.read_bytes()
    path.write_bytes(torn[: torn.rindex(stamp)] + bytes(8) + torn[torn.rindex(stamp) + 8 :])
    assert [issued.seq for issued in read_inflight(path)] == [0]


def test_a_rank_that_issued_nothing_has_an_empty_record(tmp_path):
    Inflight(tmp_path / "rank_00.bin")
    assert read_inflight(tmp_path / "rank_00.bin") == read_inflight(tmp_path / "rank_01.bin") == []
