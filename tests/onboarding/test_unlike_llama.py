"""A model that is seen to be made of other parts than Llama 3's, and one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from harness import ROOT
from harness.cli import main
from harness.onboarding.script_facts import read

OTHER = """
import torch
from torch import nn
import torch.nn.functional as F
class Other(nn.Module):
    def __init__(self):
        self.tokens = nn.Embedding(256, 64)
        self.parts = nn.ModuleDict(dict(wpe=nn.Embedding(128, 64)))
        self.norm = nn.LayerNorm(64)
    def forward(self, x):
        return F.gelu(self.norm(self.tokens(x)))
"""


def unlike(text: str, folder: Path) -> tuple[str, ...]:
    (folder / "train.py").write_text(text)
    return read(folder / "train.py").unlike


def test_init_says_what_of_a_model_is_not_llamas_and_which_way_in_needs_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(OTHER)
    Path("train.py").write_text("from net import Other\nOther()\n")
    assert main(["init", "train.py"]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
train.py: read, not run
  model      Other
  wrappers   none
  flags      0, of which 0 mean something to a case
  written    nothing that a case must say
  data set   none was found
  unlike     LayerNorm (net.py:9) and no RMSNorm
             learned positions (net.py:8) and no rotary embedding
             GELU (net.py:11) and no SiLU

the reference is Llama 3 (RMSNorm, rotary embedding, SwiGLU). A model with other parts computes other numbers:
`harness doctor` compares with the reference, which cannot hold then. This needs no reference, and no adapter:
  harness record -o out/a -- torchrun --nproc-per-node 2 train.py ..

wrote train_adapter.py and cases/first.yaml; look at the lines with TODO, then:
  harness doctor --trainer train_adapter.py
""",
    )
    assert "unlike the reference: GELU (net.py:11) and no SiLU\n" in Path("train_adapter.py").read_text()


def test_of_a_llama_nothing_is_said() -> None:
    assert read(ROOT / "tests" / "script_trainer.py").unlike == ()


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ("class RMSNorm(nn.Module):\n    pass\n", "LayerNorm"),
        ("def apply_rotary_emb(x):\n    pass\n", "learned positions"),
        ("ACTIVATIONS = {'silu': F.silu}\n", "GELU"),
        ("table = {'swish': 1}\n", "GELU"),
    ],
)
def test_what_has_llamas_counterpart_beside_it_is_not_said(tmp_path: Path, seen: str, said: str) -> None:
    assert any(phrase.startswith(said) for phrase in unlike(OTHER, tmp_path))
    assert not any(phrase.startswith(said) for phrase in unlike(OTHER + seen, tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "'''No RMSNorm: nn.LayerNorm, GELU and wpe.'''\n",  # words for people
        "self.layer_norm = Norm(64)\n",  # whatever that is
        "pos_emb = angles(8)\n",  # of a rotation, perhaps
    ],
)
def test_a_name_that_may_be_anything_is_no_part(tmp_path: Path, text: str) -> None:
    assert unlike(text, tmp_path) == ()


def test_a_parameter_of_positions_and_relu_are_seen_too(tmp_path: Path) -> None:
    text = "self.pos_embed = nn.Parameter(zeros)\ny = F.relu(x).square()\nclass LayerNorm(nn.Module):\n    pass\n"
    assert unlike(text, tmp_path) == (
        "LayerNorm (train.py:3) and no RMSNorm",
        "learned positions (train.py:1) and no rotary embedding",
        "ReLU (train.py:2) and no SiLU",
    )
