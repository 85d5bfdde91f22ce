"""Traffic of tensor parallelism: activations between sharded matmuls, the loss, scales of 8-bit matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.core.case import releases
from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.plan.frozen import gradients_of_activations, trained_values
from harness.core.plan.slices import BYTES, parameter_shapes, tp_dim
from harness.core.plan.stages import layers_of_stage, layers_of_stages, stages_of_rank
from harness.core.plan.traffic.data_parallel import reductions_per_step
from harness.core.plan.traffic.flow import Flow
from harness.reference.config import is_trainable


def tensor_parallel_flows(case: Case, traits: TrainerTraits, stages: tuple[int, ...], length: int) -> Iterable[Flow]:
    """Yield every crossing of the residual stream: into and out of attention and feed-forward, out of embedding, into
    output.

    Nothing without tp. With sequence parallel a crossing is an all_gather or a reduce_scatter, and backward mirrors
    forward. Without it, it is an all_reduce, forward of what comes out, backward of what went in. A trainer that does
    not keep what a column-parallel layer gathered, gathers it again for the weight's gradient.
    """
    dims = case.dims
    model = case.model
    if dims.tp == 1:
        return
    activation = residual_stream_bytes(case, length)
    layers = layers_of_stages(case, stages)
    count = len(layers)
    first = 0 in stages
    last = case.n_stages - 1 in stages
    back_in, back_out = _crossings_in_backward(case, layers, first=first, last=last)
    phase = "pipeline" if dims.pp > 1 else "backward"
    size_of_sums = _bytes_of_norm_gradients(case, traits.measured.torch)
    if case.features.sequence_parallel:
        yield Flow("tp", "activations", "all_gather", "forward", (2 * count + last) * activation)
        yield Flow("tp", "activations", "reduce_scatter", "forward", (2 * count + first) * activation)
        yield Flow("tp", "activations", "all_gather", "backward", back_out * activation)
        reduces_input_of_chunks = last and traits.loss_chunks > 1 and traits.cuts_gathered
        yield Flow("tp", "activations", "reduce_scatter", "backward", (back_in - reduces_input_of_chunks) * activation)
        yield Flow(
            "tp", "gradient of what chunks are cut from", "all_reduce", "backward", reduces_input_of_chunks * activation
        )
        if traits.gathers_input_again:
            yield Flow("tp", "activations again", "all_gather", "backward", (2 * count + last) * activation)
        norms = _trained_norms(case, layers, last=last) * model.dim  # each rank's norms saw its part of the sequence
        yield Flow("tp", "norm gradients", "all_reduce", phase, norms * size_of_sums, optional=True)
    else:
        yield Flow("tp", "activations", "all_reduce", "forward", (2 * count + first) * activation)
        yield Flow("tp", "activations", "all_reduce", "backward", back_in * activation)
    if model.lora is not None:
        sums = _whole_adapter_elements(case, layers)
        yield Flow("tp", "adapter gradients", "all_reduce", phase, sums * size_of_sums, optional=True)
    if not case.features.loss_parallel and last:
        yield Flow("tp", "logits", "all_gather", "forward", logits_bytes(case, length))
    elif traits.loss_in_forward and last:
        yield Flow("tp", "loss", "all_reduce", "forward", loss_parallel_bytes(case, length))


def _crossings_in_backward(case: Case, layers: list[int], *, first: bool, last: bool) -> tuple[int, int]:
    """Return (into, out of): how many inputs of attention, feed-forward and output have a gradient, and how many
    results have one.

    Results are those of attention, feed-forward and the embedding. first, last: whether the rank has that stage of the
    pipeline.
    """
    into, out_of = gradients_of_activations(case.model, case.training)
    back_in = int(last and into["output"])
    back_out = int(first and out_of["tok_embeddings"])
    for layer in layers:
        back_in += into[f"layers.{layer}.attention.wq"] + into[f"layers.{layer}.feed_forward.w1"]
        back_out += out_of[f"layers.{layer}.attention"] + out_of[f"layers.{layer}.feed_forward"]
    return back_in, back_out


def _trained_norms(case: Case, layers: list[int], *, last: bool) -> int:
    """Return the number of norm weights that are trained: two of each layer, and the final norm's on the last stage."""
    fqns = []
    for layer in layers:
        fqns += [f"layers.{layer}.attention_norm.weight", f"layers.{layer}.ffn_norm.weight"]
    if last:
        fqns.append("norm.weight")
    return sum(is_trainable(case.training, fqn) for fqn in fqns)


