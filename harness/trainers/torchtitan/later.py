"""torchtitan since 2026-02-23, with 0.3.0: `Trainer(config).train()`, with configurations as objects."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.probe import chunks
from harness.probe.losses import noted
from harness.spec.case import Case
from harness.spec.features import LOOPED
from harness.trainers import Metrics
from harness.trainers.llama3.context import teach_cpu_attention
from harness.trainers.torchtitan import cpu, handover, precise, sizes
from harness.trainers.torchtitan.source import Era, Source, chunks_of

NORMS = r"norm\.weight$"


class LaterTrainer:
    """harness.trainers.StartedTrainer around torchtitan's Trainer."""

    def __init__(self, trainer: Any, case: Case) -> None:
        self.model_parts: list[nn.Module] = trainer.model_parts
        self.metrics: list[Metrics] = []
        self._trainer, self._case = trainer, case
        handover.note_processor(
            trainer.metrics_processor, case, self.metrics, lambda: getattr(trainer, "pp_has_last_stage", True)
        )

    def train(self, last_step: int) -> None:
        """Its loop ends after the last step that it was configured for."""
        if last_step != self._case.training.steps:
            self._trainer.config.training.steps = last_step
        self._trainer.train()

    def save(self, folder: Path) -> object:
        checkpointer = self._trainer.checkpointer
        checkpointer.folder, checkpointer.load_only, checkpointer.interval = str(folder), False, 1
        return checkpointer.save(self._trainer.step)

    def resume(self, folder: Path) -> None:
        """As `train` does it, which then finds nothing in the folder that it is left with."""
        checkpointer = self._trainer.checkpointer
        usual, checkpointer.folder = checkpointer.folder, str(folder)
        if not checkpointer.load():
            raise ValueError(f"{folder}: no complete checkpoint there")
        checkpointer.folder = usual


class Built:
    """Stands in a configuration for a component, whose builder it is."""

    def __init__(self, component: Any) -> None:
        self.component = component

    def build(self, **_: Any) -> Any:
        return self.component(**_) if callable(self.component) else self.component

    def to_dict(self) -> dict[str, Any]:
        return {}


def start(case: Case, source: Source, weights: Path | None, device: str) -> LaterTrainer:
    sys.path.insert(0, str(source.folder))
    os.environ.setdefault("LOCAL_RANK", "0")
    handover.meet()
    handover.give_rates(case)
    handover.no_sleep("torchtitan.trainer")
    if case.dims.cp > 1 and device == "cpu":
        teach_cpu_attention(exact=(case.training.compute_dtype or case.training.dtype) == "float64")
    if source.era.flat and device == "cpu":
        cpu.attend_densely()
    precise.widen(case.training.dtype, "torchtitan.components.loss")  # where gradients of chunks are collected
    trainer = configuration(case, source.era).build()
    handover.give_weights(trainer.model_parts, case, weights, source.era.fqn)
    show_loss(trainer.loss_fn)
    return LaterTrainer(trainer, case)


def show_loss(loss: Any) -> None:
    """Over logits that lie apart torchtitan has a cross entropy of its own since 2026-06, where the probe does not look.
    Until 2026-04-27 its loss is a function, which calls torch's."""
    each = getattr(loss, "loss_fn", loss)
    if hasattr(each, "fn"):
        each.fn = chunks.no_forward(noted(each.fn, reduction="sum"))
    if hasattr(loss, "num_chunks"):
        type(loss).__call__ = chunks.forward(type(loss).__call__)


def configuration(case: Case, era: Era) -> Any:
    """torchtitan's own for its debug model, with the case's values."""
    from torchtitan.components import loss, optimizer
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    TORCH_DTYPE_MAP["float64"] = torch.float64
    config = llama3_debugmodel()
    config.model_spec.model = sizes.model(case, flat=era.flat)
    if hasattr(config, "loss"):
        if chunks_of(case, era) == 1:
            config.loss = loss.CrossEntropyLoss.Config()
        sizes.put(getattr(config.loss, "loss_fn", config.loss), global_vocab_size=case.model.vocab_size)
    adamw = getattr(optimizer, "default_adamw", optimizer.OptimizersContainer.Config)
    config.optimizer = adamw(lr=case.training.lr)
    if case.training.decay == "matrices":
        (whole,) = config.optimizer.param_groups
        kept = dataclasses.replace(
            whole, pattern=NORMS, optimizer_kwargs={**whole.optimizer_kwargs, "weight_decay": 0.0}
        )
        config.optimizer.param_groups.insert(0, kept)  # who matches first
    inputs = EndToEnd if era.flat else Microbatches if era.fed_microbatches else Inputs
    config.dataloader = Built(lambda dp_world_size, dp_rank, **_: inputs(case, dp_world_size, dp_rank, lambda: None))
    config.tokenizer = Built(None)
    for name, value in options(case).items():
        section, _, key = name.rpartition(".")
        sizes.put(getattr(config, section) if section else config, **{key: value})
    if getattr(config.parallelism, "spmd_backend", "default") == "spmd_types":  # which needs a newer torch
        config.parallelism.spmd_backend = "partial_dtensor"  # "default", as long as it was
    return config


