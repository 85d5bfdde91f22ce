"""Parameters of a trainer, matched to the reference's by shape and order, and the lines to write for what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from harness.adapters.onboarding.matching import Shapes, match, name_table
from harness.adapters.onboarding.names import remedies
from harness.adapters.support.requests import NOT_PASSED_ON
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.trainers import Adapter
from harness.core.trainers.support.names import in_one, pairs, renamed
from harness.reference.config import ModelConfig

CASE = Case("any", "a test", ParallelDims())
LINE = (
    "embed=tok_embeddings head=output blocks=layers q_proj=attention.wq k_proj=attention.wk v_proj=attention.wv "
    "o_proj=attention.wo gate_proj=feed_forward.w1 up_proj=feed_forward.w3 down_proj=feed_forward.w2 norm1=attention_norm "
    "norm2=ffn_norm"
)
Layer = Mapping[str, tuple[int, ...]]


def model_of(
    layer: Layer, start: str = "", end: Layer | None = None, layers: str = "layers", vocab: int = 256
) -> Shapes:
    """Two such layers between an embedding and what comes at the end."""
    inside = {f"{start}{layers}.{n}.{name}": shape for n in (0, 1) for name, shape in layer.items()}
    return (
        {f"{start}embed.weight": (vocab, 64)} | inside | dict(end or {"norm.weight": (64,), "head.weight": (vocab, 64)})
    )


def flat_block(ffn: int = 192, kv: int = 32) -> dict[str, tuple[int, ...]]:
    """A layer whose projections lie in the block itself."""
    block = {"q_proj": (64, 64), "k_proj": (kv, 64), "v_proj": (kv, 64), "o_proj": (64, 64)}
    block |= {"gate_proj": (ffn, 64), "up_proj": (ffn, 64), "down_proj": (64, ffn), "norm1": (64,), "norm2": (64,)}
    return {f"{name}.weight": shape for name, shape in block.items()}


FLAT = model_of(flat_block(), layers="blocks")


class Named(Adapter):
    """fused: as `in_one` takes it."""

    name = "named"

    def __init__(self, names: Mapping[str, str], *fused: str, refused: str | None = None) -> None:
        self.names, self.told, self.refused = names, fused, refused

    def fqn(self, name: str) -> str:
        return renamed(name, self.names)

    def fused(self, case: Case) -> dict[str, tuple[str, ...]]:
        return in_one(case, *self.told)

    def unsupported(self, case: Case) -> str | None:
        return self.refused


TOO_SHORT = Named(pairs(LINE.replace("attention.", "").replace("feed_forward.", "")))
HUGGING_FACE = {
    **{f"self_attn.{name}.weight": (64, 64) for name in ("q_proj", "o_proj")},
    **{f"self_attn.{name}.weight": (32, 64) for name in ("k_proj", "v_proj")},
    **{f"mlp.{name}.weight": (192, 64) for name in ("gate_proj", "up_proj")},
    "mlp.down_proj.weight": (64, 192),
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
}
UNSPELLED = {
    "first.g": (64,),
    "mix.a.w": (64, 64),
    "mix.b.w": (32, 64),
    "mix.c.w": (32, 64),
    "mix.proj.w": (64, 64),
    "second.g": (64,),
    "swi.a.w": (160, 64),
    "swi.proj.w": (64, 160),
    "swi.b.w": (160, 64),
}
FUSED = {
    "first.g": (64,),
    "at.c_in.weight": (64 + 2 * 16, 64),
    "at.c_proj.weight": (64, 64),
    "second.g": (64,),
    "ml.c_in.weight": (2 * 160, 64),
    "ml.c_proj.weight": (64, 160),
}
RAW = {
    "attn_norm": (64,),
    "attn.wqkv": (128, 64),
    "attn.wo": (64, 64),
    "mlp_norm": (64,),
    "mlp.w13": (384, 64),
    "mlp.w2": (64, 192),
}
END = {"model.norm.weight": (64,), "lm_head.weight": (256, 64)}


@pytest.mark.parametrize(
    ("shapes", "others", "fused"),
    [
        (FLAT, {}, ()),
        (model_of(HUGGING_FACE, "model.", END), {}, ()),
        (model_of(UNSPELLED, "net."), {"ffn_dim": 160}, ()),
        (
            model_of(FUSED, "t.", {"t.last.g": (64,)}, "h", vocab=300),
            {"ffn_dim": 160, "n_kv_heads": 2, "vocab_size": 300, "tied_embeddings": True},
            ("attention.c_in.weight=wq+wk+wv", "feed_forward.c_in.weight=w1+w3"),
        ),
        (model_of(RAW), {}, ("attention.wqkv.weight=wq+wk+wv", "feed_forward.w13.weight=w1+w3")),
        (model_of(flat_block(ffn=128)), {"ffn_dim": 128}, ()),  # as many rows as wq, wk and wv together
        (model_of(flat_block(kv=64)), {"n_kv_heads": 8}, ()),
    ],
)
def test_every_parameter_gets_its_name_by_a_table_that_gives_it(
    shapes: Shapes, others: dict[str, Any], fused: tuple[str, ...]
) -> None:
    found = match(shapes, CASE.model.n_heads)
    assert found.other_sizes(CASE.model) == others and found.declarations == fused
    case = replace(CASE, model=replace(CASE.model, **others))
    adapter = Named(name_table(found.names), *fused)
    parts = [part for name in shapes for one in [adapter.fqn(name)] for part in adapter.fused(case).get(one, (one,))]
    assert sorted(parts) == sorted(case.model.parameter_shapes())
    assert list(remedies(shapes, case, adapter, "a.py")) == []


def test_where_names_do_not_decide_order_does() -> None:
    names = match(model_of(UNSPELLED), CASE.model.n_heads).names
    ours = [names[f"layers.1.{name}"].removeprefix("layers.1.").removesuffix(".weight") for name in UNSPELLED]
    assert ours == [
        *("attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.wo"),
        *("ffn_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    ]


def test_the_table_of_a_flat_block_is_short_and_names_that_an_adapter_has_stay() -> None:
    assert name_table(match(FLAT, 8).names) == pairs(LINE)
    exchanged = Named(pairs(LINE.replace("w1", "w0").replace("w3", "w1").replace("w0", "w3")))
    assert match(FLAT, 8, exchanged.fqn).names["blocks.0.gate_proj.weight"] == "layers.0.feed_forward.w3.weight"
    assert list(remedies(FLAT, CASE, exchanged, "a.py")) == []


def test_what_llama_has_not_is_no_parameter_of_its() -> None:
    shapes = {**FLAT, "wpe.weight": (512, 64), "blocks.0.norm1.bias": (64,)}
    assert shapes.keys() - match(shapes, 8).names.keys() == {"wpe.weight", "blocks.0.norm1.bias"}


def lines(shapes: Shapes, adapter: Adapter, case: Case = CASE) -> list[str]:
    return [text for _, text in remedies(shapes, case, adapter, "a.py")]


def test_the_names_to_write_are_said_and_were_tried() -> None:
    said = lines(FLAT, TOO_SHORT)
    written = next(text for text in said if text.startswith("NAMES"))
    assert pairs(written.partition('"""')[2].partition('"""')[0]) == pairs(LINE)
    assert "by it 21 of its 21 parameters have a name of the reference's, now 7" in said
    assert said[0] == (
        "blocks.0.q_proj.weight [64, 64] is mapped to layers.0.wq.weight, which there is not: by shape, order and name it is "
        "layers.0.attention.wq.weight; alike in 1 more"
    )
    assert "of the reference's 21 parameters 14 have no match: layers.0.attention.wq.weight" in said[7]


@pytest.mark.parametrize("refused", [None, f"ffn_dim 128: train {NOT_PASSED_ON}"])
def test_another_size_is_answered_with_the_case_that_has_it_and_what_the_adapter_must_know(refused: str | None) -> None:
    said = lines(model_of(flat_block(ffn=128)), Named(pairs(LINE), refused=refused))
    assert "case: model: {ffn_dim: 128}" in said and not any("NAMES = " in text for text in said)
    known = 'adapter: add ffn_dim to KNOWN in a.py: "ffn_dim": (128,); or ... for any value, if it passes that on'
    assert (known in said) is (refused is not None)


@pytest.mark.parametrize("rows", [64, 32])
def test_weights_in_one_tensor_are_declared_by_a_line_that_declares_them(rows: int) -> None:
    """With 64 rows it has the shape of wq."""
    block = {name: shape for name, shape in flat_block().items() if name[:6] not in ("k_proj", "v_proj")}
    shapes, adapter = model_of({**block, "kv.weight": (rows, 64)}), Named(pairs(LINE + " kv=attention.wkv"))
    said = lines(shapes, adapter)
    line = next(text for text in said if text.startswith("def fused"))
    assert line == 'def fused(self, case): return in_one(case, "attention.wkv.weight=wk+wv")'
    declared = Named(adapter.names, "attention.wkv.weight=wk+wv")
    left = lines(shapes, declared)
    assert left == [] if rows == 64 else left[-1] == "case: model: {n_kv_heads: 2}"


@pytest.mark.parametrize(
    ("name", "shape", "dims", "hint"),
    [
        ("down_proj.weight", (192, 64), {}, "it is the transpose; no check covers transposed slices"),
        (
            "q_proj.weight",
            (32, 64),
            {"tp": 2},
            "the tp rank's part: give load_weights(.., cut=tensor_parallel(rank, degree))",
        ),
        ("q_proj.weight", (2048,), {"dp_shard": 2}, "a part of it, flat: let weights be copied before FSDP1 wraps"),
    ],
)
def test_a_parameter_of_another_shape_is_named_with_why(
    name: str, shape: tuple[int, ...], dims: dict[str, int], hint: str
) -> None:
    case = replace(CASE, dims=ParallelDims(**dims))
    said = lines(model_of({**flat_block(), name: shape}), Named(pairs(LINE)), case)
    assert f"layers.0.{name} {list(shape)}" in said[0] and hint in said[0]


def test_sizes_that_no_model_has_are_not_said() -> None:
    assert match(FLAT, 7).other_sizes(ModelConfig()) == {}
