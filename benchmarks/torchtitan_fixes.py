"""Fixes in torchtitan's history, and what made them necessary, each with the case that shows it: see torchtitan_history.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """A commit that fixed a bug, or brought it, and the case that shows it."""

    commit: str
    pull: str
    bug: str
    case: str
    valid: bool = True
    """Whether the case has valid labels only."""
    before: str = ""
    """A commit before it that can be run, if the one right before cannot."""
    breaks: bool = False
    """Whether it brought the bug."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """What differs from the case's training."""
    features: dict[str, Any] = field(default_factory=dict)
    """What differs from the case's features."""
    options: dict[str, Any] = field(default_factory=dict)
    """torchtitan's own options, as its users give them."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """Traits that it is judged by on both sides."""
    shows: bool = True
    """Whether what it reports is judged; False if another fix of that came later."""
    between: tuple[str, str] = ("", "")
    """The good and the bad commit that bisecting begins with."""

    @property
    def name(self) -> str:
        return f"{self.commit} {self.pull}".strip()

    @property
    def asked(self) -> str:
        """Return what differs from the case that it names, as text; empty if nothing does."""
        told = {**self.recipe, **self.features, **self.options, **self.chosen}
        words = [f"{name} {'as it comes' if value is None and '.' in name else value}" for name, value in told.items()]
        return ", ".join([*words, *([] if self.shows else ["what it reports is not judged"])])

    @property
    def key(self) -> str:
        return f"{self.commit} {self.case}"


ALLGATHER = {"cp_rotation": "allgather"}
BF16 = {"dtype": "float32", "compute_dtype": "bfloat16"}
NO_DECAY = {"lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0}
WARM_UP = {"lr_scheduler.warmup_steps": 2, "lr_scheduler.decay_ratio": 0.0}

VALIDATED = {"validation.enable": True, "validation.freq": 1, "validation.steps": 1}

FIXES = (
    Change("046de5694", "#649", "gradients are clipped by the norm of one pipeline stage", "pp_2"),
    Change(
        "53d0f699b",
        "#450",
        "a pipeline's split points are cut into letters where a file has them",
        "pp_2",
        recipe={"max_norm": None},
        options={"experimental.pipeline_parallel_split_points": "layers.2"},
    ),
    Change("3e3909a0c", "#683", "context parallel without data ranks looks for a mesh that is not there", "cp_2"),
    Change("9a4eebe1c", "#713", "HSDP runs as FSDP", "hsdp_2x2"),
    Change(
        "40a0873b3", "#685", "HSDP with context parallel runs as FSDP", "hsdp_2x2_cp_2", features=ALLGATHER, shows=False
    ),
    Change(
        "40a0873b3",
        "#685",
        "context parallel without data ranks: no FSDP, nobody sums gradients",
        "cp_2",
        shows=False,
    ),
    Change("6b03ffa32", "#761", "the reported loss is averaged over dp, not over cp", "cp_2"),
    Change(
        "90567fc98",
        "#781",
        "one microbatch a rank by default, not one a stage",
        "pp_2_interleaved",
        options={"experimental.pipeline_parallel_microbatches": None},
    ),
    Change(
        "2fa6d8367",
        "#779",
        "the reported loss is the mean of all steps since one was reported",
        "fsdp_4",
        options={"metrics.log_freq": 3},
    ),
    Change("d9898423e", "#792", "a stage's rotary frequencies are not cut over cp", "pp_2_cp_2"),
    Change("3996b634a", "#817", "a rank of ZBVZeroBubble holds the stages of another schedule", "pp_2_zbv"),
    Change(
        "7e614f136",
        "#950",
        "a decay that leaves the warm-up no room has begun when the warm-up ends",
        "fsdp_4",
        recipe={"rates": (0.0015, 0.003, 0.0015)},
        options={"lr_scheduler.warmup_steps": 1, "lr_scheduler.decay_ratio": 0.8},
    ),
    Change(
        "240419732",
        "#1010",
        "a learning rate that does not decay is divided by zero steps",
        "fsdp_4",
        recipe={"rates": (0.003, 0.003, 0.003)},
        options=NO_DECAY,
    ),
    Change(
        "e7c0cae93",
        "#1284",
        "the learning rate does not reach its height when the warm-up ends",
        "fsdp_4",
        recipe={"rates": (0.0015, 0.003, 0.003)},
        options=WARM_UP,
    ),
    Change(
        "0b44d4c43",
        "#1303",
        "replicas compute in float32, whatever is requested",
        "ddp_4",
        recipe=BF16,
        features={"reduce_dtype": "float32"},
    ),
    Change(
        "83e694105", "#1094", "reshard_after_forward is not heard by embedding, norm and output", "fsdp_4_reshard_never"
    ),
    Change(
        "83e694105", "#1094", "of a pipeline always is not heard by embedding, norm and output", "pp_2_fsdp_2_always"
    ),
    Change(
        "91979081a",
        "#1627",
        "data that end raise what nobody catches",
        "fsdp_4",
        options={"training.steps": 4},
    ),
    Change(
        "3e1b843ec",
        "#1732",
        "a pipeline divides accumulated gradients again with every pass of its schedule",
        "pp_2_accum",
    ),
    Change("92ed8b318", "#1880", "context parallel is requested and never entered", "cp_2"),
    Change(
        "24e91056a",
        "#1758",
        "a pipeline's loss of validation is divided by the accumulation of training",
        "pp_2_accum",
        options={"validation.enable": True, "validation.freq": 1, "validation.steps": 2},
    ),
    Change("bb308da6b", "#1983", "one rank alone cannot be seeded", "single"),
    Change(
        "0cb743558", "#2206", "each rank's mean, whatever number of labels counts", "fsdp_4", valid=False, shows=False
    ),
    Change("1a36996b8", "#2314", "the largest loss of a step, as it is reported, is below the mean", "fsdp_4"),
    Change(
        "f80a441a0",
        "#2366",
        "the loss of validation is divided by all ranks' tokens, then averaged over the ranks",
        "fsdp_4",
        options=VALIDATED,
    ),
    Change("e1847f439", "#2458", "replicas divide gradients twice", "ddp_4"),
    Change("786e26f8e", "#2937", "a pipeline's gradients are never divided", "pp_2"),
    Change("d64eabcce", "#3159", "the reported loss is one data rank's share", "fsdp_2_tp_2", recipe={"seq_len": 36}),
    Change("c2a3771a4", "#3412", "a sum over tp is lost behind the loss in chunks", "fsdp_2_tp_2"),
    Change("a695565f5", "#3681", "context parallel names heads as what it cuts", "cp_2"),
    Change("9ccbb57b0", "#3708", "attention's inputs are not redistributed: a parameter was renamed", "fsdp_2_tp_2"),
    Change(
        "cbe4bfaad",
        "#4167",
        "the loss of validation is the mean of batches' means, whatever number of labels counts",
        "fsdp_4_accum",
        valid=False,
        recipe={"seq_len": 36},
        options={"validator.enable": True, "validator.freq": 1, "validator.steps": 2},
    ),
    Change(
        "04326fc8e",
        "#4143",
        "what was gathered for the loss in chunks is kept",
        "fsdp_4",
        chosen={"keeps_loss_unit": False},
    ),
)

BREAKS = (
    Change("d7cabfb6c", "#667", "HSDP runs as FSDP", "hsdp_2x2", breaks=True, between=("db6b39acd", "9a4eebe1c^")),
    Change(
        "7e614f136",
        "#950",
        "a learning rate that does not decay is divided by zero steps",
        "fsdp_2",
        breaks=True,
        between=("cca07028e", "240419732^"),
        recipe={"rates": (0.003, 0.003, 0.003)},
        options=NO_DECAY,
    ),
    Change(
        "6a3a9da95",
        "#1776",
        "context parallel is requested and never entered",
        "cp_2",
        breaks=True,
        between=("07c00d9c8", "92ed8b318^"),
    ),
    Change(
        "ff078526d",
        "#1946",
        "one rank alone cannot be seeded",
        "single",
        breaks=True,
        between=("4191def49", "bb308da6b^"),
    ),
    Change(
        "0cb743558",
        "#2206",
        "the largest loss of a step, as it is reported, is below the mean",
        "fsdp_2",
        breaks=True,
        between=("7e4ab8599", "1a36996b8^"),
    ),
    Change(
        "0cb743558",
        "#2206",
        "the loss of validation is divided by all ranks' tokens, then averaged over the ranks",
        "hsdp_2x2",
        breaks=True,
        between=("7e4ab8599", "f80a441a0^"),
        options=VALIDATED,
    ),
    Change(
        "0cb743558",
        "#2206",
        "replicas divide gradients twice",
        "ddp_4",
        breaks=True,
        between=("7e4ab8599", "e1847f439^"),
    ),
    Change(
        "0cb743558",
        "#2206",
        "a pipeline's gradients are never divided",
        "pp_2",
        breaks=True,
        between=("7e4ab8599", "786e26f8e^"),
    ),
    Change(
        "1e8f9acd1",
        "#2144",
        "all-to-all over cp is requested, and gathers",
        "cp_2_alltoall",
        breaks=True,
        between=("7e4ab8599", "eeca21577"),
    ),
    Change(
        "786e26f8e",
        "#2937",
        "a sum over tp is lost behind the loss in chunks",
        "fsdp_2_tp_2",
        breaks=True,
        between=("261819688", "c2a3771a4^"),
        shows=False,
    ),
    Change(
        "786e26f8e",
        "#2937",
        "what was gathered for the loss in chunks is kept",
        "fsdp_4",
        breaks=True,
        between=("261819688", "04326fc8e^"),
        chosen={"keeps_loss_unit": False},
    ),
    Change(
        "1786292db",
        "#2963",
        "the reported loss is one data rank's share",
        "fsdp_2_tp_2",
        breaks=True,
        between=("261819688", "d64eabcce^"),
    ),
    Change(
        "1786292db",
        "#2963",
        "context parallel names heads as what it cuts",
        "cp_2",
        breaks=True,
        between=("261819688", "a695565f5^"),
    ),
    Change(
        "196a88981",
        "#3443",
        "attention's inputs are not redistributed: a parameter was renamed",
        "fsdp_2_tp_2",
        breaks=True,
        between=("221041490", "9ccbb57b0^"),
    ),
)

NOT_RUN = (
    ("2a25f4d78 #575", "8-bit all-gathers after HSDP came", "8 bits are not requested"),
    (
        "3d82ca62f #588",
        "a pipeline's stages are made on the device before they are sharded",
        "pipelines until 1629fb976 (2024-10-14) have no gradients with torch 2.13",
    ),
    (
        "ce5a73e37, 1060feacc #647",
        "checkpoints that are staged, or loaded",
        "this adapter lets none be written before 0.3.0",
    ),
    ("05a8b5e4c #689", "stages of a pipeline draw the same random weights", "weights are handed over"),
    ("2a4437014 #769", "the gradient norm that is logged", "it is not reported yet"),
    ("b3cdf8fa8 #918, 14c810ed0 #1112", "seed checkpoints", "weights are handed over"),
    ("3ce56164a #1037", "Trainer.train reads a global of its script", "this adapter provides it"),
    ("775a486ed #1258", "clipping by parameters that can be read once only", "its own trainer passes a list"),
    ("40b54e47f #2340", "learning rates of more steps than are trained", "before, no option asks for them"),
    (
        "e2fea3ff0 #3257",
        "validation under cp counts a share of its tokens",
        "cp is broken before and after: #2963 to #3681",
    ),
    ("b6b2c2de7 #1991", "checkpointing around torch.compile", "torch.compile is not requested"),
    (
        "00b7f5693 #2900",
        "one rank alone computes in bfloat16 by autocast, whose norms are float32",
        "both PASS: the bound of bfloat16 holds for either",
    ),
    (
        "8313428cf #3135",
        "attention may not fall back to torch's own product of matrices",
        "both PASS: another kernel is there on CPUs",
    ),
    (
        "18300a1ee #2780, 179d9e100 #3206",
        "FlexAttention under context parallel",
        "context parallel is judged with SDPA",
    ),
    ("114fedc96 #2990", "tokens seen are counted once a cp rank", "the harness does not read that number"),
    ("6a1b334e8 #3356", "an optimizer's state by order", "in an experiment alone (graph_trainer)"),
    (
        "2e1ce0471 #3675",
        "a checkpoint's weights from before",
        "this adapter lets none be written before 0.3.0",
    ),
    ("8e5554449 #3666", "all-to-all over cp, which does nothing, is an option no more", "it cannot be requested after"),
    ("3c9940675 #3807", "loading one matrix for queries, keys and values", "they are requested apart"),
)
