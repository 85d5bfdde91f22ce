"""Reasons why a trainer, or this machine, cannot run a case."""

from __future__ import annotations

import resource

from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.case.limits import start_problem
from harness.core.case.traits import with_wrapper
from harness.core.evidence.fused import blocks_in_order, local_blocks_of
from harness.core.launch import machine
from harness.core.run import communication
from harness.core.run.options import Options
from harness.core.run.reference_memory import reason_never_fits


def reason_unsupported(case: Case, options: Options) -> str | None:
    """Return why the case cannot run here: the trainer's reason, or the machine's; None if it can.

    The reason against an earlier launch begins with the launch's name.
    """
    adapter = trainers.load_adapter(options.trainer)
    for name, launched in case.launches.items():
        reason = (
            reason_against_dtype(launched, adapter)
            or adapter.unsupported(launched)
            or reason_against_cut_fused(launched, adapter)
        )
        if reason := reason or _reason_against_weights_only(launched, adapter):
            return reason if name == "run" else f"{name}: {reason}"
    if case.resume and options.torchrun_args:
        return "resume means several launches, and other nodes join one (--torchrun-args); run it on one node"
    if case.runs > 1 and options.torchrun_args:
        return "runs 2 means two launches, and other nodes join one (--torchrun-args); run it on one node"
    if reason := start_problem(case) or reason_never_fits(case, options.device) or _reason_too_few_descriptors(case):
        return reason
    on_cp = any(launched.dims.cp > 1 for launched in case.launches.values())
    if options.device == "cuda" and on_cp and case.training.dtype == "float64":
        return "float64 with cp on GPUs: no fused attention kernel takes float64, and torch's ring attention needs one"
    if options.device == "cuda" and options.launcher == "local":
        visible_count = count_visible_gpus()
        world_size = max(launched.dims.world_size for launched in case.launches.values())
        wanted = communication.gpus_needed(world_size, options)
        if wanted > visible_count:
            remedy = "use more machines, or let ranks share a GPU with --ranks-per-gpu"
            if not visible_count:
                remedy = "check CUDA_VISIBLE_DEVICES, or leave out --device cuda to run on CPU"
            return f"needs {wanted} GPUs, and {visible_count} are visible; {remedy}"
    return communication.reason_against_backend(case, options) or None


def reason_against_dtype(case: Case, adapter: trainers.Adapter) -> str | None:
    """Return why a trainer cannot compute in the case's dtype, and the option for one that it can; None if it can."""
    if case.training.dtype in adapter.dtypes:
        return None
    known = " and ".join(adapter.dtypes)
    return f"dtype {case.training.dtype}: {adapter.name} computes in {known} only; add --dtype {adapter.dtypes[0]}"


def _reason_against_weights_only(case: Case, adapter: trainers.Adapter) -> str | None:
    """Return why a trainer cannot start from a checkpoint's weights alone; None if it can, or if the case does not
    request it."""
    if case.model_of is None or adapter.starts_from_weights:
        return None
    return f"resume: model_only: the adapter of {adapter.name} has no starts_from_weights, it continues all of a checkpoint"


def reason_against_cut_fused(case: Case, adapter: trainers.Adapter) -> str | None:
    """Return why FSDP cannot be judged where the trainer has several weights in one tensor; None if it can.

    FSDP may cut that tensor inside of a weight, and the plan cuts each weight alone. Under FSDP2 it is judged if each
    rank holds whole blocks of it.
    """
    case = with_wrapper(case, adapter.traits(case).wrapper)
    if case.wrapper not in ("fsdp1", "fsdp2"):
        return None
    rows = {fqn: shape[0] for fqn, shape in case.model.parameter_shapes().items()}
    ranks = case.shards * case.dims.tp
    for name, parts in adapter.fused(case).items():
        fused_blocks = blocks_in_order(parts, rows)
        total_rows = sum(rows[part] for part in dict.fromkeys(parts))
        if case.wrapper == "fsdp1" or total_rows % ranks or not local_blocks_of(fused_blocks, total_rows // ranks):
            layout = ",".join(f"{axis}={getattr(case.dims, axis)}" for axis in AXES if getattr(case.dims, axis) > 1)
            return (
                f"{name} is several weights in one (`fused`), and {case.wrapper} over {case.shards} ranks cuts it inside of"
                " one of them: what each rank then holds is not planned; judge the model with DDP, and FSDP without an"
                f" adapter: harness record --layout {layout} -- torchrun .."
            )
    return None


def _reason_too_few_descriptors(case: Case) -> str:
    """Return why ranks may run out of file descriptors; empty if there are enough.

    16 ranks were seen to use 53 each. Below the limit a rank dies in a socket, which reads like the trainer's mistake."""
    world_size = max(launched.dims.world_size for launched in case.launches.values())
    needed = 32 + 8 * world_size
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        return (
            f"{world_size} ranks may need {needed} file descriptors each, {allowed} are allowed; `ulimit -n {needed}`"
        )
    return ""


def count_visible_gpus() -> int:
    """Return the number of visible GPUs, without touching CUDA, which ranks forked from here could not use any more."""
    return len(machine.visible_gpu_uuids())
