"""Names of torch, beyond the documented ones, that the probe and the recorder rely on, each with its purpose.

A release of torch that was never tried may rename one. A sentence names it before the probe is imported, and so before anything
is observed without it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

TORCH_NAMES: dict[str, str] = {
    "torch._C._current_graph_task_id": "whether backward runs",
    "torch._C._dispatch_keyset_full_after": "collectives, below autograd",
    "torch._C.DispatchKey.BackendSelect": "collectives, below autograd",
    "torch._C._distributed_c10d.Backend": "groups that are not registered",
    "torch.distributed.ProcessGroup._register_backend": "groups that are not registered",
    "torch.distributed.distributed_c10d._world.pg_group_ranks": "the ranks of each group",
    "torch.distributed.distributed_c10d._world.pg_names": "the names of groups",
    "torch.distributed.distributed_c10d._world.pg_map": "the backend of each group",
    "torch.distributed.distributed_c10d._resolve_process_group": "the group of a functional collective",
    "torch.utils._python_dispatch.TorchDispatchMode": "operators where tensors have no memory",
    "torch.utils._python_dispatch._disable_current_modes": "operators where tensors have no memory",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "tensors inside of tensors",
    "torch.utils._pytree.tree_leaves": "tensors inside of arguments",
    "torch.distributed._composable.contract.STATE_KEY": "which modules FSDP2 and replicate wrap",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "FSDP2's units",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "FSDP2's slices",
    "torch.distributed.pipelining.schedules._PipelineSchedule": "a pipeline's schedule",
}
PROBE_ALONE = {
    "torch._C._autograd._push_saved_tensors_default_hooks": "what autograd keeps for backward",
    "torch._C._nn.cross_entropy_loss": "losses and their labels",
    "torch._C._nn.nll_loss_nd": "losses and their labels",
    "torch.autograd._engine_run_backward": "when backward begins and ends",
}
RECORDER_ALONE = {"torch._C._dynamo.eval_frame.set_eval_frame": "what a compiler traces"}


def lacking_for_probe() -> str:
    """Return a sentence on the names that this torch lacks of those that a case's probe relies on; empty if none."""
    return _lacking(TORCH_NAMES | PROBE_ALONE, "probe")


def lacking_for_recorder() -> str:
    """Return a sentence on the names that this torch lacks of those that a job's recorder relies on; empty if none."""
    return _lacking(TORCH_NAMES | RECORDER_ALONE, "recorder")


def _lacking(needed: Mapping[str, str], user: str) -> str:
    """Return a sentence on the names that this torch lacks, of the modules that are imported; empty if none.

    needed: name -> what is seen by it. user: who relies on the names.
    """
    missing = [
        f"no {name}, by which {purpose} would be seen" for name, purpose in needed.items() if not _has_name(name)
    ]
    if not missing:
        return ""
    release = sys.modules["torch"].__version__
    return f"torch {release} lacks what the {user} relies on: {'; '.join(missing)}"


def _has_name(name: str) -> bool:
    """Return whether torch has this name, or the name belongs to a module that is not imported."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    module = next(prefix for prefix in prefixes if prefix in sys.modules)
    value: object = sys.modules[module]
    for part in parts[len(module.split(".")) :]:
        if not hasattr(value, part):
            return type(value) is type(sys) and _is_module(f"{module}.{part}")
        value = getattr(value, part)
    return True


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
