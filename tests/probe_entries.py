"""What ranks do in test_probe.py: entries for harness.launch. Each writes what it saw to a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import trainers
from harness.case import from_json
from harness.probe import Probe
from harness.probe.collectives import OPERATORS, CollectiveRecorder


def _rank() -> int:
    return int(os.environ["RANK"])


def _join() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=_rank(), world_size=world_size)


def _leave(options: dict[str, Any], found: Any) -> None:
    Path(options["result"], f"rank_{_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


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
    dist.broadcast(ones.double(), src=2 * (_rank() // 2), group=half)
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
    else:
        dist.recv(torch.empty(8), partner)
    dist.barrier(group=half)
    recorder.remove()
    dist.all_reduce(ones)  # no longer seen
    _leave(options, [dataclasses.asdict(record) for record in recorder.records])


def beside_the_profiler(options: dict[str, Any]) -> None:
    """A whole training run, counted by the recorder and by torch's own profiler."""
    case, adapter = from_json(options["case"]), trainers.load(options.get("trainer", "llama3"))
    probe = Probe(_rank(), case.dims.world_size)
    trainer = adapter.start(case, None, "cpu")
    probe.install()
    probe.attach(trainer.model_parts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.train(case.training.steps)
    names = (event.name.removeprefix("c10d::") for event in profiler.events() if event.name.startswith("c10d::"))
    witnessed = Counter(OPERATORS[name][0] for name in names if name in OPERATORS)
    recorded = Counter(record.op for record in probe.collectives.records)
    probe.remove()
    _leave(options, {"profiler": witnessed, "recorder": recorded})


def seen_from_outside(options: dict[str, Any]) -> None:
    """Evidence of a two-step run of a plain module that is no Llama and of which the probe knows nothing."""
    _join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16, bias=False))
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
    evidence = probe.evidence({1: (0.0, None)})
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
            "gradient_before_clipping": float((last.gradients["1.weight"] ** 2).sum() ** 0.5),
            "gradient_after_clipping": clipped,
            "structure": evidence.structure,
            "patched": torch.nn.functional.cross_entropy.__module__,
        },
    )
