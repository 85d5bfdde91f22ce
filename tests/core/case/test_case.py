"""Loading cases: what a person writes, and the whole answer to everything they can get wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import find_case, from_json, load_all, load_cases
from harness.core.case.named_case import load_case_named
from harness.reference.config import PRESETS, ModelConfig, TrainingConfig


def load(tmp_path: Path, text: str) -> list[Case]:
    (tmp_path / "a.yaml").write_text(text)
    return load_cases(tmp_path / "a.yaml")


def refusal(tmp_path: Path, text: str) -> str:
    """The message, with the file's folder cut off."""
    with pytest.raises(CaseError) as error:
        load(tmp_path, text)
    return str(error.value).replace(f"{tmp_path}/", "")


def one(case: str) -> str:
    """A file with one case `x` of these lines."""
    return "cases:\n  x:\n    why: because\n" + "".join(f"    {line}\n" for line in case.splitlines())


# ---- what is written is what one gets


def test_a_case_is_what_its_lines_and_the_defaults_say(tmp_path: Path) -> None:
    text = """
    defaults:
      why: everything
      training: {steps: 5, lr: 1.0e-3}
      features: {accumulation: 2}
    cases:
      hsdp_2x2:
        dims: {dp_replicate: 2, dp_shard: 2}
        world_size: 4
        training: {lr: 2}
      plain:
        why: nothing else
        runs: 2
    """
    training = TrainingConfig(steps=5, lr=1e-3)
    features, file = Features(accumulation=2), str(tmp_path / "a.yaml")
    assert load(tmp_path, text) == [
        Case(
            "hsdp_2x2",
            "everything",
            dims=ParallelDims(dp_replicate=2, dp_shard=2),
            training=dataclasses.replace(training, lr=2),
            features=features,
            file=file,
        ),
        Case("plain", "nothing else", training=training, features=features, runs=2, file=file),
    ]


def test_a_case_without_a_line_but_its_why_is_the_default(tmp_path: Path) -> None:
    assert load(tmp_path, one("")) == [Case("x", "because", file=str(tmp_path / "a.yaml"))]


@pytest.mark.parametrize(
    ("default", "own", "expected"),
    [
        ("8B", "{n_layers: 2}", dataclasses.replace(PRESETS["8B"], n_layers=2)),
        ("{preset: 8B, dim: 64}", "{n_layers: 2}", dataclasses.replace(PRESETS["8B"], dim=64, n_layers=2)),
        ("{n_layers: 3}", "8B", dataclasses.replace(PRESETS["8B"], n_layers=3)),
        ("8B", "debug", ModelConfig()),
        ("debug", "{rope_scaling: {factor: 32}}", None),
    ],
)
def test_a_model_named_by_preset_is_merged_with_overrides(tmp_path: Path, default: str, own: str, expected) -> None:
    text = f"defaults: {{model: {default}}}\ncases: {{x: {{why: because, model: {own}}}}}"
    (case,) = load(tmp_path, text)
    if expected is None:
        assert case.model.rope_scaling is not None and case.model.rope_scaling.factor == 32
    else:
        assert case.model == expected


CROSS = """
defaults: {why: because}
matrix:
- each:
    dp: {ddp: {dims: {dp_replicate: 2}}, fsdp: {dims: {dp_shard: 2}}}
    tp: {"": {}, _tp: {dims: {tp: 2}}}
    opt: {"": {}, _sgd: {training: {optimizer: sgd}}}
"""


def test_a_cross_product_has_a_case_per_combination(tmp_path: Path) -> None:
    cases = {case.name: case for case in load(tmp_path, CROSS)}
    assert list(cases) == [
        *("ddp", "ddp_sgd", "ddp_tp", "ddp_tp_sgd"),
        *("fsdp", "fsdp_sgd", "fsdp_tp", "fsdp_tp_sgd"),
    ]
    assert cases["fsdp_tp_sgd"].dims == ParallelDims(dp_shard=2, tp=2)
    assert cases["fsdp_tp_sgd"].training == TrainingConfig(optimizer="sgd")


