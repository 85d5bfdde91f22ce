"""`harness init`: what one rank of a script shows, and the adapter and cases that are begun with it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import FUSED, HUGGING_FACE, LITTLE, PARALLEL, RESUMES, SCRIPT, changed

from harness.adapters.onboarding import skeleton
from harness.adapters.onboarding.observed import CASE, Facts, Flag, observe
from harness.core import trainers
from harness.core.case.case import Case, Saved
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import load_all
from harness.core.cli import main


@functools.cache
def facts_of(text: str, folder: Path) -> Facts:
    (folder / "train.py").write_text(text)
    return observe(folder / "train.py")


def begun(facts: Facts, folder: Path) -> tuple[Any, dict[str, Case], str]:
    """Return the adapter, its first cases, and its text."""
    file, cases = folder / "train_adapter.py", folder / "cases"
    cases.mkdir(exist_ok=True)
    file.write_text(skeleton.adapter_text(folder / "train.py", facts, file))
    (cases / "first.yaml").write_text(skeleton.cases_text(facts))
    return trainers.reload_adapter(str(file)), {case.name: case for case in load_all(cases)}, file.read_text()


def names_fit(adapter: Any, facts: Facts, case: Case) -> bool:
    """Return whether every parameter of the reference is one of the script's, whole or in a fused one."""
    fused = adapter.fused(case)
    found = [part for name in facts.shapes for own in [adapter.fqn(name)] for part in fused.get(own, (own,))]
    return sorted(found) == sorted(case.model.parameter_shapes())


def test_a_script_shows_its_model_flags_wrappers_data_set_and_constants(tmp_path: Path) -> None:
    facts = facts_of(SCRIPT, tmp_path)
    assert (facts.stopped, facts.model, facts.data) == ("", "TinyLlama", ("Tokens", "samples", "pair"))
    assert [*facts.wrappers] == ["ddp", "fsdp2"] and facts.sampler == (False, 0) and facts.heads == 8 and facts.halves
    assert facts.recipe == {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "max_norm": 1.0}
    assert facts.sizes == {"norm_eps": 1e-6, "rope_theta": 500_000.0}
    assert {"--dim", "--ddp", "--log-every"} <= {flag.name for flag in facts.flags}
    adapter, cases, text = begun(facts, tmp_path)
    assert names_fit(adapter, facts, cases["single"]) and "TODO nothing" not in text
    assert [*cases] == ["single", "ddp_2", "fsdp_2"] and cases["single"].model.norm_eps == 1e-6
    assert all(adapter.unsupported(case) is None for case in cases.values())
    words = adapter.arguments(cases["ddp_2"], "cpu")
    assert {"--max-steps=3", "--batch-size=8", "--ddp"} <= {*words} and not any("log-every" in word for word in words)
    assert "--ddp" not in adapter.arguments(cases["fsdp_2"], "cpu") and adapter.rows(cases["single"])


def test_hugging_faces_prefix_a_replicate_degree_and_a_flag_that_resumes_are_passed_on(tmp_path: Path) -> None:
    facts = facts_of(changed(SCRIPT, *HUGGING_FACE, *RESUMES), tmp_path)
    adapter, cases, text = begun(facts, tmp_path)
    assert facts.stopped == "" and "# --tokens: left at None; TODO it is required" in text
    assert names_fit(adapter, facts, cases["single"]) and adapter.fqn("model.layers.1.mlp") == "layers.1.feed_forward"
    assert adapter.fqn("model.norm.weight") == "norm.weight" and adapter.saves == "save"
    assert "--dp-replicate=2" in adapter.arguments(cases["hsdp_2x2"], "cpu")
    resumed = cases["fsdp_2_resumes"]
    assert adapter.unsupported(resumed) is None and resumed.resume == (Saved(1, ParallelDims(dp_shard=2), Features()),)


def test_launches_that_save_and_resume_name_the_folder_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_CHECKPOINTS", "/there")
    flags = [Flag("--resume", "False", switch=True), Flag("--save-to", "''"), Flag("--stop-after", "0")]
    adapter, _, _ = begun(Facts(flags=flags, model="Net"), tmp_path)
    case = replace(CASE, resume=(Saved(1, ParallelDims(), Features()),))
    assert adapter.arguments(case, "cpu") == ["--resume", "--save-to=/there"]
    assert adapter.arguments(case.launches["saved_1"], "cpu") == ["--save-to=/there", "--stop-after=1"]
    alone, _, _ = begun(Facts(flags=flags[1:], model="Net"), tmp_path)
    assert alone.arguments(case, "cpu") == [] and alone.saves is None  # where its outputs lie is its own affair


