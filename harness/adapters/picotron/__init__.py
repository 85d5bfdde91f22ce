"""The adapter of picotron's train.py, unedited, as the program that it is, with its own data, tensor, context and
pipeline parallelism.

Examined are its model, parallel layers, schedules, buckets of gradients, sampler, optimizer and loop. What it gets in
place of downloads, and what is stubbed on a machine without accelerator, is in lent.py. See docs/trainers.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.adapters.support.requests import beyond
from harness.adapters.support.rows import halves
from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.trainers import Adapter, Metrics, StartedTrainer
from harness.core.trainers.support.names import pairs, renamed

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

NAMES = pairs("""embedding=tok_embeddings decoder_layers=layers input_layernorm=attention_norm q_proj=wq k_proj=wk v_proj=wv
    out_proj=wo post_attention_layernorm=ffn_norm mlp=feed_forward gate_proj=w1 down_proj=w2 up_proj=w3 final_norm=norm
    final_proj=output""")
ANY = """dp_replicate tp pp cp accumulation microbatches name dim n_layers n_heads n_kv_heads vocab_size ffn_dim norm_eps
    rope_theta steps seed dtype global_batch seq_len lr data rates"""
WRITTEN = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "max_norm": None, "all_valid": True}
"""What its train.py fixes: AdamW's defaults, no clipping, no masked label."""
KNOWN: dict[str, Any] = dict.fromkeys([*ANY.split(), *WRITTEN], ...)
KNOWN |= {"wrapper": ("ddp",), "schedule": ("GPipe",), "sequence_parallel": (False,), "loss_parallel": (False,)}
KNOWN |= {"cp_rotation": ("alltoall",), "cp_load_balance": (False,)}


@dataclass(frozen=True)
class Picotron(Adapter):
    """The adapter of a checkout of picotron.

    where: the checkout; without it no case can run. tables: the dtype of the rotary tables, by the variable DTYPE. None
    sets no DTYPE, as train.py leaves it: they are bfloat16 in any run then. A FILE.py with `adapter =
    Picotron(tables=None)` is a trainer.
    """

    where: str | None = None
    tables: str | None = "float32"
    name: str = "picotron"
    dtypes: tuple[str, ...] = ("float32",)
    reports: tuple[str, ...] = ("loss",)

    def of(self, source: str) -> Picotron:
        return replace(self, where=source)

    def traits(self, case: Case) -> TrainerTraits:
        """Return what the plan has to know: one rate for all steps, K/V exchanged over cp by send and receive, and its
        own model.
        """
        return TrainerTraits(own_model=True, cp_sends=True, rates=(case.training.lr,) * case.training.steps)

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        """Return a sentence for each part of picotron that does not run as its users run it."""
        from harness.adapters.picotron.lent import replaced_parts

        return replaced_parts(self.tables, device)

    def unsupported(self, case: Case) -> str | None:
        """Return why the case cannot run: no checkout is there, or the first thing that picotron cannot do. None if it can."""
        if not Path(self.where or "", "picotron", "process_group_manager.py").is_file():
            return (
                f"picotron is not at {self.where}"
                if self.where
                else "picotron is on no index: give its checkout, --source PATH"
            )
        return next(_limits(case), None)

    def fqn(self, name: str) -> str:
        return renamed(name, NAMES)

    def rows(self, case: Case) -> dict[str, np.ndarray]:
        return halves(case)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return Started(case, weights, device, self)


class Started(StartedTrainer):
    """The started trainer: train.py, stopped where it counts the parameters of the model, which is then whole and wrapped."""

    def __init__(self, case: Case, weights: Path | None, device: str, adapter: Picotron) -> None:
        from harness.adapters.picotron import lent
        from harness.adapters.support.script import Script
        from harness.core.trainers.support.weights import load_weights, tensor_parallel

        assert adapter.where is not None
        lent.stub_imports(case, adapter.tables, device)
        self.metrics: list[Metrics] = []
        self.script = Script(Path(adapter.where) / "train.py", case.training.dtype)
        lent.replace_in_script(case, self.script, self.metrics)

        def load(model: nn.Module) -> None:
            cut = tensor_parallel(lent.process_grid().tp_rank, case.dims.tp)
            load_weights([model], case, weights, adapter.fqn, adapter.rows(case), cut)

        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(lent.configuration(case, device))
            file.flush()
            self.model_parts = [self.script.set_up(["--config", file.name], load)]

    def train(self, last_step: int) -> None:
        self.script.run()


def _limits(case: Case) -> Iterator[str]:
    """Yield a sentence for each thing that the case requests and picotron cannot do. Nothing if it can run."""
    dims = case.dims
    recipe = case.training
    for key, value in WRITTEN.items():
        if getattr(recipe, key) != value:
            yield f"{key} {getattr(recipe, key)}: picotron has {value} written into its train.py"
    if dims.tp > 1 and (case.features.sequence_parallel or case.features.loss_parallel):
        yield "sequence_parallel, loss_parallel: picotron has neither; request false for both"
    if dims.cp > 1 and (case.wrapper, case.features.cp_rotation, case.features.cp_load_balance) != (
        "ddp",
        "alltoall",
        False,
    ):
        yield "cp: picotron's are ranks of DDP (wrapper ddp), passed on from one to the next (alltoall), unbalanced"
    if dims.pp > 1 and dims.dp > 1:
        yield "data ranks with pp: in picotron's grid of ranks dp is outside of pp"
    if dims.pp > 1 and case.features.accumulation > 1:
        yield "accumulation with pp: picotron's schedules accumulate over microbatches alone"
    for field, degree in (("vocab_size", dims.tp), ("ffn_dim", dims.tp), ("n_layers", dims.pp)):
        if getattr(case.model, field) % degree:
            yield f"{field} {getattr(case.model, field)} is not divisible by {degree}"
    if recipe.rates is not None and set(recipe.rates) != {recipe.lr}:
        yield "rates: picotron has one for all steps"
    yield from beyond(case, KNOWN, "picotron")


adapter = Picotron()
