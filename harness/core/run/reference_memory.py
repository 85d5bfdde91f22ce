"""The memory that a case's reference needs: checked before anything is started, as the kernel kills without a word.

What is counted is the least that it takes, by what reference/train.py keeps. A case that fits may be too large all the
same.
"""

from __future__ import annotations

from harness.core.case.case import Case
from harness.core.launch import machine
from harness.core.plan.slices import BYTES

LAYER_ACTIVATIONS = (12, 4)
"""Numbers that a layer keeps of a token until backward, in dim and ffn_dim. Measured: 14 (float64) or 20 (float32), and 4."""
LOGIT_COPIES = 3
"""Numbers that the output keeps of a token, in vocab_size: log-softmax, its gradient and that of the logits."""


def reason_never_fits(case: Case, device: str) -> str:
    """Return why the reference needs more memory than this machine has, whatever else runs on it; empty if it may fit."""
    return _reason_too_large(case, device, machine.total_memory(), "this machine has", noise=False)


def reason_not_fitting_now(case: Case, device: str, *, noise: bool) -> str:
    """Return why the reference needs more memory than is free now; empty if it may fit.

    noise: whether it is measured as well.
    """
    return _reason_too_large(case, device, machine.free_memory(), "there are now", noise=noise)


def _reason_too_large(case: Case, device: str, available: int, availability_text: str, *, noise: bool) -> str:
    """Return a sentence with the bytes needed, those available and the remedy; empty if they suffice.

    available: in bytes.
    """
    parameter_bytes = parameter_bytes_of(case, device, noise=noise)
    activation_bytes = activation_bytes_of(case, device)
    needed = max(parameter_bytes, activation_bytes)
    if needed <= available:
        return ""
    training = case.training
    model = case.model
    work = f"{training.steps} steps of {case.model.numel / 1e6:,.0f} M parameters"
    keys = f"model: {{dim: {model.dim}, n_layers: {model.n_layers}, vocab_size: {model.vocab_size}}}"
    if activation_bytes > parameter_bytes:
        work = f"{training.global_batch} x {training.seq_len} tokens in one pass"
        keys = f"training: {{global_batch: {training.global_batch}, seq_len: {training.seq_len}}}"
    where = f"{case.file}: " if case.file else ""
    return (
        f"{where}case {case.name!r}: the reference, {work} in {training.dtype} on one device, takes at least"
        f" {needed / 1e9:.1f} GB of memory, and {availability_text} {available / 1e9:.1f} GB; for a trial request"
        f" smaller sizes, and give the trainer the same: {keys}"
    )


def parameter_bytes_of(case: Case, device: str, *, noise: bool) -> int:
    """Return the bytes of the host for parameters: seed weights in float64, the model, its gradients and moments, copies of
    these for each step.

    Copies are copied once more as they are written. A repeat, for noise, has as much as the run."""
    training = case.training
    moments = {"adamw": 2, "sgd": 0, "muon": 1}[case.training.optimizer]
    bytes_per_number = BYTES[training.dtype]
    bytes_per_copy = max(4, BYTES[training.dtype])
    recorded_bytes = bytes_per_copy * (1 + training.steps * (2 + moments))
    model_bytes = bytes_per_number * (2 + moments) if device == "cpu" else 0
    return case.model.numel * max((8 + model_bytes + recorded_bytes) + noise * recorded_bytes, 2 * recorded_bytes)


def activation_bytes_of(case: Case, device: str) -> int:
    """Return the bytes of the host in the first backward pass, the model's included; 0 if the reference does not run on
    CPU.

    It computes the whole batch at once.
    """
    if device != "cpu":
        return 0
    training = case.training
    model = case.model
    tokens = training.global_batch * training.seq_len
    size = BYTES[training.compute_dtype or training.dtype]
    layers = model.n_layers * (LAYER_ACTIVATIONS[0] * model.dim + LAYER_ACTIVATIONS[1] * model.ffn_dim)
    bytes_per_parameter = 8 + max(4, BYTES[training.dtype]) + 2 * BYTES[training.dtype]
    return (
        tokens * (size * layers + max(4, size) * LOGIT_COPIES * model.vocab_size)
        + case.model.numel * bytes_per_parameter
    )
