"""The default trainer under test: a complete distributed Llama 3 trainer. It is not trusted; it is what the harness examines.

The model is reference/model.py, unmodified; parallelism is applied from outside. This folder has all else.

    parallelize.py   the mesh; tensor parallel, FSDP2, DDP; when and how gradients are reduced
    recompute.py     activation checkpointing and torch.compile
    context.py       context parallel: attention over the ranks that share a sequence
    pipeline.py      the model in stages, and torch's schedules that run them
    tied.py          an embedding that is the output's weight, on the first and on the last stage
    data.py          which samples this rank reads
    quantize.py      matmuls in 8 bits
    recipe.py        optimizer and learning rate
    lora.py          adapters of low rank, cut by tp and merged for others
    muon.py          Muon for matrices, with AdamW for all else
    clip.py          the global gradient norm and clipping by it
    checkpoint.py    saving and resuming, also into another layout
    export.py        weights under Hugging Face's names
    trainer.py       start-up, the step, the loop
    __main__.py      the command line
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.measured import Unit
from harness.core.case.schedule import MOST_ACTIVE_STAGES, V_SHAPED, ZERO_BUBBLE
from harness.core.case.traits import TrainerTraits
from harness.core.plan.frozen import count_differentiated_layers, has_frozen, units_gathered_in_backward
from harness.core.plan.units import fqns_of_separate_units
from harness.core.trainers import Adapter
from harness.core.trainers.support.alone import needs_memory

if TYPE_CHECKING:
    from harness.core.trainers.llama3.trainer import Trainer


MX_BLOCK = 32


class Llama3(Adapter):
    """harness.core.trainers.Adapter of this trainer."""

    name = "llama3"
    preload: tuple[str, ...] = ()
    reports: tuple[str, ...] = ("loss", "grad_norm", "lr")
    backends: tuple[str, ...] = ("nccl", "gloo")
    starts_from_weights: bool = True

    def traits(self, case: Case) -> TrainerTraits:
        gathers = case.dims.cp > 1 and case.training.document_mask
        return TrainerTraits(fsdp_units="apart", attention="fused", cp_gathers=gathers)

    def unsupported(self, case: Case) -> str | None:
        return next(_why_unsupported(case), None)

    def start(self, case: Case, weights: Path | None, device: str) -> Trainer:
        from harness.core.trainers.llama3 import trainer

        if reason := self.unsupported(case):
            raise ValueError(f"case {case.name!r}: {self.name} cannot run it: {reason}")
        return trainer.Trainer(case, weights=weights, device=trainer.join(case, device))

    def unsupported_alone(self, case: Case) -> str | None:
        """Return why a rank of the case cannot run alone without memory, in one sentence; None if it can."""
        return self.unsupported(case) or next(_unsupported_alone(case), None) or next(needs_memory(case), None)

    def dry(self, case: Case) -> Trainer:
        import torch

        from harness.core.trainers.llama3 import data, trainer

        return trainer.Trainer(case, weights=None, device=torch.device("cpu"), batches=data.Shapes)

    def fqn(self, name: str) -> str:
        return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")  # DDP's, checkpointing's


def _why_unsupported(case: Case) -> Iterator[str]:
    """Yield why this trainer cannot run the case, one sentence each."""
    dims = case.dims
    features = case.features
    if dims.tp > 1 and case.wrapper in ("ddp", "replicate"):
        yield f"dp_replicate {dims.dp_replicate} x tp {dims.tp} with wrapper {case.wrapper}: torch DDP takes no DTensors"
    if dims.cp > 1 and case.wrapper in ("ddp", "replicate"):
        yield f"cp {dims.cp} with wrapper {case.wrapper}: this trainer shards parameters over cp"
    if not features.shards_over_cp:
        yield "shards_over_cp false: this trainer shards parameters over cp"
    if case.training.quantize and importlib.util.find_spec("torchao") is None:
        yield f"quantize {case.training.quantize} needs torchao: pip install -e '.[precision]'"
    tokens = case.local_batch * case.training.seq_len // dims.cp
    if case.training.quantize == "mxfp8" and tokens % MX_BLOCK:
        yield f"quantize mxfp8 with {tokens} tokens in a microbatch of a rank: torchao scales blocks of {MX_BLOCK}"
    if dims.tp > 1 and case.model.ffn_dim % dims.tp:
        yield f"ffn_dim {case.model.ffn_dim} is not divisible by tp {dims.tp}"
    if case.wrapper != "fsdp2" and (case.training.compute_dtype or features.reduce_dtype):
        yield "compute_dtype and reduce_dtype are FSDP2's MixedPrecisionPolicy: they need wrapper fsdp2"
    if features.wrapper == "fsdp2" and dims.dp * dims.cp == 1:
        yield "wrapper fsdp2 without data ranks: this trainer then wraps nothing"
    if features.fsdp_units == "root":
        yield f"fsdp_units {features.fsdp_units}: this trainer gathers embedding, blocks, and norm with output, apart"
    if case.wrapper in ZERO:
        yield f"wrapper {case.wrapper}: this trainer cuts optimizer state and gradients as it cuts parameters (FSDP)"
    if case.wrapper == "fsdp1":
        yield from _fsdp1_obstacles(case)
    if dims.tp > 1 and isinstance(features.reshard_after_forward, int):
        number = features.reshard_after_forward
        yield f"reshard_after_forward {number} with tp {dims.tp}: FSDP2 reshards no DTensors to fewer ranks"
    yield from (*_limits_of_validation(case), *_limits_of_export(case))
    yield from (*_torchs_limits_of_the_recipe(case), *_limits_of_freezing(case))
    yield from _limits_of_pipelines(case)
    yield from _where_dropout_differs(case)
    if features.async_tp and not features.compile:
        yield "async_tp is a pass of the compiler's over its graphs: it needs compile"
    if features.async_tp and not Path("/proc/driver/nvidia").exists():
        yield "async_tp: its fused operators (symmetric memory) have no CPU kernel; no NVIDIA driver is here"
    yield from (f"{request}: not implemented yet" for request, requested in _not_implemented(case).items() if requested)


def _limits_of_validation(case: Case) -> Iterator[str]:
    """Yield why this trainer cannot validate in this case, one sentence each; nothing if it can."""
    if case.features.validate_every and case.dims.pp > 1:
        yield f"validate_every with pp {case.dims.pp}: this trainer evaluates whole models only"
    if case.features.validate_every and case.training.quantize:
        yield f"validate_every with quantize {case.training.quantize}: torchao copies a weight once more without gradients"


def _limits_of_export(case: Case) -> Iterator[str]:
    """Yield why this trainer cannot export the weights in this case; nothing if it can."""
    if case.features.export and case.dims.pp > 1:
        yield f"export with pp {case.dims.pp}: this trainer exports whole models only"


def _limits_of_freezing(case: Case) -> Iterator[str]:
    """Yield why frozen parameters cannot be combined with the rest of the case; nothing if none is frozen, or they can.

    How backward changes if parameters are frozen is not planned for each feature that changes backward.
    """
    if case.model.lora is None and not has_frozen(case):
        return
    frozen_by = f"lora {case.model.lora}" if case.model.lora else f"trainable {list(case.training.trainable)}"
    dims = case.dims
    features = case.features
    training = case.training
    limits = {"compile": features.compile, f"wrapper {case.wrapper}": case.wrapper == "fsdp1"}
    limits |= {f"optimizer {training.optimizer}": training.optimizer == "muon"}
    limits |= {f"quantize {training.quantize}": training.quantize is not None}
    limits |= {"cp and document_mask": dims.cp > 1 and training.document_mask}
    limits |= {f"schedule {features.schedule}": dims.pp > 1 and features.schedule in ZERO_BUBBLE}
    idle = count_differentiated_layers(case, range(case.model.n_layers)) < case.model.n_layers
    by_name = {"activation_checkpointing": features.activation_checkpointing != "none"}
    by_name |= {"cp": dims.cp > 1, "pp": dims.pp > 1}
    limits |= {
        f"{name} and a block whose attention has no gradient": idle and is_requested
        for name, is_requested in by_name.items()
    }
    yield from (f"{frozen_by} with {other}: not implemented yet" for other, requested in limits.items() if requested)
    units = [Unit(unit, 1) for unit in fqns_of_separate_units(case)]
    if isinstance(features.reshard_after_forward, int) and len(units_gathered_in_backward(case, units)) < len(units):
        number = features.reshard_after_forward
        reason = (
            "what forward left of units that backward never gathers; see upstream_bugs/fsdp2_frozen_post_forward.py"
        )
        yield f"{frozen_by} with reshard_after_forward {number}: FSDP2 keeps {reason}"


def _unsupported_alone(case: Case) -> Iterator[str]:
    """Yield why the case needs samples or contents, which a rank that runs alone lacks."""
    if case.features.validate_every:
        yield f"validate_every {case.features.validate_every}: a rank alone reads no samples"
    if case.features.export:
        yield f"export {case.features.export}: it is contents"


def _where_dropout_differs(case: Case) -> Iterator[str]:
    """Yield why dropout would draw other masks than the reference; nothing without dropout, or if masks are equal.

    Both draw masks over the whole sequence, block after block, from torch's generator.
    """
    dims = case.dims
    if not case.model.dropout:
        return
    if dims.tp > 1 and case.features.sequence_parallel:
        yield f"dropout with tp {dims.tp} and sequence parallel: each rank would draw a mask for its part of the sequence"
    if dims.cp > 1:
        yield f"dropout with cp {dims.cp}: each rank would draw a mask for its part of the sequence"
    if case.features.compile:
        yield "dropout with compile: compiled code draws other random numbers than the reference"


def _torchs_limits_of_the_recipe(case: Case) -> Iterator[str]:
    """Yield why torch cannot train this recipe with cp or pp."""
    dims = case.dims
    training = case.training
    if dims.cp > 1 and training.document_mask and case.features.cp_rotation == "alltoall":
        yield "document_mask with cp_rotation alltoall: torch's ring takes no mask"
    if dims.pp > 1 and training.variable_length:
        yield f"variable_length with pp {dims.pp}: torch's pipeline stages fix the shapes they exchange at the first step"


def _limits_of_pipelines(case: Case) -> Iterator[str]:
    """Yield why torch's schedules, or the plan of them, cannot run this case; nothing without a pipeline."""
    dims = case.dims
    features = case.features
    if dims.pp == 1:
        return
    if dims.dp_shard * dims.cp > 1 and case.stages_per_rank > MOST_ACTIVE_STAGES:
        yield (
            f"stages_per_rank {case.stages_per_rank} with FSDP2: torch's schedules keep {MOST_ACTIVE_STAGES} stages gathered"
            " at a time, and how often they gather more than that is not planned"
        )
    if features.compile and features.schedule in ZERO_BUBBLE:
        yield f"compile with schedule {features.schedule}: torch cannot split the backward of compiled blocks"
    if case.training.quantize and features.schedule in ZERO_BUBBLE:
        yield (
            f"quantize {case.training.quantize} with schedule {features.schedule}: a quantized matmul has one backward,"
            " which either half of a split one runs as a whole; how often is not planned"
        )
    if features.schedule in ZERO_BUBBLE and case.expected_failure is None:
        yield from _wrong_with_zero_bubble(case)
    if features.schedule in V_SHAPED and torch_version() < (2, 13):
        yield f"schedule {features.schedule} before torch 2.13: a stage sends to its neighbour on its own rank, gloo cannot"
    if case.model.dropout:
        yield f"dropout with pp {dims.pp}: its seed is set before every forward, and torch's schedules run those"
    if case.model.tied_embeddings and features.schedule in V_SHAPED and case.wrapper is not None:
        yield f"tied_embeddings with schedule {features.schedule} and wrapper {case.wrapper}: two wrappers for one weight"
    if case.wrapper == "replicate":
        yield f"wrapper replicate with pp {dims.pp}: torch's stages hold back the reductions of DDP and FSDP2 only"
    if isinstance(features.reshard_after_forward, int):
        number = features.reshard_after_forward
        yield f"reshard_after_forward {number} with pp {dims.pp}: how often torch's schedules gather is not planned for it"
    if features.defer_sync is not True:
        value = str(features.defer_sync).lower()
        yield f"defer_sync {value} with pp {dims.pp}: torch reduces after every pass of the schedule, as it is"


