"""The rank server that outlives a command: what a command gets from it is its own, and nothing is left of a command."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from harness import ROOT
from harness.core.launch import Job, RankServer, identity, launch, resident_client
from harness.core.launch.leftovers import find_leftovers
from harness.core.launch.resident_client import ResidentServer, connect_resident, status_of_all, stop_servers

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a kernel that tells when a command has died")
LIGHT = ("json",)  # beside a torch that is empty


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """A folder of this module's own, whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="harness-test-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder / "harness"
        wait_for(lambda: not any(status.get("commands") for status in status_of_all()))
        stop_servers()
    shutil.rmtree(folder)


@pytest.fixture
def light(sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module, and a torch that takes no time to import: for servers that start no rank."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "some_module.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def wait_for(condition, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)


def output() -> IO[bytes]:
    return tempfile.TemporaryFile()


def resident_of(link: ResidentServer) -> int:
    return resident_client.peer_process(link.connection)[0]


def met(*modules: str) -> int:
    """The pid of the resident server that a command meets, which then ends."""
    link = connect_resident(modules, output())
    link.connection.settimeout(20)
    link.hang_up()
    while link.connection.recv(4096):
        pass
    pid = resident_of(link)
    link.end()
    return pid


# ---- what a command gets


def job(directory: Path, entry: str, **more) -> Job:
    return Job(directory, 2, f"tests.launch_entries:{entry}", **{"timeout": 30.0, **more})


def test_a_second_command_meets_the_server_of_the_first_and_gets_circumstances_of_its_own(
    sockets, tmp_path, monkeypatch
):
    said, residents = [], []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processors = os.sched_getaffinity(0)
    for colour, umask, limit, processor in [("red", 0o22, 500, min(processors)), ("blue", 0o77, 600, max(processors))]:
        (tmp_path / colour).mkdir()
        with monkeypatch.context() as patch:
            patch.setenv("HARNESS_COLOUR", colour)
            patch.chdir(tmp_path / colour)
            before = os.umask(umask)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            os.sched_setaffinity(0, [processor])
            with RankServer((), connect_resident) as server:
                exits = launch(job(tmp_path / colour / "job", "says_its_circumstances"), server=server)
                residents.append(resident_of(server.link))
            os.umask(before)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.sched_setaffinity(0, processors)
        said += [Path(exit.log).read_text() for exit in exits]
        where = f"{colour} {tmp_path / colour} {oct(umask)} {limit} [{processor}]"
        assert said[-2:] == [f"{where} [False, False, False]\n"] * 2
    assert residents[0] == residents[1]


@pytest.mark.slow(
    "servers; test_a_second_command_meets_the_server_of_the_first_and_gets_circumstances_of_its_own has one"
)
def test_two_commands_at_once_have_servers_of_their_own(sockets, tmp_path):
    with RankServer((), connect_resident) as one, RankServer((), connect_resident) as two:
        exits = [launch(job(tmp_path / name, "reduces"), server=each) for name, each in (("a", one), ("b", two))]
        assert [exit.how for each in exits for exit in each] == ["ok"] * 4
        assert resident_of(one.link) == resident_of(two.link)
        assert one.pid != two.pid
        assert next(status for status in status_of_all() if status["pid"] == resident_of(one.link))["commands"] == 2


def test_the_end_of_the_resident_server_ends_no_command(sockets, tmp_path):
    with RankServer((), connect_resident) as server:
        server.wait_until_ready()
        assert {status["pid"] for status in stop_servers()} >= {resident_of(server.link)}
        assert [exit.how for exit in launch(job(tmp_path / "a", "reduces"), server=server)] == ["ok"] * 2
    wait_for(lambda: not Path(f"/proc/{server.pid}").exists())


# ---- nothing is left of a command

DRIVER = """
import sys
from pathlib import Path
from harness.core.launch import Job, launch
options = {"here": sys.argv[1]}
job = Job(Path(sys.argv[1], "job"), 2, "tests.launch_entries:starts_a_process_and_sleeps", options, timeout=60.0)
try:
    launch(job)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow("a server and a command; the first ends in the same way", after=1)
@pytest.mark.parametrize(("number", "printed"), [(signal.SIGINT, "interrupted\n"), (signal.SIGKILL, "")])
def test_a_command_that_is_interrupted_or_killed_leaves_the_resident_server_alone(sockets, tmp_path, number, printed):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), resident_client.SERVER_VARIABLE: "resident", "CI": ""}
    command = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        wait_for(lambda: all((tmp_path / name).exists() for name in "01"))
        assert len(find_leftovers(tmp_path / "job", range(2))) >= 4  # two ranks, a process of each
        [serves] = [status["pid"] for status in status_of_all() if status["commands"]]
        command.send_signal(number)
        assert command.communicate(timeout=20)[0] == printed
    finally:
        command.kill()
    wait_for(lambda: not find_leftovers(tmp_path / "job", range(2)))
    wait_for(lambda: [status["commands"] for status in status_of_all() if status["pid"] == serves] == [0])


# ---- which server it is


def test_a_changed_source_is_served_by_a_new_server(light):
    first = met("some_module")
    assert met("some_module") == first
    (light / "some_module.py").write_text("changed = True")
    assert met("some_module") != first
    wait_for(lambda: not Path(f"/proc/{first}").exists())


def test_another_environment_is_served_by_another_server_beside_it(light, monkeypatch):
    first = met()
    monkeypatch.setenv("OTHER", "1")
    assert met() != first
    monkeypatch.delenv("OTHER")
    assert met() == first


def test_what_a_terminal_sets_makes_no_difference(monkeypatch):
    before = identity.server_identity(())
    monkeypatch.setenv("COLUMNS", "77")
    assert identity.server_identity(()) == before
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert identity.server_identity(()) != before


def test_a_file_written_while_it_was_imported_has_changed(tmp_path):
    file = tmp_path / "module.py"
    file.touch()
    stamp = identity.stamp_of(str(file))
    assert stamp is not None
    assert identity.find_changed_file({str(file): stamp}, stamp[-1] + 1) is None
    assert identity.find_changed_file({str(file): stamp}, stamp[-1] - 1) == str(file)
    file.unlink()
    assert identity.find_changed_file({str(file): stamp}, stamp[-1] + 1) == str(file)


# ---- what goes wrong with it


def test_a_server_that_hangs_is_killed_and_replaced_with_one_line(light, monkeypatch, capfd):
    monkeypatch.setattr(resident_client, "ANSWER_PATIENCE", 0.5)
    first = met()
    os.kill(first, signal.SIGSTOP)
    assert met() != first
    told = f"harness: the resident rank server (pid {first}) did not answer and was killed; another one is started\n"
    assert capfd.readouterr().err == told


def test_a_server_that_died_is_replaced_with_one_line(light, capfd):
    first = met()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{first}").exists())
    assert met() != first
    assert capfd.readouterr().err == "harness: the resident rank server had died; another one is started\n"


def test_a_server_that_hangs_is_killed_when_it_is_told_to_stop(light, monkeypatch):
    monkeypatch.setattr(resident_client, "ANSWER_PATIENCE", 0.5)
    first = met()
    os.kill(first, signal.SIGSTOP)
    assert {"pid": first} in stop_servers()
    wait_for(lambda: not Path(f"/proc/{first}").exists())


def test_stop_leaves_a_server_of_a_version_that_does_not_say_whose_it_is(monkeypatch):
    """It ends for any request with "stop"."""
    asked = []
    older = (Path("x.sock"), {"pid": 1, "commands": 0, "root": "/elsewhere", "idle": 0.0, "ends": 300.0, "torch": ""})
    monkeypatch.setattr(resident_client, "ask_all_servers", lambda request: asked.append(request) or [older])
    assert [status["stays"] for status in stop_servers()] == [True]
    assert "stop" not in asked[0]


@pytest.mark.parametrize("hangs", [False, True])
def test_stop_leaves_the_servers_of_other_environments(light, monkeypatch, hangs):
    monkeypatch.setattr(resident_client, "ANSWER_PATIENCE", 0.5)
    other = met()
    if hangs:
        os.kill(other, signal.SIGSTOP)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "prefix", "/elsewhere")
        elsewhere.setattr(sys, "executable", "/elsewhere/bin/python")
        assert [status["stays"] for status in stop_servers() if status["pid"] == other] == [True]
        assert Path(f"/proc/{other}").exists()
        assert [status.get("stays", False) for status in stop_servers(every=True) if status["pid"] == other] == [False]
    wait_for(lambda: not Path(f"/proc/{other}").exists())


def test_a_server_ends_when_no_command_comes(light, sockets, monkeypatch):
    monkeypatch.setattr(resident_client, "IDLE_LIMIT", 0.5)
    pid = met()
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    assert not [
        path for path in sockets.iterdir() if path.stem == identity.server_identity(()) and path.suffix != ".lock"
    ]


def test_one_that_cannot_start_costs_a_line_and_the_command_has_its_own(light, monkeypatch, capfd):
    monkeypatch.setenv(resident_client.SERVER_VARIABLE, "resident")
    monkeypatch.setenv("CI", "")
    (light / "torch" / "__init__.py").write_text("raise SystemError('broken build')")
    with (
        RankServer((), resident_client.connect_or_start) as server,
        pytest.raises(Exception, match="SystemError: broken build"),
    ):
        server.wait_until_ready()
    told = "harness: no resident rank server, this command starts its own: it (ended as it started|did not start), see "
    assert re.search(told, capfd.readouterr().err), "it may have ended before anybody reached it"


def test_a_folder_that_others_may_look_into_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "harness").mkdir(mode=0o755)
    with pytest.raises(identity.UnsafeFolder, match="is open to others: remove it"):
        connect_resident((), output())


def test_in_ci_or_where_it_is_not_wanted_every_command_has_its_own():
    assert resident_client.is_resident_wanted({})
    assert not resident_client.is_resident_wanted({"CI": "true"})
    assert resident_client.is_resident_wanted({"CI": "true", resident_client.SERVER_VARIABLE: "resident"})
    assert not resident_client.is_resident_wanted({resident_client.SERVER_VARIABLE: "own"})