def test_a_partial_exclusion_leaves_out_all_that_match(tmp_path: Path) -> None:
    text = CROSS + '  exclude: [{dp: ddp, tp: _tp}, {dp: fsdp, tp: "", opt: _sgd}]\n'
    assert [case.name for case in load(tmp_path, text)] == ["ddp", "ddp_sgd", "fsdp", "fsdp_tp", "fsdp_tp_sgd"]


def test_an_inclusion_adds_a_named_case_with_its_own_lines(tmp_path: Path) -> None:
    text = CROSS + "  include: [{dp: ddp, tp: _tp, opt: _sgd, name: odd, why: odd one, runs: 2}]\n"
    case = load(tmp_path, text)[-1]
    assert (case.name, case.why, case.runs) == ("odd", "odd one", 2)
    assert case.dims == ParallelDims(dp_replicate=2, tp=2)


def test_yaml_anchors_and_merges_may_be_used(tmp_path: Path) -> None:
    text = "cases:\n  x: &x\n    why: because\n    runs: 2\n  y:\n    <<: *x\n    runs: 1\n"
    x, y = load(tmp_path, text)
    assert (x.why, x.runs, y.why, y.runs) == ("because", 2, "because", 1)


def test_a_case_comes_back_from_json_as_it_was() -> None:
    for model in PRESETS.values():
        model = dataclasses.replace(model, tied_embeddings=False)
        case = Case("x", "because", ParallelDims(2, 2, 2, 1, 1), model, TrainingConfig(max_norm=None))
        case = dataclasses.replace(case, features=Features(reshard_after_forward=2))
        assert from_json(json.loads(json.dumps(to_json(case)))) == case


def test_what_follows_from_a_case() -> None:
    case = Case("x", "-", ParallelDims(dp_replicate=2, dp_shard=2, tp=2), features=Features(accumulation=2))
    assert (case.dims.world_size, case.dims.dp, case.local_batch, case.has_derived_bounds) == (8, 4, 2, True)
    assert str(case.dims) == "pp 1 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 2"
    assert not dataclasses.replace(case, features=Features(reduce_dtype="bfloat16")).has_derived_bounds
    assert not dataclasses.replace(case, training=TrainingConfig(dtype="float32")).has_derived_bounds


# ---- what a person gets wrong: a value

