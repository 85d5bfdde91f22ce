"""The eras of torchtitan: what can be requested of each version. An era is named by the API that it is run by."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.case.features import FEATURE_CHOICES
from harness.core.case.traits import TrainerTraits

MODEL = ("name", "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim", "norm_eps", "rope_theta")
DATA_AND_LOGS = ("datasets", "torchdata.stateful_dataloader", "torch.utils.tensorboard")
NOT_PASSED_ON = ("async_save", "validate_every", "export", "muon")  # but by eras that list them
COMPILERS = ("torch._inductor.compile_fx", "torch.nn.attention.varlen", "spmd_types", "tyro", "tokenizers")


@dataclass(frozen=True)
class Era:
    """The requests that torchtitan of a time can fulfil, by the keys of a case.

    A key that is not listed must have its usual value.
    """

    name: str
    run_by: str  # the module here that does
    axes: tuple[str, ...]
    features: dict[str, tuple[object, ...]]
    training: tuple[str, ...]
    traits: TrainerTraits  # what it chose where a case leaves that open
    replicates_by: str  # its wrapper where only dp_replicate is above 1
    wraps_alone: bool  # FSDP2 is also around a model without data ranks
    reports: tuple[str, ...]
    inputs_by_name: bool = False  # its loop takes tokens as a dict
    fed_microbatches: bool = False  # since 0.3.0, its data loader gives a pipeline's microbatches one by one
    flat: bool = False  # samples lie end to end in one row, separated by positions
    chunks_loss: bool = False  # its loss applies the output, in chunks of the sequence
    largest_of_whole: bool = False  # the largest loss reported divides a rank's part by the tokens of whole sequences
    cp_by_types: bool = False  # it cuts sequences with spmd_backend spmd_types only, which torch 2.13 cannot shard
    gives_positions: bool = False  # since 2026-03, its data loader gives each token's, beside whole batches
    shapes_by_example: bool = False  # a pipeline's stages get what they exchange as tensors that need no gradient
    model: tuple[str, ...] = MODEL
    resumes: bool = False  # checkpoints can be requested of it
    adapts: bool = False  # since 2026-06-24, beside its adapters of low rank all else is frozen
    dist_muon: bool = False  # since 2026-08-13, its Muon is DistMuon
    # keys of options that it has, and this adapter does not pass on; what is neither listed nor there, it has not
    unasked: tuple[str, ...] = ("compile", "async_tp", "quantize", "document_mask", "cpu_offload")
    preload: tuple[str, ...] = DATA_AND_LOGS  # packages that it imports
    renamed: tuple[tuple[str, str], ...] = ()

    def without(self, key: str) -> str:
        """Return why this torchtitan cannot be requested what a case has under this key, as a phrase."""
        if key == "muon" and self.dist_muon:
            return f"the DistMuon of {self.name} refuses all but CUDA devices, where this adapter was never run"
        if key in NOT_PASSED_ON:
            return f"this adapter does not pass that on to {self.name}"
        if key in self.unasked:
            return f"{self.name} has such an option, which this adapter does not pass on"
        return f"{self.name} has no such option"

    def masks(self, case: Case) -> bool:
        """Return whether attention uses a mask made of positions. If not, a position sees all earlier ones in its row."""
        return self.flat or case.training.document_mask

    def fqn(self, name: str) -> str:
        """Return the reference's spelling of a parameter's or module's name."""
        name = ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")
        for theirs, ours in self.renamed:
            name = re.sub(rf"(^|\.){re.escape(theirs)}(\.|$)", rf"\1{ours}\2", name)
        return name


MAIN_FUNCTION = Era(
    name="this early torchtitan",
    run_by="main_function",
    axes=("dp_replicate", "dp_shard", "tp", "pp"),
    features={
        "wrapper": ("fsdp2", "replicate"),
        "schedule": ("GPipe",),
        "microbatches": tuple(range(1, 65)),
        "loss_parallel": (True, False),
        "activation_checkpointing": ("none", "full", "layer", "op"),
        "reduce_dtype": ("float32", "bfloat16", "float64"),
    },
    training=("steps", "seed", "dtype", "global_batch", "seq_len", "lr", "warmup_steps", "final_lr_fraction")
    + ("max_norm", "data", "compute_dtype", "variable_length", "all_valid", "masked_samples", "rates"),
    traits=TrainerTraits(fsdp_units="root", attention="fused", own_model=True, defers_sync=False),
    replicates_by="replicate",
    wraps_alone=False,
    reports=("loss",),
)
TRAIN_SPEC = dataclasses.replace(
    MAIN_FUNCTION,
    name="this torchtitan of 2025",
    run_by="train_spec",
    axes=AXES,
    features=MAIN_FUNCTION.features
    | {
        "schedule": tuple(name for name in FEATURE_CHOICES["schedule"] if name != "DualPipeV"),
        "microbatches": tuple(range(1, 65)),
        "stages_per_rank": tuple(range(1, 65)),
        "cp_rotation": ("alltoall",),
        "cpu_offload": (True,),
        "reshard_after_forward": ("always", "never"),
    },
)
TRAINER_CONFIG = Era(
    name="torchtitan 0.3.0",
    run_by="trainer_config",
    axes=AXES,
    features={
        "wrapper": ("fsdp2",),
        "schedule": FEATURE_CHOICES["schedule"],
        "microbatches": tuple(range(1, 65)),
        "stages_per_rank": tuple(range(1, 65)),
        "first_stage_less_layers": tuple(range(1, 65)),
        "last_stage_less_layers": tuple(range(1, 65)),
        "cp_load_balance": (False,),
        "cpu_offload": (True,),
        "activation_checkpointing": ("none", "full", "op"),
        "accumulation": tuple(range(1, 65)),
        "validate_every": tuple(range(1, 65)),
        "async_save": (True,),
        "export": ("hf",),
        "defer_sync": (False,),
        "reshard_after_forward": ("always", "never"),
        "reduce_dtype": ("float32", "bfloat16", "float64"),
    },
    training=(*MAIN_FUNCTION.training, "decay", "document_mask", "quantize"),
    traits=TrainerTraits(
        fsdp_units="apart",
        attention="fused",
        own_model=True,
        ac_early_stop=False,
        defers_sync=False,
        cp_heads="key_value",
    ),
    replicates_by="fsdp2",
    wraps_alone=True,
    reports=("loss", "grad_norm"),
    unasked=("async_tp",),
    preload=(*DATA_AND_LOGS, *COMPILERS),
    model=(*MODEL, "rope_scaling", "tied_embeddings"),
    resumes=True,
    fed_microbatches=True,
    renamed=(("lm_head", "output"), *((f"qkv_linear.{name}", name) for name in ("wq", "wk", "wv"))),
)
"""Its data loader gives the microbatches of a pipeline one by one."""
TRAINER_CONFIG_OF_BATCHES = dataclasses.replace(
    TRAINER_CONFIG,
    name="this torchtitan of 2026",
    features=TRAINER_CONFIG.features | {"wrapper": ("fsdp2", "replicate")},
    training=MAIN_FUNCTION.training,
    model=MODEL,
    replicates_by="replicate",
    wraps_alone=False,
    unasked=("async_tp", "quantize"),
    fed_microbatches=False,
)
"""Before: its data loader gives whole batches."""
TRAINER_CONFIG_OF_ROWS = dataclasses.replace(
    TRAINER_CONFIG,
    name="this torchtitan since 2026-08-20",
    flat=True,
)
