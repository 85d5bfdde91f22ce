"""Trainers that do not come with the harness, each with its adapter: the harness runs them and does not change them.

torchtitan, megatron, deepspeed, picotron, transformers    one package or file each.
support/      what several adapters need: a checkout's sources, a script that is run, float64.
onboarding/   an adapter of somebody's own is begun and examined; cli/ has init and doctor.
"""
