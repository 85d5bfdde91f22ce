"""Jobs that end in unusual ways: which rank is blamed, for what, and how far each one came."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from forked_jobs import Main

from harness.core.cli import main
from harness.core.evidence.recording import Reached
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.recorded_ends import exits_of
from harness.recording.judged.stored_recording import Recording, load_recording

JOB = """
import os, signal, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HOW, WHERE, START = sys.argv[1:4]


class Gone(Exception):
    pass


def end():
    if HOW == "excepthook":
        sys.excepthook = lambda *error: print("an own hook")
    if HOW == "excepthook that leaves":
        sys.excepthook = lambda *error: os._exit(3)
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        raise Gone("the reason")
    except Gone:
        if HOW == "sys.exit":
            sys.exit(7)
        if HOW == "os._exit":
            os._exit(7)
        raise


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        at("optimizer", self.times)
        self.times += 1
        return super().step(closure)


def at(phase, step):
    if (phase, step) == (WHERE.split()[0], int(WHERE.split()[1])) and (not dist.is_initialized() or dist.get_rank() == 1):
        end()


def train(rank, folder):
    if folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: at("backward", step))
    if folder:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = Slow(model.parameters(), lr=0.1)
    optimizer.times = 1
    for step in range(1, 5):
        loss = model(torch.full((1, 2), rank + step + 1.0)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    folder = os.getcwd()
    if START == "alone":
        train(0, "")
    elif START == "spawn":
        mp.spawn(train, args=(folder,), nprocs=2)
    else:
        processes = [mp.get_context(START).Process(target=train, args=(rank, folder)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(JOB)
    return script


def recorded(run: Main, job: Path, *words: str) -> Recording:
    run(["record", "-o", "out", "--", sys.executable, str(job), *words])
    return load_recording(Path("out"))


@pytest.mark.slow("mp.spawn; tests/recording/judged/test_recorded_ends.py blames over literals")
@pytest.mark.parametrize("start", ["spawn", pytest.param("fork", marks=pytest.mark.slow("spawn catches it, too"))])
def test_the_rank_that_raised_is_blamed_where_multiprocessing_caught_it(start: str, job: Path) -> None:
    found = recorded(main, job, "raised", "backward 2", start)
    other, first = exits_of(found, 2)
    assert (first.how, first.error, first.blamed, other.blamed) == ("raised", "Gone: the reason", True, False)
    assert (find_anomalies(found)[0].label, find_anomalies(found)[0].ranks) == ("RAISED", (1,))
    assert found.summaries[1].progress.reached == Reached(2, "backward", over=False)


@pytest.mark.slow("mp.spawn; tests/recording/judged/test_recorded_ends.py blames over literals")
def test_a_rank_of_mp_spawn_that_is_killed_in_its_first_step_is_blamed_and_how_far_each_came_is_on_record(
    job: Path,
) -> None:
    found = recorded(main, job, "killed", "optimizer 1", "spawn")
    assert found.exits[1] == -signal.SIGKILL
    other, first = exits_of(found, 2)
    assert (first.how, first.signal, first.blamed, other.blamed) == ("signal", "SIGKILL", True, False)
    assert found.summaries[1].progress.reached == Reached(1, "optimizer", over=False)
    assert (find_anomalies(found)[0].label, find_anomalies(found)[0].ranks) == ("ENDED", (1,))
    assert {one.label for one in find_anomalies(found)} >= {"REACHED"}


@pytest.mark.slow("a process each; the first ends on record in the same way", after=1)
@pytest.mark.parametrize(
    ("how", "where", "reached"),
    [
        ("excepthook", "optimizer 2", Reached(2, "optimizer")),
        ("excepthook that leaves", "backward 1", Reached(1, "backward")),
        ("sys.exit", "backward 2", Reached(2, "backward")),
        ("os._exit", "optimizer 2", Reached(2, "optimizer")),
    ],
)
def test_what_ended_a_process_is_on_record_whatever_way_it_leaves(
    how: str, where: str, reached: Reached, job: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    run = main if how == "os._exit" else forked_main
    (one,) = recorded(run, job, how, where, "alone").summaries.values()
    assert (one.progress.ended, one.progress.error, one.progress.reached) == ("raised", "Gone: the reason", reached)


CAUGHT = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    try:
        if step == 1:
            try:
                raise OSError("no such file")
            except OSError:
                sys.exit(2)
    except SystemExit:
        pass
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_an_exit_that_was_caught_ended_nothing(tmp_path: Path, forked_main: Main) -> None:
    assert forked_main(["record", "-o", str(tmp_path / "out"), "--", sys.executable, "-c", CAUGHT]) == 0
    (one,) = load_recording(tmp_path / "out").summaries.values()
    assert (one.progress.ended, one.progress.error) == ("ok", "")


HANGS = """
import os, signal, time, torch
model = torch.nn.Linear(2, 2)
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(100)
optimizer = Slow(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow("a process; test_what_ended_a_process_is_on_record_whatever_way_it_leaves ends one as well")
def test_a_process_alone_that_is_ended_in_its_first_step_reports_how_far_it_came(tmp_path: Path) -> None:
    assert main(["record", "-o", str(tmp_path / "out"), "--", sys.executable, "-c", HANGS]) == 1
    found = load_recording(tmp_path / "out")
    assert found.nothing == ""
    assert found.summaries[0].progress.reached == Reached(1, "optimizer", over=False)
    assert [one.step for one in find_anomalies(found) if one.label == "REACHED"] == [1]


IN_FORWARD = """
import os, signal, time, torch
class Net(torch.nn.Linear):
    def forward(self, x):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(100)
Net(2, 2)(torch.ones(1, 2))
"""


@pytest.mark.slow("a process; test_what_ended_a_process_is_on_record_whatever_way_it_leaves ends one as well")
def test_a_process_without_a_rank_that_is_ended_in_its_first_forward_pass_did_call_a_model(tmp_path: Path) -> None:
    assert main(["record", "-o", str(tmp_path / "out"), "--", sys.executable, "-c", IN_FORWARD]) == 1
    assert "1 Python process had called a model" in load_recording(tmp_path / "out").nothing


ONE_STEP = """
import torch
import torch.distributed as dist
def train():
    dist.init_process_group("gloo", init_method="file://" + __import__("os").getcwd() + "/store", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
train()
"""


def test_wrapper_and_optimizer_of_one_step_are_read_while_the_model_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    monkeypatch.chdir(tmp_path)
    assert forked_main(["record", "-o", "out", "--", sys.executable, "-c", ONE_STEP]) == 0
    (one,) = load_recording(Path("out")).summaries.values()
    assert (one.modules.wrappers, one.modules.unstepped, one.progress.steps_seen) == ({"ddp": 1}, 0, 1)
    assert one.modules.optimizers


BY_HAND = """
import torch
model = torch.nn.Linear(2, 2)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""


def test_without_an_optimizer_what_the_recorder_needs_is_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    words = ["record", "-o", str(tmp_path / "out"), "--layout", "dp_shard=1", "--", sys.executable, "-c", BY_HAND]
    assert forked_main(words) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "torch.optim.Optimizer" in printed and "see `completed`" not in printed


AVERAGES = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= 2
dist.destroy_process_group()
"""


def test_parameters_that_are_averaged_after_the_optimizers_step_are_read_as_the_next_step_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(AVERAGES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert forked_main(["record", "-o", "out", "--layout", "dp_replicate=2", "--", *torchrun, "train.py"]) == 0
    one, other = load_recording(Path("out")).summaries.values()
    assert one.contents.by_step == other.contents.by_step
    assert len({*one.contents.by_step.values()}) == 4


SPAWNED = """
import os, signal, time
import torch
import torch.distributed as dist
def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            if rank == 0 or step < 2:
                work = dist.all_reduce(parameter.grad, async_op=True)
                if step < 2:
                    work.wait()
        if step < 2:
            optimizer.step()
    open(f"{folder}/ready_{rank}", "w").close()
    time.sleep(60)
if __name__ == "__main__":
    context = torch.multiprocessing.spawn(train, (os.getcwd(),), nprocs=2, join=False)
    while not all(os.path.exists(f"ready_{rank}") for rank in (0, 1)):
        time.sleep(0.05)
    for process in context.processes:
        os.kill(process.pid, signal.SIGINT)
    for process in context.processes:
        process.join()
"""


@pytest.mark.slow("mp.spawn; tests/recording/judged/test_recorded_ends.py blames over literals")
def test_a_ctrl_c_that_mp_spawn_catches_is_no_end_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(SPAWNED)
    main(["record", "-o", "out", "--", sys.executable, "job.py"])
    recording = load_recording(Path("out"))
    assert {rank: (one.progress.ended, one.progress.error) for rank, one in recording.summaries.items()} == {
        rank: ("raised", "KeyboardInterrupt") for rank in (0, 1)
    }
    found = {odd.label: odd.ranks for odd in find_anomalies(recording)}
    assert found["WAITED FOR"] == (1,) and "ORDER" not in found
