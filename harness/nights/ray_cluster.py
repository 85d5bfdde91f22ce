"""A matrix on the nodes of a Ray cluster: each case is made where Ray finds room for all its ranks, and judged here.

A case that fits on a node is a task that takes as many of its GPUs, or of its cores, as the ranks need. A larger one is a gang
of tasks, one a node, whose ranks torchrun brings together. Evidence comes back through Ray, no disk is shared. Nodes have this
environment and these sources, at the same place. What was being made on a node that died is made again, once, and says so.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import socket
import tarfile
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.case.case import Case
from harness.core.evidence.store import EvidenceError
from harness.core.judge.judgement import Judgement
from harness.core.launch import LaunchError, resident_client
from harness.core.launch.machine import RANKS_PER_CORE
from harness.core.launch.torchrun import join
from harness.core.report.outcome import ranks_of
from harness.core.run.folders import folder_of, fresh_folder
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import judged, make, to_itself
from harness.core.run.sources import sources_anywhere
from harness.core.run.supported import unsupported
from harness.nights.gang_files import FirstNode, joined

NODE = Path(tempfile.gettempdir()) / f"harness-node-{os.getuid()}"
"""Where a node keeps its reference and compile caches."""
RENDEZVOUS = "PET_RDZV_CONF"  # torchrun's --rdzv-conf
GLANCE = 10.0  # seconds between two looks at which nodes are alive
NODE_PATIENCE = 600.0  # for one that comes back, or that an autoscaler brings
JOIN_PATIENCE = 300.0  # seconds in which the first node of a gang trains the reference


@dataclass(frozen=True)
class Gang:
    """Several nodes that run the ranks of one case, each as many."""

    nodes: int
    ranks: int  # of each node


class Cluster:
    """The nodes of a Ray cluster, on which cases are made.

    address: "ray" for the cluster this machine belongs to (or RAY_ADDRESS), or ray://HOST:PORT. LaunchError without a cluster.
    """

    def __init__(self, address: str, device: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise LaunchError("--on ray: Ray is not installed: pip install ray") from error
        self.ray = ray
        self.device = device
        try:
            if not ray.is_initialized():
                ray.init("auto" if address == "ray" else address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise LaunchError(f"--on {address}: no Ray cluster is there: {error}") from error

    def carries(self) -> list[int]:
        """Return how many ranks each living node takes, most first."""
        if self.device == "cuda":
            resource = "GPU"
            ranks_each = 1
        else:
            resource = "CPU"
            ranks_each = RANKS_PER_CORE
        living = [node for node in self.ray.nodes() if node["Alive"]]
        return sorted((int(node["Resources"].get(resource, 0) * ranks_each) for node in living), reverse=True)

    def needs(self, ranks: int) -> dict[str, float]:
        """Return what this many ranks need of a node, for Ray."""
        if self.device == "cuda":
            return {"num_gpus": ranks, "num_cpus": 0}
        cores = ranks / RANKS_PER_CORE  # Ray knows parts of one core, not of several
        return {"num_cpus": cores if cores < 1 else math.ceil(cores)}

    def run_case(self, case: Case, options: Options) -> Judgement:
        """Do what run_case does on one machine; raises what that raises."""
        gang = gang_of(ranks_of(case), self.carries())
        remake_note = ""
        with to_itself(case, options) as folder:
            try:
                self.make(case, options, folder, gang)
            except lost(self.ray) as death:
                remake_note = f"made again: {first_line(death)}"
                self.make_again(case, options, folder, gang)
            judgement = judged(folder)
        return replace(judgement, made=judgement.made | {"again": remake_note}) if remake_note else judgement

    def make_again(self, case: Case, options: Options, folder: Path, gang: Gang) -> None:
        """Make the case again after a node died. Raises LaunchError if a node dies this time too."""
        try:
            self.make(case, options, folder, gang)
        except lost(self.ray) as death:
            raise LaunchError(f"twice a node died on which it was made: {first_line(death)}") from death

    def answers(self, tasks: list[Any], gang: Gang) -> list[Any]:
        """Return the tasks' answers; what one raised is raised here as itself. LaunchError if their nodes are gone."""
        done_tasks: list[Any] = []
        last_fit = time.monotonic()
        while len(done_tasks) < len(tasks):
            done_tasks, _ = self.ray.wait(tasks, num_returns=len(tasks), timeout=GLANCE)
            try:
                self.ray.get(done_tasks)
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            if self.carries()[gang.nodes - 1 : gang.nodes] >= [gang.ranks]:
                last_fit = time.monotonic()
            elif time.monotonic() - last_fit > NODE_PATIENCE:
                raise LaunchError(
                    f"for {NODE_PATIENCE:g} s no {gang.nodes} nodes were alive that take {gang.ranks} ranks each"
                )
        return self.ray.get(tasks)

    def make(self, case: Case, options: Options, folder: Path, gang: Gang) -> None:
        """Make the case on the cluster, and unpack its evidence into the folder."""
        if gang.nodes > 1:
            sources, packed = self.made_on_several(case, options, gang)
        else:
            task = self.ray.remote(make_here).options(max_retries=0, **self.needs(gang.ranks))
            ((sources, packed),) = self.answers([task.remote(case, options)], gang)
        refuse_other_sources(sources)
        unpack(packed, folder)

    def made_on_several(self, case: Case, options: Options, gang: Gang) -> tuple[str, bytes]:
        """Return a digest of the first node's sources, and the packed evidence of all ranks.

        The tasks of all nodes start at once or not at all, by a placement group.
        """
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needed = self.needs(gang.ranks)
        bundle = {"GPU": needed["num_gpus"]} if self.device == "cuda" else {"CPU": needed["num_cpus"]}
        group = placement_group([bundle] * gang.nodes, strategy="STRICT_SPREAD")

        def on(node: int, target: Any, **ray_options: Any) -> Any:
            strategy = PlacementGroupSchedulingStrategy(group, node)
            return self.ray.remote(target).options(scheduling_strategy=strategy, **ray_options)

        first_node = None
        tasks: list[Any] = []
        try:
            self.answers([group.ready()], gang)
            launch = uuid.uuid4().hex[:8]
            first_node = on(0, OnFirstNode, num_cpus=0).remote(case, options, launch)
            (meeting,) = self.answers([first_node.meeting_place.remote()], gang)
            gang_options = replace(options, launcher="torchrun", torchrun_args=words(gang, meeting, launch))
            tasks = [on(0, make_with_others, max_retries=0, **needed).remote(case, gang_options)]
            joins = [on(node, join_here, max_retries=0, **needed) for node in range(1, gang.nodes)]
            tasks += [join.remote(first_node, f"{launch}-{node}") for node, join in enumerate(joins, 1)]
            return self.answers(tasks, gang)[0]
        finally:
            for task in tasks:
                with contextlib.suppress(self.ray.exceptions.RayError):
                    self.ray.cancel(task, force=True)
            if first_node is not None:
                self.ray.kill(first_node)
            remove_placement_group(group)


