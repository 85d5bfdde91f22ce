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
from harness.core.launch.torchrun import run_as_node
from harness.core.report.outcome import largest_world_size
from harness.core.run.folders import folder_of, make_fresh_folder
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import judge_and_report, locked_case_folder, make_evidence
from harness.core.run.sources import digest_of_sources
from harness.core.run.supported import reason_unsupported
from harness.nights.gang_files import FirstNode, join_launch

NODE_FOLDER = Path(tempfile.gettempdir()) / f"harness-node-{os.getuid()}"
"""Where a node keeps its reference and compile caches."""
RENDEZVOUS_VARIABLE = "PET_RDZV_CONF"  # torchrun's --rdzv-conf
GLANCE_SECONDS = 10.0  # seconds between two looks at which nodes are alive
NODE_PATIENCE_SECONDS = 600.0  # for one that comes back, or that an autoscaler brings
JOIN_PATIENCE_SECONDS = 300.0  # seconds in which the first node of a gang trains the reference


@dataclass(frozen=True)
class Gang:
    """A number of nodes that together run the ranks of one case, equally many ranks on each node."""

    nodes: int
    ranks_per_node: int  # of each node


class RayCluster:
    """The nodes of a Ray cluster, on which cases are run. This machine judges them.

    address: "ray" for the cluster that this machine belongs to (or RAY_ADDRESS), or ray://HOST:PORT. device: "cpu" or
    "cuda". The constructor connects to the cluster. It raises LaunchError if Ray is not installed or no cluster is
    there.
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

    def node_capacities(self) -> list[int]:
        """Return how many ranks each living node can run at a time, one number a node, largest first.

        On cuda a node runs a rank on each GPU, else RANKS_PER_CORE ranks on each core.
        """
        if self.device == "cuda":
            resource = "GPU"
            ranks_each = 1
        else:
            resource = "CPU"
            ranks_each = RANKS_PER_CORE
        living = [node for node in self.ray.nodes() if node["Alive"]]
        return sorted((int(node["Resources"].get(resource, 0) * ranks_each) for node in living), reverse=True)

    def ray_resources(self, ranks: int) -> dict[str, float]:
        """Return the options of a Ray task that reserve room for this many ranks on one node: num_gpus and num_cpus, or
        num_cpus alone.
        """
        if self.device == "cuda":
            return {"num_gpus": ranks, "num_cpus": 0}
        cores = ranks / RANKS_PER_CORE  # Ray knows parts of one core, not of several
        return {"num_cpus": cores if cores < 1 else math.ceil(cores)}

    def run_case(self, case: Case, options: Options) -> Judgement:
        """Run a case on the cluster and judge it here, like run_case of one machine. Return the judgement.

        If a node dies, the case is run once more, and `made["again"]` of the judgement says so. Raises as run_case
        does, and Unsupported if the ranks do not fit on the nodes.
        """
        gang = smallest_gang(largest_world_size(case), self.node_capacities())
        remake_note = ""
        with locked_case_folder(case, options) as folder:
            try:
                self.run_on_cluster(case, options, folder, gang)
            except node_loss_errors(self.ray) as death:
                remake_note = f"made again: {first_line(death)}"
                self.rerun_on_cluster(case, options, folder, gang)
            judgement = judge_and_report(folder)
        return replace(judgement, made=judgement.made | {"again": remake_note}) if remake_note else judgement

    def rerun_on_cluster(self, case: Case, options: Options, folder: Path, gang: Gang) -> None:
        """Run the case again after a node died, and unpack its evidence into the folder.

        Raises LaunchError if a node dies this time too.
        """
        try:
            self.run_on_cluster(case, options, folder, gang)
        except node_loss_errors(self.ray) as death:
            raise LaunchError(f"twice a node died on which it was made: {first_line(death)}") from death

    def wait_for_answers(self, tasks: list[Any], gang: Gang) -> list[Any]:
        """Wait for Ray tasks. Return their answers, in the order of the tasks.

        An exception of a task is raised here as itself. Raises LaunchError if for NODE_PATIENCE_SECONDS too few nodes
        were alive.
        """
        done_tasks: list[Any] = []
        last_fit = time.monotonic()
        while len(done_tasks) < len(tasks):
            done_tasks, _ = self.ray.wait(tasks, num_returns=len(tasks), timeout=GLANCE_SECONDS)
            try:
                self.ray.get(done_tasks)
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            if self.node_capacities()[gang.nodes - 1 : gang.nodes] >= [gang.ranks_per_node]:
                last_fit = time.monotonic()
            elif time.monotonic() - last_fit > NODE_PATIENCE_SECONDS:
                raise LaunchError(
                    f"for {NODE_PATIENCE_SECONDS:g} s no {gang.nodes} nodes were alive"
                    f" that take {gang.ranks_per_node} ranks each"
                )
        return self.ray.get(tasks)

    def run_on_cluster(self, case: Case, options: Options, folder: Path, gang: Gang) -> None:
        """Run the case on the cluster, and unpack its evidence into the folder. Nothing is judged yet.

        Raises LaunchError if a node has other sources, and EvidenceError if no evidence of a case came back.
        """
        if gang.nodes > 1:
            sources, packed = self.make_on_several_nodes(case, options, gang)
        else:
            task = self.ray.remote(make_on_node).options(max_retries=0, **self.ray_resources(gang.ranks_per_node))
            ((sources, packed),) = self.wait_for_answers([task.remote(case, options)], gang)
        refuse_other_sources(sources)
        unpack_evidence(packed, folder)

    def make_on_several_nodes(self, case: Case, options: Options, gang: Gang) -> tuple[str, bytes]:
        """Run the case's ranks on all nodes of the gang.

        Return a digest of the first node's sources, and the tar of all ranks' evidence. The tasks of all nodes start at
        once or not at all, by a placement group. Afterwards tasks, actor and group are removed.
        """
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needed = self.ray_resources(gang.ranks_per_node)
        bundle = {"GPU": needed["num_gpus"]} if self.device == "cuda" else {"CPU": needed["num_cpus"]}
        group = placement_group([bundle] * gang.nodes, strategy="STRICT_SPREAD")

        def on(node: int, target: Any, **ray_options: Any) -> Any:
            strategy = PlacementGroupSchedulingStrategy(group, node)
            return self.ray.remote(target).options(scheduling_strategy=strategy, **ray_options)

        first_node = None
        tasks: list[Any] = []
        try:
            self.wait_for_answers([group.ready()], gang)
            launch = uuid.uuid4().hex[:8]
            first_node = on(0, FirstNodeActor, num_cpus=0).remote(case, options, launch)
            (meeting,) = self.wait_for_answers([first_node.meeting_place.remote()], gang)
            gang_options = replace(
                options, launcher="torchrun", torchrun_args=torchrun_arguments(gang, meeting, launch)
            )
            tasks = [on(0, make_on_first_node, max_retries=0, **needed).remote(case, gang_options)]
            joins = [on(node, join_on_node, max_retries=0, **needed) for node in range(1, gang.nodes)]
            tasks += [join.remote(first_node, f"{launch}-{node}") for node, join in enumerate(joins, 1)]
            return self.wait_for_answers(tasks, gang)[0]
        finally:
            for task in tasks:
                with contextlib.suppress(self.ray.exceptions.RayError):
                    self.ray.cancel(task, force=True)
            if first_node is not None:
                self.ray.kill(first_node)
            remove_placement_group(group)


def node_loss_errors(ray: Any) -> tuple[type[Exception], ...]:
    """Return the exception classes that Ray raises when a node, or a process of ours on it, has died. ray: the module."""
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
    """Return the first line of an error's message, without Ray's list of possible reasons."""
    return str(error).strip().partition("\n")[0].partition(" This can happen")[0]


def smallest_gang(ranks: int, capacities: Sequence[int]) -> Gang:
    """Return the fewest nodes over which the ranks can be divided equally.

    Raises Unsupported, with the arithmetic, if none fit.
    capacities: how many ranks each node can run, largest first.
    """
    for nodes in range(1, len(capacities) + 1):
        if ranks % nodes == 0 and ranks // nodes <= capacities[nodes - 1]:
            return Gang(nodes, ranks // nodes)
    raise Unsupported(f"{ranks} ranks in equal parts do not fit on the cluster's nodes, which take {list(capacities)}")


def torchrun_arguments(gang: Gang, meeting: str, launch: str) -> tuple[str, ...]:
    """Return the words of torchrun's command line on each node. meeting: HOST:PORT of the rendezvous. launch: its id."""
    nodes = ("--nnodes", str(gang.nodes), "--nproc-per-node", str(gang.ranks_per_node))
    return (*nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", launch)


def refuse_other_sources(sources: str) -> None:
    """Raise LaunchError if the node's sources or packages differ from those of this machine. sources: the digest of the
    node.
    """
    if sources != digest_of_sources():
        raise LaunchError("a node has other sources of the harness, or other packages, than this machine")


def unpack_evidence(packed: bytes, folder: Path) -> None:
    """Empty the folder and unpack the tar of a case's evidence into it. Raises EvidenceError if the tar has no case.json."""
    make_fresh_folder(folder)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
    if not (folder / "case.json").exists():
        raise EvidenceError(f"{folder}: what came back from the node is not evidence of a case")


# ---- on a node


def options_on_node(options: Options) -> Options:
    """Return the options with `out` changed to a folder on this node's own disk."""
    return replace(options, out=(NODE_FOLDER / "out").resolve())


def make_on_node(case: Case, options: Options) -> tuple[str, bytes]:
    """Run a case on this node.

    Return a digest of the node's sources, and the bytes of a tar of the case's folder, which is deleted.
    """
    options = prepare_node(case, options_on_node(options))
    with locked_case_folder(case, options) as folder:
        make_evidence(case, options)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(folder, arcname=".")
        shutil.rmtree(folder)
    return digest_of_sources(), packed.getvalue()


def make_on_first_node(case: Case, options: Options) -> tuple[str, bytes]:
    """Run the first node's ranks of a gang, as host of the rendezvous.

    Return as make_on_node does; the tar has all nodes' evidence.
    """
    os.environ[RENDEZVOUS_VARIABLE] = "is_host=true"  # an address need not be one that this machine knows as its own
    try:
        return make_on_node(case, options)
    finally:
        os.environ.pop(RENDEZVOUS_VARIABLE)


class FirstNodeActor(FirstNode):
    """A Ray actor on the first node of a gang, by which the other nodes fetch the launch and deliver their ranks' files."""

    def __init__(self, case: Case, options: Options, launch: str) -> None:
        options = options_on_node(options)
        super().__init__(options.out, folder_of(case, options) / "run", launch)

    def meeting_place(self) -> str:
        """Return HOST:PORT at which torchrun's processes meet. The port was free just now."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def prepare_node(case: Case, options: Options) -> Options:
    """Make this process use a rank server that ends with it, and return the options unchanged.

    Raises Unsupported for the case.
    """
    resident_client.choose_server_kind("own")
    if reason := reason_unsupported(case, options):
        raise Unsupported(reason)
    return options


class ActorCalls:
    """An object whose methods call those of a Ray actor on the first node and wait for the answer, as gang_files needs them."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        import ray

        return lambda *arguments: ray.get(getattr(self.actor, name).remote(*arguments))


def join_on_node(first: Any, name: str) -> None:
    """Run another node's ranks of a gang until they end, then delete its folder. Return nothing: results are on the first node.

    first: the handle of the first node's actor. name: the name of this node's folder, which no other node has.
    """
    folder_here = NODE_FOLDER / "joined" / name
    os.environ[RENDEZVOUS_VARIABLE] = "is_host=false"
    try:
        with join_launch(ActorCalls(first), folder_here.resolve(), JOIN_PATIENCE_SECONDS) as folder:
            run_as_node(folder, JOIN_PATIENCE_SECONDS)
    finally:
        os.environ.pop(RENDEZVOUS_VARIABLE)
        shutil.rmtree(folder_here, ignore_errors=True)