WRONG_LINES = {
    "resume: {after: 1}": "resume: expected a list (lines that begin with '-'), got {'after': 1}",
    "resume: [{dims: {tp: 2}}]": "resume: entry 1: 'after' is missing: the step after which that launch saves",
    "resume: [{after: 0}]": "resume: entry 1: after must be at least 1, got 0",
    "resume: [{after: 1, dim: {tp: 2}}]": "resume: entry 1: unknown key 'dim' (did you mean 'dims'?);"
    " known: after, dims, features, until, cut_short, model_only",
    "resume: [{after: 3}]": "resume: launches end after steps 3, 3; each must train at least one step",
    "resume: [{after: 2}, {after: 1}]": "resume: launches end after steps 2, 1, 3; each must train at least one step",
    "resume: [{after: 1, dims: {tp: 16}}]": "resume: saved_1: n_heads 8 is not divisible by tp 16;"
    " request a tp of 1, 2 or 4",
    "resume: [{after: 2, until: 2}]": "resume: entry 1: until must be above after 2, got 2",
    "resume: [{after: 2, cut_short: true}]": "resume: entry 1: cut_short needs until: the step after which"
    " the interrupted save begins",
    "resume: [{after: 1, model_only: true}, {after: 2}]": "resume: model_only is allowed in the last entry only",
    "resume: [{after: 4, model_only: true}]": "resume: after 4 is beyond the 3 steps of the recipe",
    "cut_short: true": "'cut_short' is not written in a case; for a checkpoint, `resume: [{after: STEP, dims: ..}]` lists"
    " the launches before it",
    "training: {last_batch: 16}": "training: last_batch 16: above 0 and below global_batch 16 is wanted",
    "dims: {dp_shard: 2}\nfeatures: {accumulation: 2}\ntraining: {last_batch: 12}": "last_batch 12 over 2 data ranks: neither"
    " one microbatch of at most 4 samples a rank, nor several of 4",
    "dims: {dp_shard: 2, tp: 2}\ntraining: {last_batch: 5}": "last_batch 5 is not divisible by 2 data ranks, and other axes are"
    " above 1",
    "dims: {pp: 2}\ntraining: {last_batch: 8}": "last_batch with pp 2: a schedule always cuts a batch in as many parts",
    "features: {async_save: true}": "async_save belongs in the features of an entry of `resume`; leave it out here",
    "resume: [{after: 1, until: 9}]": "resume: until 9 is beyond the 3 steps of the recipe",
    "saves_after: 2": "'saves_after' is not written in a case; for a checkpoint, `resume: [{after: STEP, dims: ..}]` lists"
    " the launches before it",
    "last_step: 2": "'last_step' is not written in a case; for a checkpoint, `resume: [{after: STEP, dims: ..}]` lists"
    " the launches before it",
    "dims: {dp_shrad: 2}": "dims: unknown key 'dp_shrad' (did you mean 'dp_shard'?);"
    " known: pp, dp_replicate, dp_shard, cp, tp",
    "dim: {tp: 2}": "unknown key 'dim' (did you mean 'dims'?);"
    " known: why, dims, model, training, features, runs, tier, expected_failure, resume, allow,"
    " traits, world_size",
    "training: {zzz: 1}": "training: unknown key 'zzz'; known: steps, seed, dtype, global_batch, seq_len, optimizer,"
    " lr, beta1, beta2, eps, weight_decay, warmup_steps, final_lr_fraction, max_norm, data, compute_dtype, quantize,"
    " tf32, variable_length, document_mask, masked_samples, all_valid, last_batch, decay, momentum, nesterov, adjust_lr,"
    " muon_matrices, trainable, rates",
    "training: {trainable: [layer.1.*]}": "trainable 'layer.1.*' fits no parameter;"
    " names are such as 'layers.0.attention.wq.weight'",
    "training: {trainable: [1]}": "training: trainable: entry 1: expected str, got 1; the default is None",
    "training: {trainable: []}": "trainable '' fits no parameter; names are such as 'layers.0.attention.wq.weight'",
    "model: {lora: {targets: [wz]}}": "model: lora: targets ['wz']: choose some of wq, wk, wv, wo, w1, w2, w3, each once",
    "model: {lora: {rank: 0}}": "model: lora: rank must be at least 1 and alpha positive, got rank 0, alpha 8.0",
    "model: {lora: {}}\ntraining: {trainable: [norm.weight]}": "lora: trainable ['norm.weight'] fits no adapter;"
    " add '*.lora_?.weight'",
    "dims: {dp_shard: 4}\nworld_size: 8": "pp 1 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 1 = 4 ranks,"
    " but world_size says 8",
    "dims: {tp: 16}": "n_heads 8 is not divisible by tp 16; request a tp of 1, 2 or 4",
    "dims: {tp: 8}": "n_kv_heads 4 is not divisible by tp 8; request a tp of 1, 2 or 4",
    "dims: {dp_replicate: 2, dp_shard: 2}\nfeatures: {accumulation: 3}": "global_batch 16 is not divisible by"
    " dp_replicate 2 x dp_shard 2 x accumulation 3 = 12; request 12 or 24",
    "dims: {tp: 4}\ntraining: {seq_len: 30}": "seq_len 30 is not divisible by cp 1 x tp 4 (sequence parallel);"
    " request 28 or 32",
    "dims: {tp: 4}\ntraining: {seq_len: 36, variable_length: true}": "seq_len 18 of every second step is not divisible by"
    " cp 1 x tp 4 (sequence parallel); request 32 or 40",
    "dims: {pp: 4}": "pp 4 x stages_per_rank 1 = 4 stages, but the model has only 2 layers;"
    " request n_layers 4 or more, or fewer stages",
    "dims: {pp: 4}\nfeatures: {last_stage_less_layers: 1}": "pp 4 x stages_per_rank 1 = 4 stages,"
    " but the model has only 2 layers, and 1 that its ends have less; request n_layers 3 or more, or fewer stages",
    "dims: {pp: 2}\nfeatures: {first_stage_less_layers: 3}": "first_stage_less_layers 3: an even share of 2 layers,"
    " and 3 that its ends have less, over 2 stages is 2",
    "features: {first_stage_less_layers: -1}": "features: first_stage_less_layers must be at least 0, got -1",
    "features: {last_stage_less_layers: 1}": "last_stage_less_layers 1 means nothing with pp 1; leave it out",
    "dims: {tp: 2.0}": "dims: tp: expected int, got 2.0; the default is 1",
    "dims: {tp: true}": "dims: tp: expected int, got True; the default is 1",
    "dims: {tp: 0}": "dims: tp must be a whole number of at least 1, got 0",
    "dims: [2]": "dims: expected a mapping of keys to values, got [2]",
    "training: {lr: 1e-3}": "training: lr: expected float, got '1e-3' (YAML reads 1e-3 as text: write 1.0e-3);"
    " the default is 0.003",
    "training: {optimizer: adam}": "training: optimizer 'adam': choose one of adamw, sgd, muon",
    "training: {steps: 0}": "training: steps must be at least 1, got 0",
    "training: {lr: .nan}": "training: lr must be at least 0 and below inf, got nan",
    "training: {beta1: 1.5}": "training: beta1 must be at least 0 and below 1, got 1.5",
    "training: {warmup_steps: -2}": "training: warmup_steps must be at least 0 and below inf, got -2",
    "training: {max_norm: .nan}": "training: max_norm must be positive, or null for no clipping, got nan",
    "features: {sequence_parallel: 1}": "features: sequence_parallel: expected bool, got 1; the default is True",
    "features: {reshard_after_forward: sometimes}": "features: reshard_after_forward 'sometimes':"
    " choose default, always, never or a number above 1",
    "training: {compute_dtype: fp8}": "training: compute_dtype 'fp8': choose one of null, float64, float32, bfloat16",
    "features: {schedule: GPipe}": "schedule 'GPipe' means nothing with pp 1; leave it out",
    "features: {wrapper: ddp}": "wrapper 'ddp' needs dp_replicate, dp_shard or cp above 1",
    "dims: {dp_shard: 2}\nfeatures: {wrapper: ddp}": "wrapper 'ddp' shards nothing, but dp_shard 2",
    "dims: {dp_replicate: 2}\nfeatures: {reshard_after_forward: never}": "reshard_after_forward is FSDP's, and this case"
    " has wrapper ddp; leave it out",
    "dims: {pp: 2, dp_shard: 2}\nmodel: {tied_embeddings: true}\nfeatures: {wrapper: zero1}": "wrapper 'zero1':"
    " tied_embeddings with pp 2: a weight in the vectors of two stages is not planned",
    "dims: {pp: 2}\nfeatures: {stages_per_rank: 2}\nmodel: {n_layers: 4}": "schedule 1F1B has one stage a rank, requested"
    " stages_per_rank 2",
    "dims: {dp_replicate: 2}\nfeatures: {accumulation: 2, defer_sync: all_reduce}": "defer_sync all_reduce is of HSDP: it takes"
    " wrapper fsdp2, dp_replicate and dp_shard above 1",
    "dims: {dp_shard: 2}\nfeatures: {accumulation: 2, defer_sync: all_reduce}": "defer_sync all_reduce is of HSDP: it takes"
    " wrapper fsdp2, dp_replicate and dp_shard above 1",
    "dims: {dp_shard: 2}\nfeatures: {defer_sync: all_reduce}": "defer_sync all_reduce means nothing with accumulation 1;"
    " leave it out",
    "features: {defer_sync: never}": "features: defer_sync 'never': choose true, false or all_reduce",
    "features: {accumulation: 0}": "features: accumulation must be at least 1, got 0",
    "model: 80B": "model: unknown preset '80B' (did you mean '8B'?); known: debug, 1B, 3B, 8B, 70B, 405B",
    "model: {preset: [8B]}": "model: unknown preset ['8B'] (did you mean '8B'?); known: debug, 1B, 3B, 8B, 70B, 405B",
    "model: {dim: 60}": "model: dim 60 is not divisible by n_heads 8: it is n_heads * head_dim",
    "model: {n_heads: 0}": "model: n_heads must be at least 1, got 0",
    "model: {rope_scaling: {fcator: 8}}": "model: rope_scaling: unknown key 'fcator' (did you mean 'factor'?);"
    " known: factor, low_freq_factor, high_freq_factor, original_max_position",
    "runs: 3": "runs must be 1, or 2 to compare a repeat, got 3",
    "runs: true": "runs must be 1, or 2 to compare a repeat, got True",
    "name: y": "'name' is not written in a case: its key is its name",
}


