"""A compiler finds nothing of the recorder: with frames of ours around every module it makes the graphs of a trainer alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.decorators
from torch import nn

from harness.recording.compiling import no_compiler, not_compiled

Graphs = list[torch.fx.GraphModule]


def computed_beside(x: torch.Tensor) -> torch.Tensor:
    return x.sum() + 2


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Those that are made while every call of a module passes a frame of ours."""
    original = nn.Module.__call__

    @not_compiled
    def called(module: nn.Module, *args: Any) -> Any:
        if not torch.compiler.is_compiling():
            with no_compiler():
                computed_beside(*args)
        return original(module, *args)

    monkeypatch.setattr(nn.Module, "__call__", called)
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def compiled_in_place(module: nn.Module, graphs: Graphs) -> nn.Module:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module.compile(backend=backend)
    return module


def test_nothing_of_a_class_of_torchs_own_is_compiled_in_place_nor_what_we_compute(graphs: Graphs) -> None:
    compiled_in_place(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), graphs)(torch.zeros(1, 2))
    assert graphs == []


def test_a_module_is_traced_as_one_graph_through_our_frames(graphs: Graphs) -> None:
    compiled_in_place(Own(), graphs)(torch.zeros(1, 2))
    assert len(graphs) == 1
