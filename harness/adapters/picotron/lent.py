"""The substitutes that picotron's train.py gets for what it downloads, and the stubs for a machine without accelerator.

Its imports ask for flash-attn, wandb, datasets, transformers and safetensors. A run on CPU needs a configuration and a
data set of them: both are the case's. Its own sampler, loader and collation bring the samples to the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

from harness.adapters.support.script import Script
from harness.core.case.case import Case
from harness.core.probe.pipeline import note_action, pass_of_schedule
from harness.core.probe.structure import note_wrapper
from harness.core.trainers import Metrics
from harness.core.trainers.support.samples import RecipeSamples

FLASH = """flash_attn flash_attn.flash_attn_interface flash_attn.layers flash_attn.layers.rotary flash_attn.ops
    flash_attn.ops.triton flash_attn.ops.triton.layer_norm"""
IMPORTED = f"{FLASH} wandb safetensors huggingface_hub".split()
SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}


def replaced_parts(tables: str | None, device: str) -> tuple[str, ...]:
    """Return a sentence for each part of picotron that does not run as its users run it. tables: as of Picotron."""
    texts = ["weights: its download by the seed's", "samples: text by the recipe's, behind its own sampler and loader"]
    if tables:
        texts.append(f"rotary tables: {tables} by its variable DTYPE, which train.py never sets")
    if device == "cpu":
        texts.append("device: torch.cuda.synchronize does nothing")
    return tuple(texts)


def stub_imports(case: Case, tables: str | None, device: str) -> None:
    """Put stubs for picotron's imports into sys.modules, and set its environment variables.

    Call it before picotron is imported.
    """
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    os.environ["FLASH_ATTEN"] = "0"
    if tables:
        os.environ["DTYPE"] = tables
    sizes = {theirs: getattr(case.model, ours) for theirs, ours in SIZES.items()}
    sys.modules |= {name: MagicMock() for name in IMPORTED}
    sys.modules["transformers"] = MagicMock(
        AutoConfig=SimpleNamespace(from_pretrained=lambda *_: SimpleNamespace(**sizes)),
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda *_: None),
    )
    sys.modules["datasets"] = MagicMock(load_dataset=lambda *_, **__: Text(case))
    if device == "cpu":
        torch.cuda.synchronize = lambda *_: None


class Text:
    """The part of a data set that picotron uses: column names, and `map`, which returns the case's samples."""

    column_names = ("text",)

    def __init__(self, case: Case) -> None:
        self.case = case

    def map(self, *_: Any, **__: Any) -> RecipeSamples:
        return RecipeSamples(self.case, form=_sample)


def _sample(tokens: Tensor, labels: Tensor) -> dict[str, list[int]]:
    """Return one sample as picotron's loader takes it: {"input_ids": tokens, and the last label behind them}."""
    return {"input_ids": [*tokens.tolist(), int(labels[-1])]}


def replace_in_script(case: Case, script: Script, metrics: list[Metrics]) -> None:
    """Replace names in the script, before it runs: downloads, averaging of losses, counting of parameters, pipeline steps.

    The loss of each step is appended to `metrics`: None but on the last stage. Where parameters are counted, the script
    stops.
    """

    def note_average(average: Any) -> Any:
        def average_and_note(*args: Any) -> float:
            loss: float = average(*args)
            metrics.append(Metrics(len(metrics) + 1, loss if process_grid().pp_is_last_stage else None, None, None))
            return loss

        return average_and_note

    def wait_and_count(model: nn.Module) -> int:
        """Report DDP and the schedule to the probe, stop the script, then return the number of the model's parameters."""
        if process_grid().cp_dp_world_size > 1:
            note_wrapper(model, "ddp", replicate_ranks=process_grid().cp_dp_group_ids)
        if case.dims.pp > 1:
            show_actions(model, case.microbatches)
        script.wait(model)
        return sum(parameter.numel() for parameter in model.parameters())

    script.replace("init_model_with_materialized_weights", lambda model, *_, **__: model.to_empty(device="cpu"))
    script.replace("download_model", lambda *_: None)
    script.wrap("average_loss_across_dp_cp_ranks", note_average)
    script.replace("get_num_params", wait_and_count)
    for name in ("train_step_pipeline_1f1b", "train_step_pipeline_afab"):
        script.wrap(name, _run_as_pass_of_schedule)


def process_grid() -> Any:
    """Return picotron's process group manager, with this rank's coordinates. The rank must have joined."""
    return sys.modules["picotron.process_group_manager"].__dict__["process_group_manager"]


def configuration(case: Case, device: str) -> str:
    """Return the JSON of picotron's configuration file for a case."""
    dims = case.dims
    recipe = case.training
    degrees = {"tp_size": dims.tp, "cp_size": dims.cp, "pp_size": dims.pp, "dp_size": dims.dp}
    engine = {"pp_engine": "afab" if case.features.schedule == "GPipe" else "1f1b", "use_cpu": device == "cpu"}
    training = {"seed": recipe.seed, "learning_rate": recipe.lr, "total_train_steps": recipe.steps, "max_tokens": None}
    training |= {"seq_length": recipe.seq_len, "micro_batch_size": case.local_batch}
    settings = {
        "distributed": degrees | engine,
        "model": {"name": "the case's", "use_fused_adam": False},
        "dataset": {"name": "the recipe's", "num_workers": 0, "num_proc": 1},
        "training": training | {"gradient_accumulation_steps": case.passes},
        "environment": {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "FLASH_ATTEN": "0",
            "HF_TOKEN": "none",
        },
        "checkpoint": {"save_dir": "none", "save_frequency": recipe.steps + 1, "load_path": ""},
        "logging": {"use_wandb": False, "run_name": "none"},
    }
    return json.dumps(settings)


# ---- what the probe needs of its pipeline


def _run_as_pass_of_schedule(train_step: Any) -> Any:
    """Return the step, run as one pass of the schedule."""

    def run_as_pass(*args: Any) -> Any:
        with pass_of_schedule():
            return train_step(*args)

    return run_as_pass


def show_actions(model: Any, microbatches: int) -> None:
    """Patch a stage's model so that the probe records each forward and backward of a pipeline's schedule.

    picotron's schedules call the model's `forward`, past the hooks of a module: here that becomes a call of the module
    itself.
    """
    forward = model.forward
    backward = model.backward
    done = {"F": 0, "B": 0}

    def note(kind: str) -> None:
        note_action(process_grid().pp_rank, kind, done[kind] % microbatches)
        done[kind] += 1

    def note_and_call(**inputs: Any) -> Any:
        note("F")
        model.forward = forward
        try:
            return model(**inputs)
        finally:
            model.forward = note_and_call

    def note_and_go_back(*args: Any) -> Any:
        note("B")
        return backward(*args)

    model.forward = note_and_call
    model.backward = note_and_go_back
