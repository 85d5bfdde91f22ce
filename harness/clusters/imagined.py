"""Tensors without memory (torch's FakeTensors), and patches of torch functions that would not work with them.

Changes torch for the rest of the process, which runs one rank. If a trainer asks a tensor for a number, it gets 1; so
no verdict may depend on a number.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from harness.clusters.unable import codes_that_ask
from harness.core.probe.witness import Witness

MESH_FUNCTIONS = ("init_device_mesh", "_get_post_forward_mesh_info")
"""Functions of modules that compute with a mesh's ranks."""
asked_codes: set[CodeType] = set()
"""The functions that a number was answered to."""


def prepare_torch() -> FakeTensorMode:
    """Patch torch for tensors without memory, and return the mode in which new tensors have none.

    It is not entered yet.
    """
    _answer_numbers()
    _use_one_cpu()
    _keep_meshes_real()
    nn.Module._apply = _convert_module
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor  # it draws until numbers lie within bounds
    return FakeTensorMode(allow_non_fake_inputs=True)


def silence_propagation(witness: Witness) -> None:
    """Patch DTensor so that the witness does not see the operators that it repeats to infer a result's shape.

    The trainer does not run these.
    """
    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        if original := getattr(ShardingPropagator, name, None):
            setattr(ShardingPropagator, name, _without_witness(original, witness))


def _without_witness(original: Callable[..., Any], witness: Witness) -> Callable[..., Any]:
    """Return the function with the witness silenced while it runs, and the same result."""

    @functools.wraps(original)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with witness.silenced():
            return original(*args, **kwargs)

    return quiet


# ---- numbers


def _answer_numbers() -> None:
    """Patch torch to answer 1 (True for bool) where a tensor without memory is asked for numbers, and note which code asked.

    That is .item(), int(), float(), bool() and .tolist().
    """

    def answer_number(mode: Any, operator: Any, tensor: torch.Tensor) -> bool | int | float:
        asked_codes.update(codes_that_ask())
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1

    def answer_list(tensor: torch.Tensor) -> Any:
        asked_codes.update(codes_that_ask())
        return _outside_of_modes(lambda: torch.ones(tuple(tensor.shape), dtype=tensor.dtype).tolist())()

    fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = answer_number
    FakeTensor.tolist = answer_list


def _use_one_cpu() -> None:
    """Patch torch to make tensors without memory on cpu where cpu:0 is named, as a rank's mesh may do."""
    original = FakeTensor.__new__

    def make_on_cpu(kind: Any, mode: Any, inner: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        device = torch.device("cpu") if torch.device(device).type == "cpu" else device
        return original(kind, mode, inner, device, *args, **kwargs)

    FakeTensor.__new__ = staticmethod(make_on_cpu)


# ---- meshes


def _outside_of_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that runs outside of all dispatch modes, on real tensors."""

    @functools.wraps(function)
    def call_outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call_outside


def _keep_meshes_real() -> None:
    """Patch DeviceMesh, and functions that read one, to run outside of the mode: a mesh's ranks are real numbers."""
    for name, member in list(vars(DeviceMesh).items()):
        if isinstance(member, staticmethod | classmethod):
            setattr(DeviceMesh, name, type(member)(_outside_of_modes(member.__func__)))
        elif isinstance(member, property) and member.fget is not None:
            setattr(DeviceMesh, name, property(_outside_of_modes(member.fget), member.fset))
        elif callable(member) and not isinstance(member, type):
            setattr(DeviceMesh, name, _outside_of_modes(member))
    for module in list(sys.modules.values()):
        for name in MESH_FUNCTIONS:
            function = vars(module).get(name) if hasattr(module, "__dict__") else None
            if callable(function) and getattr(function, "__module__", "").startswith("torch.distributed"):
                setattr(module, name, _outside_of_modes(function))


# ---- conversions


def _convert_module(module: nn.Module, convert: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """Convert a module's parameters and buffers as to() and to_empty() do, in place, by new parameters; return the module.

    torch would exchange the contents of the old parameters, and there are none.
    """
    if recurse:
        for child in module.children():
            child._apply(convert)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                new_parameter = nn.Parameter(convert(parameter), requires_grad=parameter.requires_grad)
            if not isinstance(parameter, DTensor):
                attributes = {key: value for key, value in vars(parameter).items() if key not in vars(new_parameter)}
                vars(new_parameter).update({} if isinstance(parameter, FakeTensor) else attributes)
            module._parameters[name] = new_parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module
