"""The adapter of Megatron-core, unmodified, with its GPT model in the local spec, which needs no TransformerEngine.

Examined are its parallel layers, the pipeline's schedules, DDP's buffers, what it does with gradients when backward has
ended, clipping and optimizer. Handed over as data are sizes, seed weights, samples, and the rates and weight decay of
each step. The loop, which a library leaves to its users, is `trainer.py`: what pretrain_gpt.py and its train_step do,
in their order.

    model.py    configuration, the model in chunks, names and marks of its parameters.
    shards.py   where the distributed optimizer has its part of each.
    trainer.py  the step, the loop.
    checkpoint.py  distributed checkpoints.
    cpu.py      what is stubbed on a machine without accelerator.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.adapters.support import checkout
from harness.adapters.support.requests import beyond
from harness.adapters.support.rows import halves
from harness.core.case.allowance import Allowance
from harness.core.case.case import Case
from harness.core.case.traits import FlatLayout, TrainerTraits
from harness.core.plan.slices import BYTES
from harness.core.trainers import Adapter, StartedTrainer
from harness.core.trainers.support.names import pairs, renamed
from harness.reference.config import RopeScaling

if TYPE_CHECKING:
    import numpy as np

NAMES = pairs("""module= embedding= word_embeddings=tok_embeddings decoder= final_layernorm=norm output_layer=output
    input_layernorm=attention_norm self_attention=attention linear_qkv=wqkv linear_proj=wo pre_mlp_layernorm=ffn_norm
    mlp=feed_forward linear_fc1=w13 linear_fc2=w2""")
SAVED_AS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names of norms in its checkpoints, where they are those of TransformerEngine's layers."""

ANY = """pp dp_replicate dp_shard tp microbatches stages_per_rank accumulation sequence_parallel name dim n_layers n_heads
    n_kv_heads vocab_size ffn_dim norm_eps rope_theta rope_scaling tied_embeddings steps seed global_batch seq_len lr
    beta1 beta2 eps weight_decay warmup_steps final_lr_fraction rates data max_norm decay dtype all_valid
    masked_samples document_mask"""
KNOWN: dict[str, Any] = dict.fromkeys(ANY.split(), ...)
KNOWN |= {
    "optimizer": ("sgd",),
    "wrapper": ("ddp", "zero1"),
    "schedule": ("Interleaved1F1B",),
    "activation_checkpointing": ("full",),
}
OLDEST = (0, 13)
LLAMA_3 = RopeScaling()
"""What of it Megatron has written into its code: all but the factor."""


