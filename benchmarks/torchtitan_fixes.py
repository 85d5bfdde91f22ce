"""Fixes in torchtitan's history, and what made them necessary, each with the case that shows it: see torchtitan_history.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """before: a commit of the side before, where the one right before cannot be run. valid: with valid labels only.
    breaks: it brought the bug, rather than taking it away. rotation: the K/V exchange over cp, if not the case's.
    """

    commit: str
    pull: str
    bug: str
    case: str
    valid: bool = True
    before: str = ""
    breaks: bool = False
    rotation: str = ""

    @property
    def name(self) -> str:
        return f"{self.commit} {self.pull}".strip()

    @property
    def key(self) -> str:
        return f"{self.commit} {self.case}"


FIXES = (
    Change("046de5694", "#649", "gradients are clipped by the norm of one pipeline stage", "pp_2"),
    Change("3e3909a0c", "#683", "context parallel without data ranks looks for a mesh that is not there", "cp_2"),
    Change("9a4eebe1c", "#713", "HSDP runs as FSDP", "hsdp_2x2"),
    Change("40a0873b3", "#685", "HSDP with context parallel runs as FSDP", "hsdp_2x2_cp_2", rotation="allgather"),
    Change("40a0873b3", "#685", "context parallel without data ranks: no FSDP, nobody sums gradients", "cp_2"),
    Change("6b03ffa32", "#761", "the reported loss is averaged over dp, not over cp", "cp_2"),
    Change("d9898423e", "#792", "a stage's rotary frequencies are not cut over cp", "pp_2_cp_2"),
    Change(
        "83e694105", "#1094", "reshard_after_forward is not heard by embedding, norm and output", "fsdp_4_reshard_never"
    ),
    Change(
        "3e1b843ec",
        "#1732",
        "a pipeline divides accumulated gradients again with every pass of its schedule",
        "pp_2_accum",
    ),
    Change("92ed8b318", "#1880", "context parallel is requested and never entered", "cp_2"),
    Change("0cb743558", "#2206", "each rank's mean, whatever number of labels counts", "fsdp_4", valid=False),
    Change("e1847f439", "#2458", "replicas divide gradients twice", "ddp_4"),
    Change("786e26f8e", "#2937", "a pipeline's gradients are never divided", "pp_2"),
    Change("d64eabcce", "#3159", "the reported loss is one data rank's share", "fsdp_2_tp_2"),
    Change("c2a3771a4", "#3412", "a sum over tp is lost behind the loss in chunks", "fsdp_2_tp_2"),
    Change("a695565f5", "#3681", "context parallel names heads as what it cuts", "cp_2"),
    Change("9ccbb57b0", "#3708", "attention's inputs are not redistributed: a parameter was renamed", "fsdp_2_tp_2"),
)

BREAKS = (
    Change("d7cabfb6c", "#667", "HSDP runs as FSDP", "hsdp_2x2", breaks=True),
    Change("6a3a9da95", "#1776", "context parallel is requested and never entered", "cp_2", breaks=True),
    Change("0cb743558", "#2206", "replicas divide gradients twice", "ddp_4", breaks=True),
    Change("0cb743558", "#2206", "a pipeline's gradients are never divided", "pp_2", breaks=True),
    Change("1e8f9acd1", "#2144", "all-to-all over cp is requested, and gathers", "cp_2_alltoall", breaks=True),
    Change("786e26f8e", "#2937", "a sum over tp is lost behind the loss in chunks", "fsdp_2_tp_2", breaks=True),
    Change("1786292db", "#2963", "the reported loss is one data rank's share", "fsdp_2_tp_2", breaks=True),
    Change("1786292db", "#2963", "context parallel names heads as what it cuts", "cp_2", breaks=True),
    Change(
        "196a88981",
        "#3443",
        "attention's inputs are not redistributed: a parameter was renamed",
        "fsdp_2_tp_2",
        breaks=True,
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
    (
        "90567fc98 #781",
        "one microbatch a rank by default, not one a stage",
        "a case says how many microbatches there are",
    ),
    ("b3cdf8fa8 #918, 14c810ed0 #1112", "seed checkpoints", "weights are handed over"),
    ("3ce56164a #1037", "Trainer.train reads a global of its script", "this adapter provides it"),
    ("775a486ed #1258", "clipping by parameters that can be read once only", "its own trainer passes a list"),
    ("e7c0cae93 #1284, 40b54e47f #2340", "learning rates", "they are the case's"),
    (
        "24e91056a #1758, f80a441a0 #2366, e2fea3ff0 #3257",
        "the loss of validation, its tokens",
        "validation is not requested",
    ),
    ("b6b2c2de7 #1991", "checkpointing around torch.compile", "torch.compile is not requested"),
    (
        "1a36996b8 #2314",
        "the largest loss of a step, as it is reported, is not a rank's mean",
        "the harness reads the mean that is reported, not the largest",
    ),
    (
        "18300a1ee #2780, 179d9e100 #3206",
        "FlexAttention under context parallel",
        "context parallel is judged with SDPA",
    ),
    ("114fedc96 #2990", "tokens seen are counted once a cp rank", "the harness does not read that number"),
    (
        "6a1b334e8 #3356, 2e1ce0471 #3675",
        "a checkpoint's optimizer state by order; its weights from before",
        "this adapter lets none be written before 0.3.0",
    ),
    ("8e5554449 #3666", "all-to-all over cp, which does nothing, is an option no more", "it cannot be requested after"),
    ("3c9940675 #3807", "loading one matrix for queries, keys and values", "they are requested apart"),
    (
        "04326fc8e #4143",
        "what was gathered for the loss in chunks is kept",
        "planned as its own choice, `keeps_loss_unit`",
    ),
)