def test_weights_in_one_tensor_are_declared_and_a_gathered_loss_is_requested(tmp_path: Path) -> None:
    facts = facts_of(changed(SCRIPT, *FUSED, *PARALLEL), tmp_path)
    adapter, cases, _ = begun(facts, tmp_path)
    assert names_fit(adapter, facts, cases["single"]) and len(adapter.fused(cases["single"])) == 4
    assert not cases["tp_2"].features.loss_parallel and cases["tp_2"].features.sequence_parallel
    assert adapter.unsupported(cases["tp_2"]) is None
    assert "--tensor-parallel-size=2" in adapter.arguments(cases["tp_2"], "cpu")


def test_the_adapter_of_another_checkout_runs_its_script(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "train.py").touch()
    adapter, _, _ = begun(Facts(model="Net"), tmp_path / "tools")
    assert adapter.of(str(tmp_path / "other")).script == tmp_path / "other" / "tools" / "train.py"
    assert adapter.script == tmp_path / "tools" / "train.py"


SETTER = """
import sys
for word in sys.argv[1:]:
    name, value = word.removeprefix("--").split("=")
    globals()[name] = type(globals()[name])(value)
"""
GLOBALS = """
import torch
learning_rate, dim = 6e-4, 32
accum_steps = 5 * 8
_own = [1]
margin = -1
exec(open("settings.py").read())
warmup_iters = 3
"""


def test_constants_that_an_executed_file_sets_by_name_are_flags_and_what_it_makes_of_them_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.py").write_text(SETTER)
    facts = facts_of(GLOBALS + LITTLE, tmp_path)
    assert {flag.name: flag.default for flag in facts.flags} == {
        "--learning_rate": "0.0006",
        "--dim": "32",
        "--accum_steps": "40",
        "--margin": "-1",
    }
    adapter, _, text = begun(facts, tmp_path)
    assert f"--learning_rate={CASE.training.lr}" in adapter.arguments(CASE, "cpu") and "# --margin: left at -1" in text
    assert facts.shapes["embed.weight"] == (256, 64)  # as requested


def test_of_several_optimizers_the_one_that_steps_the_model_counts_and_batches_are_the_recipes(tmp_path: Path) -> None:
    facts = facts_of("dim = 64\n" + LITTLE, tmp_path)
    assert (facts.stopped, facts.model, facts.optimizer) == ("", "Other", "AdamW")
    assert facts.recipe == {"decay": "matrices", "beta1": 0.9, "beta2": 0.98, "weight_decay": 0.3, "eps": 1e-6}
    assert facts.data == ("get_batch", "function", "pair")
    assert skeleton.other_parts(facts) == [
        "LayerNorm (train.py:24) and no RMSNorm",
        "GELU (train.py:24) and no SiLU",
        "learned positions (wpe.weight) and no rotary embedding",
    ]
    adapter, cases, text = begun(facts, tmp_path)
    training = cases["single"].training
    assert (training.decay, training.beta2, training.weight_decay, training.eps) == ("matrices", 0.98, 0.3, 1e-6)
    assert training.max_norm is None and adapter.unsupported(cases["single"]) is None
    assert "next(trained if torch.is_grad_enabled() else evaluated)" in text and "Unlike the reference: GELU" in text


@pytest.mark.parametrize("at", ["own", "src/own"])
def test_a_script_in_a_folder_is_run_with_what_it_imports_from_its_repositorys_root_and_says_where_it_stops(
    tmp_path: Path, at: str
) -> None:
    script, package = tmp_path / "scripts" / "train.py", tmp_path / at
    for folder in (script.parent, package):
        folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (package / "net.py").write_text("from torch import nn\nclass Net(nn.Module):\n    pass\n")
    (package / "data.py").write_text("from torch.utils.data import Dataset\nclass Rows(Dataset):\n    pass\n")
    text = "from own.net import Net\nfrom own.data import Rows\nfrom torch.nn.parallel import DistributedDataParallel"
    script.write_text(f"{text}\nrows = Rows()\nnet = DistributedDataParallel(Net())\n")
    facts = observe(script)
    assert facts.data == ("Rows", "samples", "pair") and [*facts.wrappers] == ["ddp"] and "line 5" in facts.stopped
    assert [Path(file) for file in facts.files] == [script, package / "net.py", package / "data.py"]


@pytest.mark.parametrize(
    ("data", "sampler", "line"),
    [
        (
            ("Rows", "samples", "x y"),
            (True, 7),
            'case, shuffled=True, form=lambda tokens, labels: {"x": tokens, "y": labels})',
        ),
        (
            ("Rows", "samples", "joined"),
            None,
            "(case, form=lambda tokens, labels: torch.cat([tokens, labels[-1:]]))",
        ),
        (("Rows", "stream", "pair"), None, "RecipeStream(case, rank, case.dims.dp)"),
        (("rows", "generator", "pair"), None, "recipe_batches(case, rank, case.dims.dp)"),
    ],
)
def test_samples_are_handed_over_in_the_place_and_form_of_the_scripts(
    tmp_path: Path, data: tuple[str, str, str], sampler: tuple[bool, int] | None, line: str
) -> None:
    adapter, cases, text = begun(Facts(data=data, sampler=sampler), tmp_path)
    assert f'script.replace("{data[0]}", lambda *_, **__: ' in text and line in text and adapter.replaces
    assert cases["single"].training.seed == (7 if sampler else 1234)
    assert (adapter.unsupported(replace(CASE, training=replace(CASE.training, seed=8))) is None) is (sampler is None)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([Flag("--hidden", "1"), Flag("--dim", "1")], "--hidden=192"),
        ([Flag("--hidden", "1"), Flag("--heads", "1")], "--hidden=64"),
        ([Flag("--dtype", "''", choices=("float32", "bfloat16"))], "--dtype=float32"),
        ([Flag("--batch-size", "1", help="the global batch")], "--batch-size=16"),
        ([Flag("--device", "'cuda'")], "--device=cpu"),
        ([Flag("--num-layers", "1")], "--num-layers=2"),
        ([Flag("--dp-replicate-degree", "1")], "--dp-replicate-degree=1"),
        ([Flag("--strategy", "''", choices=("ddp", "fsdp2"))], "--strategy=fsdp2"),
    ],
)
def test_a_flag_is_passed_what_its_name_says(tmp_path: Path, flags: list[Flag], word: str) -> None:
    assert begun(Facts(flags=flags), tmp_path)[0].arguments(CASE, "cpu")[0] == word


def test_accumulation_is_claimed_of_a_script_with_a_flag_for_it_alone(tmp_path: Path) -> None:
    case = replace(CASE, features=Features(accumulation=2))
    refused = [begun(Facts(flags=flags), tmp_path)[0].unsupported(case) for flags in ([], [Flag("--grad-accum", "1")])]
    assert [reason is None for reason in refused] == [False, True]


def test_init_writes_what_it_found_overwrites_nothing_and_names_another_way_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    net = "from torch import nn\nclass Net(nn.Linear): pass\nmodel = Net(1, 1)\n"
    Path("train.py").write_text(f"{net}from torch.distributed.fsdp import fully_shard\nfully_shard(model, 2)\n")
    assert main(["init", "train.py"]) == 0
    assert "harness doctor --trainer train_adapter.py" in capsys.readouterr().out
    assert [case.name for case in load_all(tmp_path / "cases")] == ["single", "fsdp_2"]
    assert yaml.safe_load(Path("cases/first.yaml").read_text())["defaults"]["training"] == {"all_valid": True}
    assert main(["init", "train.py"]) == 2 and "train_adapter.py is there already" in capsys.readouterr().err
    Path("other.py").write_text("from elsewhere import main\nmain()\n")
    assert main(["init", "other.py", "--cases", "others"]) == 2
    assert "harness record -o out/a -- torchrun" in capsys.readouterr().err
    Path("broken.py").write_text("def (")
    assert main(["init", "broken.py", "--cases", "others"]) == 2
    assert main(["init", str(tmp_path), "--cases", "others"]) == 2
    assert {path.name for path in tmp_path.glob("*_adapter.py")} == {"train_adapter.py"} and not Path("others").exists()
