"""What ranks do in test_probe.py: entries for harness.core.launch. Each writes what it saw to a JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.core import trainers
from harness.core.case.loading import from_json
from harness.core.probe import Probe
from harness.core.probe.collectives import C10D_OPERATORS, CollectiveRecorder


def _rank() -> int:
    return int(os.environ["RANK"])


def _join() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=_rank(), world_size=world_size)


def _leave(options: dict[str, Any], found: Any) -> None:
    Path(options["result"], f"rank_{_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def late_rank(options: dict[str, Any]) -> None:
    """Rank 0 comes late to a sum that is waited for at once, and to one that is waited for after another call."""
    _join()
    recorder = CollectiveRecorder(lambda: (1, "backward"))
    recorder.install()
    ones = torch.ones(8)
    for _ in range(2):
        time.sleep(0.3 * (_rank() == 0))
        dist.all_reduce(ones)
    first, second = (dist.all_reduce(torch.ones(8), async_op=True) for _ in range(2))
    first.wait()
    second.wait()
    untouched = recorder.call_times.times_by_call.copy()
    recorder.remove()
    dist.all_reduce(ones)
    assert recorder.call_times.times_by_call == untouched
    _leave(options, [dataclasses.asdict(one) for one in recorder.final_records()])


def known_sequence(options: dict[str, Any]) -> None:
    """Collectives by hand over the world and over two halves, from every side that torch has."""
    _join()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[_rank() // 2]
    recorder = CollectiveRecorder(lambda: (7, "other"))
    recorder.install()
    ones = torch.ones(8)
    dist.all_reduce(ones)
    dist.all_reduce(ones, group=half)
    dist.all_gather_into_tensor(torch.empty(16), ones, group=half)
    dist.reduce_scatter_tensor(torch.empty(4), ones, group=half)
    first = 2 * (_rank() // 2)
    dist.broadcast(ones.double(), src=first, group=half)
    parts = [torch.empty(8), torch.empty(8)] if _rank() == first else None
    dist.reduce(ones.clone(), dst=first, group=half)
    dist.gather(ones, parts, dst=first, group=half)
    dist.scatter(torch.empty(8), parts, src=first, group=half)
    dist.all_gather([torch.empty(8), torch.empty(8)], ones, group=half)
    thread = threading.Thread(target=lambda: dist.all_reduce(ones, group=half))
    thread.start()
    thread.join()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2), group=half)
    gathered = torch.distributed._functional_collectives.all_gather_tensor(ones, 0, half)
    gathered.sum().item()
    partner = _rank() ^ 1
    if _rank() % 2 == 0:
        dist.send(ones, partner)
        dist.send(ones, partner)
    else:
        dist.recv(torch.empty(8), partner)
        dist.recv(torch.empty(8))
    dist.barrier(group=half)
    recorder.remove()
    dist.all_reduce(ones)  # no longer seen
    _leave(options, [dataclasses.asdict(record) for record in recorder.records])


def outlived_group(options: dict[str, Any]) -> None:
    """Whether a group that was destroyed before DDP is still there when DDP has been freed."""
    _join()
    group = dist.new_group()
    recorder = CollectiveRecorder(lambda: (7, "other"))
    recorder.install()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    model(torch.ones(1, 2)).sum().backward()
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    recorder.remove()
    del model, group, recorder
    _leave(options, alive() is not None)


def beside_other_witnesses(options: dict[str, Any]) -> None:
    """A whole training run, as told by the recorder, by torch's profiler and by gloo's own flight recorder."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100000"
    flown()  # makes it, before anybody changes its size
    case, adapter = from_json(options["case"]), trainers.load_adapter(options.get("trainer", "llama3"))
    probe = Probe(_rank(), case.dims.world_size)
    trainer = adapter.start(case, None, "cpu")
    probe.install()
    probe.attach(trainer.model_parts)
    before = len(flown())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.train(case.training.steps)
    names = (event.name.removeprefix("c10d::") for event in profiler.events() if event.name.startswith("c10d::"))
    records = probe.collectives.records
    found = {
        "profiler": Counter(C10D_OPERATORS[name][0] for name in names if name in C10D_OPERATORS),
        "recorder": Counter(record.op for record in records),
        "moved": [
            (r.ranks, ON_GLOO.get(r.op, r.op), r.dtype if r.bytes else "none", r.bytes)
            for r in records
            if r.op not in ("send", "recv")
        ],
        "flown": flown()[before:],
    }
    probe.remove()
    _leave(options, found)


