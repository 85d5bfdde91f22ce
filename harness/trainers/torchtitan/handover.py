"""What is handed to torchtitan as data, at names that it looks up itself: samples, seed weights, rates; and what it shows."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from harness.probe.structure import local
from harness.spec.case import Case
from harness.trainers import Metrics
from harness.trainers.llama3.trainer import local_slice, read_weights
from reference.data import build_dataset, documents, step_length, step_samples
from reference.train import lr_factor


def meet() -> None:
    """torchtitan joins its process group by the environment's address; the local launcher's ranks meet in a file."""
    if "INIT_METHOD" not in os.environ:
        return
    original = dist.init_process_group
    here: dict[str, Any] = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **{**kwargs, **here, "init_method": os.environ["INIT_METHOD"]})

    dist.init_process_group = init_process_group


class Samples:
    """The case's samples of the data-parallel rank that torchtitan says this is, step after step: its data loader. Its
    state is the last step that it gave samples of, the same on all ranks."""

    def __init__(self, case: Case, dp_degree: int, dp_rank: int, at_start: Callable[[], None]) -> None:
        self.case, self.dp_degree, self.dp_rank, self.at_start = case, dp_degree, dp_rank, at_start
        self.dataset = build_dataset(case.training, case.model)
        self.step = 0

    def __iter__(self) -> Iterator[Any]:
        self.at_start()
        size = self.case.local_batch * self.case.microbatches
        while self.step < self.case.training.steps:
            self.step += 1
            mine = step_samples(self.case.training, len(self.dataset), self.step)[self.dp_rank :: self.dp_degree]
            for start in range(0, len(mine), size):
                yield self.batch(mine[start : start + size], step_length(self.case.training, self.step))

    def batch(self, ids: tuple[int, ...], length: int) -> Any:
        tokens, labels = zip(*(self.dataset[i] for i in ids), strict=True)
        return torch.stack(tokens)[:, :length], torch.stack(labels)[:, :length]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def in_order(case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The case's samples, step after step, for a trainer that divides them over ranks and microbatches itself."""
    dataset = build_dataset(case.training, case.model)
    for step in range(1, case.training.steps + 1):
        for which in step_samples(case.training, len(dataset), step):
            tokens, labels = dataset[which]
            yield tokens[: case.seq_len(step)], labels[: case.seq_len(step)]


def attended(tokens: torch.Tensor) -> torch.Tensor:
    """Which positions see which under a document mask: bool [b, 1, s, s]."""
    which = documents(tokens)
    return (which[:, None, :, None] == which[:, None, None]).tril()


@torch.no_grad()
def give_weights(
    parts: list[nn.Module],
    case: Case,
    weights: Path | None,
    fqn: Callable[[str], str],
    rows: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Each parameter's own slice of the seed weight of that name, its rows in that order. No communication."""
    full = read_weights(weights, case)
    for part in parts:
        for name, parameter in part.named_parameters():
            whole = torch.from_numpy(full[fqn(name)][rows.get(fqn(name), slice(None))])
            if whole.shape != parameter.shape:
                raise ValueError(
                    f"weights of {name} have shape {tuple(whole.shape)}, the model {tuple(parameter.shape)}"
                )
            local(parameter).copy_(local_slice(whole, parameter))


def no_sleep(module: str) -> None:
    """torchtitan's rank 0 sleeps two seconds at the end, for the others."""
    found = importlib.import_module(module)
    found.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)  # type: ignore[attr-defined]


def give_rates(case: Case) -> None:
    """Every LambdaLR made from now on has the recipe's factors: torchtitan of 2024 knows no cosine."""
    original = LambdaLR.__init__

    def with_recipe(self: LambdaLR, optimizer: Any, lr_lambda: Any, *args: Any, **kwargs: Any) -> None:
        original(self, optimizer, lambda finished: lr_factor(finished + 1, case.training), *args, **kwargs)

    LambdaLR.__init__ = with_recipe  # type: ignore[method-assign]


def note_logger(logger: Any, case: Case, metrics: list[Metrics]) -> Any:
    """The same logger; what it is told to log is noted: the loss averaged over ranks, the gradient norm if it has one."""
    original = logger.log

    def log(values: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        norm = values.get("grad_norm", values.get("optim/grad_norm"))
        metrics.append(Metrics(step, float(values["loss_metrics/global_avg_loss"]), norm, values.get("lr")))
        original(values, step, *args, **kwargs)

    logger.log = log
    return logger


def note_processor(processor: Any, case: Case, metrics: list[Metrics], shows: Callable[[], bool] = lambda: True) -> Any:
    """The same metrics processor; what it is told to log is noted. Versions without a gradient norm tell none.

    shows: whether this rank knows the loss, when it comes to it; ranks without the last stage of a pipeline show -1.
    """
    original = processor.log

    def log(step: int, average: float, largest: float, *norm: Any, **extra: Any) -> None:
        rate = (extra.get("extra_metrics") or {}).get("lr")
        metrics.append(Metrics(step, float(average) if shows() else None, norm[0] if norm else None, rate))
        original(step, average, largest, *norm, **extra)

    processor.log = log
    return processor
