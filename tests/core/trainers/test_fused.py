"""Weights that a trainer has in one tensor are judged apart, and copied together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from literal import tiny_case, trial_of
from torch import nn

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.traits import TrainerTraits
from harness.core.checks import placements
from harness.core.evidence.checkpoint_index import Checkpoint, SavedTensor
from harness.core.evidence.fused import blocks_in_order, split_fused, split_fused_checkpoint
from harness.core.evidence.records import RankEvidence, Resumed, TensorEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.judge.result import Verdict
from harness.core.run.supported import reason_against_cut_fused
from harness.core.trainers import Adapter
from harness.core.trainers.support.weights import DoNotFit, load_weights, tensor_parallel
from harness.reference.config import ModelConfig
from harness.reference.model import initial_weights

WHOLE = np.arange(12.0).reshape(6, 2)
FUSED = {"qkv": (("q", 3), ("k", 2), ("v", 1))}
MODEL = ModelConfig(dim=4, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=16, ffn_dim=4)
CASE = Case("any", "a test", ParallelDims(), model=MODEL)


def evidence_of(value: np.ndarray) -> RankEvidence:
    state = {"qkv": {"exp_avg": value, "step": np.array(3.0)}}
    step = StepEvidence(1, (), None, None, None, {"qkv": value, "o": value}, {"qkv": value}, state, {})
    return RankEvidence(0, 1, (TensorEvidence("qkv", value.shape, "float64", None, (), value),), (), (), (step,))


def test_a_fused_weight_is_taken_apart_by_rows_with_its_gradient_and_moments() -> None:
    found = split_fused(evidence_of(WHOLE), FUSED)
    assert [(t.fqn, t.global_shape, t.value.tolist()) for t in found.parameters] == [
        ("q", (3, 2), WHOLE[:3].tolist()),
        ("k", (2, 2), WHOLE[3:5].tolist()),
        ("v", (1, 2), WHOLE[5:].tolist()),
    ]
    (step,) = found.steps
    assert list(step.gradients) == ["q", "k", "v", "o"]
    assert step.optimizer_state["k"]["exp_avg"].tolist() == WHOLE[3:5].tolist()
    assert float(step.optimizer_state["v"]["step"]) == 3.0


def test_a_slice_of_a_fused_weight_stays_what_it_is() -> None:
    found = split_fused(evidence_of(WHOLE[:3]), FUSED)
    assert [t.fqn for t in found.parameters] == ["qkv"]
    assert list(found.steps[0].optimizer_state) == ["qkv"]


def test_groups_of_heads_are_taken_apart_block_by_block_on_a_rank_that_holds_whole_ones() -> None:
    fused = {"qkv": blocks_in_order(("q", "k", "v") * 2, {"q": 4, "k": 2, "v": 2})}
    held = np.arange(4.0).reshape(4, 1)
    whole = split_fused(evidence_of(np.concatenate([held, held + 4])), fused)
    assert {t.fqn: t.value[:, 0].tolist() for t in whole.parameters} == {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}
    part = split_fused(evidence_of(held), fused)
    assert {t.fqn: t.value[:, 0].tolist() for t in part.parameters} == {"q": [0, 1], "k": [2], "v": [3]}
    assert part.steps[0].optimizer_state["v"]["exp_avg"].tolist() == [[3.0]]


def test_what_is_claimed_of_a_cut_fused_weight_is_claimed_of_each_part() -> None:
    fused = {"w13": blocks_in_order(("w1", "w3") * 2, {"w1": 4, "w3": 4})}
    held = TensorEvidence("w13", (8, 1), "float64", [0, 1], ("Shard(0)",), np.arange(4.0).reshape(4, 1))
    found = split_fused(replace(evidence_of(WHOLE), parameters=(held,)), fused).parameters
    assert [(t.fqn, t.global_shape, t.placements, t.value[:, 0].tolist()) for t in found] == [
        ("w1", (4, 1), ("Shard(0)",), [0, 1]),
        ("w3", (4, 1), ("Shard(0)",), [2, 3]),
    ]


class OnlyAttention(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.wqkv = nn.Parameter(torch.zeros(rows, 4, dtype=torch.float64))


def fqn(name: str) -> str:
    return f"layers.0.attention.{name}.weight"


def test_seed_weights_are_copied_one_below_the_other_into_a_fused_one() -> None:
    model, names = OnlyAttention(8), tuple(map(fqn, ("wq", "wk", "wv")))
    load_weights([model], CASE, None, fqn, fused={fqn("wqkv"): names})
    seed = initial_weights(MODEL, CASE.training.seed)
    assert model.wqkv.detach().numpy().tolist() == np.concatenate([seed[name] for name in names]).tolist()


def test_each_tp_rank_has_its_groups_of_heads_of_a_fused_one() -> None:
    model = ModelConfig(dim=8, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=16, ffn_dim=4)
    case, names = Case("any", "a test", ParallelDims(tp=2), model=model), tuple(map(fqn, ("wq", "wk", "wv")))
    held = nn.Module()
    held.wqkv = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    load_weights([held], case, None, fqn, cut=tensor_parallel(1, 2), fused={fqn("wqkv"): names * 2})
    q, k, v = (initial_weights(model, case.training.seed)[name] for name in names)
    assert held.wqkv.detach().numpy().tolist() == np.concatenate([q[4:], k[2:], v[2:]]).tolist()


def test_all_parameters_that_do_not_fit_are_told() -> None:
    try:
        load_weights([OnlyAttention(8)], CASE, None, fqn)
    except DoNotFit as error:
        assert error.shapes == {"wqkv": (8, 4)}
        assert str(error) == "wqkv [8, 4]: fqn gives 'layers.0.attention.wqkv.weight', which is none of the reference's"
    else:
        raise AssertionError("it fits")


def test_layers_that_are_cut_by_hand_get_their_part() -> None:
    cut, whole = tensor_parallel(1, 2), torch.arange(8.0).reshape(4, 2)
    assert cut("layers.0.attention.wq.weight", whole).tolist() == whole[2:].tolist()
    assert cut("layers.0.attention.wo.weight", whole).tolist() == whole[:, 1:].tolist()
    assert cut("norm.weight", whole[:, 0]).tolist() == whole[:, 0].tolist()


def test_a_cut_weight_that_is_not_fused_gets_its_part_whatever_that_is() -> None:
    held = nn.Module()
    held.wo = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    load_weights([held], CASE, None, fqn, cut=tensor_parallel(1, 2))
    assert held.wo.tolist() == initial_weights(MODEL, CASE.training.seed)[fqn("wo")][:, 2:].tolist()
    held.wq = nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))
    load_weights([held], CASE, None, fqn, cut=tensor_parallel(1, 2))
    assert held.wq.tolist() == initial_weights(MODEL, CASE.training.seed)[fqn("wq")][2:].tolist()


def test_a_plain_tensor_as_large_as_the_slice_claims_nothing_and_one_as_large_as_the_whole_does() -> None:
    trial = trial_of(tiny_case("tp_2"))
    evidence = trial.ranks[0]
    plain = tuple(replace(t, mesh=None, placements=(), global_shape=t.value.shape) for t in evidence.parameters)
    cut = replace(trial, run=replace(trial.run, ranks={**trial.ranks, 0: replace(evidence, parameters=plain)}))
    assert placements.check(cut).verdict is Verdict.PASS
    whole = tuple(replace(t, global_shape=w.shape, value=w) for t in plain for w in [trial.reference.weights[t.fqn]])
    kept = replace(trial, run=replace(trial.run, ranks={**trial.ranks, 0: replace(evidence, parameters=whole)}))
    assert placements.check(kept).verdict is Verdict.FAIL


def test_what_is_saved_of_a_fused_weight_is_saved_of_its_parts() -> None:
    whole = SavedTensor("model.qkv", "qkv", (6, 2), "float64", 12)
    found = split_fused_checkpoint(Checkpoint((whole, SavedTensor("step", "", (), "float32", 1))), FUSED)
    assert [(t.name, t.fqn, t.shape, t.numbers) for t in found.tensors] == [
        ("model.qkv", "q", (3, 2), 6),
        ("model.qkv", "k", (2, 2), 4),
        ("model.qkv", "v", (1, 2), 2),
        ("step", "", (), 1),
    ]


def test_what_was_resumed_of_a_fused_weight_is_of_its_parts() -> None:
    evidence = replace(evidence_of(WHOLE), resumed=Resumed({"qkv": WHOLE}, {"qkv": {"exp_avg": WHOLE}}))
    resumed = split_fused(evidence, FUSED).resumed
    assert resumed is not None and {*resumed.parameters} == {*resumed.optimizer_state} == {"q", "k", "v"}
    assert resumed.parameters["k"].tolist() == WHOLE[3:5].tolist()


class Fusing(Adapter):
    """wq, wk and wv in one, n times each."""

    name = "fusing"

    def __init__(self, times: int = 1, wrapper: str | None = None) -> None:
        self.times, self.wrapper = times, wrapper

    def traits(self, case: Case) -> TrainerTraits:
        return TrainerTraits(wrapper=self.wrapper)

    def fused(self, case: Case) -> dict[str, tuple[str, ...]]:
        return {fqn("wqkv"): tuple(map(fqn, ("wq", "wk", "wv"))) * self.times}


def cut_by(wrapper: str | None, times: int = 1, **dims: int) -> str | None:
    model = ModelConfig(dim=8, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=16, ffn_dim=4)
    return reason_against_cut_fused(Case("any", "a test", ParallelDims(**dims), model=model), Fusing(times, wrapper))


def test_what_fsdp_cuts_inside_of_a_fused_weight_is_refused_with_what_can_be_judged() -> None:
    told = (
        "layers.0.attention.wqkv.weight is several weights in one (`fused`), and fsdp2 over 2 ranks cuts it inside of one"
        " of them: what each rank then holds is not planned; judge the model with DDP, and FSDP without an adapter: "
        "harness record --layout dp_replicate=2,dp_shard=2 -- torchrun .."
    )
    assert cut_by(None, dp_replicate=2, dp_shard=2) == told
    assert "fsdp1 over 2 ranks" in (cut_by("fsdp1", times=2, dp_shard=2) or "")  # which flattens it
    assert cut_by(None, times=2, dp_shard=4) and cut_by(None, times=2, dp_shard=3)


def test_a_fused_weight_that_ranks_hold_whole_or_in_whole_blocks_is_judged() -> None:
    assert cut_by(None) is cut_by(None, dp_replicate=2) is cut_by("ddp", dp_replicate=4) is None
    assert cut_by(None, times=2, dp_shard=2) is cut_by(None, times=4, dp_shard=2, tp=2) is None
