"""Where torchtitan comes from, which era it is of, and what of a case that era can be requested."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.spec.case import Case
from harness.spec.dims import AXES
from harness.spec.features import FEATURE_CHOICES, Features
from harness.spec.traits import TrainerTraits, with_wrapper
from reference.config import ModelConfig, TrainingConfig

FILES = ("/torchtitan/", "/train.py")  # of the repository, all that running it needs
LOSS_CHUNKS = 8  # torchtitan's own number
HOW_TO_GET_IT = "`make titan` prepares an environment with it, or give --source a checkout of pytorch/torchtitan"


class NotThere(Exception):
    """No torchtitan where it was looked for. The message says how to get it."""


MODEL = ("name", "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim", "norm_eps", "rope_theta")
DATA_AND_LOGS = ("datasets", "torchdata.stateful_dataloader", "torch.utils.tensorboard")
COMPILERS = ("torch._inductor.compile_fx", "torch.nn.attention.varlen", "spmd_types", "tyro", "tokenizers")


@dataclass(frozen=True)
class Era:
    """What torchtitan of a time can be requested, by the names of the case's keys; a key not listed must be as usual.

    run_by: the module here that does. inputs_by_name: whether its loop takes tokens as a dict.
    fed_microbatches: since 0.3.0, its data loader gives a pipeline's microbatches one by one. flat: samples lie end to end in
    one row, told apart by positions.
    cp_by_types: it cuts sequences with spmd_backend spmd_types only, which torch 2.13 cannot shard.
    resumes: whether checkpoints can be requested of it. traits: what it chose where a case leaves that open.
    chunks_loss: its loss applies the output, in chunks of the sequence.
    replicates_by: its wrapper where only dp_replicate is above 1. wraps_alone: FSDP2 is also around a model without data ranks.
    preload: packages that it imports.
    unasked: keys of options that it has, and this adapter does not pass on; what is neither listed nor there, it has not.
    """

    name: str
    run_by: str
    axes: tuple[str, ...]
    features: dict[str, tuple[object, ...]]
    training: tuple[str, ...]
    traits: TrainerTraits
    replicates_by: str
    wraps_alone: bool
    reports: tuple[str, ...]
    inputs_by_name: bool = False
    fed_microbatches: bool = False
    flat: bool = False
    chunks_loss: bool = False
    cp_by_types: bool = False
    model: tuple[str, ...] = MODEL
    resumes: bool = False
    unasked: tuple[str, ...] = ("compile", "async_tp", "quantize", "document_mask", "cpu_offload")
    preload: tuple[str, ...] = DATA_AND_LOGS
    renamed: tuple[tuple[str, str], ...] = ()

    def without(self, key: str) -> str:
        """Why what a case requests by this key is not done."""
        if key in self.unasked:
            return f"{self.name} has such an option, which this adapter does not pass on"
        return f"{self.name} has no such option"

    def fqn(self, name: str) -> str:
        """The reference's spelling of a parameter's or module's name."""
        name = ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")
        for theirs, ours in self.renamed:
            name = re.sub(rf"(^|\.){re.escape(theirs)}(\.|$)", rf"\1{ours}\2", name)
        return name


