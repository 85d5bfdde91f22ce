"""Trainers that do not come with the harness, each with its adapter: the harness runs them and does not change them.

torchtitan, megatron, deepspeed, picotron, transformers    one package or file each.
support/      what several adapters need: a checkout's sources, a script that is run, float64.
onboarding/   an adapter of somebody's own is begun and examined; cli/ has init and doctor.
"""

from __future__ import annotations

from harness.core.rings import Ring

RING = Ring(
    commands={
        "init": "begin an adapter for a training script, and its first cases",
        "doctor": "examine a trainer's adapter: what is wrong, and the line to write",
    },
    trainers={
        "deepspeed": "harness.adapters.deepspeed",
        "megatron": "harness.adapters.megatron",
        "picotron": "harness.adapters.picotron",
        "torchtitan": "harness.adapters.torchtitan",
        "transformers": "harness.adapters.transformers",
    },
)
