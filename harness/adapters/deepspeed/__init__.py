"""The adapter of DeepSpeed's engine, unmodified, around a plain Llama: ZeRO 0 to 3.

Examined are the engine's partitions, reductions, accumulation, clipping and optimizer step. Handed over are the model
(the reference's blocks), seed weights, samples, rates, the loop, and torch's optimizer. See docs/trainers.md.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.adapters.support import checkout
from harness.adapters.support.requests import beyond
from harness.core.case.allowance import Allowance
from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.traits import FlatLayout, TrainerTraits
from harness.core.trainers import Adapter, StartedTrainer

OTHERS = """dp_replicate dp_shard accumulation all_valid masked_samples max_norm steps seed lr weight_decay beta1
    beta2 eps warmup_steps final_lr_fraction decay name dim n_layers n_heads n_kv_heads ffn_dim vocab_size norm_eps rope_theta
    tied_embeddings global_batch seq_len data variable_length dtype"""
KNOWN: dict[str, Any] = dict.fromkeys(OTHERS.split(), ...) | {"wrapper": ("ddp", *ZERO), "optimizer": ("sgd",)}

BUCKET = 2**17
"""Elements: less than this model has, so that there are two."""
KEPT_BY_ZERO3 = (
    Allowance("kept", 4 * BUCKET, "the bucket in which gradients lie until they are reduced"),
    Allowance("kept", "1 x parameters", "the buffer in which the rank's part of the reduced gradients lies"),
)


@dataclass(frozen=True)
class DeepSpeed(Adapter):
    """The adapter of one DeepSpeed.

    offload: ZeRO's optimizer, and what it steps on, lie on the host (`offload_optimizer`). A FILE.py with `adapter =
    DeepSpeed(offload=True)` is a trainer. where: a checkout, or the folder of a release; None for the installed one.
    """

    offload: bool = False
    where: str | None = None
    name: str = "deepspeed"
    dtypes: tuple[str, ...] = ("float32",)
    files: tuple[str, ...] = ("/deepspeed/", "/op_builder/", "/accelerator/")

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.where else ("deepspeed",)

    def of(self, source: str) -> DeepSpeed:
        return replace(self, where=source)

    def traits(self, case: Case) -> TrainerTraits:
        """Return what the plan has to know of DeepSpeed for this case: layout of ZeRO, master weights, and what it keeps.

        In ZeRO-1 and 2 each rank's part of the vector begins at an even element. An all_reduce brings whole gradients,
        of which a rank keeps its own (`use_multi_rank_bucket_allreduce`). ZeRO-3 has its own linear layer.
        """
        if case.wrapper == "zero3":
            return TrainerTraits(master_weights=True, own_model=True, allow=KEPT_BY_ZERO3)
        layout = FlatLayout(parts=2)
        allow = (_kept_by_offload(case),) if self.offload and case.wrapper in ZERO else ()
        return TrainerTraits(zero_layout=layout, zero_reduces_by="all_reduce", master_weights=True, allow=allow)

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        """Return a sentence on DeepSpeed's collectives in shared memory, which torch's replace on CPU. Empty on GPUs."""
        if device != "cpu":
            return ()
        from harness.adapters.deepspeed.cpu import SHARED_MEMORY

        return (SHARED_MEMORY,)

    def unsupported(self, case: Case) -> str | None:
        """Return why the case cannot run: DeepSpeed is not there, or the first thing that it cannot do. None if it can."""
        if self.where and not Path(self.where, "deepspeed", "__init__.py").is_file():
            return f"{self.where}/deepspeed: no DeepSpeed there"
        if not self.where and importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
        return next(beyond(case, KNOWN, self.name), None) or _limit(case)

    def importable(self) -> None:
        checkout.put_first(self.where)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        """Return the started engine of a case. Raises ImportError if another DeepSpeed was imported before."""
        self.importable()
        from harness.adapters.deepspeed.engine import Started

        started = Started(case, weights, device, offload=self.offload)
        checkout.must_lie_in("deepspeed", self.where)
        return started


def _kept_by_offload(case: Case) -> Allowance:
    """Return the bytes that offloading keeps on the host: gradients of the rank's part, and two buffers on the way there.

    All are float32. ZeRO-2 with accumulation has them twice: it adds microbatches up in buffers of its own. These are
    of all parameters that the part touches, two of them whole at most.
    """
    sizes = [math.prod(shape) for shape in case.model.parameter_shapes().values()]
    part = -(-sum(sizes) // (2 * case.dims.dp_shard)) * 2
    times = 2 if case.wrapper == "zero2" and case.features.accumulation > 1 else 1
    return Allowance(
        "kept", 4 * times * (part + 2 * max(sizes)), "gradients on the host, and two buffers on the way there"
    )


def _limit(case: Case) -> str | None:
    """Return why DeepSpeed cannot run the case's wrapper, or its weight decay with ZeRO. None if it can."""
    if case.wrapper not in (None, "ddp", *ZERO):
        return f"wrapper {case.wrapper}: DeepSpeed has none but its own"
    if case.wrapper in ZERO and case.training.decay == "matrices":
        return f"{case.wrapper} with decay matrices: two groups of parameters are two vectors, which are not planned"
    return None


adapter = DeepSpeed()
