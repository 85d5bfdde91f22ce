"""The trainer of torchtitan since 2026-02-23, with 0.3.0: `Trainer(config).train()`, with configurations as objects."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from harness.adapters.support import float64
from harness.adapters.torchtitan import cpu, model_config, options
from harness.adapters.torchtitan.data_loader import Inputs, LoaderBuilder, Microbatches, Positioned, Rows, Samples
from harness.adapters.torchtitan.eras import Era
from harness.adapters.torchtitan.source import Source, chunks_of, why_not_spmd_types
from harness.adapters.torchtitan.trainer import TitanTrainer, no_sleep
from harness.core.case.case import Case
from harness.core.case.features import LOOPED
from harness.core.probe import chunks
from harness.core.probe.losses import noting_loss
from harness.core.trainers.support.weights import load_weights

# ---- The case's optimizer in torchtitan's own container of optimizers, since 2026-02-23


NORMS = r"norm\.weight$"


def optimizer_config(case: Case) -> Any:
    """Return the configuration of torchtitan's optimizers for the case: SGD or AdamW."""
    return sgd(case) if case.training.optimizer == "sgd" else adamw(case)


def adamw(case: Case) -> Any:
    """Return the configuration of AdamW. If only matrices decay, norms are a separate group, which matches first."""
    from torchtitan.components import optimizer

    config = getattr(optimizer, "default_adamw", optimizer.OptimizersContainer.Config)(lr=case.training.lr)
    if case.training.decay == "matrices":
        (whole,) = config.param_groups
        undecayed = {**whole.optimizer_kwargs, "weight_decay": 0.0}
        config.param_groups.insert(0, dataclasses.replace(whole, pattern=NORMS, optimizer_kwargs=undecayed))
    return config


def sgd(case: Case) -> Any:
    """Return the configuration of a container with SGD.

    It inherits from torchtitan's, as users add an optimizer that it lacks.
    """
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class WithSGD(OptimizersContainer):
        """torchtitan's container of optimizers, which finds any optimizer of torch.optim by name."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config): ...

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return getattr(torch.optim, name)

    kwargs = {"lr": case.training.lr, "weight_decay": case.training.weight_decay}
    whole = ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs=kwargs)
    undecayed = ParamGroupConfig(pattern=NORMS, optimizer_name="SGD", optimizer_kwargs=kwargs | {"weight_decay": 0.0})
    groups = [whole] if case.training.decay == "all" else [undecayed, whole]
    return WithSGD.Config(param_groups=groups, implementation="for-loop")


# ---- torchtitan's own cross entropy, shown to the probe


def note_loss_function(loss: Any) -> None:
    """Patch torchtitan's loss so that the probe records the cross entropy that torchtitan has for sharded logits.

    torchtitan has one since 2026-06, where the probe does not look. Until 2026-04-27 its loss is a function, which
    calls torch's, and is left as it is. The class of a loss in chunks is changed, too.
    """
    each = getattr(loss, "loss_fn", loss)
    if hasattr(each, "fn"):
        each.fn = chunks.no_forward(noting_loss(each.fn, reduction="sum"))
    if hasattr(loss, "num_chunks"):
        type(loss).__call__ = chunks.forward(type(loss).__call__)


# ---- the configuration


class Built:
    """A configuration of a component that exists already, or of a function that makes it."""

    def __init__(self, component: Any) -> None:
        self.component = component

    def build(self, **_: Any) -> Any:
        """Return the component; if it can be called, its result."""
        return self.component(**_) if callable(self.component) else self.component

    def to_dict(self) -> dict[str, Any]:
        return {}


def start(case: Case, source: Source, weights: Path | None, device: str) -> TitanTrainer:
    """Return torchtitan's trainer, built for the case, with the weights loaded. weights: None for the seed's.

    Patches attention on CPU if a mask is used, float64 in the loss, and the loss for the probe.
    """
    no_sleep("torchtitan.trainer")
    if source.era.masks(case) and device == "cpu":
        cpu.attend_densely()
    float64.widen(case.training.dtype, "torchtitan.components.loss")  # where gradients of chunks are collected
    trainer = configuration(case, source).build()
    load_weights(trainer.model_parts, case, weights, source.era.fqn)
    note_loss_function(trainer.loss_fn)
    return TitanTrainer(trainer, case, source)


def configuration(case: Case, source: Source) -> Any:
    """Return torchtitan's configuration of its debug model with the case's values. Options of the adapter take their place.

    Raises ValueError for an option that does not exist.
    """
    from torchtitan.components import loss
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    era = source.era
    TORCH_DTYPE_MAP["float64"] = torch.float64
    config = llama3_debugmodel()
    config.model_spec.model = model_config.model_of_size(case, masked=era.masks(case))
    if hasattr(config, "loss"):
        if chunks_of(case, era) == 1:
            config.loss = loss.CrossEntropyLoss.Config()
        model_config.put(getattr(config.loss, "loss_fn", config.loss), global_vocab_size=case.model.vocab_size)
    config.optimizer = optimizer_config(case)
    inputs = samples_class(era)
    config.dataloader = Built(lambda dp_world_size, dp_rank, **_: inputs(case, dp_world_size, dp_rank, lambda: None))
    if source.options.get("validator.enable") or case.features.validate_every:
        config.validator.dataloader = LoaderBuilder(case, inputs)
    config.tokenizer = Built(None)
    for name, value in options_of_case(case).items():
        section, _, key = name.rpartition(".")
        if name not in source.options:
            model_config.put(getattr(config, section) if section else config, **{key: value})
    options.put_own(config, source.options)
    if source.spmd_backend is not None:
        config.parallelism.spmd_backend = source.spmd_backend
    elif getattr(config.parallelism, "spmd_backend", "default") == "spmd_types" and why_not_spmd_types(
        case, None, source.era
    ):
        config.parallelism.spmd_backend = "partial_dtensor"  # "default", as long as it was
    return config


def samples_class(era: Era) -> type[Samples]:
    """Return the class of data loaders whose samples have the form that this era's loop takes."""
    if era.flat:
        return Rows
    if era.fed_microbatches:
        return Microbatches
    return Positioned if era.gives_positions else Inputs


