"""What a rank costs that is forked for one case, against one that runs case after case; see docs/results/ranks_that_stay.md.

    python benchmarks/ranks_that_stay.py [--rounds 3] [--cases fsdp_2,ddp_2] [--parts]
    python benchmarks/ranks_that_stay.py --stale            which cached value of DTensor names a group of an earlier case

Each case is run by the code that a rank of the harness runs, under the probe, in three ways that take turns:

    forked     in ranks forked for it from the rank server, which has torch imported
    cleared    in ranks that ran the other cases of its world size before: groups made anew, caches with a mesh cleared
    kept       the same, with DTensor's caches kept; the harness may not do this, as --stale shows

CPU seconds are those of all ranks of a case, by the kernel. A forked rank's contain fork and exit. --parts: where they go.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.launch import Job, default_server, launch
from harness.run.options import Options
from harness.run.reference_cache import reference_folder
from harness.spec.case import Case, to_json
from harness.spec.case_files import OURS, folder_of
from harness.spec.loading import find_case, load_all

SAMPLE = (
    "ddp_2 fsdp_2 fsdp_2_ac_full ddp_2_accum tp_2 tp_2_no_sp cp_2 pp_2 bf16_fsdp_2 fsdp_2_documents "
    "fsdp_4 hsdp_2x2 fsdp_2_tp_2 fsdp_2_cp_2 pp_2_tp_2 pp_2_fsdp_2 hsdp_2x2_tp_2"
)
PARTS = ("fork", "trainer starts", "probe attaches", "steps", "evidence", "file", "rest")
WAYS = ("forked", "cleared", "kept")


# ---- on every rank


def in_turn(options: dict[str, Any]) -> list[Any]:
    """Run the cases one after the other; leave the CPU seconds of each part of each case in RESULT/RANK.json."""
    from harness.run import rank_main

    rank, found, kept, spent = os.environ["RANK"], [], [], {"fork": cpu()}
    spent_in(spent)
    for number, one in enumerate(options["cases"]):
        began = cpu() if number else 0.0
        os.environ["INIT_METHOD"] = f"file://{options['result']}/store_{number}"
        kept.append(rank_main.watched(one))  # freeing a trainer may hang
        found.append(spent | {"all": cpu() - began})
        spent.clear()
        if len(options["cases"]) > 1:
            start_anew(clear=options["clear"])
    Path(options["result"], f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return kept


def cpu() -> float:
    """CPU seconds of all threads of this process."""
    return time.process_time()


def spent_in(spent: dict[str, float]) -> None:
    """Have the CPU seconds of each part added up here."""
    from harness.probe import Probe
    from harness.run import rank_main

    for owner, name, part in (
        (rank_main, "_started", "trainer starts"),
        (Probe, "attach", "probe attaches"),
        (rank_main, "_train", "steps"),
        (Probe, "evidence", "evidence"),
        (rank_main, "save", "file"),
    ):
        setattr(owner, name, adding(getattr(owner, name), spent, part))


def adding(function: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = cpu()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] = spent.get(part, 0.0) + cpu() - began

    return timed


def start_anew(*, clear: bool) -> None:
    """Destroy all groups; with `clear` empty each cache of torch that holds a mesh. Freeze what lives, as the server does."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if clear:
        for cache in caches_with_a_mesh():
            cache()
    gc.collect()
    gc.freeze()


def caches_with_a_mesh() -> Iterable[Callable[[], object]]:
    """What clears each of torch's caches whose keys or values hold a mesh (torch 2.11 to 2.14)."""
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    yield debug._clear_sharding_prop_cache
    yield _redistribute._gen_transform_infos.cache_clear
    yield _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("torch.distributed.tensor._ops"):
            yield each.cache_clear