IMPORTED = ("models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "optimizer", "distributed", "pipeline_parallel")


@dataclass(frozen=True)
class Megatron(Adapter):
    """The adapter of one Megatron-core.

    where: a checkout, or the folder of a release; None for the installed one.
    overlap_grad_reduce: DDP reduces inside backward, from the second step on.
    overlap_param_gather: the parameters that the distributed optimizer updated are gathered in the next step's forward
    pass.

    A FILE.py with `adapter = Megatron(overlap_grad_reduce=True)` is a trainer.
    """

    where: str | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    name: str = "megatron"
    package: str = "megatron-core"
    dtypes: tuple[str, ...] = ("float64", "float32")

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.where else tuple(f"megatron.core.{name}" for name in IMPORTED)

    def of(self, source: str) -> Megatron:
        return replace(self, where=source)

    def traits(self, case: Case) -> TrainerTraits:
        """Return what the plan has to know of Megatron for this case: its wrapper, the layout of ZeRO-1 and its allowances."""
        return TrainerTraits(
            wrapper="ddp" if case.dims.dp_shard * case.dims.cp == 1 < case.dims.dp_replicate else None,
            ac_early_stop=False,
            own_model=True,
            loss_in_forward=True,
            gathers_input_again=True,
            zero_layout=FlatLayout(order=_tensor_order(case), reverse=True, starts=64, whole=128),
            zero_gathers_late=self.overlap_param_gather,
            allow=tuple(_allowances(case)),
        )

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        return tuple(_replaced_parts(case, device))

    def unsupported(self, case: Case) -> str | None:
        return _missing_text(self.where) or next(_obstacles(case), None)

    def fqn(self, name: str) -> str:
        """Return the reference's name of a parameter of the model or of a checkpoint."""
        for saved, own in SAVED_AS.items():
            name = name.replace(saved, own)
        return renamed(name, NAMES)

    def rows(self, case: Case) -> dict[str, np.ndarray]:
        return halves(case)

    def fused(self, case: Case) -> dict[str, tuple[str, ...]]:
        """Return, by name of a fused tensor, the reference's weights whose blocks lie in it, in the order of its rows.

        linear_qkv is cut by groups of heads. linear_fc1 has on each tp rank its part of w1 above its part of w3.
        """
        names_of_blocks = {}
        for block in (f"layers.{n}" for n in range(case.model.n_layers)):
            names_of_blocks[f"{block}.attention.wqkv.weight"], names_of_blocks[f"{block}.feed_forward.w13.weight"] = (
                _fused_names(case, block)
            )
        return names_of_blocks

    def importable(self) -> None:
        """Have imports find Megatron-core in `where` first.

        Without triton installed, import a checkout's modules with triton mocked.
        """
        checkout.put_first(self.where)
        if self.where and importlib.util.find_spec("triton") is None:
            from harness.adapters.megatron import cpu

            cpu.import_without_triton(f"megatron.core.{name}" for name in IMPORTED)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        """Return the started trainer of a case. On CPU, patch torch and Megatron for a machine without accelerator.

        Raises ValueError if Megatron cannot run the case, and ImportError if another Megatron was imported before.
        """
        if reason := self.unsupported(case):
            raise ValueError(f"case {case.name!r}: {self.name} cannot run it: {reason}")
        self.importable()
        if device == "cpu":
            from harness.adapters.megatron import cpu

            cpu.patch_for_cpu()
        from harness.adapters.megatron.trainer import MegatronTrainer

        checkout.must_lie_in("megatron.core", self.where)
        return MegatronTrainer(case, weights, device, self)


def _fused_names(case: Case, block: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the reference's weights behind the blocks of a layer's linear_qkv, and those of its linear_fc1, in the
    order of rows.

    block: the layer, "layers.0".
    """
    qkv = tuple(f"{block}.attention.{name}.weight" for name in ("wq", "wk", "wv"))
    gated = tuple(f"{block}.feed_forward.{name}.weight" for name in ("w1", "w3"))
    return qkv * case.model.n_kv_heads, gated * case.dims.tp


def _tensor_order(case: Case) -> tuple[tuple[str, ...], ...]:
    """Return a tuple for each of Megatron's tensors, in the order of its modules: names of the blocks that a tp rank has.

    A tensor that is not fused is one block. The output is left out if the model has no parameter of that name.
    """
    order: list[tuple[str, ...]] = [("tok_embeddings.weight",)]
    for block in (f"layers.{n}" for n in range(case.model.n_layers)):
        qkv, gated = (parts[: len(parts) // case.dims.tp] for parts in _fused_names(case, block))
        order += [(f"{block}.attention_norm.weight",), (f"{block}.attention.wo.weight",), qkv]
        order += [(f"{block}.ffn_norm.weight",), gated, (f"{block}.feed_forward.w2.weight",)]
    last = ("norm.weight", "output.weight")
    return (*order, *((fqn,) for fqn in last if fqn in case.model.parameter_shapes()))


def _obstacles(case: Case) -> Iterator[str]:
    """Yield a sentence for each thing that the case requests and Megatron, or this adapter, cannot do.

    Nothing if it can run.
    """
    dims = case.dims
    model = case.model
    if dims.cp > 1:
        yield f"cp {dims.cp}: attention of the local spec knows no context parallel, that of TransformerEngine needs a GPU"
    if dims.dp_shard > 1 and case.wrapper != "zero1":
        yield f"dp_shard {dims.dp_shard}: its distributed optimizer cuts optimizer state alone (wrapper zero1)"
    if case.wrapper == "zero1" and case.training.optimizer != "adamw":
        yield f"optimizer {case.training.optimizer}: its distributed optimizer steps by Adam alone"
    if dims.pp > 1 and case.features.accumulation > 1:
        yield f"accumulation with pp {dims.pp}: Megatron's schedules accumulate over microbatches alone"
    if model.n_layers % case.n_stages:
        yield f"{model.n_layers} layers in {case.n_stages} stages: Megatron deals out equally many"
    if case.stages_per_rank > 1 and case.microbatches % dims.pp:
        yield f"{case.microbatches} microbatches: Megatron's interleaved schedule wants a multiple of pp {dims.pp}"
    for field in ("vocab_size", "n_kv_heads", "ffn_dim"):
        if getattr(model, field) % dims.tp:
            yield f"{field} {getattr(model, field)} is not divisible by tp {dims.tp}"
    if model.rope_scaling is not None and _fields_but_factor(model.rope_scaling) != _fields_but_factor(LLAMA_3):
        yield "rope_scaling: Megatron has its frequencies and first length written into its code, but for the factor"
    yield from _obstacles_of_checkpoints(case) if case.resume or case.last_step else ()
    yield from beyond(case, KNOWN, "Megatron-core", saves=True)


def _obstacles_of_checkpoints(case: Case) -> Iterator[str]:
    """Yield a sentence for each reason why this case cannot save and resume. Call it only for a case that does."""
    if importlib.util.find_spec("psutil") is None:
        yield "checkpoints: psutil is not installed, without which Megatron's writers die and it waits for them for ever"
    if case.wrapper == "zero1":
        yield "checkpoints with zero1: the state of a part of each parameter is compared by no check"
    if case.training.optimizer != "adamw":
        yield f"checkpoints with optimizer {case.training.optimizer}: Megatron makes room for state that it reads of Adam alone"


def _missing_text(where: str | None) -> str:
    """Return why no Megatron-core that this adapter can run is at `where`. Empty if there is one. It is not imported for that.

    where: a folder; None for the installed one.
    """
    folders = [where] if where else sys.path
    package_info = next(
        filter(Path.is_file, (Path(folder, "megatron", "core", "package_info.py") for folder in folders)), None
    )
    if package_info is None and where:
        return f"{where}/megatron/core: no Megatron-core there"
    if package_info is None:
        return "megatron-core is not installed: pip install --no-deps megatron-core, or give --source"
    version = _version(package_info.read_text(encoding="utf-8"))
    number = ".".join(map(str, version))
    return f"megatron-core {number}: a chunk does not get its virtual stage before 0.13" if version < OLDEST else ""


def _version(package_info: str) -> tuple[int, ...]:
    """Return (major, minor) of Megatron-core, as the text of its package_info.py has them."""
    return tuple(int(number) for number in re.findall(r"^(?:MAJOR|MINOR) = (\d+)", package_info, re.MULTILINE))


def _fields_but_factor(scaling: RopeScaling) -> tuple[float, ...]:
    return scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position


def _replaced_parts(case: Case, device: str) -> Iterator[str]:
    """Yield a sentence for each part of Megatron that does not run as its users run it."""
    yield "rates and weight decay: OptimizerParamScheduler by the recipe's schedule, set in each group"
    if case.training.dtype == "float64":
        yield "casts: those to float32 leave float64 as it is (a float64 recipe)"
    if device == "cpu":
        yield "communication: NCCL by gloo"
        yield "device: torch.cuda answers as a machine with one would, and its tensors lie on the CPU"
        if case.dims.tp > 1 and case.features.sequence_parallel:
            yield "norm: Apex's by torch's, its weight marked as Apex's is (sequence parallel)"


def _allowances(case: Case) -> Iterator[Allowance]:
    """Yield the bytes that Megatron may keep or copy beyond the plan, each with its reason."""
    yield Allowance("kept", _buffer_bytes(case), "the global memory buffer of megatron.core")
    if case.saved_step is not None and case.saved_step < case.steps[-1]:
        gated = 2 * case.model.n_layers // case.dims.pp * case.model.ffn_dim // case.dims.tp * case.model.dim
        halves = "what it saves as two tensors (linear_fc1) its writers are given copies of"
        yield Allowance("copied", gated * BYTES[case.training.dtype], halves)


def _buffer_bytes(case: Case) -> int:
    """Return the bytes of a buffer that is never freed: attention's scores, or a layer's input gathered from all tp ranks."""
    samples = case.local_batch
    length = case.training.seq_len
    model = case.model
    scores = samples * model.n_heads // case.dims.tp * length * length
    return max(scores, samples * length * model.dim) * BYTES[case.training.dtype]


adapter = Megatron()