def checkpointing(kind: str) -> Any:
    """Return the configuration of activation checkpointing: a class for each kind since 2026-06-15, one class with
    modes before.

    kind: "none", "full" or "op". None for "none" in the newer one.
    """
    from torchtitan.config import configs
    from torchtitan.distributed import activation_checkpoint

    if hasattr(configs, "ActivationCheckpointConfig"):
        mode = {"none": "none", "full": "full", "op": "selective"}[kind]
        return model_config.call_with_known(configs.ActivationCheckpointConfig, mode=mode, selective_ac_option="op")
    return {
        "none": lambda: None,
        "full": lambda: activation_checkpoint.FullAC.Config(),
        "op": lambda: activation_checkpoint.SelectiveAC.Config(),
    }[kind]()


def stages(case: Case) -> list[list[str]] | None:
    """Return the names of the modules of each pipeline stage, cut by torchtitan's own function.

    None if torchtitan counts one or two stages a rank itself. From a number of layers a stage it could not make six
    stages of seven layers.
    """
    usual = 2 if case.features.schedule in LOOPED else 1
    if case.dims.pp == 1 or case.stages_per_rank == usual:
        return None
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    features = case.features
    less = features.first_stage_less_layers, features.last_stage_less_layers
    return _generate_llm_fqn_per_model_part(case.n_stages, case.model.n_layers, *less)


def options_of_case(case: Case) -> dict[str, Any]:
    """Return the case's values by `section.name`, or by name alone if they are in no section."""
    tokens = {
        "num_tokens_per_microbatch_per_dp_rank": case.local_batch * case.training.seq_len,
        "num_tokens_per_train_step": case.training.global_batch * case.training.seq_len,
        "max_context_length": case.training.seq_len,
        "disable_cuda_graphs": True,
    }
    pipeline = {
        "num_pp_microbatches": case.microbatches,
        "module_fqns_per_model_part": stages(case),
        "pipeline_parallel_first_stage_less_layers": case.features.first_stage_less_layers,
        "pipeline_parallel_last_stage_less_layers": case.features.last_stage_less_layers,
        "enable_sequence_parallel": case.features.sequence_parallel,
    }
    return {
        "activation_checkpoint": checkpointing(case.features.activation_checkpointing),
        "dump_folder": os.path.join(tempfile.gettempdir(), "torchtitan"),
        **options.under("training", options.training(case) | tokens),
        **options.under("parallelism", options.parallelism(case) | pipeline),
        "metrics.log_freq": 1,
        **options.under("checkpoint", options.checkpoint(case)),
        "validator.enable": bool(case.features.validate_every),
        "validator.freq": case.features.validate_every or 1,
        "validator.steps": 1,
        "comm.trace_buf_size": 0,
        "debug.enable_structured_logging": False,
    }
