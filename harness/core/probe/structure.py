"""Structure of this rank: its process groups, parameters and parallel wrappers, as claims (metadata) and contents."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from harness.core.evidence.records import Group, TensorEvidence, Wrapper
from harness.core.probe.collectives import global_ranks_of
from harness.core.probe.shards import shards_of
from harness.core.probe.without_memory import is_without_memory

Ranks = Sequence[int]
WRAPPER_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


_wrappers: WeakKeyDictionary[nn.Module, Wrapper] = WeakKeyDictionary()
_noted_placements: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_name_prefixes: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def note_wrapper(module: nn.Module, kind: str, *, shard_ranks: Ranks = (), replicate_ranks: Ranks = ()) -> None:
    """Note what a trainer's own data-parallel wrapper claims; for its adapter. kind: a case's word."""
    _wrappers[module] = Wrapper(kind, tuple(shard_ranks), tuple(replicate_ranks))


def note_placement(parameter: nn.Parameter, ranks: Ranks, dim: int | None) -> None:
    """Note that these ranks hold parts of a parameter's dim, or for None, all of it each.

    For the adapter of a trainer whose own parallel layers cut parameters. Replaces what was noted of it before.
    """
    _noted_placements[parameter] = tuple(ranks), dim


def plain_fqn(name: str) -> str:
    """Return a parameter's name without what wrappers (DDP, FSDP1, compile, activation checkpointing) put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def join_names(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def set_name_prefix(part: nn.Module, name: str) -> None:
    """Let all names of a model begin with this one, because another model of the job has the same names."""
    _name_prefixes[part] = name


def fqn_of(part: nn.Module, name: str) -> str:
    """Return the name of a module or a parameter of a model within the job."""
    return join_names(_name_prefixes.get(part, ""), plain_fqn(name)).removesuffix(".")


def module_names(part: nn.Module) -> dict[nn.Module, str]:
    """Return the modules in the order of named_modules(), which takes several times as long in each of many calls a step."""
    names: dict[nn.Module, str] = {}
    _add_names(part, _name_prefixes.get(part, ""), names)
    return names


def _add_names(module: nn.Module, name: str, names: dict[nn.Module, str]) -> None:
    """Add a module and all below it to `names`, module -> name, each once by its first name."""
    names[module] = name
    for key, child in module._modules.items():
        if child is not None and child not in names:
            _add_names(child, _name_within(name, key), names)


def _name_within(module: str, key: str) -> str:
    """Return the name of what this module has by this key."""
    return module if key in WRAPPER_NAMES else join_names(module, key)


