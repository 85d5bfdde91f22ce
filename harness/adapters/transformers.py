"""The adapter of transformers' Trainer, unmodified, with its Llama under accelerate: DDP, FSDP2, HSDP, DeepSpeed's ZeRO 1 to 3.

Examined are its model, how it splits data over ranks, wrapping, accumulation, loss, clipping, optimizer and loop.
Handed over as data are sizes, seed weights, samples and the recipe's rates.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.adapters.deepspeed import adapter as deepspeed
from harness.adapters.deepspeed import under_accelerate
from harness.adapters.deepspeed.under_accelerate import LENT
from harness.adapters.support.requests import beyond
from harness.adapters.support.rows import halves
from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.traits import TrainerTraits
from harness.core.trainers import Adapter, Metrics, StartedTrainer
from harness.core.trainers.support.names import pairs, renamed

NAMES = pairs("""embed_tokens=tok_embeddings lm_head=output input_layernorm=attention_norm self_attn=attention q_proj=wq
    k_proj=wk v_proj=wv o_proj=wo post_attention_layernorm=ffn_norm mlp=feed_forward gate_proj=w1 down_proj=w2 up_proj=w3""")
SIZES = pairs("""hidden_size=dim intermediate_size=ffn_dim num_hidden_layers=n_layers num_attention_heads=n_heads
    num_key_value_heads=n_kv_heads vocab_size=vocab_size rms_norm_eps=norm_eps tie_word_embeddings=tied_embeddings""")
RECIPE = pairs("""max_steps=steps learning_rate=lr weight_decay=weight_decay adam_beta1=beta1 adam_beta2=beta2
    adam_epsilon=eps""")
ROPE = pairs("""factor=factor low_freq_factor=low_freq_factor high_freq_factor=high_freq_factor
    original_max_position_embeddings=original_max_position""")
OTHERS = """dp_replicate dp_shard accumulation defer_sync bucket_mb rope_scaling rope_theta name seed dtype global_batch seq_len
    decay warmup_steps final_lr_fraction max_norm data all_valid variable_length document_mask masked_samples"""
KNOWN: dict[str, Any] = dict.fromkeys([*SIZES.values(), *RECIPE.values(), *OTHERS.split()], ...)
KNOWN |= {
    "optimizer": ("sgd",),
    "wrapper": ("ddp", "fsdp2", *ZERO),
    "defer_sync": (True, False),
    "reshard_after_forward": ("never",),
    "activation_checkpointing": ("full",),
}
USUAL = {"train_sampling_strategy": "sequential", "remove_unused_columns": False, "dataloader_pin_memory": False}
USUAL |= {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False, "disable_tqdm": True}
USUAL |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}
CASTING = ("transformers.models.llama.modeling_llama", "transformers.modeling_rope_utils")


class Transformers(Adapter):
    """The adapter of the installed transformers and accelerate."""

    name = "transformers"
    preload = ("transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate")

    def traits(self, case: Case) -> TrainerTraits:
        """Return what the plan has to know: the units of FSDP, fused attention, and with ZeRO DeepSpeed's layout.

        accelerate wraps embedding, each block, and norm with output. Whether it still does is judged; so is attention.
        """
        if case.wrapper in ZERO:
            layout = replace(deepspeed.traits(case).zero_layout, order=_parameter_order(case))
            return replace(deepspeed.traits(case), zero_layout=layout, attention="fused", own_model=True)
        return TrainerTraits(fsdp_units="apart", attention="fused", own_model=True)

    def unsupported(self, case: Case) -> str | None:
        """Return why the case cannot run: a package is not installed, or the first thing that the Trainer cannot do.

        None if it can.
        """
        if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate")):
            return "transformers and accelerate are not installed: pip install transformers accelerate"
        reason = next(beyond(case, KNOWN, self.name), None)
        if reason is None and case.wrapper in ZERO:
            return deepspeed.unsupported(case) or _only_float32(case)
        if reason is None and case.wrapper == "fsdp2" and case.dims.dp_shard == 1:
            return "wrapper fsdp2 with dp_shard 1: accelerate takes no FSDP without ranks to shard over"
        return reason

    def fqn(self, name: str) -> str:
        return renamed(name.removeprefix("model."), NAMES)

    def rows(self, case: Case) -> dict[str, Any]:
        """Return the order of rows of wq and wk: the rotary embedding turns entry i of a head with entry i + head_dim / 2."""
        return halves(case)

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        return (*deepspeed.replaced(case, device), LENT) if case.wrapper in ZERO and device == "cpu" else ()

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return Started(case, weights, device)


class Started(StartedTrainer):
    """The started trainer: `Trainer.train()`, stopped where all is set up for the first step."""

    def __init__(self, case: Case, weights: Path | None, device: str) -> None:
        if case.wrapper in ZERO:
            under_accelerate.choose(device)
        from accelerate import DistributedType, PartialState
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        from harness.adapters.support import float64, learning_rate
        from harness.adapters.support.training_function import TrainingFunction
        from harness.core.trainers.support import process_group
        from harness.core.trainers.support.weights import load_weights

        float64.preserve(case.training.dtype, *CASTING)
        learning_rate.follow_recipe(case)
        process_group.redirect()
        if case.dims.world_size == 1:  # who starts a single process has no LOCAL_RANK, with which it would be DDP
            del os.environ["LOCAL_RANK"]
        model = LlamaForCausalLM(LlamaConfig(**_sizes(case)))
        load_weights([model], case, weights, adapter.fqn, adapter.rows(case))
        if case.wrapper in ZERO:
            under_accelerate.patch_accelerate_backend(device)
        arguments = TrainingArguments(**_options(case, device))
        if device == "cpu" and case.wrapper == "fsdp2":  # else it would be DDP: upstream_bugs/accelerate_cpu_fsdp.py
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self.trainer: Any = Trainer(model, arguments, train_dataset=_samples(case), callbacks=[_callback(self, case)])
        if case.training.decay == "all":
            every = [name for name, _ in model.named_parameters()]
            self.trainer.get_decay_parameter_names = lambda _: every
        self.function = TrainingFunction(lambda _: self.trainer.train())
        self.function.set_up()
        self.model_parts = [self.trainer.model_wrapped]
        if case.wrapper in ZERO:
            from harness.adapters.deepspeed.seams import note_engine

            note_engine(self.trainer.model_wrapped)

    def train(self, last_step: int) -> None:
        """Train to the end of the case, whatever `last_step` is, and set the metrics from the Trainer's log."""
        self.function.train()
        shown: Any = [entry for entry in self.trainer.state.log_history if "loss" in entry]
        self.metrics = []
        for entry in shown:
            self.metrics.append(Metrics(entry["step"], entry["loss"], entry["grad_norm"], entry["learning_rate"]))


