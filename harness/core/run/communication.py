"""The library that carries the collectives of a case's ranks, and what ranks that share a GPU need for that.

Since 2.30 NCCL lets several ranks share a GPU, where a variable says so; before that it refuses ("Duplicate GPU
detected"). gloo carries tensors of GPUs too, through the host's memory: all collectives, but no sends and receives.
"""

from __future__ import annotations

from harness.core import trainers
from harness.core.case.case import Case
from harness.core.run.options import Options

SHARES_GPUS_SINCE = (2, 30)
BACKEND_VARIABLE = "HARNESS_BACKEND"
"""Variable of a rank's environment: the backend that `support/process_group.py` returns to a trainer that asks."""


def backend_of(options: Options) -> str:
    """Return "nccl" or "gloo": what was requested, else NCCL on GPUs. On CPU it is always gloo.

    Ranks that share a GPU have gloo where NCCL is too old for that.
    """
    if options.device == "cpu":
        return "gloo"
    shared_by_gloo = options.ranks_per_gpu > 1 and nccl_version() < SHARES_GPUS_SINCE
    return options.backend or ("gloo" if shared_by_gloo else "nccl")


def communication_environment(options: Options, case: Case) -> dict[str, str]:
    """Return the variables of ranks on GPUs: the backend, sharing a GPU, and cuBLAS's workspace; {} on CPU.

    Sharing is named only if NCCL's ranks share a GPU, the workspace only if the case has several runs. cuBLAS adds up in
    one order only with a workspace of this size, read when CUDA starts.
    """
    if options.device == "cpu":
        return {}
    exact_variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if case.runs > 1 else {}
    is_sharing = options.ranks_per_gpu > 1 and backend_of(options) == "nccl"
    return {
        BACKEND_VARIABLE: backend_of(options),
        **({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if is_sharing else {}),
        **exact_variables,
    }


def device_text(options: Options) -> str:
    """Return the device with sharing and backend if these are requested: "cuda, 2 ranks share one, gloo", or "cpu"."""
    shared = f", {options.ranks_per_gpu} ranks share one" if options.ranks_per_gpu > 1 else ""
    return f"{options.device}{shared}{f', {options.backend}' if options.backend else ''}"


def gpus_needed(world_size: int, options: Options) -> int:
    """Return the number of GPUs on which so many ranks run."""
    return -(-world_size // options.ranks_per_gpu)


def replacement_notes(options: Options) -> list[str]:
    """Return lines on what does not run as it does on one GPU a rank; empty on CPU and on one GPU a rank with NCCL.

    They are printed with every verdict.
    """
    if options.device == "cpu" or (options.ranks_per_gpu == 1 and backend_of(options) == "nccl"):
        return []
    shared = f"up to {options.ranks_per_gpu} ranks share a GPU" if options.ranks_per_gpu > 1 else "--backend gloo"
    carrier = "by gloo, through the host" if backend_of(options) == "gloo" else "with NCCL_MULTI_RANK_GPU_ENABLE"
    return [f"communication: NCCL {carrier} ({shared})"]


def reason_against_backend(case: Case, options: Options) -> str:
    """Return why a case's ranks could not communicate over this backend; empty if they can."""
    if options.device == "cpu" or backend_of(options) == "nccl":
        return ""
    version = ".".join(map(str, nccl_version()))
    if "gloo" not in trainers.load_adapter(options.trainer).backends:
        return f"{options.trainer} joins no group of gloo on GPUs, and NCCL {version} lets no two ranks share one (2.30 does)"
    if any(launched.dims.pp > 1 for launched in case.launches.values()):
        return "pp with gloo on GPUs: gloo sends no tensor of a GPU from one rank to another"
    return ""


def nccl_version() -> tuple[int, ...]:
    """Return NCCL's version in the installed torch; (0,) if it has none. Asks the library, not a GPU."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return (0,)
    return tuple(torch.cuda.nccl.version())
