"""Real jobs under torchrun, not edited: what their ranks leave, and what is said where they leave nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_jobs import Main

from harness.core.case.launching import requested_ranks
from harness.core.cli import main
from harness.core.evidence.recording import load_record, record_file
from harness.core.evidence.summary_parts import Use
from harness.core.judge.observed import groups_out_of_order, observed_axes
from harness.recording.injection import missing_script
from harness.recording.judged.stored_recording import load_recording

SCRIPT = str(Path(__file__).parents[1] / "recorded_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def record(out: Path, *words: str) -> int:
    return main(["record", "-o", str(out), "--", *words])


def test_an_unedited_job_is_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVALUATES", "1")
    monkeypatch.setenv("BESIDE", "1")
    assert record(Path("one"), *TORCHRUN, "2", SCRIPT) == 0
    recording = load_recording(tmp_path / "one")
    assert sorted(recording.summaries) == [0, 1]
    (axis,) = observed_axes(recording.summaries.values())
    assert (axis.size, axis.role, axis.groups) == (2, "sharded by fsdp2", ("0,1",))
    found = load_record(record_file(tmp_path / "one", 1))
    assert [step.step for step in found.evidence.steps] == [1, 2, 3]
    assert (found.ended, found.steps_seen) == ("ok", 4)
    assert {tensor.placements for tensor in found.evidence.parameters} == {("Shard(0)",)}  # not as evaluation left them
    assert {call.step for call in found.evidence.collectives} <= {0, 1, 2, 3}
    assert not list((tmp_path / "one" / "ranks").glob("*.last"))
    for one in recording.summaries.values():
        assert one.traffic.background == (Use("0,1", "all_reduce", "background", "float32", 3, 24),)
    assert not groups_out_of_order(recording.summaries.values())
    printed = capfd.readouterr().out
    assert "other threads   all_reduce of float32 over [0,1]: 24 B in 3 calls" in printed
    assert "2 of 2 ranks left evidence" in printed and "FSDP2 shards parameters: [0,1]" in printed
    assert max(map(len, printed.splitlines())) <= 100 and len(printed.splitlines()) <= 44


def test_a_rank_that_is_killed_leaves_its_last_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES", "1")
    assert record(tmp_path / "one", *TORCHRUN, "2", SCRIPT) == 1
    recording = load_recording(tmp_path / "one")
    assert recording.summaries[1].progress.ended == ""
    assert "step 3, backward" in recording.last[1].text
    assert recording.last[1].ranks == (0, 1)
    assert recording.exits[1] == -signal.SIGKILL  # as the launcher has it


TOLD_TO_END = """
import os, signal, time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(100)
"""


@pytest.mark.slow("a job; test_a_rank_that_is_killed_leaves_its_last_collective shows what a job was")
def test_a_recording_that_is_told_to_end_ends_the_job_and_shows_what_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = signal.getsignal(signal.SIGTERM)
    assert record(tmp_path / "one", sys.executable, "-c", TOLD_TO_END) == 1
    assert signal.getsignal(signal.SIGTERM) is usual
    printed = capsys.readouterr().out
    assert "1 of 1 ranks left evidence, ended by SIGTERM" in printed
    assert [step.step for step in load_record(record_file(tmp_path / "one", 0)).evidence.steps] == [1, 2]


JOINS = """
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    with Join([model]):
        for step in range(1 if dist.get_rank() else 3):
            model(torch.full((1, 2), dist.get_rank() + step + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow("a real torchrun; test_an_unedited_job_is_recorded has one")
def test_ranks_with_uneven_inputs_under_join_have_no_anomaly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(JOINS)
    words = ["record", "-o", str(tmp_path / "one"), "--layout", "dp_replicate=2", "--"]
    assert main([*words, *TORCHRUN, "2", str(tmp_path / "train.py")]) == 0
    assert "PASS layout dp_replicate 2" in capsys.readouterr().out
    summaries = load_recording(tmp_path / "one").summaries
    assert [summaries[rank].progress.joined for rank in (0, 1)] == [None, 1]
    assert [summaries[rank].progress.steps_seen for rank in (0, 1)] == [6, 2]


LEAVES = """
import os, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
os._exit(0)
"""


@pytest.mark.slow("a job; tests/recording/judged/test_recorded_ends.py reads literal ends")
def test_a_rank_that_leaves_by_os_exit_is_heard_of(tmp_path: Path) -> None:
    assert record(tmp_path / "one", sys.executable, "-c", LEAVES) == 0
    recording = load_recording(tmp_path / "one")
    assert (recording.summaries[0].progress.ended, recording.exits) == ("", {0: 0})


OUTLIVED = """
import tempfile, weakref, torch
import torch.distributed as dist
groups = []
with tempfile.TemporaryDirectory() as folder:
    for time in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{time}", rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        groups.append(weakref.ref(dist.group.WORLD))
        dist.destroy_process_group()
        del model
print("freed:", [group() is None for group in groups])
"""


def test_a_group_that_is_destroyed_before_ddp_is_never_freed_for_that_can_hang(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    assert forked_main(["record", "-o", str(tmp_path / "one"), "--", sys.executable, "-c", OUTLIVED]) == 0
    assert "freed: [False, False]" in capfd.readouterr().out


MARKS = "open('started', 'w').close()"


@pytest.mark.parametrize("layout", ["dp_shard=2,tp=x", "dp_shard=0", "no.toml", "bad.toml"])
def test_a_layout_that_cannot_be_read_is_refused_before_the_job_starts(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[parallelism]\ntensor_parallel_degree = 'x'\n")
    assert main(["record", "-o", "one", "--layout", layout, "--", sys.executable, "-c", MARKS]) == 2
    assert not Path("started").exists() and not Path("one").exists()
    said = capsys.readouterr().err
    assert (layout if layout.endswith("toml") else "dp_shard=0" if "0" in layout else "'tp=x'") in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    ("layout", "command"),
    [
        ("dp_replicate=2,dp_shard=4", ["torchrun", "--nproc-per-node", "2"]),
        ("dp_shard=2", [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4"]),
        ("dp_shard=2", ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"]),
        ("some.toml", ["accelerate", "launch", "--num_processes", "4"]),
    ],
)
def test_a_layout_of_another_number_of_ranks_is_refused_before_the_job_starts(
    layout: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.toml").write_text("[parallelism]\ntensor_parallel_degree = 3\n")
    Path("marks.py").write_text(MARKS)
    assert main(["record", "-o", "one", "--layout", layout, "--", *command, "marks.py"]) == 2
    assert not Path("started").exists() and not Path("one").exists()


def test_steps_that_are_no_numbers_are_told_what_they_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in ("x", "1-y", "/z"):
        words = ["record", "-o", str(tmp_path / "one"), "--steps", steps, "--", sys.executable, "-c", "pass"]
        assert main(words) == 2
        assert "--steps: " in (said := capsys.readouterr().err) and "such as 1-3,100" in said


INTERRUPTED = """
import os, signal, sys
os.kill(os.getppid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.SIG_DFL)
END
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGINT)", "sys.exit(1)"])
def test_ctrl_c_before_anything_is_trained_is_the_cause_and_no_other_is_said(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record(tmp_path / "one", sys.executable, "-c", INTERRUPTED.replace("END", end)) == 130
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 of an unknown number of ranks left evidence, ended by SIGINT" in printed
    assert "it was ended by SIGINT before an optimizer's first step" in printed and "none had imported torch" in printed


TRAINS = """
import os, signal, sys, time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
if "interrupted" in sys.argv:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
"""


@pytest.mark.slow("two jobs; test_ctrl_c_before_anything_is_trained_is_the_cause_and_no_other_is_said interrupts one")
def test_what_was_named_to_judge_a_job_that_is_interrupted_is_said_to_judge_it_and_is_not_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    monkeypatch.chdir(tmp_path)
    assert forked_main(["record", "-o", "one", "--", sys.executable, "-c", TRAINS]) == 0
    assert "(--same-as); what groups are for, --layout" in " ".join(capsys.readouterr().out.split())
    named = ["--same-as", "one", "--layout", "dp_replicate=1"]
    assert main(["record", *named, "-o", "two", "--", sys.executable, "-c", TRAINS, "interrupted"]) == 130
    printed, said = capsys.readouterr()
    assert f"`harness compare --numbers {tmp_path}/one two`" in " ".join(printed.split())
    assert "--same-as" not in printed and "--layout" not in printed
    assert [line.split("`")[1] for line in said.splitlines() if line.startswith("harness: interrupted")] == [
        "harness report --layout dp_replicate=1 two",
        "harness compare --numbers one two",
    ]


LONG = 100.0
WAITS = f"import time; print('it runs', flush=True); time.sleep({LONG})"


@pytest.mark.slow("a job each; the first is judged in the same way", after=1)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_ends_with_its_recording_though_nobody_signals_the_job_itself(by: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "harness", "record", "-o", "one", "--", sys.executable, "-c", WAITS]
    recording = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a shell's background jobs ignore
    )
    assert recording.stdout is not None
    assert recording.stdout.readline() == "it runs\n"
    began = time.monotonic()
    recording.send_signal(by)
    recording.stdout.read()  # until the last process that has it is gone
    assert time.monotonic() - began < LONG
    assert recording.wait() == {signal.SIGINT: 130, signal.SIGTERM: 1, signal.SIGKILL: -signal.SIGKILL}[by]


def test_a_script_that_is_not_there_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(tmp_path / "one", sys.executable, "nope.py") == 2
    assert "nope.py: no such file" in capsys.readouterr().err


def test_a_script_is_looked_for_only_where_python_or_torchrun_is_to_run_it_here() -> None:
    assert missing_script(["torchrun", "--nproc-per-node", "2", "nope.py", "--config", "x"]) == "nope.py"
    assert missing_script([*TORCHRUN, "2", "nope.py"]) == "nope.py"
    elsewhere = ["docker run image python nope.py", "bash -c nope.py", "srun --chdir /there torchrun nope.py"]
    modules = ["python -m pkg.train --config nope.py", "torchrun -m pkg.train nope.py", "python -c 1 nope.py"]
    assert [missing_script(text.split()) for text in (*elsewhere, *modules)] == [""] * 6
    assert missing_script(["torchrun", SCRIPT, "nope.py"]) == ""


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nopen(os.environ['MARK'], 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    record(tmp_path / "one", sys.executable, "-c", "pass")
    assert (tmp_path / "mark").exists()


def test_a_folder_that_is_no_recording_is_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("-")
    assert record(tmp_path, sys.executable, "-c", "pass") == 2
    assert (tmp_path / "mine.txt").exists()
    assert "holds mine.txt" in capsys.readouterr().err


def test_a_recording_is_overwritten_only_where_that_is_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one"
    (out / "ranks").mkdir(parents=True)
    (out / "processes").mkdir()
    record_file(out, 0).write_bytes(b"an earlier job")
    assert record_file(out, 0).suffix == ".record"
    words = ["--", sys.executable, "-c", "open('ran', 'w')"]
    assert main(["record", "-o", str(out), *words]) == 2
    assert record_file(out, 0).read_bytes() == b"an earlier job" and not Path("ran").exists()
    assert "--force" in capsys.readouterr().err
    main(["record", "-o", str(out), "--force", "--", sys.executable, "-c", "pass"])
    assert not record_file(out, 0).exists()
    assert main(["record", "-o", str(out), "--", sys.executable, "-c", "pass"]) == 2  # no rank left evidence there
    assert "is there already" not in capsys.readouterr().err


def test_a_command_of_the_environment_that_is_not_on_path_is_told_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    there = Path(sys.executable).parent / "torchrun"
    assert record(tmp_path, "torchrun", "train.py") == 2
    assert "train.py: no such file" in capsys.readouterr().err
    (tmp_path / "train.py").touch()
    assert record(tmp_path / "out", "torchrun", str(tmp_path / "train.py")) == 2
    told = (
        f"torchrun: cannot be run: No such file or directory; {there} is there: name that, or activate its environment"
    )
    assert told in capsys.readouterr().err
    assert record(tmp_path / "out", "no-such-command") == 2
    assert capsys.readouterr().err.endswith("no-such-command: cannot be run: No such file or directory\n")


def test_how_many_ranks_a_command_starts_is_read_from_it() -> None:
    assert requested_ranks(["torchrun", "--nnodes", "2", "--nproc-per-node=8", "train.py"]) == 16
    assert requested_ranks(["accelerate", "launch", "--num_processes", "4", "train.py"]) == 4
    assert requested_ranks(["python", "train.py"]) is None
    assert requested_ranks(["torchrun", "--nnodes=1:4", "--nproc-per-node=8", "train.py"]) is None
    assert requested_ranks(["torchrun", "--nproc-per-node", "auto", "train.py"]) is None
    assert requested_ranks(["python", "train.py", "--num_processes", "4"]) is None


def test_a_command_that_cannot_run_has_bisecting_skip_the_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--with", str(tmp_path / "good"), "-o", str(tmp_path / "new"), "--"]
    assert main([*words, "no-such-command"]) == 125
    assert "no-such-command: cannot be run" in capsys.readouterr().err
    assert main([*words, sys.executable, "-c", "raise SystemExit(3)"]) == 125
    assert "ended with code 3" in capsys.readouterr().err