def _callback(started: Started, case: Case) -> Any:
    """Return a callback of the Trainer that stops it before the first step, and reports each step of ZeRO to the probe."""
    from transformers import TrainerCallback

    from harness.core.probe.values import note_update

    class Wait(TrainerCallback):
        """A callback that waits at the begin of training; with ZeRO it reports that parameters are updated after each step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            started.function.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if case.wrapper in ZERO:
                note_update()

    return Wait()


def _parameter_order(case: Case) -> tuple[tuple[str, ...], ...]:
    """Return the reference's names of transformers' Llama parameters in its order, each as a group of its own."""
    parts = "attention.wq attention.wk attention.wv attention.wo feed_forward.w1 feed_forward.w3 feed_forward.w2"
    block = f"{parts} attention_norm ffn_norm".split()
    layers = []
    for layer in range(case.model.n_layers):
        layers += [f"layers.{layer}.{part}.weight" for part in block]
    names = ("tok_embeddings.weight", *layers, "norm.weight", "output.weight")
    return tuple((name,) for name in names if name in case.model.parameter_shapes())


def _only_float32(case: Case) -> str | None:
    """Return why ZeRO cannot run the case's dtype. None for float32."""
    return (
        None if case.training.dtype == "float32" else f"dtype {case.training.dtype}: {deepspeed.name} steps on float32"
    )


def _samples(case: Case) -> list[dict[str, Any]]:
    """Return the samples of all steps in order, of all ranks: transformers divides them over ranks and microbatches."""
    from harness.core.trainers.support.samples import rank_samples
    from harness.reference.data import build_dataset

    dataset = build_dataset(case.training, case.model)
    samples = []
    for step in range(1, case.training.steps + 1):
        tokens, labels = rank_samples(case, dataset, step)
        samples += [_named_sample(case, *sample) for sample in zip(tokens, labels, strict=True)]
    return samples


def _named_sample(case: Case, tokens: Any, labels: Any) -> dict[str, Any]:
    """Return one sample by the names of the model's inputs. Labels are shifted already.

    With a document mask there is "attention_mask": bool [1, s, s], True where a position sees another.
    """
    from harness.reference.data import document_indices

    sample = {"input_ids": tokens, "labels": labels, "shift_labels": labels}
    if not case.training.document_mask:
        return sample
    which = document_indices(tokens[None])[0]
    return sample | {"attention_mask": (which[None, :, None] == which[None, None]).tril()}


def _sizes(case: Case) -> dict[str, Any]:
    """Return the case's model sizes and rotary options by the names of LlamaConfig."""
    sizes = {theirs: getattr(case.model, ours) for theirs, ours in SIZES.items()}
    scaling = case.model.rope_scaling
    rope = {"rope_type": "default", "rope_theta": case.model.rope_theta}
    if scaling is not None:
        rope |= {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for theirs, ours in ROPE.items()}
    return sizes | {"rope_parameters": rope, "attn_implementation": "sdpa", "pad_token_id": None}


def _options(case: Case, device: str) -> dict[str, Any]:
    """Return TrainingArguments' values for the case: recipe, accumulation, recomputation, and DeepSpeed or FSDP2 if
    requested.
    """
    training = case.training
    features = case.features
    dims = case.dims
    arguments = USUAL | {theirs: getattr(training, ours) for theirs, ours in RECIPE.items()}
    arguments |= {"optim": "sgd" if training.optimizer == "sgd" else "adamw_torch"}
    arguments |= {"max_grad_norm": training.max_norm or 0.0, "ddp_bucket_cap_mb": features.bucket_mb}
    arguments |= {"per_device_train_batch_size": case.local_batch, "gradient_accumulation_steps": features.accumulation}
    arguments |= {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": not features.defer_sync}}}
    arguments |= {"output_dir": os.path.join(tempfile.gettempdir(), "transformers"), "use_cpu": device == "cpu"}
    recompute = {"activation_checkpointing": features.activation_checkpointing == "full"}
    if case.wrapper in ZERO:
        from harness.adapters.deepspeed.engine import configuration

        return arguments | recompute | {"deepspeed": configuration(case), "use_cpu": False}
    if case.wrapper != "fsdp2":
        return arguments | recompute
    from accelerate import ParallelismConfig

    reshard = {"reshard_after_forward": features.reshard_after_forward != "never"}
    sizes = ParallelismConfig(dp_replicate_size=dims.dp_replicate, dp_shard_size=dims.dp_shard)
    return arguments | {"fsdp": True, "fsdp_config": reshard | recompute, "parallelism_config": sizes}


adapter = Transformers()