@pytest.mark.parametrize("lines", WRONG_LINES)
def test_a_wrong_line_is_answered_with_file_case_key_and_remedy(tmp_path: Path, lines: str) -> None:
    assert refusal(tmp_path, one(lines)) == f"a.yaml: case 'x': {WRONG_LINES[lines]}"


# ---- what a person gets wrong: a file

WHY = "'why' is missing: one sentence that says what this case is here to catch"
LETTERS = "a name is made of letters, digits and underscores, so that `pytest -k` takes it"
MAPPING = "expected a mapping with 'cases:' or 'matrix:' at the top level"
EACH = "matrix:\n- each: {dp: {ddp: {why: because}}}\n"
WRONG_FILES = {
    "": MAPPING,
    "- a": MAPPING,
    "cases: {}": "no case in it; add one under 'cases:' or a cross product under 'matrix:'",
    "case: {x: {}}": "top level: unknown key 'case' (did you mean 'cases'?); known: defaults, cases, matrix",
    "cases: [x]": "cases: expected a mapping of keys to values, got ['x']",
    "cases: {x: 3}": "case 'x': expected a mapping of keys to values, got 3",
    "defaults: 3\ncases: {x: {why: because}}": "defaults: expected a mapping of keys to values, got 3",
    "cases: {x: }": f"case 'x': {WHY}",
    "cases: {x: {why: 5}}": f"case 'x': {WHY}",
    "cases: {tp-2: {why: because}}": f"case 'tp-2': {LETTERS}",
    "cases: {2: {why: because}}": f"case 2: {LETTERS}",
    "cases:\n  x: {why: a}\n  x: {why: b}\n": "not valid YAML: line 3: key 'x' is written twice",
    "cases:\n  x:\n    why: a\n    dims: {tp: 2, tp: 4}\n": "not valid YAML: line 4: key 'tp' is written twice",
    "defaults: &a {}\ncases:\n  x:\n    <<: *a\n    <<: *a\n": "not valid YAML: line 5: key '<<' is written twice;"
    " one list merges several: <<: [*first, *second]",
    "cases: {x: {why: a, model: {norm_eps: -1.0}}}": "case 'x': model: norm_eps must be positive and finite, got -1.0",
    "cases: {x: {why: a, model: {norm_eps: 0.0}}}": "case 'x': model: norm_eps must be positive and finite, got 0.0",
    "cases: {x: {why: a, model: {norm_eps: .nan}}}": "case 'x': model: norm_eps must be positive and finite, got nan",
    "cases: {x: {why: a, model: {norm_eps: true}}}": "case 'x': model: norm_eps: expected float, got True;"
    " the default is 1e-05",
    "cases: {x: {why: a, model: {rope_theta: .inf}}}": "case 'x': model: rope_theta must be positive and finite, got inf",
    "cases: {x: {why: a, model: {rope_scaling: {factor: 0}}}}": "case 'x': model: rope_scaling: factor must be positive"
    " and finite, got 0",
    "cases: {x: {why: a, training: {max_norm: .inf}}}": "case 'x': training: max_norm must be positive, or null for no"
    " clipping, got inf",
    "cases: {x: {why: a, features: {wrapper: ddp, bucket_mb: .inf}}}": "case 'x': features: bucket_mb: expected a finite"
    " number, got inf; the default is None",
    "matrix: 5": "matrix: expected a list (lines that begin with '-'), got 5",
    "matrix: [{each: {}}]": "matrix entry 1: 'each' must name at least one axis with labels",
    "matrix: [{each: {dp: [ddp]}}]": "matrix entry 1: dp: expected a mapping of keys to values, got ['ddp']",
    "matrix: [{each: {dp: {ddp: 3}}}]": "matrix entry 1: dp: ddp: expected a mapping of keys to values, got 3",
    "matrix: [{eech: {}}]": "matrix entry 1: unknown key 'eech' (did you mean 'each'?); known: each, exclude, include",
    EACH + "  exclude: [{dp: dpd}]": "matrix entry 1: exclude: axis 'dp' has no label 'dpd' (did you mean 'ddp'?)",
    EACH + "  exclude: [{dq: ddp}]": "matrix entry 1: exclude: unknown axis 'dq' (did you mean 'dp'?)",
    EACH + "  exclude: [{dp: [ddp]}]": "matrix entry 1: exclude: axis 'dp' has no label ['ddp'] (did you mean 'ddp'?)",
    EACH + "  exclude: {dp: ddp}": "matrix entry 1: exclude: expected a list (lines that begin with '-'),"
    " got {'dp': 'ddp'}",
    EACH + "  include: [{dp: zzz}]": "matrix entry 1: include: axis 'dp' has no label 'zzz'",
    EACH + "  include: [{dp: ddp}]": "two cases are named 'ddp'; names must be unique",
    EACH + "cases: {ddp: {why: because}}": "two cases are named 'ddp'; names must be unique",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_is_answered_with_what_is_wrong_in_it(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text) == f"a.yaml: {WRONG_FILES[text]}"


@pytest.mark.parametrize("text", ["cases: : x", "cases: {x", "cases: {? {a: b} : c}"])
def test_a_file_that_is_not_yaml_is_answered_with_the_place(tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith("a.yaml: not valid YAML: ") and "line 1, column" in message


def test_a_file_that_is_not_text_is_answered(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(CaseError, match="a.yaml: not valid YAML: 'utf-8' codec can't decode"):
        load_cases(tmp_path / "a.yaml")


def test_a_file_that_is_not_there_is_answered(tmp_path: Path) -> None:
    with pytest.raises(CaseError) as error:
        load_cases(tmp_path / "a.yaml")
    assert str(error.value) == f"{tmp_path}/a.yaml: cannot be read: No such file or directory"


# ---- what a person gets wrong: several files


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("a", "b"):
        (tmp_path / f"{file}.yaml").write_text("cases: {x: {why: because}}")
    with pytest.raises(CaseError) as error:
        load_all(tmp_path)
    assert str(error.value) == f"{tmp_path}/b.yaml: case 'x' also exists in {tmp_path}/a.yaml; rename one"


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError) as error:
        load_all(tmp_path)
    assert str(error.value) == f"{tmp_path}: no *.yaml file with cases in it"


def test_one_case_is_found_in_whatever_file_and_way_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# a is not here\n" + one("dims: {tp: 2}"))
    (tmp_path / "b.yaml").write_text(one("").replace("x:", "a:"))
    (tmp_path / "c.yaml").write_text("matrix: [{each: {by: {cp_1: {why: all}, cp_2: {why: all, dims: {cp: 2}}}}}]")
    found = {case.name: case for case in load_all(tmp_path)}
    assert len(found) == 4 and all(load_case_named(name, tmp_path) == case for name, case in found.items())
    with pytest.raises(CaseError, match=r"no case is named 'xx' \(did you mean 'x'"):
        load_case_named("xx", tmp_path)
    (tmp_path / "d.yaml").write_text(one(""))
    with pytest.raises(CaseError, match="case 'x' also exists in"):
        load_case_named("x", tmp_path)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    cases = [Case("hsdp_2x8", "-"), Case("ddp_4", "-")]
    assert find_case("ddp_4", cases) is cases[1]
    with pytest.raises(CaseError) as error:
        find_case("hsdp_2x4", cases)
    assert str(error.value) == (
        "no case is named 'hsdp_2x4' (did you mean 'hsdp_2x8'?); `harness matrix --list` lists them"
    )


def test_a_stored_case_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(CaseError, match="expected a mapping"):
        from_json([])  # type: ignore[arg-type]