class Inputs(handover.Samples):
    """Tokens by name. No positions: without them attention is causal over the whole row, and needs no mask."""

    def batch(self, ids: tuple[int, ...], length: int) -> Any:
        tokens, labels = super().batch(ids, length)
        return {"input": tokens}, labels


class Microbatches(Inputs):
    """One at a time, with positions, which context parallel cuts along. SDPA makes no mask of them: they only turn."""

    def __iter__(self) -> Iterator[Any]:
        size = self.case.local_batch
        for inputs, labels in super().__iter__():
            for start in range(0, len(labels), size):
                part = {name: values[start : start + size] for name, values in inputs.items()}
                yield part, labels[start : start + size]

    def batch(self, ids: tuple[int, ...], length: int) -> Any:
        inputs, labels = super().batch(ids, length)
        return inputs | {"positions": torch.arange(length).expand(labels.shape)}, labels


class EndToEnd(Microbatches):
    """A microbatch is one row. Where positions begin anew torchtitan's mask has a sample begin."""

    def __iter__(self) -> Iterator[Any]:
        for inputs, labels in super().__iter__():
            yield {name: values.flatten() for name, values in inputs.items()}, labels.flatten()


def checkpointing(kind: str) -> Any:
    """Of a class each since 2026-06-15, before of one with modes."""
    from torchtitan.config import configs
    from torchtitan.distributed import activation_checkpoint

    if hasattr(configs, "ActivationCheckpointConfig"):
        mode = {"none": "none", "full": "full", "op": "selective"}[kind]
        return sizes.known(configs.ActivationCheckpointConfig, mode=mode, selective_ac_option="op")
    return {
        "none": lambda: None,
        "full": lambda: activation_checkpoint.FullAC.Config(),
        "op": lambda: activation_checkpoint.SelectiveAC.Config(),
    }[kind]()


def stages(case: Case) -> list[list[str]] | None:
    """What each stage holds, cut by torchtitan's own function. None: it counts one or two stages a rank itself.

    Told how many layers a stage has it could not make six stages of seven layers.
    """
    usual = 2 if case.features.schedule in LOOPED else 1
    if case.dims.pp == 1 or case.stages_per_rank == usual:
        return None
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    return _generate_llm_fqn_per_model_part(case.n_stages, case.model.n_layers, 0, 0)


def options(case: Case) -> dict[str, Any]:
    dims, training, features = case.dims, case.training, case.features
    param = training.compute_dtype or training.dtype
    return {
        "activation_checkpoint": checkpointing(features.activation_checkpointing),
        "dump_folder": os.path.join(tempfile.gettempdir(), "torchtitan"),
        "training.local_batch_size": case.local_batch * case.microbatches,
        "training.global_batch_size": training.global_batch,
        "training.seq_len": training.seq_len,
        "training.num_tokens_per_microbatch_per_dp_rank": case.local_batch * training.seq_len,
        "training.num_tokens_per_train_step": training.global_batch * training.seq_len,
        "training.max_context_length": training.seq_len,
        "training.steps": training.steps,
        "training.max_norm": float("inf") if training.max_norm is None else training.max_norm,
        "training.dtype": training.dtype,
        "training.mixed_precision_param": param,
        "training.mixed_precision_reduce": features.reduce_dtype or param,
        "training.enable_cpu_offload": features.cpu_offload,
        "training.disable_cuda_graphs": True,
        "parallelism.data_parallel_replicate_degree": dims.dp_replicate,
        "parallelism.data_parallel_shard_degree": dims.dp_shard,
        "parallelism.tensor_parallel_degree": dims.tp,
        "parallelism.context_parallel_degree": dims.cp,
        "parallelism.context_parallel_load_balancer": "headtail" if features.cp_load_balance else None,
        "parallelism.pipeline_parallel_degree": dims.pp,
        "parallelism.pipeline_parallel_schedule": features.schedule,
        "parallelism.pipeline_parallel_microbatch_size": case.local_batch,
        "parallelism.num_pp_microbatches": case.microbatches,
        "parallelism.module_fqns_per_model_part": stages(case),
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        "parallelism.enable_sequence_parallel": features.sequence_parallel,
        "parallelism.fsdp_reshard_after_forward": features.reshard_after_forward,
        "metrics.log_freq": 1,
        "checkpoint.enable": bool(case.resume or case.last_step),
        "checkpoint.load_only": True,  # but for `save`
        "checkpoint.folder": f"none_of_{os.getpid()}",
        "validator.enable": False,
        "comm.trace_buf_size": 0,
        "debug.enable_structured_logging": False,
    }
