"""`harness init`: what a script says of itself, and the adapter and cases that are begun with it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from harness import ROOT
from harness.cli import main
from harness.onboarding import names, skeleton
from harness.onboarding.script_facts import read
from harness.spec.case import Case
from harness.spec.dims import ParallelDims
from harness.spec.loading import load_all

SCRIPT = ROOT / "tests" / "script_trainer.py"


def begun(text: str, folder: Path) -> tuple[str, str]:
    """The adapter and the cases for a script of this text."""
    (folder / "train.py").write_text(text)
    facts = read(folder / "train.py")
    return skeleton.adapter(facts), skeleton.cases(facts)


def test_a_script_says_its_model_flags_wrappers_and_data_set_without_being_run() -> None:
    facts = read(SCRIPT)
    assert facts.models == ("TinyLlama",)
    assert facts.wrappers() == {"DDP", "fully_shard"}
    assert [name for _, name, _ in facts.data_sets] == ["Tokens"]
    assert facts.optimizer == {"optimizer": "adamw", "lr": None, "betas": (0.9, 0.95), "weight_decay": 0.1}
    assert {"--dim", "--ddp", "--log-every"} <= {flag.name for flag in facts.flags}
    assert facts.turns_halves and not facts.spares_vectors


def test_what_it_imports_from_beside_it_is_read_as_well(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\nclass Net(nn.Module):\n    pass\n")
    (tmp_path / "train.py").write_text("from net import Net\nif __name__ == '__main__':\n    Net()\n")
    assert read(tmp_path / "train.py").models == ("Net",)


@pytest.mark.parametrize("at", ["own", "src/own"])
def test_a_script_in_a_folder_of_a_repository_is_read_with_what_it_imports_from_the_root(
    tmp_path: Path, at: str
) -> None:
    script, package = tmp_path / "scripts" / "train.py", tmp_path / at
    for folder in (script.parent, package):
        folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (package / "net.py").write_text("from torch import nn\nfrom .data import Rows\nclass Net(nn.Module):\n    pass\n")
    (package / "data.py").write_text("from torch.utils.data import Dataset\nclass Rows(Dataset):\n    pass\n")
    script.write_text("import torch\nfrom own.net import Net\nNet()\n")
    facts = read(script)
    assert facts.models == ("Net",) and facts.data_sets == (("data", "Rows", ""),)
    assert facts.files == (script, package / "net.py", package / "data.py")


def test_classes_of_one_name_that_extend_each_other_in_several_files_are_no_end_of_it(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("import train\nclass Part(train.Part):\n    pass\n")
    (tmp_path / "train.py").write_text("import part\nclass Part(part.Part):\n    pass\nclass Net(Module):\n    pass\n")
    assert read(tmp_path / "train.py").models == ("Net",)


def test_the_adapter_is_python_and_has_the_facts_in_it() -> None:
    text = skeleton.adapter(read(SCRIPT))
    ast.parse(text)
    assert "wte=tok_embeddings" in text and "q_proj=wq" in text
    assert "head=output" not in text.split()  # an attribute that is a number
    assert 'f"--max-steps={case.training.steps}"' in text
    assert "# --log-every: left at 5" in text
    assert "return halves(case)" in text
    assert 'replace("Tokens", lambda *_, **__: RecipeSamples(case))' in text


def test_a_sampler_that_shuffles_and_a_data_set_of_mappings_are_told_apart(tmp_path: Path) -> None:
    script = """
from torch.utils.data import Dataset, DistributedSampler
class Rows(Dataset):
    def __getitem__(self, i):
        return {"x": self.t[i], "y": self.t[i]}
sampler = DistributedSampler(Rows(), shuffle=True)
"""
    adapter, _ = begun(script, tmp_path)
    assert 'shuffled=True, form=lambda tokens, labels: {"x": tokens, "y": labels}' in adapter


def test_what_the_optimizer_has_written_into_it_is_requested_by_the_cases(tmp_path: Path) -> None:
    _, cases = begun("opt = torch.optim.AdamW(net.parameters(), lr=x, eps=1e-6)\n", tmp_path)
    assert "beta1: 0.9, beta2: 0.999, weight_decay: 0.01, eps: 1.0e-06" in cases


def test_of_several_optimizers_the_one_that_is_given_the_model_is_requested(tmp_path: Path) -> None:
    script = """
from torch import nn
class Probe(nn.Module):
    pass
class Net(nn.Module):
    def __init__(self):
        self.embed = nn.Embedding(256, 64)
