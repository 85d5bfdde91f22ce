"""What a job's own file says of a layout is read; what it leaves open is asked for, never guessed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness.clusters.request import Request
from harness.core.case.case import Case, CaseError
from harness.core.case.dims import ParallelDims
from harness.core.cli import main
from harness.core.plan.make_plan import make_plan

TITAN = """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""
SIXTEEN = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_machines: 2\nnum_processes: 16\n"
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.5,
}
EIGHT_B = 8_030_261_248
RECIPE = """
def model():
    return run.Config(LlamaModel, config=run.Config(Llama3Config70B))

def trainer(tensor_parallelism=4, pipeline_parallelism=4, virtual_pipeline_parallelism=5, num_nodes=4, gpus=8):
    plugins = bf16_mixed()
    return run.Config(
        Trainer,
        devices=8,
        num_nodes=num_nodes,
        strategy=run.Config(
            Strategy,
            tensor_model_parallel_size=tensor_parallelism,
            pipeline_model_parallel_size=pipeline_parallelism,
            virtual_pipeline_model_parallel_size=virtual_pipeline_parallelism,
            context_parallel_size=2,
            sequence_parallel=True,
        ),
    )

def pretrain_recipe(num_nodes=4):
    data = run.Config(Data, seq_length=4096, global_batch_size=64, micro_batch_size=1)
    return run.Partial(pretrain, model=model(), trainer=trainer(num_nodes=num_nodes), data=data)

def finetune_recipe():
    recipe = pretrain_recipe()
    recipe.trainer.strategy.tensor_model_parallel_size = 8
    return recipe
"""
NEMO = """
trainer: {devices: 8, num_nodes: 4, precision: bf16}
model:
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 5
  context_parallel_size: 2
  sequence_parallel: true
  micro_batch_size: 1
  global_batch_size: 64
  encoder_seq_length: 4096
  num_layers: 80
  hidden_size: 8192
  ffn_hidden_size: 28672
  num_attention_heads: 64
  activations_checkpoint_granularity: full
"""


def case(folder: Path, name: str, text: str, **more: object) -> Case:
    (folder / name).write_text(text)
    return Request(dims=str(folder / name), **more).build_case()  # type: ignore[arg-type]


def test_a_shard_degree_of_minus_1_is_the_rest_of_the_world_that_an_option_says(tmp_path: Path) -> None:
    found = case(tmp_path, "some.toml", TITAN, world=512)
    assert (found.dims, found.model.name) == (ParallelDims(dp_shard=64, tp=8), "70B")
    assert (found.training.seq_len, found.local_batch) == (4096, 2)
    assert found.features.activation_checkpointing == "full"


def test_degrees_of_a_file_that_are_all_there_are_its_world(tmp_path: Path) -> None:
    found = case(tmp_path, "some.toml", TITAN.replace("shard_degree = -1", "shard_degree = 4"))
    assert found.dims == ParallelDims(dp_shard=4, tp=8)


def test_options_take_precedence_over_a_file(tmp_path: Path) -> None:
    found = case(tmp_path, "some.toml", TITAN, world=16, model="8B", seq=512, checkpointing="none", batch=8)
    assert (found.model.name, found.training.seq_len, found.training.global_batch) == ("8B", 512, 8)
    assert found.features.activation_checkpointing == "none"


@pytest.mark.parametrize(
    ("more", "dims"),
    [
        ("", ParallelDims(dp_shard=16)),
        (
            "fsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: HYBRID_SHARD}",
            ParallelDims(dp_replicate=2, dp_shard=8),
        ),
        (
            "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 4}",
            ParallelDims(dp_shard=4, tp=4),
        ),
    ],
)
def test_accelerates_file_is_of_its_processes(more: str, dims: ParallelDims, tmp_path: Path) -> None:
    text = SIXTEEN.replace("fsdp_config: {fsdp_version: 2}\n", "") if "fsdp_config" in more else SIXTEEN
    assert case(tmp_path, "some.yaml", text + more, model="8B").dims == dims