def named_parameters(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that each model's modules show, once in a model, by their first name within the job."""
    for part in parts:
        if type(part).named_parameters is nn.Module.named_parameters:
            yield from _own_parameters(part)
        else:  # FSDP1's class has its own
            yield from ((fqn_of(part, name), parameter) for name, parameter in part.named_parameters())


def _own_parameters(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, by its first name."""
    seen_ids = set()
    for module, name in module_names(part).items():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen_ids:
                seen_ids.add(id(parameter))
                yield _name_within(name, key), parameter


def sharded_parameters(parts: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rank's slice of each parameter, by name.

    So it is also while FSDP2 has units gathered, whose modules then show whole parameters, and where a trainer keeps the slices
    itself (shards.py)."""
    for part in parts:
        if (shards := shards_of(part)) is not None:
            yield from shards.parameters()
            continue
        names = module_names(part)
        shards_by_fqn: dict[str, torch.Tensor] = {}
        for module in names:
            for group in fsdp2_groups(module):
                for fsdp_parameter in group.fsdp_params:
                    owner = fsdp_parameter._module_info
                    shards_by_fqn[join_names(names[owner.module], owner.param_name)] = fsdp_parameter.sharded_param
        for fqn, parameter in named_parameters([part]):
            yield fqn, shards_by_fqn.get(fqn, parameter)


def local_tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, whatever its placements claim, and any other tensor itself; detached."""
    local_tensor: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # to_local() would record autograd
    return local_tensor.detach()  # not the DTensor: that would dispatch another operator


def dense_tensors_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors behind a tensor: of a sparse one, such as an embedding's gradient, its indices and values."""
    local_tensor = local_tensor_of(tensor)
    if local_tensor.layout == torch.sparse_coo:
        return (local_tensor._indices(), local_tensor._values())
    return (local_tensor,)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy on the host, in numpy's own memory. If the tensor has no memory, only the shape of the copy is real.

    bfloat16, which numpy lacks, becomes float32, which holds each of its values exactly. Trap: what numpy has looked into
    cannot be resized any more, and FSDP frees what it gathered by that."""
    tensor = local_tensor_of(tensor)
    if is_without_memory(tensor):
        return np.broadcast_to(np.zeros((), numpy_dtype(tensor.dtype)), tuple(tensor.shape))
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array = np.empty(tuple(tensor.shape), numpy_dtype(tensor.dtype))
    torch.from_numpy(array).copy_(tensor)
    return array


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype("float32" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))


def parameter_evidence(
    parts: Iterable[nn.Module], copy_value: Callable[[torch.Tensor], Any] = as_numpy
) -> tuple[TensorEvidence, ...]:
    """Return what each parameter claims, and what this rank's slice of it holds.

    copy_value: returns what stands for a tensor's value, if it is read later or not at all."""
    return tuple(_tensor_evidence(fqn, shard, copy_value(shard)) for fqn, shard in sharded_parameters(parts))


def _tensor_evidence(fqn: str, tensor: torch.Tensor, value: Any) -> TensorEvidence:
    """Return what a parameter claims (an adapter's note, else the DTensor's mesh and placements), with its value."""
    if tensor in _noted_placements:
        return _noted_tensor_evidence(fqn, tensor, value)
    return TensorEvidence(
        fqn=fqn,
        global_shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        mesh=_ranks_of_mesh(tensor.device_mesh) if hasattr(tensor, "device_mesh") else None,
        placements=placement_texts(tensor),
        value=value,
    )


@functools.lru_cache(maxsize=16)
def _ranks_of_mesh(mesh: Any) -> Any:
    """Return the mesh's ranks as nested lists: one list object for all parameters on it."""
    return mesh.mesh.tolist()


def _noted_tensor_evidence(fqn: str, tensor: torch.Tensor, value: Any) -> TensorEvidence:
    """Return what an adapter noted of a plain parameter: cut along a dim over its ranks, or whole on each."""
    ranks, dim = _noted_placements[tensor]
    shape = tuple(size * (len(ranks) if tensor_dim == dim else 1) for tensor_dim, size in enumerate(tensor.shape))
    placement = "Replicate" if dim is None else f"Shard({dim})"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEvidence(fqn, shape, dtype, list(ranks), (placement,), value)


def placement_texts(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the claimed placements, one per mesh axis: "Replicate", "Shard(0)", "Partial", "StridedShard(0)"."""
    return tuple(placement_text(placement) for placement in getattr(tensor, "placements", ()))


def placement_text(placement: Any) -> str:
    """Return a placement as `placements` has it."""
    kind = type(placement).__name__.lstrip("_")
    return f"{kind}({placement.dim})" if hasattr(placement, "dim") else kind


def group_evidence() -> tuple[Group, ...]:
    """Return every group that this rank is a member of, except torch's stand-ins for axes of degree 1 (backend "fake").

    A rank that runs alone has no other groups, also for larger degrees."""
    if not dist.is_initialized():
        return ()
    world = dist.distributed_c10d._world
    member_groups = []
    for group, ranks in world.pg_group_ranks.items():
        backend = world.pg_map[group][0] if group in world.pg_map else "unknown"
        if group not in world.pg_map or -100 in ranks or not (ranks_of_group := global_ranks_of(group)):
            continue
        if backend != "fake" or len(ranks_of_group) > 1:
            description = getattr(group, "group_desc", "") or ""
            member_groups.append(Group(world.pg_names.get(group, ""), ranks_of_group, str(backend), description))
    return tuple(member_groups)


def wrapper_evidence(parts: Iterable[nn.Module]) -> dict[str, Wrapper]:
    """Return what the data-parallel wrappers claim, by module name ("" is the root)."""
    wrappers_by_name: dict[str, Wrapper] = {}
    for part in parts:
        for module, name in module_names(part).items():
            wrapper = (
                _wrappers.get(module)
                or _ddp_wrapper(module)
                or _replicate_wrapper(module)
                or _fsdp1_wrapper(module)
                or _fsdp2_wrapper(module)
            )
            if wrapper:
                unit_parameters = _parameters_of_unit(module, part)
                ignored = tuple(join_names(name, fqn) for fqn in wrapper.ignored)
                wrappers_by_name[name] = dataclasses.replace(wrapper, parameters=unit_parameters, ignored=ignored)
    return wrappers_by_name


def _ddp_wrapper(module: nn.Module) -> Wrapper | None:
    """Return the wrapper of a DistributedDataParallel; None for other modules."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return None
    return _make_ddp_wrapper("ddp", module, module)


def _replicate_wrapper(module: nn.Module) -> Wrapper | None:
    """Return the wrapper of a module under the composable DDP; None for other modules.

    That keeps its DistributedDataParallel aside, from the first forward pass on."""
    for state in vars(module).get(STATE_KEY, {}).values():
        ddp = state._ddp_weakref() if hasattr(state, "_ddp_weakref") else None
        if ddp is not None:
            return _make_ddp_wrapper("replicate", ddp, module)
    return None


def _make_ddp_wrapper(kind: str, ddp: nn.parallel.DistributedDataParallel, module: nn.Module) -> Wrapper:
    """Return the wrapper of a DDP. module: the one that DDP is put on."""
    ranks = global_ranks_of(ddp.process_group)
    finds_unused = bool(ddp.find_unused_parameters and not ddp.static_graph)
    sizes = {True: 0, False: 0}  # of buffers, by whether they are floating-point numbers
    if ddp.broadcast_buffers:
        for buffer in ddp.modules_buffers:
            sizes[buffer.is_floating_point()] += buffer.numel() * buffer.element_size()
    return Wrapper(
        kind,
        replicate_ranks=ranks,
        find_unused_parameters=finds_unused,
        float_buffers=sizes[True],
        other_buffers=sizes[False],
        comm_hook=str(ddp._get_ddp_logging_data().get("comm_hook", "")),
        ignored=_ignored_parameters(ddp, module),
    )


def _ignored_parameters(ddp: Any, module: nn.Module) -> tuple[str, ...]:
    """Return their names in the module. DDP also lists parameters as ignored whose all-reduce is delayed; it reduces these."""
    reduced_ids = {
        id(parameter) for parameter in (*ddp._module_parameters, *getattr(ddp, "_delay_all_reduce_params", ()))
    }
    return tuple(plain_fqn(name) for name, parameter in module.named_parameters() if id(parameter) not in reduced_ids)


def _fsdp1_wrapper(module: nn.Module) -> Wrapper | None:
    """Return the wrapper of a unit of FSDP1; None for other modules.

    NO_SHARD reduces over the group that the other strategies shard over; the hybrid ones have one for each."""
    if not isinstance(module, FullyShardedDataParallel):
        return None
    unit: Any = module
    strategy = unit.sharding_strategy.name
    ranks = global_ranks_of(unit.process_group)
    if strategy == "NO_SHARD":
        return Wrapper("fsdp1", replicate_ranks=ranks)
    return Wrapper("fsdp1", ranks, global_ranks_of(unit._inter_node_pg) if "HYBRID" in strategy else ())


def _fsdp2_wrapper(module: nn.Module) -> Wrapper | None:
    """Return the wrapper of a module that FSDP2 is put on, by its first parameter group; None for other modules."""
    group = next(fsdp2_groups(module), None)
    if group is None:
        return None
    meshes = [getattr(group.mesh_info, f"{axis}_process_group", None) for axis in ("shard", "replicate")]
    shard_ranks, replicate_ranks = (() if mesh is None else global_ranks_of(mesh) for mesh in meshes)
    return Wrapper(
        "fsdp2",
        shard_ranks,
        replicate_ranks,
        ranks_after_forward=getattr(group.post_forward_mesh_info, "shard_mesh_size", 1),
        cpu_offload=any(parameter.offload_to_cpu for parameter in group.fsdp_params),
        casts_to=_policy_dtype(group, "param_dtype"),
        reduces_in=_policy_dtype(group, "reduce_dtype"),
        backward_gathers=getattr(group, "unshard_in_backward", True),
    )


def fsdp2_switches(parts: Iterable[nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return what users set by methods of FSDP2's modules and by its policies, where it is not the usual; by module name."""
    switches_by_name: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for module, name in module_names(part).items():
            if hasattr(module, "_get_fsdp_state"):
                switches_by_name[name] = tuple(_switches_of_module(module, part))
    return {name: texts for name, texts in switches_by_name.items() if texts}


def _switches_of_module(module: Any, part: nn.Module) -> Iterator[str]:
    """Yield a text for each switch of a module of FSDP2 that is not as usual."""
    state = module._get_fsdp_state()
    groups = list(fsdp2_groups(module))
    for name in ("unshard_in_backward", "reshard_after_backward"):
        if not all(getattr(group, name, True) for group in groups):
            yield f"{name} off"
    policy = getattr(state, "_mp_policy", None)
    if (dtype := getattr(policy, "output_dtype", None)) is not None:
        yield f"output_dtype {str(dtype).removeprefix('torch.')}"
    if not getattr(policy, "cast_forward_inputs", True):
        yield "cast_forward_inputs off"
    fsdp_parameters = itertools.chain.from_iterable(group.fsdp_params for group in groups)
    if any(getattr(parameter, "pin_memory", False) for parameter in fsdp_parameters):
        yield "offload to pinned memory"
    names = {named_module: name or "the root" for named_module, name in module_names(part).items()}
    for direction in ("forward", "backward"):
        prefetched_states = getattr(state, f"_states_to_{direction}_prefetch", ())
        prefetched = [names.get(prefetched_state._modules[0], "?") for prefetched_state in prefetched_states]
        if prefetched:
            yield f"{direction} prefetch of {', '.join(prefetched)}"
    if module is part and getattr(state._state_ctx, "post_optim_event", None) is not None:
        yield "post_optim_event"


def _policy_dtype(group: Any, name: str) -> str:
    dtype = getattr(getattr(group, "mp_policy", None), name, None)
    return str(dtype or "").removeprefix("torch.")


def _parameters_of_unit(module: nn.Module, part: nn.Module) -> tuple[str, ...]:
    """Return the parameters of an FSDP unit; of another wrapper none."""
    names = module_names(part)
    flat = flat_parameter(module)
    if flat is not None:
        return tuple(join_names(names[module], plain_fqn(fqn)) for fqn in flat._fqns)
    fsdp_parameters = itertools.chain.from_iterable(group.fsdp_params for group in fsdp2_groups(module))
    owners = [fsdp_parameter._module_info for fsdp_parameter in fsdp_parameters]
    return tuple(join_names(names[owner.module], owner.param_name) for owner in owners)


def fsdp2_groups(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of a module: one, in newer versions of torch several; of other modules none."""
    get_state = attribute_or_none(module, "_get_fsdp_state")
    if get_state is not None:
        state = get_state()
        group = getattr(state, "_fsdp_param_group", None)
        yield from [group] if group is not None else getattr(state, "_fsdp_param_groups", ())


def flat_parameter(module: nn.Module) -> Any:
    """Return the vector of a unit of FSDP1; None for other modules."""
    return getattr(attribute_or_none(module, "_handle"), "flat_param", None)


def attribute_or_none(module: nn.Module, name: str) -> Any:
    """Return an attribute that most modules lack, else None. getattr() takes microseconds to raise that it is missing."""
    kind: Any = type(module)
    if name in vars(module) or hasattr(kind, name) or kind.__getattr__ is not nn.Module.__getattr__:
        return getattr(module, name, None)
    return None