def main():
    probe, unused = Probe(), None
    net = Net()
    other = Probe(net)
    first = torch.optim.SGD(probe.parameters(), lr=1.0)
    second = torch.optim.AdamW(other.parameters(), betas=(0.5, 0.5))
    never = torch.optim.AdamW(net.parameters(), betas=(0.6, 0.6))
    wrapped = DDP(net)
    groups = [{"params": wrapped.parameters()}]
    opt = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    for one in (first, second):
        one.step()
    opt.step()
"""
    _, cases = begun(script, tmp_path)
    assert "beta1: 0.9, beta2: 0.98" in cases


def test_a_dtype_that_the_script_does_not_take_is_passed_as_float32(tmp_path: Path) -> None:
    adapter, _ = begun('p.add_argument("--dtype", choices=["float32", "bfloat16"])', tmp_path)
    assert "--dtype={'float32' if case.training.dtype == 'float64'" in adapter


def test_init_writes_an_adapter_and_cases_that_load_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.read_text())
    assert main(["init", "train.py"]) == 0
    assert "harness doctor --trainer train_adapter.py" in capsys.readouterr().out
    assert [case.name for case in load_all(tmp_path / "cases")] == ["single", "ddp_2", "fsdp_2"]
    assert main(["init", "train.py"]) == 2
    assert "train_adapter.py is there already" in capsys.readouterr().err


def test_a_script_that_cannot_be_brought_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def (")
    assert main(["init", "train.py"]) == 2
    assert "cannot be read as Python" in capsys.readouterr().err
    assert not Path("train_adapter.py").exists() and not Path("cases").exists()


def test_a_script_that_tells_nothing_is_not_begun_and_another_way_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("from elsewhere import main\np.add_argument('--lr')\nmain()\n")
    assert main(["init", "train.py"]) == 2
    assert_expected_inline(
        capsys.readouterr().err,
        """\
harness: train.py: nothing was found to begin an adapter with, and nothing is written
  read         train.py; imports are followed inside the repository, not run
  looked for   classes of torch's modules, DDP, FSDP, fully_shard or parallelize_module, an optimizer that is
               made by its name, a Dataset, a function of batches; 1 flags alone are no beginning
  instead      a job of any kind is recorded as it is, without adapter or reference; `harness record --help`:
               harness record -o out/a -- torchrun --nproc-per-node 2 train.py ..
  or           name the file that has the model and the loop, for an adapter
""",
    )
    assert not Path("train_adapter.py").exists() and not Path("cases").exists()


def test_each_wrapper_of_a_script_has_a_case_of_its_own(tmp_path: Path) -> None:
    _, cases = begun("model = FSDP(net) if sharded else DDP(net)\n", tmp_path)
    assert "  ddp_2: {dims: {dp_replicate: 2}, why" in cases
    assert "  fsdp_2: {dims: {dp_shard: 2}, features: {wrapper: fsdp1}, why" in cases


def test_a_script_without_a_main_guard_is_begun_and_its_evaluation_has_batches_of_its_own(tmp_path: Path) -> None:
    adapter, _ = begun("def get_batch(split):\n    return x, y\nloss = model(*get_batch('train'))\n", tmp_path)
    ast.parse(adapter)
    assert "next(trained if torch.is_grad_enabled() else evaluated)" in adapter
    assert "        import torch\n" in adapter


def test_a_folder_in_place_of_a_script_is_told_in_words(tmp_path: Path, capsys: Any) -> None:
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path}: cannot be read: Is a directory" in capsys.readouterr().err


def test_a_parameter_that_is_none_of_the_references_is_named_with_what_it_may_be() -> None:
    case = Case("any", "a test", ParallelDims())
    shapes = {
        "blocks.0.attn.query.weight": (64, 64),
        "blocks.0.attn.qkv.weight": (128, 64),
        "w2.weight": (192, 64),
        "blocks.0.attn.all.weight": (128, 64),
    }
    fqn = {
        "blocks.0.attn.query.weight": "layers.0.attention.query.weight",
        "w2.weight": "layers.0.feed_forward.w2.weight",
    }
    said = names.unfit(shapes, case, lambda name: fqn.get(name, name))
    assert said[0].endswith("by its name and shape it is layers.0.attention.wq.weight")
    assert said[1].endswith("by its name it is wq, wk and wv in one: say so in `fused`, where it is not sharded")
    assert said[2].endswith("it is the transpose; no check covers transposed slices")
    assert said[3].endswith("as many rows as wq, wk and wv together: say so in `fused`, where it is not sharded")
    assert said[4].startswith("of the reference's 21 parameters 20 are nobody's: tok_embeddings.weight")