def stale(options: dict[str, Any]) -> None:
    """Two meshes alike, in groups that were destroyed in between. Leave what a DTensor of the second one communicates over."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, found = int(os.environ["RANK"]), {}
    for number in (0, 1):
        store = f"file://{options['result']}/store_{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
        if number:  # as another case makes other groups first
            DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        doubled = distribute_tensor(torch.arange(4.0), mesh, (Replicate(), Shard(0))) * 2
        if rank == 0:
            right, used = (dist.get_process_group_ranks(each.get_group("tp")) for each in (mesh, doubled.device_mesh))
            found = {
                "its mesh is the new one": doubled.device_mesh is mesh,
                "ranks of its tp group": used,
                "right": right,
            }
        if not number:
            start_anew(clear=options["clear"])
    if rank == 0:
        Path(options["result"], "stale.json").write_text(json.dumps(found), encoding="utf-8")


# ---- in this process


def measured(cases: Sequence[Case], way: str, folder: Path) -> dict[str, dict[str, float]]:
    """CPU seconds of all ranks, by case and part. Cases of one world size; those that stay run the last case first."""
    if way == "forked":
        return {case.name: launched([case], way, folder / case.name)[0] for case in cases}
    found = launched([cases[-1], *cases], way, folder)[1:]
    return {case.name: spent for case, spent in zip(cases, found, strict=True)}


def launched(cases: Sequence[Case], way: str, folder: Path) -> list[dict[str, float]]:
    """Run the cases in one launch. Raises SystemExit if a rank does not end well."""
    folder.mkdir(parents=True)
    wanted = [options_of(case, folder / f"evidence_{number}") for number, case in enumerate(cases)]
    options = {"cases": wanted, "clear": way == "cleared", "result": str(folder)}
    before = of_children()
    exits = launch(Job(folder / "job", cases[0].dims.world_size, "ranks_that_stay:in_turn", options, 600))
    children = of_children() - before
    if failed := [exit for exit in exits if exit.how != "ok"]:
        raise SystemExit(f"rank {failed[0].rank} {failed[0].how}: {failed[0].error}\n{failed[0].stack}")
    ranks = [json.loads((folder / f"{exit.rank}.json").read_text(encoding="utf-8")) for exit in exits]
    found = [summed(spent) for spent in zip(*ranks, strict=True)]
    if way == "forked":
        found[0]["all"] = children
    for spent in found:
        spent["rest"] = spent["all"] - sum(spent.get(part, 0.0) for part in PARTS)
    return found


def shown_stale(folder: Path) -> str:
    """Return what rank 0 has of a DTensor in new groups, with DTensor's caches cleared and kept."""
    lines = []
    for way in ("cleared", "kept"):
        options = {"clear": way == "cleared", "result": str(folder / way)}
        Path(folder, way).mkdir()
        exits = launch(Job(folder / way / "job", 4, "ranks_that_stay:stale", options, 120))
        if failed := [exit for exit in exits if exit.how != "ok"]:
            raise SystemExit(f"rank {failed[0].rank} {failed[0].how}: {failed[0].error}\n{failed[0].stack}")
        found = json.loads((folder / way / "stale.json").read_text(encoding="utf-8"))
        lines += [f"DTensor's caches {way}", *(f"    {what:24} {value}" for what, value in found.items())]
    return "\n".join(lines)


def summed(ranks: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for spent in ranks:
        for part, seconds in spent.items():
            total[part] += seconds
    return total


def options_of(case: Case, evidence: Path) -> dict[str, Any]:
    weights = reference_folder(case, Options(out=evidence.parents[2] / "out")) / "weights.npz"
    options = {"case": to_json(case), "trainer": "llama3", "weights": str(weights), "device": "cpu", "fault": None}
    return options | {"directory": str(evidence), "checkpoints": str(evidence / "checkpoint")}


def of_children() -> float:
    """CPU seconds of the rank server and of all ranks that it has buried."""
    stat = Path(f"/proc/{default_server().pid}/stat").read_text(encoding="utf-8")
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=SAMPLE.replace(" ", ","), metavar="NAMES")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--ways", default=",".join(WAYS), help="of the three; the first is 100 %%")
    parser.add_argument("--stale", action="store_true")
    chosen = parser.parse_args()
    default_server().ready()
    if chosen.stale:
        with tempfile.TemporaryDirectory() as folder:
            return print(shown_stale(Path(folder)))
    every = load_all(folder_of(OURS))
    cases = [find_case(name, every) for name in chosen.cases.split(",")]
    ways = chosen.ways.split(",")
    found: dict[str, dict[str, list[dict[str, float]]]] = {way: defaultdict(list) for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            reference_folder(case, Options(out=Path(folder) / "out"))
        for number in range(chosen.rounds):
            for size in sorted({case.dims.world_size for case in cases}):
                mine = [case for case in cases if case.dims.world_size == size]
                for way in ways:
                    done = measured(mine, way, Path(folder) / "runs" / f"{number}_{size}_{way}")
                    for name, spent in done.items():
                        found[way][name].append(spent)
    print(table(cases, found))
    if chosen.parts:
        print("\n" + parts(found))


def median(runs: Sequence[dict[str, float]], part: str) -> float:
    return statistics.median(spent.get(part, 0.0) for spent in runs)


def table(cases: Sequence[Case], found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = [f"{'CPU seconds of all ranks':30} ranks" + "".join(f"{way:>9}" for way in found)]
    for case in cases:
        each = [median(found[way][case.name], "all") for way in found]
        lines += [f"{case.name:30} {case.dims.world_size:5}" + "".join(f"{seconds:9.2f}" for seconds in each)]
    sums = [sum(median(found[way][case.name], "all") for case in cases) for way in found]
    lines += [f"{'all of them':36}" + "".join(f"{seconds:9.2f}" for seconds in sums)]
    lines += [f"{'of forked':36}" + "".join(f"{seconds / sums[0]:9.1%}" for seconds in sums)]
    return "\n".join(lines)


def parts(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = [f"{'where they go':36}" + "".join(f"{way:>9}" for way in found)]
    for part in PARTS:
        sums = [sum(median(runs, part) for runs in found[way].values()) for way in found]
        lines += [f"{part:36}" + "".join(f"{seconds:9.2f}" for seconds in sums)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
