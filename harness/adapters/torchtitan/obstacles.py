"""The reasons why a case is not requested of a version of torchtitan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from harness.adapters.torchtitan.eras import Era
from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.case.features import Features
from harness.core.case.traits import OBSERVED, TrainerTraits, with_choices
from harness.reference.config import ModelConfig, TrainingConfig

ADAPTERS = ("*.lora_?.weight",)
"""What is trained beside adapters, in the words of `trainable`: nothing else."""
MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's masks, of which each cp rank gets whole ones (torch 2.15)."""


def obstacles(case: Case, era: Era, traits: TrainerTraits, *, types: bool = False) -> Iterator[str]:
    """Yield a sentence for each reason why this torchtitan, or this adapter, cannot run the case. Nothing if it can.

    traits: what it chose for this case. types: whether it shards by spmd_types.
    """
    case = with_choices(case, traits)
    yield from _layout_obstacles(case, era, types=types)
    yield from _feature_obstacles(case, era)
    if era.fed_microbatches:
        yield from _microbatch_obstacles(case, era)
    yield from _model_obstacles(case, era)
    yield from _without_option(case, era)
    if (case.resume or case.last_step) and not era.resumes:
        yield f"resume: this adapter does not let {era.name} write checkpoints"


def _layout_obstacles(case: Case, era: Era, *, types: bool) -> Iterator[str]:
    """Yield the reasons that lie in degrees and wrapper, lengths of sequences and masks, and an inexact recipe."""
    dims = case.dims
    for axis in AXES:
        if getattr(dims, axis) > 1 and axis not in era.axes:
            yield f"{axis} {getattr(dims, axis)}: not asked of {era.name} by this adapter"
    if dims.pp > 1 and era.shapes_by_example:
        why = "tells stages what they exchange by tensors without gradients, and torch 2.13 then sends none back"
        yield f"pp {dims.pp}: {era.name} {why}"
    if dims.cp > 1 and era.cp_by_types and not types:
        yield f"cp {dims.cp}: {era.name} does that with spmd_types, whose parameters fully_shard of torch 2.13 refuses"
    together = case.local_batch if era.flat else 1
    cut = dims.cp > 1 and types and era.cp_by_types
    rows = {case.seq_len(step) * together for step in case.steps} if cut else set()
    if odd := sorted(row for row in rows if row % (MASK_BLOCK * dims.cp)):
        yield f"cp {dims.cp}: torch cuts no mask of {odd[0]} tokens, for its blocks have {MASK_BLOCK}"
    if types and case.model.vocab_size % dims.tp:
        yield f"vocab_size {case.model.vocab_size} with tp {dims.tp}: with spmd_types FSDP2 takes uneven shards for even ones"
    if not case.has_derived_bounds and not era.traits.own_model:
        yield f"an inexact recipe: where the model of {era.name} rounds otherwise than the reference is not known"
    if dims.pp > 1 and case.training.variable_length:
        why = "torch's pipeline stages fix the shapes they exchange at the first step"
        yield f"variable_length with pp {dims.pp}: {why}"
    for axis in ("pp", "tp"):
        if (degree := getattr(dims, axis)) > 1 and case.wrapper == "replicate":
            yield f"dp_replicate {dims.dp_replicate} x {axis} {degree}: torchtitan's DDP takes one axis only"
    if dims.cp > 1 and case.wrapper in ("ddp", "replicate"):
        yield f"cp {dims.cp} with wrapper {case.wrapper}: torchtitan shards parameters over cp"
    if era.replicates_by != "fsdp2" and case.wrapper == "fsdp2" and case.shards == 1:
        yield "wrapper fsdp2 with dp_shard 1: torchtitan runs that as DDP"


def _feature_obstacles(case: Case, era: Era) -> Iterator[str]:
    """Yield the reasons that lie in validation and compilation."""
    if case.features.validate_every and case.dims.pp > 1:
        yield f"validate_every with pp {case.dims.pp}: torch's schedules keep an evaluated batch's outputs until the next step"
    if case.features.compile and "compile" not in era.unasked:
        yield f"compile: {era.name} casts to float32 within what it compiles, where this adapter keeps no float64"


def _microbatch_obstacles(case: Case, era: Era) -> Iterator[str]:
    """Yield the reasons of versions whose data loader gives microbatches: quantization, loss and document mask."""
    features = case.features
    if case.training.quantize == "float8_tensorwise":
        yield f"quantize float8_tensorwise: {era.name} has no such recipe"
    elif (recipe := case.training.quantize or "").startswith("float8"):
        shown = "upstream_bugs/torchtitan_float8_emulation.py"
        yield f"quantize {recipe}: {era.name} emulates it on CPUs with one scale a tensor; see {shown}"
    elif recipe:
        yield f"quantize {recipe}: {era.name} refuses that but on GPUs of compute capability 10"
    if not features.loss_parallel:
        yield f"loss_parallel False: {era.name} always computes the loss in parallel"
    if case.training.document_mask and case.dims.cp > 1 and not era.cp_by_types:
        yield f"document_mask with cp: {era.name} cuts masks along the sequence, which this adapter does not pass on"


def _model_obstacles(case: Case, era: Era) -> Iterator[str]:
    """Yield the reasons that lie in LoRA targets and tied embeddings."""
    lora = case.model.lora
    if era.adapts and lora is not None and ("wk" in lora.targets) != ("wv" in lora.targets):
        yield f"lora targets {', '.join(lora.targets)}: {era.name} adapts wk and wv together"
    tied = case.model.tied_embeddings and "tied_embeddings" in era.model
    if tied and case.dims.pp > 1:
        yield f"tied_embeddings with pp: {era.name} refuses that"


def _without_option(case: Case, era: Era) -> Iterator[str]:
    """Yield a reason for each value of the case that is not the usual one and that this version cannot be requested."""
    for key, value in _unusual(case.features, Features()):
        own = (era.traits.fsdp_units, OBSERVED) if key == "fsdp_units" else ()
        if value not in (*era.features.get(key, ()), *own):
            yield f"{key} {value}: {era.without(key)}"
    adapters_alone = era.adapts and case.model.lora is not None and case.training.trainable == ADAPTERS
    for key, value in _unusual(case.training, TrainingConfig()):
        if key == "trainable" and adapters_alone:
            continue
        if key not in era.training or value == "muon":
            yield f"{key} {value}: {era.without('muon' if value == 'muon' else key)}"
    for key, value in _unusual(case.model, ModelConfig()):
        if key not in era.model and not (key == "lora" and adapters_alone):
            yield f"{key} {value}: the model of {era.without(key)}"


def _unusual(given: object, usual: object) -> Iterator[tuple[str, object]]:
    """Yield (field, value) where a dataclass differs from one of the same type with usual values."""
    for field in dataclasses.fields(given):  # type: ignore[arg-type]
        if getattr(given, field.name) != getattr(usual, field.name):
            yield field.name, getattr(given, field.name)