def _whole_adapter_elements(case: Case, layers: list[int]) -> int:
    """Return the number of elements of trained LoRA parts that every tp rank holds whole, in these layers.

    They are A of a matrix cut by rows, B of one that is cut by columns. Each rank has the gradient of its part alone.
    """
    elements = 0
    for fqn, shape in trained_values(case, parameter_shapes(case.model)).items():
        if ".lora_" in fqn and tp_dim(fqn) is None and int(fqn.split(".")[1]) in layers:
            elements += math.prod(shape)
    return elements


def residual_stream_bytes(case: Case, length: int) -> int:
    """Return the bytes of the residual stream of all of a rank's microbatches in a step, not cut over tp."""
    size = BYTES[case.training.compute_dtype or case.training.dtype]
    return case.local_batch * (length // case.dims.cp) * case.model.dim * size * case.passes


def logits_bytes(case: Case, length: int) -> int:
    """Return the bytes of the logits of all of a rank's microbatches, gathered over tp in equal parts."""
    vocabulary = -(-case.model.vocab_size // case.dims.tp) * case.dims.tp
    return residual_stream_bytes(case, length) // case.model.dim * vocabulary


def loss_parallel_bytes(case: Case, length: int) -> int:
    """Return the bytes that loss parallel moves over tp in a step, for all of a rank's microbatches.

    They are three numbers a token: the largest logit, the sum of the exponentials, and the logit of the label.
    """
    return 3 * case.local_batch * case.passes * (length // case.dims.cp) * BYTES[case.training.dtype]


def _bytes_of_norm_gradients(case: Case, torch: str) -> int:
    """Return the bytes that one element of a norm's or an adapter's gradient moves over tp in a step.

    FSDP2 sums over tp whenever it reduces: under pp at the end of every pass. A gradient that backward does not reduce
    at once is kept in the dtype of its reduction. This is always so under pp, else if the reduction of several
    microbatches is deferred. One that is reduced at once is as computed, in torch up to 2.14.
    """
    computed = case.training.compute_dtype or case.training.dtype
    features = case.features
    kept = case.dims.pp > 1 or (features.accumulation > 1 and features.defers_every_reduction)
    kept = kept or (case.wrapper == "fsdp2" and releases.condition_holds(releases.SUMS_IN_REDUCE_DTYPE, torch))
    times = features.accumulation if case.dims.pp > 1 else reductions_per_step(case)
    return times * BYTES[features.reduce_dtype or computed if kept else computed]


def scale_flows(case: Case, rank: int, length: int) -> Iterable[Flow]:
    """Yield, for float8, the largest entry of what is cut over tp, for its scale; one number a tensor, or one a row.

    Nothing without tp, and for recipes whose scales do not cross it. All weights are cut. Forward also cuts the inputs
    of wo and w2. Backward also cuts the gradients of the outputs of the other five, and with them the columns of their
    weights. (Under rowwise_with_gw_hp weights have one scale in backward.)
    """
    recipe = case.training.quantize
    if case.dims.tp == 1 or recipe not in SCALES_OVER_TP:
        return
    layers = sum(len(layers_of_stage(case, stage)) for stage in stages_of_rank(case, rank))
    tokens = case.local_batch * (length // case.dims.cp)
    size = layers * case.passes * BYTES["float64"]  # in which torchao computes scales
    for phase, (rows, columns, ones) in SCALES_OVER_TP[recipe].items():
        yield Flow("tp", "scales", "all_reduce", phase, (rows * tokens + columns * case.model.dim + ones) * size)


SCALES_OVER_TP = {
    "float8_tensorwise": {"forward": (0, 0, 7 + 2), "backward": (0, 0, 7 + 2 + 2 * 5)},
    "float8_rowwise": {"forward": (2, 2, 0), "backward": (5, 5, 0)},
    "float8_rowwise_with_gw_hp": {"forward": (2, 2, 0), "backward": (5, 0, 7)},
}
"""By recipe and phase, how many matmuls of a layer need the scales of all tokens, of all features, and one scale."""