EARLY = Era(
    name="this early torchtitan",
    run_by="early",
    axes=("dp_replicate", "dp_shard", "tp"),
    features={
        "wrapper": ("fsdp2", "replicate"),
        "loss_parallel": (True, False),
        "activation_checkpointing": ("none", "full", "layer", "op"),
        "reduce_dtype": ("float32", "bfloat16", "float64"),
    },
    training=("steps", "seed", "dtype", "global_batch", "seq_len", "lr", "warmup_steps", "final_lr_fraction")
    + ("max_norm", "data", "compute_dtype", "variable_length", "all_valid", "masked_samples"),
    traits=TrainerTraits(fsdp_units="root", attention="fused", own_model=True),
    replicates_by="replicate",
    wraps_alone=False,
    reports=("loss",),
)
MIDDLE = dataclasses.replace(
    EARLY,
    name="this torchtitan of 2025",
    run_by="middle",
    axes=AXES,
    features=EARLY.features
    | {
        "schedule": tuple(name for name in FEATURE_CHOICES["schedule"] if name != "DualPipeV"),
        "microbatches": tuple(range(1, 65)),
        "stages_per_rank": tuple(range(1, 65)),
        "cp_rotation": ("alltoall",),
        "cpu_offload": (True,),
        "reshard_after_forward": ("always", "never"),
    },
)
LATER = Era(
    name="torchtitan 0.3.0",
    run_by="later",
    axes=AXES,
    features={
        "wrapper": ("fsdp2",),
        "schedule": FEATURE_CHOICES["schedule"],
        "microbatches": tuple(range(1, 65)),
        "stages_per_rank": tuple(range(1, 65)),
        "cp_load_balance": (False,),
        "cpu_offload": (True,),
        "activation_checkpointing": ("none", "full", "op"),
        "accumulation": tuple(range(1, 65)),
        "defer_sync": (False,),
        "reshard_after_forward": ("always", "never"),
        "reduce_dtype": ("float32", "bfloat16", "float64"),
    },
    training=(*EARLY.training, "decay"),
    traits=TrainerTraits(
        fsdp_units="apart", attention="fused", own_model=True, ac_early_stop=False, cp_heads="key_value"
    ),
    replicates_by="fsdp2",
    wraps_alone=True,
    reports=("loss", "grad_norm"),
    unasked=("async_tp", "quantize"),
    preload=(*DATA_AND_LOGS, *COMPILERS),
    model=(*MODEL, "rope_scaling", "tied_embeddings"),
    resumes=True,
    fed_microbatches=True,
    renamed=(("lm_head", "output"), *((f"qkv_linear.{name}", name) for name in ("wq", "wk", "wv"))),
)
BETWEEN = dataclasses.replace(
    LATER,
    name="this torchtitan of 2026",
    features=LATER.features | {"wrapper": ("fsdp2", "replicate")},
    training=EARLY.training,
    model=MODEL,
    resumes=False,
    replicates_by="replicate",
    wraps_alone=False,
    fed_microbatches=False,
)
FLAT = dataclasses.replace(
    LATER,
    name="this torchtitan since 2026-08-20",
    flat=True,
)
SCRIPTS = (  # what train.py has, and who it is then
    (re.compile(r"^def main\(job_config: JobConfig\)", re.MULTILINE), EARLY),
    (re.compile(r"^class Trainer", re.MULTILINE), MIDDLE),
)
TRAINERS = (
    ("num_pp_microbatches", FLAT),
    ("num_pipeline_parallel_microbatches", LATER),
)  # what trainer.py has since then


@dataclass(frozen=True)
class Change:
    """What torchtitan can be requested from the commit on that brought these words into this file of the package."""

    file: str
    words: str
    era: dict[str, object] = field(default_factory=dict)
    features: dict[str, tuple[object, ...]] = field(default_factory=dict)
    traits: dict[str, Any] = field(default_factory=dict)


