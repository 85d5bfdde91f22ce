"""The torchtitan adapter, as far as it goes without torchtitan; and with it, where a checkout is named.

TORCHTITAN_REPO=/path/to/pytorch/torchtitan runs the real one at the commit before issue 711 and at the last one that has it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.adapters.torchtitan import source
from harness.adapters.torchtitan.job_config import configure_job, stages
from harness.core import trainers
from harness.core.case.case import Case, Saved
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.traits import with_trainer_choices
from harness.core.plan.units import fsdp_units
from harness.reference.config import ModelConfig, RopeScaling, TrainingConfig

FSDP = ParallelDims(dp_shard=4)


def case(dims: ParallelDims = FSDP, **parts: object) -> Case:
    return Case("any", "a test", dims, **parts)  # type: ignore[arg-type]


def test_where_it_is_missing_the_reason_says_how_to_get_it(tmp_path: Path) -> None:
    adapter = trainers.load_adapter(f"torchtitan@{tmp_path}")
    assert adapter.unsupported(case()) == (
        f"{tmp_path}/torchtitan: no torchtitan there; `make titan` prepares an environment with it, or give --source a"
        " checkout of pytorch/torchtitan"
    )


def test_a_trainer_without_other_sources_refuses_one() -> None:
    with pytest.raises(ValueError, match="trainer llama3 has no other sources; leave out @/x"):
        trainers.load_adapter("llama3@/x")


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        (case(ParallelDims(cp=2)), "cp 2: not asked of this early torchtitan by this adapter"),
        (case(ParallelDims(pp=2)), None),
        (
            case(features=Features(accumulation=2)),
            "accumulation 2: this early torchtitan has no such option",
        ),
        (
            case(training=TrainingConfig(optimizer="sgd")),
            "optimizer sgd: this early torchtitan has no such option",
        ),
        (
            case(model=ModelConfig(tied_embeddings=True)),
            "tied_embeddings True: the model of this early torchtitan has no such option",
        ),
        (
            case(ParallelDims(dp_replicate=2, tp=2)),
            "dp_replicate 2 x tp 2: torchtitan's DDP takes one axis only",
        ),
        (case(), None),
    ],
)
def test_what_is_not_requested_of_it_has_a_reason(checkout: Path, requested: Case, reason: str | None) -> None:
    assert trainers.load_adapter(f"torchtitan@{checkout}").unsupported(requested) == reason


@pytest.mark.parametrize(
    "requested",
    [
        case(ParallelDims(pp=2, dp_shard=2), features=Features(schedule="ZBVZeroBubble")),
        case(ParallelDims(cp=2), features=Features(cp_rotation="alltoall")),
        case(training=TrainingConfig(dtype="float32", compute_dtype="bfloat16")),
    ],
)
def test_releases_of_2025_have_pipelines_context_parallel_and_other_dtypes(
    release_of_2025: Path, requested: Case
) -> None:
    assert trainers.load_adapter(f"torchtitan@{release_of_2025}").unsupported(requested) is None


def test_who_balances_context_parallel_is_an_option_since_0_2_2(release_of_2025: Path) -> None:
    adapter, unbalanced = trainers.load_adapter(f"torchtitan@{release_of_2025}"), Features(cp_load_balance=False)
    reason = "cp_load_balance False: this torchtitan of 2025 has no such option"
    assert adapter.unsupported(case(ParallelDims(cp=2), features=unbalanced)) == reason
    (release_of_2025 / "torchtitan" / "config").mkdir()
    (release_of_2025 / "torchtitan" / "config" / "job_config.py").write_text(
        "class Parallelism:\n    context_parallel_load_balancer: str"
    )
    assert adapter.unsupported(case(ParallelDims(cp=2), features=unbalanced)) is None


def test_a_pipeline_is_cut_as_the_plan_cuts_it() -> None:
    requested = case(ParallelDims(pp=2), model=ModelConfig(n_layers=3))
    assert stages(requested) == [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "output"]]


def test_an_option_is_left_out_where_another_took_its_place() -> None:
    """torchtitan of 2025-07-30 to 2025-10-13 has both, and refuses whoever gives the older one."""
    older, both = SimpleNamespace(pipeline_parallel_split_points=[]), SimpleNamespace()
    both.pipeline_parallel_split_points, both.module_fqns_per_model_part = [], None
    for parallelism in (older, both):
        configure_job(SimpleNamespace(parallelism=parallelism), case(ParallelDims(pp=2), model=ModelConfig(n_layers=2)))
    assert vars(older) == {"pipeline_parallel_split_points": ["layers.1"]}
    assert vars(both) == {
        "pipeline_parallel_split_points": [],
        "module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]],
    }


def test_its_own_choices_are_the_plans(checkout: Path) -> None:
    adapter = trainers.load_adapter(f"torchtitan@{checkout}")
    assert adapter.traits(case(ParallelDims(dp_replicate=2))).wrapper == "replicate"
    root, *blocks = fsdp_units(case(), adapter.traits(case()))
    assert (root.parameters, root.degree) == (("tok_embeddings.weight", "norm.weight", "output.weight"), 4)
    assert [block.degree for block in blocks] == [4, 1]


def test_every_label_of_an_all_valid_recipe_counts() -> None:
    from harness.reference.data import IGNORED, build_dataset

    recipe = TrainingConfig(all_valid=True)
    masked, whole = (build_dataset(r, ModelConfig()) for r in (dataclasses.replace(recipe, all_valid=False), recipe))
    assert all(bool((whole[i][1] != IGNORED).all()) for i in range(16))
    assert any(bool((masked[i][1] == IGNORED).any()) for i in range(16))
    assert all(bool((masked[i][0] == whole[i][0]).all()) for i in range(16)), "the tokens are the same"


def test_who_replicates_in_2026_is_read_from_the_sources(release: Path) -> None:
    adapter, replicas = trainers.load_adapter(f"torchtitan@{release}"), case(ParallelDims(dp_replicate=2))
    (release / "torchtitan" / "trainer.py").write_text("")
    assert adapter.traits(replicas).wrapper == "replicate"
    parallelize = release / "torchtitan" / "models" / "llama3" / "parallelize.py"
    for words in ("apply_replicate(model)", "apply_fsdp(model)", "apply_fsdp_to_decoder(model)"):
        parallelize.write_text(f"def parallelize_llama(model):\n    {words}\n")
        assert adapter.traits(replicas).wrapper == "fsdp2"
        assert adapter.unsupported(replicas) is None


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        (case(features=Features(accumulation=2)), None),
        (case(ParallelDims(), features=Features(accumulation=2)), None),
        (case(ParallelDims(pp=2), features=Features(accumulation=2)), None),
        (case(features=Features(accumulation=2, defer_sync=False)), None),
        (case(training=TrainingConfig(dtype="float32")), None),
        (case(ParallelDims(cp=2), features=Features(activation_checkpointing="op")), None),
        (
            case(ParallelDims(cp=2), training=TrainingConfig(document_mask=True)),
            "document_mask with cp: torchtitan 0.3.0 cuts masks along the sequence, which this adapter does not pass on",
        ),
        (
            case(training=TrainingConfig(quantize="float8_rowwise")),
            "quantize float8_rowwise: torchtitan 0.3.0 emulates it on CPUs with one scale a tensor; see"
            " upstream_bugs/torchtitan_float8_emulation.py",
        ),
        (
            case(training=TrainingConfig(quantize="mxfp8")),
            "quantize mxfp8: torchtitan 0.3.0 refuses that but on GPUs of compute capability 10",
        ),
        (case(training=TrainingConfig(document_mask=True)), None),
        (case(features=Features(fsdp_units="observed")), None),
        (case(ParallelDims(tp=2), model=ModelConfig(tied_embeddings=True)), None),
        (case(model=ModelConfig(tied_embeddings=True, rope_scaling=RopeScaling())), None),
        (case(training=TrainingConfig(decay="matrices")), None),
        (case(ParallelDims(tp=2)), None),
        (case(ParallelDims(dp_replicate=2)), None),
        (case(ParallelDims(pp=2, dp_shard=2, cp=2, tp=2), features=Features(activation_checkpointing="full")), None),
    ],
)
def test_what_is_not_requested_of_0_3_0_has_a_reason(release: Path, requested: Case, reason: str | None) -> None:
    assert trainers.load_adapter(f"torchtitan@{release}").unsupported(requested) == reason


def test_the_newest_lays_samples_end_to_end_and_cuts_no_sequence(release: Path) -> None:
    (release / "torchtitan" / "trainer.py").write_text("class Trainer:\n    num_pp_microbatches: int\n")
    found = source.find_source(str(release))
    assert found.era.flat
    sequences = release / "torchtitan" / "distributed" / "context_parallel" / "api.py"
    sequences.parent.mkdir(parents=True)
    sequences.write_text("parallelism.spmd_backend\n")
    assert trainers.load_adapter(f"torchtitan@{release}").unsupported(case(ParallelDims(cp=2))) == (
        "cp 2: this torchtitan since 2026-08-20 does that with spmd_types, whose parameters fully_shard of torch 2.13 refuses"
    )
    staged = case(ParallelDims(pp=2, dp_replicate=2, dp_shard=2, tp=2))
    assert trainers.load_adapter(f"torchtitan@{release}").unsupported(staged) is None


def test_with_a_torch_that_starts_its_default_backend_sequences_are_cut_as_one_row(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source.importlib.metadata, "version", lambda _: "2.15.0")
    (release / "torchtitan" / "trainer.py").write_text("class Trainer:\n    num_pp_microbatches: int\n")
    sequences = release / "torchtitan" / "distributed" / "context_parallel" / "api.py"
    sequences.parent.mkdir(parents=True)
    sequences.write_text("parallelism.spmd_backend\n")
    adapter = trainers.load_adapter(f"torchtitan@{release}")
    cut = case(ParallelDims(cp=2))
    assert adapter.unsupported(cut) is None
    assert (adapter.traits(cut).cp_gathers, adapter.traits(cut).cp_cuts_rows) == (True, True)
    assert "no mask of" in str(adapter.unsupported(case(ParallelDims(cp=2), features=Features(accumulation=8))))
    tied = ModelConfig(tied_embeddings=True)
    failing = adapter.traits(case(model=tied)).expected_failure
    stale = adapter.traits(case(model=dataclasses.replace(tied, vocab_size=259))).expected_failure
    assert failing is not None and failing.checks == "memory placements reshard traffic"
    assert stale is not None and "gradients" in stale.checks
    assert "tp 2" in str(adapter.unsupported(case(ParallelDims(tp=2), model=ModelConfig(vocab_size=259))))


def test_context_parallel_is_an_option_of_2024_since_there_is_one(checkout: Path) -> None:
    options = checkout / "torchtitan" / "config_manager.py"
    options.write_text('parser.add_argument("--experimental.context_parallel_degree", type=int)\n')
    assert trainers.load_adapter(f"torchtitan@{checkout}").unsupported(case(ParallelDims(cp=2))) is None


def test_pipelines_of_2024_are_asked_where_torch_finds_out_what_stages_exchange(checkout: Path) -> None:
    adapter, staged = trainers.load_adapter(f"torchtitan@{checkout}"), case(ParallelDims(pp=2))
    assert adapter.unsupported(staged) is None
    stages = checkout / "torchtitan" / "parallelisms" / "pipeline_llama.py"
    stages.parent.mkdir()
    stages.write_text("PipelineStage(model, output_args=output)\n")
    assert adapter.unsupported(staged) == (
        "pp 2: this early torchtitan tells stages what they exchange by tensors without gradients, and torch 2.13 then sends"
        " none back"
    )


def test_sequence_parallel_can_be_left_out_where_that_is_an_option(release: Path) -> None:
    whole = case(ParallelDims(tp=2), features=Features(sequence_parallel=False))
    adapter = trainers.load_adapter(f"torchtitan@{release}")
    assert adapter.unsupported(whole) == "sequence_parallel False: torchtitan 0.3.0 has no such option"
    (release / "torchtitan" / "config").mkdir()
    (release / "torchtitan" / "config" / "configs.py").write_text(
        "class ParallelismConfig:\n    enable_sequence_parallel: bool = True\n"
    )
    assert adapter.unsupported(whole) is None
    expected = adapter.traits(whole).expected_failure
    assert expected is not None
    assert expected.checks == "traffic"


def test_sgd_is_added_where_its_container_looks_optimizers_up(release: Path) -> None:
    adapter, plain = trainers.load_adapter(f"torchtitan@{release}"), case(training=TrainingConfig(optimizer="sgd"))
    assert adapter.unsupported(plain) == "optimizer sgd: torchtitan 0.3.0 has no such option"
    container = release / "torchtitan" / "components" / "optimizer" / "optimizer.py"
    container.parent.mkdir(parents=True)
    container.write_text("class OptimizersContainer:\n    def _resolve_optimizer_factory(name: str): ...\n")
    assert adapter.unsupported(plain) is None
    assert any(told.startswith("optimizer: torch's SGD") for told in adapter.replaced(plain, "cpu"))


def test_a_tied_weight_under_tp_fails_as_its_script_shows(release: Path) -> None:
    adapter, tied = trainers.load_adapter(f"torchtitan@{release}"), ModelConfig(tied_embeddings=True)
    dims = (ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2))
    found = [adapter.traits(case(one, model=tied)).expected_failure for one in dims]
    assert [one and one.checks for one in found] == ["memory placements", "memory placements reshard traffic"]
    assert adapter.traits(case(ParallelDims(dp_shard=2), model=tied)).expected_failure is None


@pytest.mark.parametrize(
    ("torch_release", "dims", "chosen", "why"),
    [
        ("2.13.0+cpu", FSDP, None, "torch 2.13 cannot shard its parameters"),
        ("2.15.0", FSDP, None, ""),
        ("2.15.0", ParallelDims(cp=2), None, "which does context parallel with FlexAttention only"),
        ("2.13.0", FSDP, "full_dtensor", ""),
    ],
)
def test_another_backend_stands_in_for_the_default_only_where_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, torch_release: str, dims: ParallelDims, chosen: str | None, why: str
) -> None:
    monkeypatch.setattr(source.importlib.metadata, "version", lambda _: torch_release)
    assert source.why_not_spmd_types(case(dims), chosen) == why


def test_positions_begin_anew_after_every_separator() -> None:
    from harness.adapters.torchtitan.data_loader import document_positions

    assert document_positions(torch.tensor([[5, 0, 7, 8, 0, 0, 9]])).tolist() == [[0, 1, 0, 1, 2, 0, 0]]


def test_names_of_0_3_0_are_told_in_the_references_spelling(release: Path) -> None:
    adapter = trainers.load_adapter(f"torchtitan@{release}")
    theirs = ["lm_head.weight", "layers.0.attention.qkv_linear.wk.weight", "layers.1.feed_forward.w1.weight", ""]
    assert [adapter.fqn(name) for name in theirs] == [
        "output.weight",
        "layers.0.attention.wk.weight",
        "layers.1.feed_forward.w1.weight",
        "",
    ]


def test_0_3_0_has_its_way_with_what_a_case_leaves_open(release: Path) -> None:
    adapter = trainers.load_adapter(f"torchtitan@{release}")
    assert adapter.traits(case(ParallelDims(dp_replicate=2))).wrapper == "fsdp2"
    assert adapter.traits(case(ParallelDims(tp=2))).wrapper == "fsdp2"
    traits = adapter.traits(case(ParallelDims(cp=2)))
    assert (traits.wrapper, traits.cp_heads, traits.ac_early_stop) == (None, "key_value", False)


def test_earlier_launches_have_its_choices_too(release: Path) -> None:
    saved = Saved(after=1, dims=ParallelDims(dp_replicate=2), features=Features())
    requested = case(resume=(saved,))
    chosen = trainers.traits_by_launch(requested, f"torchtitan@{release}")
    assert [launched.wrapper for launched in requested.launches.values()] == ["ddp", "fsdp2"]
    assert [launched.wrapper for launched in with_trainer_choices(requested, chosen).launches.values()] == [
        "fsdp2",
        "fsdp2",
    ]
    assert chosen["saved_1"].ac_early_stop is False


def test_what_an_earlier_launch_gets_wrong_is_expected_of_the_whole_case(release: Path) -> None:
    saved = Saved(after=1, dims=ParallelDims(tp=2), features=Features(sequence_parallel=False))
    expected = trainers.load_adapter(f"torchtitan@{release}").traits(case(resume=(saved,))).expected_failure
    assert expected and (expected.checks, expected.named) == ("traffic", "traffic of no plan")


RESUMED = case(resume=(Saved(after=1, dims=FSDP, features=Features()),))


def test_checkpoints_are_requested_of_0_3_0(release: Path) -> None:
    assert trainers.load_adapter(f"torchtitan@{release}").unsupported(RESUMED) is None


def test_a_loader_of_another_dp_degree_goes_on_with_the_next_step() -> None:
    from harness.adapters.torchtitan.data_loader import Samples

    requested = case(training=TrainingConfig(global_batch=4, steps=3))
    before, whole = Samples(requested, 2, 1, lambda: None), Samples(requested, 1, 0, lambda: None)
    next(iter(before))
    whole.load_state_dict(before.state_dict())
    third = list(Samples(requested, 1, 0, lambda: None))[-1]
    assert before.state_dict() == {"step": 1}
    assert bool((list(whole)[-1][0] == third[0]).all())


def test_what_a_model_of_its_own_rounds_is_noise_like_that_of_cut_products(release: Path) -> None:
    adapter, recipe = trainers.load_adapter(f"torchtitan@{release}"), case(training=TrainingConfig(dtype="float32"))
    assert (recipe.noise_key, adapter.traits(recipe).noise_key(recipe)) == ("float32 shares", "float32 parts")


def test_no_checkpoints_are_requested_of_older_ones(middle: Path) -> None:
    reason = "resume: this adapter does not let this torchtitan of 2025 write checkpoints"
    assert trainers.load_adapter(f"torchtitan@{middle}").unsupported(RESUMED) == reason
