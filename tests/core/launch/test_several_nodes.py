"""Two network namespaces stand for two hosts: torchrun over both, a node that joins, a link that goes down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import ROOT
from harness.core.launch.inflight import read_inflight

LONG = "cases: {pair: {why: a test, dims: {dp_shard: 2}, training: {steps: 400}}}"
SPANNING = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29500 --rdzv-id 1"


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def allowed() -> str:
    """Why network namespaces cannot be had; empty where they can."""
    if not all(map(shutil.which, ("ip", "unshare"))):
        return "ip and unshare are needed"
    made = subprocess.run(["ip", "netns", "add", "harness-may"], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    ip("netns del harness-may")
    return ""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two that are connected by one link; each knows both by name."""
    if reason := allowed():
        pytest.skip(reason)
    names = [f"harness-{os.getpid()}-{which}" for which in "ab"]
    etc, new = Path("/etc/netns"), not Path("/etc/netns").exists()
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for number, name in enumerate(names, start=1):
            for words in (f"addr add 10.77.0.{number}/24 dev eth0", "link set eth0 up", "link set lo up"):
                ip(f"-n {name} {words}")
            (etc / name).mkdir(parents=True)
            known = "".join(f"10.77.0.{i} {each}\n" for i, each in enumerate(names, start=1))
            (etc / name / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(etc / name, ignore_errors=True)
        if new and etc.exists():
            etc.rmdir()


def on(host: str, *words: str, cwd: Path) -> subprocess.Popen[str]:
    script = 'hostname "$0" && exec "$@"'
    command = [
        "ip",
        "netns",
        "exec",
        host,
        "unshare",
        "--uts",
        "sh",
        "-c",
        script,
        host,
        sys.executable,
        "-m",
        "harness",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HARNESS_SERVER": "own"}
    return subprocess.Popen(
        [*command, *words], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_on_both(
    hosts: list[str], folder: Path, case: str, cases: str, meanwhile: Callable[[], None] = lambda: None
) -> list[str]:
    """What the first node and the one that joined it print."""
    how = ("--cases", cases, "--launcher", "torchrun", "--torchrun-args", SPANNING, "--timeout", "60")
    nodes = [on(hosts[0], "run", case, *how, cwd=folder), on(hosts[1], "run", "--join", f"out/{case}", cwd=folder)]
    try:
        meanwhile()
        return [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.slow("two network namespaces; tests/core/blame/test_lost_links.py has its judgement")
def test_a_link_that_goes_down_is_told_as_that_and_both_nodes_end(hosts: list[str], tmp_path: Path) -> None:
    def cut() -> None:
        give_up = time.monotonic() + 200
        record = tmp_path / "out" / "pair" / "run" / "inflight" / "rank_00.bin"
        while not any(issued.step >= 2 for issued in read_inflight(record)):
            assert time.monotonic() < give_up, "step 2 never came"
            time.sleep(0.01)
        ip(f"-n {hosts[1]} link set eth0 down")

    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text(LONG)
    told, _ = run_on_both(hosts, tmp_path, "pair", "cases", cut)
    words = " ".join(told.split())
    assert "FAIL pair ranks [0,1] did not finish: nothing came through between" in words, told
    assert all(f"{host} (ranks" in words for host in hosts)
