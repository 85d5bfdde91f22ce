"""The case's values in torchtitan's JobConfig, model sizes and TrainSpec, up to 2026-02.

An option is listed under every name that it ever had. It is given by the names that a version has; other names are left
out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from harness.adapters.torchtitan import options
from harness.core.case.case import Case
from harness.core.plan.stages import layers_of_stage

FLAVOR = "debugmodel"
FLAVORS = ("model_args", "config")  # of a TrainSpec: the models' sizes, by flavor
CONFIG_MODULES = ("torchtitan.config", "torchtitan.config_manager")  # where TORCH_DTYPE_MAP lies
SUPERSEDED = {
    "pipeline_parallel_split_points": "module_fqns_per_model_part"
}  # kept for a while to refuse whoever gives it
USUAL = {
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "metrics.enable_color_printing": False,
    "metrics.disable_color_printing": True,
    "comm.trace_buf_size": 0,
}
OF_OLD = {"1F1B": "1f1b", "GPipe": "gpipe"}  # names until 2024-10-09; since then any letters will do
CHECKPOINTING = {"none": ("none", ""), "full": ("full", ""), "layer": ("selective", "2"), "op": ("selective", "op")}


def configure_job(job: Any, case: Case, own_options: Mapping[str, Any] | None = None) -> Any:
    """Set the case's values in a JobConfig with torchtitan's defaults, and return it. Options of one's own take their place.

    A configuration that parses a command line reads own_options from a file first. Also teaches torchtitan the dtype
    float64.
    """
    own_options = own_options or {}
    for name in CONFIG_MODULES:
        if name in sys.modules:
            sys.modules[name].TORCH_DTYPE_MAP["float64"] = torch.float64
    if hasattr(job, "parse_args"):
        read_options_file(job, own_options)
    for name, value in options_of_case(case).items():
        section, _, key = name.partition(".")
        if name not in own_options:
            put(getattr(job, section, SimpleNamespace()), key, value)
    if not hasattr(job, "parse_args"):
        options.put_own(job, own_options)
    return job


def read_options_file(job: Any, own: Mapping[str, Any]) -> None:
    """Have a job parse a command line that names a TOML file with these options, as users give them.

    Without options: no file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "own.toml")
        path.write_text(toml_text(own))
        job.parse_args(["--job.config_file", str(path)] if own else [])


def toml_text(own: Mapping[str, Any]) -> str:
    """Return options as TOML. Options that are None are left out. Texts, numbers and lists are written as in JSON.

    own: by `section.name`.
    """
    lines_by_section: dict[str, list[str]] = {}
    for name, value in own.items():
        if value is not None:
            section, key = name.split(".")
            lines_by_section.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in lines_by_section.items())


def put(section: Any, key: str, value: object) -> None:
    """Set an option of a section. Nothing happens if the section does not have it, or has one that supersedes it."""
    if hasattr(section, key) and not hasattr(section, SUPERSEDED.get(key, "")):
        setattr(section, key, value)


def options_of_case(case: Case) -> dict[str, Any]:
    """Return the case's values by `section.name`, under every name that a JobConfig ever had for them.

    Degrees were options of the section `training` before they had their own.
    """
    features = case.features
    degrees = options.parallelism(case) | _former_degrees(case)
    recompute, which = CHECKPOINTING[features.activation_checkpointing]
    return {
        "job.dump_folder": os.path.join(tempfile.gettempdir(), "torchtitan"),
        "model.name": "llama3",
        "model.flavor": FLAVOR,
        "model.norm_type": "rmsnorm",
        "optimizer.name": "AdamW",
        "optimizer.lr": case.training.lr,
        "optimizer.fused": True,
        **options.under("training", options.training(case) | degrees),
        "training.batch_size": case.local_batch * case.microbatches,
        "training.warmup_steps": case.training.warmup_steps,
        "training.compile": False,
        **options.under("parallelism", degrees),
        **options.under("experimental", degrees),
        "activation_checkpoint.mode": recompute,
        "activation_checkpoint.selective_ac_option": which,
        **options.under("checkpoint", options.checkpoint(case)),
        "checkpoint.enable_checkpoint": False,  # its name until 2025-08, when no resume was asked of it
        **USUAL,
    }


def _former_degrees(case: Case) -> dict[str, Any]:
    """Return options of parallelism under names that only versions before 2026-02 have, without a section."""
    features = case.features
    return {
        "data_parallel_degree": case.dims.dp,
        "pipeline_parallel_schedule": OF_OLD.get(features.schedule, features.schedule),
        "enable_loss_parallel": features.loss_parallel,
        "disable_loss_parallel": not features.loss_parallel,
        "context_parallel_rotate_method": features.cp_rotation,
        "pipeline_parallel_microbatches": case.microbatches,
        "pipeline_parallel_split_points": [part[0] for part in stages(case)[1:]],
        "pipeline_parallel_expert_parallel_overlap": False,
        "module_fqns_per_model_part": stages(case),
    }


def stages(case: Case) -> list[list[str]]:
    """Return the names of the modules that each stage of a pipeline holds, the first stage in front.

    The embedding is on the first stage, norm and output are on the last. torchtitan's own cut counts embedding and
    output as a layer each.
    """
    parts = []
    for stage in range(case.n_stages):
        parts.append([f"layers.{layer}" for layer in layers_of_stage(case, stage)])
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def sizes(flavor: Any, case: Case) -> Any:
    """Return a copy of torchtitan's model arguments with the case's sizes. flavor: the arguments of one of its models.

    ffn_dim is the least multiple of `multiple_of` that is not below 8/3 dim times the multiplier, here 1. Where RoPE
    frequencies are always scaled, it is by 1.
    """
    model = case.model
    values = {
        "dim": model.dim,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "multiple_of": model.ffn_dim,
        "ffn_dim_multiplier": 1.5 / int(8 * model.dim / 3),
    }
    if hasattr(flavor, "rope_scaling_args"):
        values["rope_scaling_args"] = dataclasses.replace(flavor.rope_scaling_args, scaling_factor=1.0)
    return dataclasses.replace(flavor, **values)


def specify_model(spec: Any, case: Case, loader: Callable[..., Any]) -> Any:
    """Put the case's sizes, samples and a dummy tokenizer into a TrainSpec, and return it. loader: builds the data loader."""
    flavors = next(getattr(spec, name) for name in FLAVORS if hasattr(spec, name))
    flavors[FLAVOR] = sizes(flavors[FLAVOR], case)
    spec.build_tokenizer_fn = spec.tokenizer_cls = lambda *_: tokenizer(case)
    spec.build_dataloader_fn = loader
    return spec


def tokenizer(case: Case) -> SimpleNamespace:
    """Return a dummy tokenizer with the attributes that torchtitan reads when no text is tokenized."""
    return SimpleNamespace(n_words=case.model.vocab_size, eos_id=0)
