"""The check of exported weights on literal evidence, what its solver names, and the reading of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checked import findings
from diagnosed import kinds, proven
from literal import TINY, judged, tiny_case, trial_of, with_rank, with_value

from harness.core.evidence.exported import ExportedTensor, as_exported
from harness.core.judge.exports import (
    expected_export,
    merge_adapters,
    rows_in_half_order,
    tensors_with_row_order,
    weights_to_export,
)
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.run.exports import read_export
from harness.reference.config import Lora

MODEL = replace(TINY, dim=8, n_kv_heads=1, ffn_dim=12)  # heads of four rows, so that their order shows
LORA = Lora(rank=2, alpha=3.0, targets=("w1", "w2"))
LAYER = "model.layers.0."
Q, GATE, UP = f"{LAYER}self_attn.q_proj.weight", f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"
W1 = "layers.0.feed_forward.w1.weight"
Tensors = dict[str, np.ndarray]


def exporting(kind: str, change: Callable[[Tensors, Trial], Tensors] = lambda held, _: held, **more: object) -> Trial:
    """change: of the right export."""
    model = replace(MODEL, tied_embeddings=bool(more.get("tied")), lora=LORA if more.get("lora") else None)
    trial = trial_of(tiny_case("fsdp_2", export=kind, model=model))
    held = change(expected_export(trial.case, weights_to_export(trial, 3)), trial)
    return with_rank(trial, 0, exported={name: ExportedTensor(str(one.dtype), one) for name, one in held.items()})


def test_without_a_request_there_is_nothing_to_judge() -> None:
    assert judged("export", trial_of(tiny_case("fsdp_2"))).verdict is Verdict.NOT_APPLICABLE


def test_an_export_that_nobody_read_is_unknown() -> None:
    assert judged("export", trial_of(tiny_case("fsdp_2", export="hf"))).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("kind", "count"), [("hf", 12), ("hf_interleaved", 12), ("hf_fused", 9)])
def test_the_trained_weights_pass_in_each_order(kind: str, count: int) -> None:
    result = judged("export", exporting(kind))
    assert (result.verdict, result.examined) == (Verdict.PASS, count)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_narrower_file_is_compared_in_its_dtype(dtype: str) -> None:
    trial = exporting("hf")
    held = {n: ExportedTensor(dtype, as_exported(one.value, dtype)) for n, one in trial.ranks[0].exported.items()}
    assert judged("export", with_rank(trial, 0, exported=held)).verdict is Verdict.PASS
    off = held | {Q: ExportedTensor(dtype, held[Q].value * np.asarray(1.01, held[Q].value.dtype))}
    assert [one.name for one in findings("export", with_rank(trial, 0, exported=off))] == [Q]


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    values = np.random.default_rng(1).standard_normal(1000)
    assert (as_exported(values, "bfloat16") == torch.from_numpy(values).float().bfloat16().float().numpy()).all()


def test_a_tensor_that_lacks_and_one_that_nobody_asked_for_are_found() -> None:
    odd = exporting("hf", lambda held, _: {n: v for n, v in held.items() if n != Q} | {"x.weight": held[Q]})
    assert [(one.name, one.observed) for one in findings("export", odd)] == [
        (Q, "not exported"),
        ("x.weight", "(8, 8)"),
    ]
    assert kinds(odd) == ("wrong export",)


@pytest.mark.parametrize("held", [0, 1])
def test_a_tensor_of_which_replicas_hold_different_values_is_not_judged(held: int) -> None:
    trial = trial_of(tiny_case("ddp_2", export="hf", model=MODEL))
    trial = with_value(trial, 1, 3, "parameters", W1, lambda value: value + 1)
    of_rank = with_rank(trial, 0, steps=trial.ranks[held].steps)
    export = expected_export(trial.case, {**weights_to_export(trial, 3), W1: of_rank.ranks[0].steps[-1].parameters[W1]})
    exported = {name: ExportedTensor(str(one.dtype), one) for name, one in export.items()}
    result = judged("export", with_rank(trial, 0, exported=exported))
    assert (result.verdict, result.examined) == (Verdict.UNKNOWN, 11)
    odd = exported | {Q: ExportedTensor(str(export[Q].dtype), export[Q] + 1)}
    assert [one.name for one in findings("export", with_rank(trial, 0, exported=odd))] == [Q]


def test_a_tied_output_may_be_left_out() -> None:
    left_out = exporting("hf", lambda held, _: {n: v for n, v in held.items() if n != "lm_head.weight"}, tied=True)
    assert judged("export", left_out).verdict is judged("export", exporting("hf", tied=True)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("kind", "change", "details"),
    [
        (
            "hf_interleaved",
            lambda held, _: held | {Q: rows_in_half_order(held[Q], 4)},
            {"tensors": (Q,), "with rows of q and k": "in the order for halves"},
        ),
        (
            "hf",
            lambda held, trial: (
                held | {Q: tensors_with_row_order(trial.case, weights_to_export(trial, 3), permuted=False)[Q]}
            ),
            {"tensors": (Q,), "with rows of q and k": "not in the order for halves"},
        ),
        ("hf", lambda held, _: held | {GATE: held[UP]}, {"tensors": (GATE,), "as": UP}),
        (
            "hf",
            lambda held, trial: held | {UP: expected_export(trial.case, weights_to_export(trial, 1))[UP]},
            {"tensors": (UP,), "as after step": 1},
        ),
        (
            "hf",
            lambda held, trial: held | {UP: expected_export(trial.case, weights_to_export(trial, 0))[UP]},
            {"tensors": (UP,), "as": "before training"},
        ),
        ("hf", lambda held, _: held | {UP: held[UP][::-1]}, {"tensors": (UP,), "with rows": "in another order"}),
        (
            "hf",
            lambda held, trial: (
                held
                | {
                    Q: rows_in_half_order(
                        tensors_with_row_order(trial.case, weights_to_export(trial, 3), permuted=False)[Q], 8
                    )
                }
            ),
            {"tensors": (Q,), "with rows turned as those of": "1 head"},
        ),
        (
            "hf_fused",
            lambda held, trial: (
                held
                | expected_export(trial.case, weights_to_export(trial, 3), orders={"self_attn.qkv_proj": (2, 0, 1)})
            ),
            {
                "tensors": (f"{LAYER}self_attn.qkv_proj.weight",),
                "with parts in the order": ("v_proj", "q_proj", "k_proj"),
            },
        ),
    ],
)
def test_whose_value_a_wrong_tensor_is_is_named(kind: str, change: Callable[..., Tensors], details: object) -> None:
    assert proven(exporting(kind, change)) == ("wrong export", details)


FUSED = f"{LAYER}mlp.gate_up_proj.weight"  # gate has an adapter, up has none


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_merged_weights_are_compared_within_rounding_and_all_others_bit_for_bit(dtype: str) -> None:
    trial = exporting("hf_fused", lora=True)
    held = {n: ExportedTensor(dtype, as_exported(one.value, dtype)) for n, one in trial.ranks[0].exported.items()}
    value = trial.ranks[0].exported[FUSED].value

    def verdict(row: int, by: float) -> Verdict:
        changed = value.copy()
        changed[row] *= 1 + by
        one = ExportedTensor(dtype, as_exported(changed, dtype))
        return judged("export", with_rank(trial, 0, exported=held | {FUSED: one})).verdict

    assert (verdict(0, 2.0**-52), verdict(0, 0.02)) == (Verdict.PASS, Verdict.FAIL)
    assert (verdict(-1, 0.0), verdict(-1, 0.02)) == (Verdict.PASS, Verdict.FAIL)
    assert dtype != "float64" or verdict(-1, 2.0**-51) is Verdict.FAIL


@pytest.mark.parametrize(
    ("alpha", "how"),
    [
        (None, {"with adapters": "left out"}),
        (2.0, {"with adapters": "not scaled by alpha / rank"}),
        (6.0, {"with adapters": "scaled by 2 times alpha / rank"}),
    ],
)
def test_adapters_that_are_merged_otherwise_are_named(alpha: float | None, how: dict[str, str]) -> None:
    def change(held: Tensors, trial: Trial) -> Tensors:
        return held | {GATE: merge_adapters(alpha and Lora(2, alpha, LORA.targets), weights_to_export(trial, 3))[W1]}

    assert proven(exporting("hf", change, lora=True)) == ("wrong export", {"tensors": (GATE,)} | how)


def test_noise_is_nobodys_value() -> None:
    noise = exporting("hf", lambda held, _: held | {UP: held[UP] + 1})
    assert kinds(noise) == ("wrong export",)


def test_both_kinds_of_files_are_read(tmp_path: Path) -> None:
    one, two = torch.arange(6.0).view(2, 3), torch.tensor([1.5, -2.0]).bfloat16()
    torch.save({"one": one, "count": torch.tensor(3)}, tmp_path / "a.bin")
    header = json.dumps({"__metadata__": {}, "two": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    data = two.view(torch.int16).numpy().tobytes()
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    held = read_export(tmp_path)
    assert {name: tensor.dtype for name, tensor in held.items()} == {"one": "float32", "two": "bfloat16"}
    assert (held["one"].value == one.numpy()).all() and held["two"].value.tolist() == [1.5, -2.0]
