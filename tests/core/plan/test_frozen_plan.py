"""What the plan expects of frozen parameters and of adapters, by literals worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from literal import ADAMW, TINY, tiny_case

from harness.core.plan.frozen import matmuls_left_out, matmuls_of_block
from harness.core.plan.make_plan import make_plan
from harness.core.plan.slices import tp_dim
from harness.reference.config import Lora

ADAPTERS = ("*.lora_?.weight",)
LORA = replace(TINY, lora=Lora(rank=2, targets=("wq", "wo")))


def flows(layout: str, trainable: tuple[str, ...], **changes) -> list[tuple]:
    plan = make_plan(tiny_case(layout, replace(ADAMW, trainable=trainable), **changes))
    return [(f.role, f.op, f.phase, f.bytes) for f in plan.flows[0]]


# The tiny model in elements, 8 bytes each: embedding 32, the layer 168, norm 4 and output 32.
def test_only_gradients_of_what_is_trained_are_reduced() -> None:
    assert flows("ddp_2", ("output.weight",)) == [("gradients", "all_reduce", "backward", 32 * 8)]
    assert flows("fsdp_2", ("*norm.weight",)) == [
        ("parameters", "all_gather", "forward", 236 * 8),
        ("parameters", "all_gather", "backward", 200 * 8),
        ("gradients", "reduce_scatter", "backward", (4 + 8) * 8),
    ]


def test_backward_gathers_one_unit_before_the_first_that_is_trained() -> None:
    again = [
        size
        for role, _, phase, size in flows("fsdp_2", ("norm.weight",))
        if (role, phase) == ("parameters", "backward")
    ]
    assert again == [168 * 8]


# A crossing is 8 samples, 4 tokens each, 4 numbers a token: 128 numbers, 1024 bytes.
@pytest.mark.parametrize(
    ("trainable", "gathered", "scattered"),
    [
        (("*",), 3, 3),  # out of embedding, attention and feed-forward; into both, and into output
        (("output.weight",), 0, 0),
        (("norm.weight",), 0, 1),
        (("layers.0.feed_forward.w2.weight",), 1, 1),
        (("layers.0.attention.wo.weight",), 2, 2),
        (("layers.0.attention_norm.weight",), 2, 3),
    ],
)
def test_gradients_cross_tp_where_something_before_is_trained(
    trainable: tuple[str, ...], gathered: int, scattered: int
) -> None:
    found = {(op, phase): size for role, op, phase, size in flows("tp_2", trainable) if role == "activations"}
    assert found.get(("all_gather", "backward"), 0) == gathered * 1024
    assert found.get(("reduce_scatter", "backward"), 0) == scattered * 1024


def test_of_an_adapter_one_part_is_cut_over_tp_and_the_other_is_reduced() -> None:
    cuts = {
        name: tp_dim(f"layers.0.attention.{name}.weight")
        for name in ("wq.lora_a", "wq.lora_b", "wo.lora_a", "wo.lora_b")
    }
    assert cuts == {"wq.lora_a": None, "wq.lora_b": 0, "wo.lora_a": 1, "wo.lora_b": None}
    # A of wq and B of wo have 8 elements each; they alone are trained.
    found = [each for each in flows("tp_2", ADAPTERS, model=LORA) if "gradients" in each[0]]
    assert found == [("adapter gradients", "all_reduce", "backward", 16 * 8)]


def test_a_rank_keeps_gradients_and_state_of_what_is_trained() -> None:
    plan = make_plan(tiny_case("fsdp_2", replace(ADAMW, trainable=("output.weight",))))
    assert (plan.gradient_bytes[0], plan.state_bytes[1]) == ((128, 128), (128, 128))
    assert make_plan(tiny_case("fsdp_2")).gradient_bytes == {}


@pytest.mark.parametrize(
    ("trainable", "left"),
    [
        (("*",), 0),
        (("output.weight",), 14 + 1),  # all of the block, and the gradient of output's input
        (("layers.0.feed_forward.w2.weight",), 8 + 4 + 1 + 1),  # attention, w1 and w3; w2's input; output's weight
        (("tok_embeddings.weight",), 7 + 1),  # every weight's own
    ],
)
def test_matmuls_that_backward_leaves_out(trainable: tuple[str, ...], left: int) -> None:
    assert matmuls_left_out(tiny_case("single", replace(ADAMW, trainable=trainable)), [0], outputs=1) == left


def test_matmuls_of_adapters() -> None:
    """The input of wq has no gradient: both of wq are left out and one of A. wo lacks its weight's, wk and wv lack both.
    The weights of feed-forward and output lack four."""
    case = tiny_case("single", replace(ADAMW, trainable=ADAPTERS), model=LORA)
    assert matmuls_left_out(case, [0], outputs=1) == (2 + 1) + 1 + 4 + 4


def test_matmuls_of_adapters_that_are_added_to_their_matrix_first() -> None:
    """Of wq only its input's is left out: the matrix has a gradient, which both halves need. Of wo nothing is."""
    case = tiny_case("single", replace(ADAMW, trainable=ADAPTERS), model=LORA)
    assert (matmuls_of_block(LORA, merged=True), matmuls_of_block(LORA, merged=False)) == (7 + 2, 7 + 4)
    assert matmuls_left_out(case, [0], outputs=1, merged=True) == 1 + 4 + 4