ON_GLOO = {"reduce_scatter": "all_reduce"}  # how gloo does it, and so calls it
DTYPES = {"Float": torch.float32, "Double": torch.float64, "Long": torch.int64, "Int": torch.int32, "Byte": torch.uint8}


def flown() -> list[tuple[str, str, str, int]]:
    """Group, operation, dtype and bytes of what this rank gave, of every collective that gloo was handed; it leaves out
    what goes from one rank to one other."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False)).get("entries", ())
    return [(e["process_group"][0], e["profiling_name"].removeprefix("gloo:"), *_given(e)) for e in entries]


def _given(entry: dict[str, Any]) -> tuple[str, int]:
    if entry["profiling_name"] == "gloo:barrier":
        return "none", 0
    dtype = DTYPES[entry["input_dtypes"][0]]
    return str(dtype).removeprefix("torch."), sum(map(math.prod, entry["input_sizes"])) * dtype.itemsize


def seen_from_outside(options: dict[str, Any]) -> None:
    """Evidence of a two-step run of a plain module that is no Llama and of which the probe knows nothing."""
    _join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16, bias=False))
    model.register_buffer("cos", torch.zeros(6), persistent=False)
    model.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    probe = Probe(_rank(), 2)
    probe.install()
    probe.attach([wrapped])
    before = model[0].weight.grad
    for step in range(2):
        tokens = torch.tensor([[1 + _rank(), 2, 3 + step]])
        logits = wrapped(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor([2, 3, -100]), reduction="sum")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-3)
        clipped = float(model[1].weight.grad.norm())
        optimizer.step()
        optimizer.zero_grad()
    evidence = probe.evidence({1: (0.0, None, 0.5)})
    probe.remove()
    assert before is None
    last = evidence.steps[-1]
    _leave(
        options,
        {
            "steps": [step.step for step in evidence.steps],
            "fqns": [tensor.fqn for tensor in evidence.parameters],
            "tokens": [step.microbatches[0].tokens.tolist() for step in evidence.steps],
            "labels": last.microbatches[0].labels.tolist() if last.microbatches[0].labels is not None else None,
            "valid": last.microbatches[0].valid_tokens,
            "lr": last.lr,
            "phases": sorted({(c.op, c.phase) for c in evidence.collectives if c.step == 2 and "float" in c.dtype}),
            "broadcast in step 2": {
                dtype: sum(c.bytes for c in evidence.collectives if (c.op, c.step, c.dtype) == ("broadcast", 2, dtype))
                for dtype in ("float32", "bool")
            },
            "gradient_before_clipping": float((last.gradients["1.weight"] ** 2).sum() ** 0.5),
            "gradient_after_clipping": clipped,
            "structure": {module: dataclasses.asdict(wrapper) for module, wrapper in evidence.structure.items()},
            "patched": torch.nn.functional.cross_entropy.__module__,
        },
    )


def partial_gradient(options: dict[str, Any]) -> None:
    """A weight that is whole on both tp ranks, and a table that each has half of; each rank's loss is its part of a sum."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from harness.core.probe.unsettled import unsettled_gradients

    _join()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    table = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    inputs = DTensor.from_local(torch.full((1, 4), _rank() + 1.0), mesh, [Shard(0)])
    (inputs * weight).sum().backward()
    table.grad = DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()])
    found = unsettled_gradients([("weight", weight), ("table", table), ("none", torch.nn.Parameter(torch.ones(2)))])
    values = weight.grad.to_local().tolist()
    _leave(options, [{fqn: dataclasses.asdict(lies) for fqn, lies in found.items()}, values])