def lost(ray: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that Ray raises when a node, or a process of ours on it, is no more."""
    exceptions = ray.exceptions
    task_errors = (
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
        exceptions.ObjectLostError,
        exceptions.LocalRayletDiedError,
        exceptions.OutOfMemoryError,
    )
    return (*task_errors, exceptions.ActorDiedError, exceptions.ActorUnavailableError)


def first_line(error: BaseException) -> str:
    """Return the first line of a message, without Ray's list of possible reasons."""
    return str(error).strip().partition("\n")[0].partition(" This can happen")[0]


def gang_of(ranks: int, capacities: Sequence[int]) -> Gang:
    """Return the fewest nodes that can have equal parts of the ranks. Raises Unsupported, with the arithmetic."""
    for nodes in range(1, len(capacities) + 1):
        if ranks % nodes == 0 and ranks // nodes <= capacities[nodes - 1]:
            return Gang(nodes, ranks // nodes)
    raise Unsupported(f"{ranks} ranks in equal parts do not fit on the cluster's nodes, which take {list(capacities)}")


def words(gang: Gang, meeting: str, launch: str) -> tuple[str, ...]:
    """Return torchrun's arguments on each node."""
    nodes = ("--nnodes", str(gang.nodes), "--nproc-per-node", str(gang.ranks))
    return (*nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", launch)


def refuse_other_sources(sources: str) -> None:
    """Raise LaunchError if the node's sources differ from those of this machine. sources: the digest of the node."""
    if sources != sources_anywhere():
        raise LaunchError("a node has other sources of the harness, or other packages, than this machine")


def unpack(packed: bytes, folder: Path) -> None:
    """Write evidence that came back to the folder where it would lie had it been made here. Raises EvidenceError."""
    fresh_folder(folder)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
    if not (folder / "case.json").exists():
        raise EvidenceError(f"{folder}: what came back from the node is not evidence of a case")


# ---- on a node


def here(options: Options) -> Options:
    """Return options for this node's own disk."""
    return replace(options, out=(NODE / "out").resolve())


def make_here(case: Case, options: Options) -> tuple[str, bytes]:
    """Return a digest of the sources behind a case's evidence, and the evidence, packed."""
    options = ready(case, here(options))
    with to_itself(case, options) as folder:
        make(case, options)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(folder, arcname=".")
        shutil.rmtree(folder)
    return sources_anywhere(), packed.getvalue()


def make_with_others(case: Case, options: Options) -> tuple[str, bytes]:
    """Make the first node's part of a gang. Return a digest of the sources, and the packed evidence of all nodes."""
    os.environ[RENDEZVOUS] = "is_host=true"  # an address need not be one that this machine knows as its own
    try:
        return make_here(case, options)
    finally:
        os.environ.pop(RENDEZVOUS)


class OnFirstNode(FirstNode):
    """The files of a launch, for the other nodes, as an actor on the first node, which keeps the case."""

    def __init__(self, case: Case, options: Options, launch: str) -> None:
        options = here(options)
        super().__init__(options.out, folder_of(case, options) / "run", launch)

    def meeting_place(self) -> str:
        """Return where torchrun's processes meet: a port that was free just now."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def ready(case: Case, options: Options) -> Options:
    """Choose a rank server that ends with Ray's process, and return the options. Raises Unsupported."""
    resident_client.choose("own")
    if reason := unsupported(case, options):
        raise Unsupported(reason)
    return options


class Asked:
    """Calls of the methods of an actor on the first node, as the protocol in gang_files needs them."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        import ray

        return lambda *arguments: ray.get(getattr(self.actor, name).remote(*arguments))


def join_here(first: Any, name: str) -> None:
    """Run another node's part of a gang. name: of its folder, which only this node has.

    Whether it went well is in the evidence on the first node.
    """
    folder_here = NODE / "joined" / name
    os.environ[RENDEZVOUS] = "is_host=false"
    try:
        with joined(Asked(first), folder_here.resolve(), JOIN_PATIENCE) as folder:
            join(folder, JOIN_PATIENCE)
    finally:
        os.environ.pop(RENDEZVOUS)
        shutil.rmtree(folder_here, ignore_errors=True)