@pytest.mark.parametrize(
    ("said", "computed", "reduced"), [("bf16", "bfloat16", "bfloat16"), ("'no'", None, None), (None, None, None)]
)
def test_its_precision_is_the_plans(
    said: str | None, computed: str | None, reduced: str | None, tmp_path: Path
) -> None:
    found = case(tmp_path, "some.yaml", SIXTEEN + (f"mixed_precision: {said}" if said else ""), model="8B")
    assert (found.training.dtype, found.training.compute_dtype) == ("float32", computed)
    assert found.features.reduce_dtype == reduced


def test_deepspeeds_three_numbers_of_samples_say_how_many_ranks_there_are(tmp_path: Path) -> None:
    found = case(tmp_path, "some.json", json.dumps(DEEPSPEED), model="8B")
    assert (found.dims, found.wrapper) == (ParallelDims(dp_shard=8), "zero2")
    assert (found.local_batch, found.features.accumulation, found.training.max_norm) == (2, 4, 0.5)
    assert found.training.compute_dtype == "bfloat16"


def test_accelerates_file_with_deepspeed_has_its_stage(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 16\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3}"
    found = case(tmp_path, "some.yaml", text, model="8B")
    assert (found.dims, found.wrapper) == (ParallelDims(dp_shard=16), "zero3")


@pytest.mark.parametrize(("name", "text"), [("some.py", RECIPE), ("some.yaml", NEMO)])
def test_nemos_degrees_are_those_of_its_recipe_and_of_its_file(name: str, text: str, tmp_path: Path) -> None:
    found = case(tmp_path, name, text, seq=4096)
    assert (found.dims, found.model.name) == (ParallelDims(pp=4, cp=2, tp=4), "70B")
    assert (found.stages_per_rank, found.features.schedule, found.microbatches) == (5, "Interleaved1F1B", 64)
    assert (found.wrapper, found.training.compute_dtype) == ("zero1", "bfloat16")


@pytest.mark.parametrize(
    ("name", "text", "options", "asked"),
    [
        ("some.toml", TITAN, {}, "--world"),
        ("some.toml", TITAN, {"world": 12}, "12"),
        ("some.toml", TITAN.replace("70B", "671B"), {"world": 512}, "--model"),
        ("some.toml", TITAN.replace("llama3", "deepseek_v3"), {"world": 512}, "--model"),
        ("some.toml", "training = 3", {"world": 512}, "some.toml"),
        ("some.yaml", SIXTEEN, {}, "--model"),
        ("some.yaml", SIXTEEN.replace("num_processes: 16", ""), {"model": "8B"}, "--world"),
        (
            "some.yaml",
            SIXTEEN + "parallelism_config: {parallelism_config_tp_size: 4}",
            {"model": "8B", "world": 16},
            "16",
        ),
        ("some.yaml", "cases: {}", {"model": "8B"}, "some.yaml"),
        ("some.json", json.dumps(DEEPSPEED), {}, "--model"),
        ("some.json", json.dumps(DEEPSPEED | {"train_batch_size": "auto"}), {"model": "8B"}, "--world"),
        ("some.json", json.dumps(DEEPSPEED), {"model": "8B", "world": 16}, "16"),
        ("some.json", json.dumps({"a": 1}), {"model": "8B"}, "some.json"),
        ("some.json", "[1", {"model": "8B"}, "some.json"),
        ("some.py", RECIPE.replace("num_nodes=num_nodes,", ""), {"world": 33}, "33"),
        (
            "some.py",
            RECIPE.replace("context_parallel_size=2", "context_parallel_size=find()"),
            {},
            "context_parallel_size",
        ),
        ("some.py:finetune_recipe", RECIPE, {}, "some.py"),
        ("some.py", "x = (", {"model": "8B"}, "some.py"),
        ("some.py", "x = 1", {"model": "8B"}, "some.py"),
    ],
)
def test_what_a_file_leaves_open_is_asked_for(
    name: str, text: str, options: dict[str, object], asked: str, tmp_path: Path
) -> None:
    (tmp_path / name.partition(":")[0]).write_text(text)
    with pytest.raises(CaseError, match=asked):
        Request(dims=str(tmp_path / name), **options).build_case()  # type: ignore[arg-type]


