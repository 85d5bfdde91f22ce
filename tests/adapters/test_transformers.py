"""The adapter of the transformers Trainer under accelerate."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import find_case, load_all, load_cases
from harness.core.case.variants import with_dtype
from harness.core.judge.result import Verdict
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.reference.config import ModelConfig, TrainingConfig

TRANSFORMERS = trainers.load_adapter("transformers")


def case(dims: ParallelDims, **parts: object) -> Case:
    return Case("any", "a test", dims, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.embed_tokens.weight", "tok_embeddings.weight"),
        ("model.layers.1.self_attn.q_proj.weight", "layers.1.attention.wq.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "layers.0.ffn_norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.feed_forward.w3.weight"),
        ("model.norm.weight", "norm.weight"),
        ("lm_head.weight", "output.weight"),
        ("", ""),
    ],
)
def test_transformers_names_are_told_in_the_references_spelling(theirs: str, ours: str) -> None:
    assert TRANSFORMERS.fqn(theirs) == ours


def test_transformers_rotate_halves_of_a_head() -> None:
    rows = TRANSFORMERS.rows(case(ParallelDims(), model=ModelConfig(dim=16, n_heads=2, n_kv_heads=1)))
    assert rows["layers.0.attention.wq.weight"].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert rows["layers.1.attention.wk.weight"].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert len(rows) == 4


def zero(stage: str, **training: Any) -> Case:
    return case(ParallelDims(dp_shard=2), features=Features(wrapper=stage), training=TrainingConfig(**training))


def test_zero_through_transformers_is_requested_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert TRANSFORMERS.unsupported(zero("zero2", dtype="float32")) is None
    assert TRANSFORMERS.unsupported(zero("zero2")) == "dtype float64: deepspeed steps on float32"
    told = TRANSFORMERS.unsupported(zero("zero3", dtype="float32", decay="matrices"))
    assert str(told).startswith("zero3 with decay matrices")


def test_zeros_vector_through_transformers_has_its_llamas_parameters_in_their_order() -> None:
    wanted = zero("zero1", dtype="float32")
    order = [name for (name,) in TRANSFORMERS.traits(wanted).zero_layout.order]
    assert sorted(order) == sorted(wanted.model.parameter_shapes())
    assert [name.removeprefix("layers.0.").removesuffix(".weight") for name in order[5:10]] == [
        *("feed_forward.w1", "feed_forward.w3", "feed_forward.w2", "attention_norm", "ffn_norm")
    ]


THERE = all(map(importlib.util.find_spec, ("deepspeed", "accelerate", "transformers")))


@pytest.mark.skipif(not THERE, reason="deepspeed, accelerate or transformers is not installed")
def test_zero2_through_transformers_and_accelerate_passes_every_check(tmp_path: Path) -> None:
    cases = load_cases(ROOT / "harness" / "adapters" / "deepspeed" / "cases" / "zero.yaml")
    (wanted,) = (one for one in cases if one.name == "zero2_2_accum")
    judgement = run_case(with_dtype(wanted, "float32"), Options(out=tmp_path, trainer="transformers"))
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        (
            case(ParallelDims(dp_shard=2, tp=2)),
            "tp 2: transformers has no such option, or this adapter does not pass it on",
        ),
        (
            case(ParallelDims(dp_shard=2), training=TrainingConfig(compute_dtype="bfloat16")),
            "compute_dtype bfloat16: transformers has no such option, or this adapter does not pass it on",
        ),
        (
            case(ParallelDims(dp_replicate=2), features=Features(wrapper="fsdp2")),
            "wrapper fsdp2 with dp_shard 1: accelerate takes no FSDP without ranks to shard over",
        ),
        (case(ParallelDims(dp_replicate=2, dp_shard=2), features=Features(accumulation=2)), None),
    ],
)
def test_what_transformers_are_not_requested_has_a_reason(requested: Case, reason: str | None) -> None:
    assert TRANSFORMERS.unsupported(requested) == reason


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("name", ["ddp_2_accum", "fsdp_2", "hsdp_2x2", "fsdp_2_tied", "fsdp_4_uneven"])
def test_transformers_pass_all_checks(tmp_path: Path, name: str) -> None:
    judgement = run_case(find_case(name, load_all()), Options(out=tmp_path, trainer="transformers"))
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis
