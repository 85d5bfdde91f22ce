"""The Megatron-core adapter, as far as it goes without megatron-core; where that is installed, one case on real ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from harness import ROOT, faults
from harness.adapters import megatron
from harness.adapters.support import checkout
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import find_case, load_all, load_cases
from harness.core.judge.result import Verdict
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.reference.config import ModelConfig, RopeScaling, TrainingConfig

THERE = importlib.util.find_spec("megatron") is not None
ADAPTER = trainers.load_adapter("megatron")
CASES = ROOT / "harness" / "adapters" / "megatron" / "cases"


def case(dims: ParallelDims = ParallelDims(), **parts: object) -> Case:  # noqa: B008
    return Case("any", "a test", dims, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        (
            case(ParallelDims(cp=2)),
            "cp 2: attention of the local spec knows no context parallel, that of TransformerEngine",
        ),
        (
            case(ParallelDims(dp_shard=2)),
            "dp_shard 2: its distributed optimizer cuts optimizer state alone (wrapper zero1)",
        ),
        (
            case(
                ParallelDims(dp_shard=2), training=TrainingConfig(optimizer="sgd"), features=Features(wrapper="zero1")
            ),
            "optimizer sgd: its distributed optimizer steps by Adam alone",
        ),
        (
            case(ParallelDims(pp=2), features=Features(accumulation=2)),
            "accumulation with pp 2: Megatron's schedules accumulate over microbatches alone",
        ),
        (case(ParallelDims(tp=2), model=ModelConfig(vocab_size=259)), "vocab_size 259 is not divisible by tp 2"),
        (case(model=ModelConfig(rope_scaling=RopeScaling(low_freq_factor=2.0))), "rope_scaling: Megatron has its"),
        (case(features=Features(schedule="GPipe")), "schedule GPipe: Megatron-core has no such option"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(
    requested: Case, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "_missing_text", lambda _: "")
    assert (ADAPTER.unsupported(requested) or "").startswith(reason)


def test_a_folder_without_it_is_refused_with_its_name(tmp_path: Path) -> None:
    told = trainers.load_adapter(f"megatron@{tmp_path}").unsupported(case())
    assert told == f"{tmp_path}/megatron/core: no Megatron-core there"


def test_a_release_before_the_oldest_that_it_can_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    told = tmp_path / "megatron" / "core" / "package_info.py"
    told.write_text("MAJOR = 0\nMINOR = 12\nPATCH = 3\n")
    adapter = trainers.load_adapter(f"megatron@{tmp_path}")
    assert adapter.unsupported(case()) == "megatron-core 0.12: a chunk does not get its virtual stage before 0.13"
    told.write_text("MAJOR = 0\nMINOR = 13\nPATCH = 0\n")
    assert adapter.unsupported(case()) is None


def test_a_source_goes_before_what_is_installed_and_what_came_from_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\n")
    monkeypatch.setattr(sys, "path", ["installed"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # Triton, among others, is there
    ADAPTER.of(str(tmp_path)).importable()
    assert sys.path == [str(tmp_path), "installed"]
    core = ModuleType("megatron.core")
    core.__file__ = "/installed/megatron/core/__init__.py"
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    with pytest.raises(ImportError, match="megatron.core was imported from /installed/megatron/core before"):
        checkout.must_lie_in("megatron.core", str(tmp_path))
    core.__file__ = str(tmp_path / "megatron" / "core" / "__init__.py")
    checkout.must_lie_in("megatron.core", str(tmp_path))


def test_each_group_of_heads_and_each_tp_ranks_part_of_the_gated_layer_is_a_block() -> None:
    fused = ADAPTER.fused(case(ParallelDims(tp=2), model=ModelConfig(n_layers=1, n_heads=4, n_kv_heads=2)))
    short = {name: [part.split(".")[-2] for part in parts] for name, parts in fused.items()}
    assert short == {
        "layers.0.attention.wqkv.weight": ["wq", "wk", "wv"] * 2,
        "layers.0.feed_forward.w13.weight": ["w1", "w3"] * 2,
    }


def test_its_names_are_the_references_with_or_without_its_wrapper() -> None:
    named = (
        "module.decoder.layers.3.mlp.linear_fc2.weight",
        "embedding.word_embeddings.weight",
        "module",
        "decoder.layers.0",
        "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    )
    assert [ADAPTER.fqn(name) for name in named] == [
        "layers.3.feed_forward.w2.weight",
        "tok_embeddings.weight",
        "",
        "layers.0",
        "optimizer.state.exp_avg.layers.1.ffn_norm.weight",
    ]


def test_without_psutil_a_checkpoint_that_would_be_waited_for_for_ever_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron, "_missing_text", lambda _: "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    saving = case(ParallelDims(tp=2), last_step=2)
    assert (ADAPTER.unsupported(saving) or "").startswith("checkpoints: psutil is not installed")
    assert ADAPTER.unsupported(case(ParallelDims(tp=2))) is None


def test_a_tensor_parallel_rank_lays_its_own_blocks_of_fused_weights_into_its_vector() -> None:
    tp = case(ParallelDims(dp_shard=2, tp=2), model=ModelConfig(n_layers=1, n_heads=4, n_kv_heads=4))
    order = [[part.split(".")[-2] for part in parts] for parts in ADAPTER.traits(tp).zero_layout.order]
    assert [parts for parts in order if len(parts) > 1] == [["wq", "wk", "wv"] * 2, ["w1", "w3"]]


@pytest.mark.skipif(not THERE, reason="megatron-core is not installed")
@pytest.mark.parametrize("name", ["zero1_2_tp_2", "zero1_2_pp_2_tp_2"])
def test_the_distributed_optimizer_of_tensor_parallel_ranks_of_the_real_one_passes_every_check(
    name: str, tmp_path: Path
) -> None:
    (wanted,) = (case for case in load_cases(CASES / "distributed_optimizer.yaml") if case.name == name)
    assert run_case(wanted, Options(out=tmp_path, trainer="megatron")).verdict is Verdict.PASS


@pytest.mark.skipif(not THERE, reason="megatron-core is not installed")
@pytest.mark.parametrize("fault", [None, "parameters_not_gathered"])
def test_parameters_gathered_in_the_next_forward_pass_of_the_real_one_pass_every_check_and_if_not_that_is_named(
    fault: str | None, tmp_path: Path
) -> None:
    overlapping = tmp_path / "overlapping.py"
    overlapping.write_text(
        "from harness.adapters.megatron import Megatron\n"
        "adapter = Megatron(overlap_grad_reduce=True, overlap_param_gather=True)\n"
    )
    (wanted,) = (case for case in load_cases(CASES / "distributed_optimizer.yaml") if case.name == "zero1_2")
    put_in = f"{Path(faults.__file__).parent / 'megatron.py'}:{fault}" if fault else None
    found = run_case(wanted, Options(out=tmp_path, trainer=str(overlapping), fault=put_in))
    if fault is None:
        assert found.verdict is Verdict.PASS
    else:
        assert found.diagnosis is not None and found.diagnosis.kinds == ("parameters not gathered",)


@pytest.mark.skipif(not THERE, reason="megatron-core is not installed")
def test_stages_of_tensor_parallel_ranks_of_the_real_one_pass_every_check(tmp_path: Path) -> None:
    judged = run_case(find_case("pp_2_tp_2", load_all()), Options(out=tmp_path, trainer="megatron"))
    assert judged.verdict is Verdict.PASS
    (memory,) = (result for result in judged.results if result.check == "memory")
    assert memory.note == "allow: [{what: kept, bytes: 131072, reason: the global memory buffer of megatron.core}]"