def test_a_file_that_leaves_its_world_open_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.toml").write_text(TITAN)
    assert main(["plan", "--dims", str(tmp_path / "some.toml")]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    assert main(["plan", "--dims", str(tmp_path / "some.toml"), "--world", "512"]) == 0


def test_stages_of_a_rank_can_be_asked_for() -> None:
    found = Request(dims="pp=4,dp_shard=2", model="8B", stages_per_rank=4).build_case()
    assert (found.n_stages, found.features.schedule) == (16, "Interleaved1F1B")


def test_megatrons_optimizer_cuts_its_state_over_cp_too_and_in_bfloat16_moves_2_bytes_a_parameter() -> None:
    case = Request(dims="dp_shard=2,cp=2", model="8B", wrapper="zero1").build_case()
    plan = make_plan(case)
    flows = {(flow.role, flow.op): flow.bytes for flow in plan.flows[0] if flow.axis == "dp_shard_cp"}
    elements = sum(math.prod(shape) for shape in case.model.parameter_shapes().values())
    assert flows == {("gradients", "reduce_scatter"): 4 * elements, ("parameters", "all_gather"): 2 * elements}
    assert plan.parameter_bytes[0][0] == 2 * elements and plan.state_bytes[0][0] == 4 * elements // 4


def test_fsdp1_gathers_in_the_dtype_that_it_computes_with() -> None:
    flows = make_plan(Request(dims="dp_shard=2", model="8B", wrapper="fsdp1").build_case()).flows[0]
    gathered = next(flow.bytes for flow in flows if (flow.op, flow.phase) == ("all_gather", "forward"))
    assert next(flow.bytes for flow in flows if flow.op == "reduce_scatter") == 2 * gathered


def test_where_cp_replicates_fsdp_shards_over_dp_shard_and_gradients_are_reduced_over_cp_too() -> None:
    apart = make_plan(Request(dims="dp_shard=4,cp=2", model="8B", cp_replicates=True).build_case())
    over = make_plan(Request(dims="dp_shard=4,cp=2", model="8B").build_case())
    assert (apart.shard_degree, over.shard_degree, apart.shard_axis) == (4, 8, "dp_shard")
    assert apart.parameter_bytes[0][0] == 2 * over.parameter_bytes[0][0]
    assert apart.slices[0] == apart.slices[1] != apart.slices[2]
    reduced = {(flow.axis, flow.op): flow.bytes for flow in apart.flows[0] if flow.role == "gradients"}
    assert reduced == {("dp_shard", "reduce_scatter"): 4 * EIGHT_B, ("cp", "all_reduce"): EIGHT_B}


def test_of_replicas_and_cp_together_gradients_are_reduced_over_both() -> None:
    plan = make_plan(Request(dims="dp_replicate=2,dp_shard=2,cp=2", model="8B", cp_replicates=True).build_case())
    assert plan.groups["dp_replicate_cp"] == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert [flow.bytes for flow in plan.flows[0] if flow.axis == "dp_replicate_cp"] == [2 * EIGHT_B]


@pytest.mark.parametrize("dims", ["dp_shard=4", "cp=4", "dp_replicate=2,cp=2"])
def test_cp_that_replicates_means_something_with_cp_and_shards_alone(dims: str) -> None:
    with pytest.raises(CaseError, match="shards_over_cp"):
        Request(dims=dims, model="8B", cp_replicates=True).build_case()
