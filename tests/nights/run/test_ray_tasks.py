"""What is done about tasks of a cluster that fail, with tasks that are calls: no cluster is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.core.case.case import Case
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict
from harness.core.launch import LaunchError
from harness.core.run.options import Options, Unsupported
from harness.core.run.sources import digest_of_sources
from harness.nights import ray_cluster
from harness.nights.ray_cluster import RayCluster

CASE = Case("one", "a test")


class RayTaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class NodeDiedError(Exception):
    pass


NAMES = (
    *("WorkerCrashedError", "ObjectLostError", "LocalRayletDiedError", "OutOfMemoryError"),
    *("ActorDiedError", "ActorUnavailableError"),
)


def fake_ray(answers: list[Any]) -> ModuleType:
    """Every task answers, or raises, the next of these."""
    ray: Any = ModuleType("ray")
    errors = {name: type(name, (Exception,), {}) for name in NAMES}
    ray.exceptions = SimpleNamespace(RayTaskError=RayTaskError, NodeDiedError=NodeDiedError, **errors)
    ray.is_initialized = lambda: True
    ray.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    ray.remote = lambda what: SimpleNamespace(
        options=lambda **how: SimpleNamespace(remote=lambda *arguments: answers.pop(0))
    )
    ray.wait = lambda tasks, **how: (tasks, [])

    def get(tasks: list[Any]) -> list[Any]:
        for task in tasks:
            if isinstance(task, Exception):
                raise task
        return tasks

    ray.get = get
    return ray


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Judgement]:
    """The case on a cluster whose tasks answer so."""
    monkeypatch.setattr(ray_cluster, "unpack_evidence", lambda packed, folder: None)
    result = Result("loss", Verdict.PASS, 1)
    monkeypatch.setattr(ray_cluster, "judge_and_report", lambda folder: Judgement(CASE, folder, (result,), None, 1.0))

    def run(*answers: Any, case: Case = CASE) -> Judgement:
        monkeypatch.setitem(sys.modules, "ray", fake_ray(list(answers)))
        return RayCluster("ray", "cpu").run_case(case, Options(out=tmp_path))

    return run


WELL = (digest_of_sources(), b"")


def test_what_a_node_made_is_judged_here(made: Any) -> None:
    assert made(WELL).made == {}


def test_what_was_on_a_node_that_died_is_made_again_and_says_so(made: Any) -> None:
    died = NodeDiedError("the node it was on is dead. This can happen if ...")
    assert made(died, WELL).made == {"again": "made again: the node it was on is dead."}


def test_a_second_death_is_a_problem_and_no_verdict(made: Any) -> None:
    with pytest.raises(LaunchError, match="twice a node died on which it was made: again"):
        made(NodeDiedError("first"), NodeDiedError("again"), WELL)


def test_what_a_node_raises_is_raised_here_and_nothing_is_made_again(made: Any) -> None:
    with pytest.raises(Unsupported, match="no such option"):
        made(RayTaskError(Unsupported("no such option")), WELL)


def test_a_node_with_other_sources_is_refused(made: Any) -> None:
    with pytest.raises(LaunchError, match="a node has other sources of the harness, or other packages"):
        made(("0123", b""))


def test_only_living_nodes_count(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray([]))
    assert RayCluster("ray", "cpu").node_capacities() == [8]


def test_a_task_for_which_no_node_is_left_does_not_wait_for_ever(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = fake_ray([])
    ray.wait = lambda tasks, **how: ([], tasks)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "NODE_PATIENCE_SECONDS", 0.05)
    with pytest.raises(LaunchError, match=r"for 0.05 s no 1 nodes were alive that take 16 ranks each"):
        RayCluster("ray", "cpu").wait_for_answers([None], ray_cluster.Gang(1, 16))
