"""Names of modules and parameters, walked anew each time, and the sums of what collectives get."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from harness.core.probe.collectives import ELEMENTS_SUMMED_AT_ONCE, sum_of_bits
from harness.core.probe.structure import fqn_of, module_names, named_parameters, set_name_prefix


def model() -> nn.Sequential:
    """A wrapper, a layer that stands in two places, and a weight that two layers have."""
    shared, first, last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    inner = nn.ModuleDict({"first": first, "again": shared, "none": nn.Identity()})
    return nn.Sequential(shared, checkpoint_wrapper(inner), last, nn.Identity())


def as_torch_walks(part: nn.Module) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    modules = [(fqn_of(part, name), id(module)) for name, module in part.named_modules()]
    return modules, [(fqn_of(part, name), id(parameter)) for name, parameter in part.named_parameters()]


def as_the_probe_walks(part: nn.Module) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    modules = [(name, id(module)) for module, name in module_names(part).items()]
    return modules, [(fqn, id(parameter)) for fqn, parameter in named_parameters([part])]


def test_names_are_those_of_torch_without_wrappers():
    part = model()
    assert as_the_probe_walks(part) == as_torch_walks(part)
    assert [fqn for fqn, _ in named_parameters([part])][2:4] == ["1.first.weight", "1.first.bias"]
    set_name_prefix(part, "teacher")
    assert as_the_probe_walks(part) == as_torch_walks(part)
    assert module_names(part)[part] == "teacher"


def test_a_parameter_or_module_that_is_replaced_later_is_seen():
    part = model()
    before = as_the_probe_walks(part)
    part[2].weight = nn.Parameter(torch.zeros(2, 2))
    part[0].bias = None
    part.add_module("later", nn.Linear(2, 2))
    part[3] = nn.Linear(2, 2)
    assert as_the_probe_walks(part) == as_torch_walks(part)
    assert as_the_probe_walks(part) != before


@pytest.mark.parametrize("count", [1, ELEMENTS_SUMMED_AT_ONCE, 2 * ELEMENTS_SUMMED_AT_ONCE + 3])
def test_the_sum_of_bits_is_of_all_elements(count):
    one, other = torch.randn(count), torch.randn(3, 4).t()
    expected = one.numpy().view(np.int32).sum(dtype=np.int64)
    assert int(sum_of_bits(one)) == expected
    expected += other.contiguous().numpy().view(np.int32).sum(dtype=np.int64)
    assert int(sum_of_bits([[one], other])) == expected
    assert int(sum_of_bits([])) == 0