CHANGES = (
    Change("distributed/context_parallel/api.py", "spmd_backend", {"cp_by_types": True}),
    Change("train.py", "input_dict", {"inputs_by_name": True}),
    Change(
        "train.py",
        "gradient_accumulation_steps",
        features={"accumulation": tuple(range(1, 65)), "defer_sync": (False,)},
    ),
    Change("train.py", "grad_norm.item()", {"reports": ("loss", "grad_norm")}),
    Change(
        "models/llama3/infra/parallelize.py",
        "[model.norm, model.output]",
        traits={"fsdp_units": "apart"},
    ),
    *(
        Change("models/llama3/parallelize.py", words, {"wraps_alone": True, "replicates_by": "fsdp2"})
        for words in (  # not below an `if`
            '\n    names = ["dp_replicate", "fsdp"] if',
            "\n    # Always run apply_fsdp",
            "apply_fsdp_to_decoder",
        )
    ),
    Change("models/llama3/parallelize.py", "apply_replicate", {"replicates_by": "fsdp2"}),
    Change("distributed/activation_checkpoint.py", "early_stop=", traits={"ac_early_stop": False}),
    Change("distributed/pipeline_parallel.py", "ScheduleDualPipeV", features={"schedule": FEATURE_CHOICES["schedule"]}),
    Change("config/job_config.py", "context_parallel_load_balancer", features={"cp_load_balance": (False,)}),
    Change("components/loss.py", "num_chunks", {"chunks_loss": True}, traits={"keeps_loss_unit": True}),
    Change("components/loss.py", "lm_head.unshard()", traits={"keeps_loss_unit": False}),
    Change("models/llama3/model/model.py", "enable_gqa", traits={"cp_heads": "key_value"}),
)


def changed(era: Era, package: Path) -> Era:
    for change in CHANGES:
        if change.words in _text(package / change.file):
            traits = dataclasses.replace(era.traits, **change.traits)
            merged = {"features": era.features | change.features, "traits": traits}
            era = dataclasses.replace(era, **change.era, **merged)  # type: ignore[arg-type]
    return era


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@dataclass(frozen=True)
class Source:
    """package: the folder `torchtitan` itself. Its parent goes to sys.path, in front of an installed one.

    script: its train.py, where that is what runs.
    """

    package: Path
    era: Era
    script: Path | None = None

    @property
    def folder(self) -> Path:
        return self.package.parent

    def traits(self, case: Case) -> TrainerTraits:
        """Its era says how replicas alone are wrapped, and whether a model without data ranks is."""
        era = self.era
        alone = "fsdp2" if era.wraps_alone else None
        replicas = case.dims.dp_replicate > 1 and case.shards == 1
        wrapper = era.replicates_by if replicas else alone if case.dims.dp * case.dims.cp == 1 else None
        return dataclasses.replace(era.traits, wrapper=wrapper, loss_chunks=chunks_of(case, era))

    def obstacles(self, case: Case) -> Iterator[str]:
        era, traits = self.era, self.traits(case)
        case = with_wrapper(case, traits.wrapper)
        for axis in AXES:
            if getattr(case.dims, axis) > 1 and axis not in era.axes:
                yield f"{axis} {getattr(case.dims, axis)}: not asked of {era.name} by this adapter"
        if case.dims.cp > 1 and era.cp_by_types:
            yield f"cp {case.dims.cp}: {era.name} does that with spmd_types, whose parameters fully_shard of torch 2.13 refuses"
        if not case.exact and not traits.own_model:
            yield f"an inexact recipe: where the model of {era.name} rounds otherwise than the reference is not known"
        if case.dims.pp > 1 and case.training.variable_length:
            why = "torch's pipeline stages fix the shapes they exchange at the first step"
            yield f"variable_length with pp {case.dims.pp}: {why}"
        for axis in ("pp", "tp"):
            if (degree := getattr(case.dims, axis)) > 1 and case.wrapper == "replicate":
                yield f"dp_replicate {case.dims.dp_replicate} x {axis} {degree}: torchtitan's DDP takes one axis only"
        if case.features.accumulation > 1 and case.features.defer_sync and "accumulation" in era.features:
            shown = "upstream_bugs/torchtitan_accumulation_reduces_every_microbatch.py"
            yield f"accumulation with defer_sync: {era.name} reduces gradients after every microbatch; see {shown}"
        if era.fed_microbatches and case.features.activation_checkpointing == "op" and case.dims.cp > 1:
            yield f"activation_checkpointing op with cp: what {era.name} keeps is attention of GPUs, not of CPUs"
        if era.fed_microbatches and not case.features.sequence_parallel:
            why = "moves three to four times what backward needs; see upstream_bugs/torchtitan_tp_without_sequence_parallel.py"
            yield f"sequence_parallel False: {era.name} then {why}"
        if era.fed_microbatches and not case.features.loss_parallel:
            yield f"loss_parallel False: {era.name} always computes the loss in parallel"
        if case.model.tied_embeddings and case.dims.tp > 1 and "tied_embeddings" in era.model:
            why = "gathers the one weight twice; see upstream_bugs/torchtitan_tied_under_tp.py"
            yield f"tied_embeddings with tp: {era.name} {why}"
        if case.model.tied_embeddings and case.dims.pp > 1 and "tied_embeddings" in era.model:
            yield f"tied_embeddings with pp: {era.name} refuses that"
        if case.features.compile and "compile" not in era.unasked:
            yield f"compile: {era.name} casts to float32 within what it compiles, where this adapter keeps no float64"
        if era.fed_microbatches and case.training.document_mask:
            why = "positions that begin anew in every document, not counting on"
            yield f"document_mask: the masks of {era.name} are made of {why}"
        if era.replicates_by != "fsdp2" and case.wrapper == "fsdp2" and case.shards == 1:
            yield "wrapper fsdp2 with dp_shard 1: torchtitan runs that as DDP"
        for key, value in _unusual(case.features, Features()):
            own = traits.fsdp_units if key == "fsdp_units" else None
            if value not in (*era.features.get(key, ()), own):
                yield f"{key} {value}: {era.without(key)}"
        for key, value in _unusual(case.training, TrainingConfig()):
            if key not in era.training:
                yield f"{key} {value}: {era.without(key)}"
        for key, value in _unusual(case.model, ModelConfig()):
            if key not in era.model:
                yield f"{key} {value}: the model of {era.without(key)}"
        if (case.resume or case.last_step) and not era.resumes:
            yield f"resume: this adapter does not let {era.name} write checkpoints"
        if case.saves_after:
            yield f"resume: {era.name} leaves its loop at the last step it is configured for, and does not enter it again"


