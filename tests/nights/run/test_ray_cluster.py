"""A matrix on a cluster: two nodes of Ray's own making, started here, each with a folder that it takes for its disk."""

from __future__ import annotations

import io
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from harness.core.case.case import Case
from harness.core.case.loading import from_json
from harness.core.cli import main
from harness.core.report.grid import grid_text
from harness.core.report.outcome import Outcome
from harness.core.report.progress import Progress
from harness.core.run import verdicts
from harness.core.run.matrix import run_all
from harness.core.run.options import Options, Unsupported
from harness.nights import ray_cluster
from harness.nights.ray_cluster import Gang, RayCluster, smallest_gang

EACH = 1  # ranks that a node of one core takes here; each of a gang imports torch
MISSING = "Ray is not installed: pip install ray"


def case_of(name: str, ranks: int, **training: Any) -> Case:
    dims = {"dp_replicate": ranks}
    return from_json({"name": name, "why": "a test", "dims": dims, "model": {"n_layers": 1}, "training": training})


@pytest.mark.parametrize(
    ("ranks", "carries", "gang"),
    [(8, [8, 8], Gang(1, 8)), (16, [8, 8], Gang(2, 8)), (8, [4, 4, 1], Gang(2, 4)), (6, [4, 2, 2], Gang(3, 2))],
)
def test_a_case_takes_the_fewest_nodes_that_can_have_equal_parts_of_it(
    ranks: int, carries: list[int], gang: Gang
) -> None:
    assert smallest_gang(ranks, carries) == gang


def test_a_case_that_is_too_large_for_the_cluster_is_skipped_with_the_arithmetic() -> None:
    with pytest.raises(Unsupported, match=r"16 ranks in equal parts do not fit .*, which take \[8, 4\]"):
        smallest_gang(16, [8, 4])


class Nodes:
    """They know each other through Ray alone."""

    def __init__(self) -> None:
        cluster_utils = pytest.importorskip("ray.cluster_utils", reason=MISSING)
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.living: dict[Path, Any] = {}
        self.dead: list[Path] = []

    def add(self, own: Path) -> None:
        """own: where it keeps what it makes, and its slots."""
        own.mkdir()
        variables = {"TMPDIR": str(own), "HARNESS_SLOTS_FOLDER": str(own / "slots")}
        node = self.cluster.add_node(num_cpus=1, object_store_memory=10**8, env_vars=variables)
        self.living[own] = node

    @property
    def all(self) -> list[Path]:
        return [*self.living, *self.dead]

    def kill(self, own: Path) -> None:
        self.dead.append(own)
        self.cluster.remove_node(self.living.pop(own), allow_graceful=False)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    ray = pytest.importorskip("ray", reason=MISSING)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # a short path, for sockets
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(ray_cluster, "RANKS_PER_CORE", EACH)
        monkeypatch.setenv("RAY_worker_niceness", "0")  # its own is 15, which gets nothing of a busy machine
        (Path(folder) / "ray").mkdir()
        made = Nodes()
        for name in ("one", "other"):
            made.add(Path(folder) / name)
        monkeypatch.setenv("RAY_ADDRESS", made.cluster.address)
        yield made
        ray.shutdown()
        made.cluster.shutdown()


@pytest.mark.slow("a Ray cluster; tests/nights/run/test_ray_tasks.py has its tasks without one")
def test_a_case_larger_than_a_node_is_one_launch_on_several_and_a_node_that_dies_loses_no_case(
    nodes: Nodes, tmp_path: Path
) -> None:
    """One test: to start a cluster takes longer than all its cases."""
    options = Options(out=tmp_path / "out")
    cases = [case_of("large", 2 * EACH, steps=10), case_of("long", EACH, steps=10)]
    record, cluster = verdicts.begin_record(cases, options, ""), RayCluster("ray", "cpu")

    def matrix() -> list[Outcome]:
        progress = Progress({"large": 1.0, "long": 1.0}, io.StringIO())
        return run_all(cases, options, jobs=1, progress=progress, ended=record.append_outcome, how=cluster.run_case)

    large, long = found = made_while_the_node_of_the_second_dies(nodes, matrix)
    assert [one.verdict for one in found] == ["PASS", "PASS"], f"{found}"
    assert (large.made_again, long.made_again[:41]) == ("", "made again: Task failed because the node ")
    assert "    made again: Task failed because the node" in grid_text(found)
    run, unread = verdicts.last_run(options.out)
    assert (list(run.outcomes), run.ended_twice, run.missing_cases, unread) == (["large", "long"], [], [], [])
    written = {path.parent.parent.parent.name: path.name for path in sorted(options.out.glob("*/run/ranks/*.npz"))}
    assert written == {"large": f"rank_{2 * EACH - 1:02d}.npz", "long": f"rank_{EACH - 1:02d}.npz"}
    assert sum(any(own.glob("harness-node-*/joined")) for own in nodes.all) == 1  # the other one was the first node


def made_while_the_node_of_the_second_dies(nodes: Nodes, make: Callable[[], list[Outcome]]) -> list[Outcome]:
    found: Future[list[Outcome]] = Future()

    def run() -> None:
        try:
            found.set_result(make())
        except BaseException as error:
            found.set_exception(error)

    def at_work() -> list[Path]:
        return [
            own for own in nodes.living if any(own.glob(f"harness-node-*/out/long/run/logs/rank_{EACH - 1:02d}.log"))
        ]

    threading.Thread(target=run, daemon=True).start()  # a test that fails must not wait for it
    eventually(lambda: found.done() or at_work())
    assert not found.done(), found.exception() or found.result()
    nodes.kill(at_work()[0])
    return found.result(timeout=600)


def test_without_ray_or_a_cluster_the_reason_is_told_and_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["matrix", "--on", "ray", "-k", "ddp_2", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "harness: --on ray: Ray is not installed: pip install ray\n"
    assert list(tmp_path.iterdir()) == []


def eventually(condition: Any, seconds: float = 500.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
