"""A training script whose images are augmented by a generator of each rank. Its wrapper is called by its forward method,
without labels. Rank 0 evaluates first, as many do. SAME: both ranks draw the samples of rank 0. SHUFFLES: each rank shuffles
all samples by itself, and augments none."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(16, 4))
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn_by = 0 if "SAME" in os.environ else rank
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=drawn_by))
    torch.manual_seed(rank)
    noise = 0.1
    if "SHUFFLES" in os.environ:
        loader, noise = DataLoader(data, batch_size=12, shuffle=True, drop_last=True), 0.0
    if rank == 0:
        with torch.no_grad():
            for (images,) in DataLoader(data, batch_size=16):
                net(images)
    for (images,) in loader:
        optimizer.zero_grad()
        model.forward(images + noise * torch.rand(images.shape)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