def chunks_of(case: Case, era: Era) -> int:
    """In how many parts its loss applies the output."""
    return LOSS_CHUNKS if era.chunks_loss and not why_whole(case, era) else 1


def why_whole(case: Case, era: Era) -> str:
    """Why this adapter has the loss computed at once where its era does so in chunks; empty where it does not."""
    together = case.local_batch if era.flat else 1
    if any(case.seq_len(step) // case.dims.cp * together % LOSS_CHUNKS for step in case.steps):
        return f"{LOSS_CHUNKS} chunks do not divide the sequence"
    if case.dims.pp > 1 and case.shards > 1:
        return "what FSDP2 gathers for it in a pipeline is not planned"
    return ""


def _unusual(given: object, usual: object) -> Iterator[tuple[str, object]]:
    for one in dataclasses.fields(given):  # type: ignore[arg-type]
        if getattr(given, one.name) != getattr(usual, one.name):
            yield one.name, getattr(given, one.name)


def find(where: str | None) -> Source:
    """Raises NotThere."""
    package = _installed() if where is None else Path(where).resolve() / "torchtitan"
    if not package.is_dir():
        raise NotThere(f"{package}: no torchtitan there; {HOW_TO_GET_IT}")
    for script in (package.parent / "train.py", package / "train.py"):
        if (era := next((era for words, era in SCRIPTS if words.search(_text(script))), None)) is not None:
            return Source(package, changed(era, package), script)
    if (package / "models" / "llama3" / "config_registry.py").is_file() and (package / "trainer.py").is_file():
        trainer = _text(package / "trainer.py")
        known = (era for word, era in TRAINERS if word in trainer)
        return Source(package, changed(next(known, BETWEEN), package))
    raise NotThere(f"{package}: this adapter runs torchtitan from 2024-09 on, and nothing there looks like it")


def _installed() -> Path:
    """Without importing it."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        raise NotThere(f"torchtitan is not installed; {HOW_TO_GET_IT}")
    return Path(next(iter(spec.submodule_search_locations)))
