"""A job of two ranks under torch.profiler: what DDP reduces, and a loss that is averaged."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def save(profiler: profile) -> None:
    profiler.export_chrome_trace(f"{sys.argv[1]}/rank{dist.get_rank()}.json.gz")


usual = schedule(wait=0, warmup=1, active=2)
with profile(activities=[ProfilerActivity.CPU], schedule=usual, on_trace_ready=save) as profiler:
    for _ in range(3):
        loss = model(torch.ones(2, 8)).mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        profiler.step()
dist.destroy_process_group()