def _wrong_with_zero_bubble(case: Case) -> Iterator[str]:
    """Yield what torch computes wrongly, without an error, if this case runs with a zero-bubble schedule.

    Such a case is refused, unless it expects to fail, in order to show it.
    """
    features = case.features
    schedule = f"with schedule {features.schedule}"
    if features.activation_checkpointing != "none":
        reason = "torch computes a block again for every group of its weights; see upstream_bugs/zero_bubble_checkpointing.py"
        yield f"activation_checkpointing {features.activation_checkpointing} {schedule}: {reason}"
    if case.wrapper == "ddp":
        yield f"wrapper ddp {schedule}: torch does not reduce later stages' gradients; see upstream_bugs/zero_bubble_ddp.py"
    if case.wrapper == "fsdp2" and features.reshard_after_forward == "always":
        yield f"reshard_after_forward always {schedule}: torch loses gradients; see upstream_bugs/zero_bubble_reshard.py"


def _fsdp1_obstacles(case: Case) -> Iterator[str]:
    """Yield what FSDP1 cannot do in this case, and what is not implemented with it."""
    dims = case.dims
    features = case.features
    for axis in ("pp", "cp", "tp"):
        if getattr(dims, axis) > 1:
            yield f"wrapper fsdp1 with {axis} {getattr(dims, axis)}: this trainer combines it with data parallelism only"
    if features.cpu_offload:
        yield "cpu_offload with wrapper fsdp1: only FSDP2's is implemented"
    if isinstance(features.reshard_after_forward, int):
        yield f"reshard_after_forward {features.reshard_after_forward}: FSDP1 knows no number of ranks"
    if features.reshard_after_forward == "always":
        yield "reshard_after_forward always: FSDP1 never frees the root's unit after forward"


def torch_version() -> tuple[int, int]:
    """Return the installed torch's major and minor version, without importing it: (2, 13)."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


def _not_implemented(case: Case) -> dict[str, bool]:
    """Return each combination that is not implemented, in words, and whether the case requests it."""
    features = case.features
    training = case.training
    return {
        "quantize with tp and activation checkpointing, whose scales": training.quantize is not None
        and case.dims.tp > 1
        and features.activation_checkpointing != "none",
    }


adapter = Llama3()
