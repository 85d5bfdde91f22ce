"""`harness doctor` and `harness init`: the very lines to write, for a block without modules, other sizes and another order."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.evidence.records import RankEvidence, Run
from harness.evidence.step import Microbatch, StepEvidence
from harness.judge.trial import Trial
from harness.onboarding import constructors, examination, name_table, names, sample_orders, skeleton
from harness.onboarding.script_facts import read
from harness.plan.make_plan import make_plan
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.data import build_dataset, epoch_order, sample_order
from harness.reference.train import train
from harness.run.options import Options, Unsupported
from harness.spec.case import Case
from harness.spec.dims import ParallelDims
from harness.spec.traits import USUAL
from harness.trainers.support.names import pairs, renamed
from harness.trainers.support.requests import NOT_PASSED_ON

CASE = Case("any", "a test", ParallelDims())
MODEL = ModelConfig(dim=8, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=32, ffn_dim=8)
TRAINING = TrainingConfig(steps=1, global_batch=4, seq_len=16)
LINE = (
    "embed=tok_embeddings head=output blocks=layers q_proj=attention.wq k_proj=attention.wk v_proj=attention.wv "
    "o_proj=attention.wo gate_proj=feed_forward.w1 up_proj=feed_forward.w3 down_proj=feed_forward.w2 norm1=attention_norm "
    "norm2=ffn_norm"
)
FLAT = """
from torch import nn
class Block(nn.Module):
    def __init__(self, dim, heads, kv, hidden):
        self.norm1, self.norm2 = Norm(dim), Norm(dim)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(1) for _ in range(4))
        self.gate_proj, self.up_proj, self.down_proj = Linear(1), Linear(1), Linear(1)
class Net(nn.Module):
    def __init__(self, vocab=256, dim=64, layers=2, heads=4, kv=2, hidden=128):
        self.embed, self.norm, self.head = nn.Embedding(vocab, dim), Norm(dim), nn.Linear(dim, vocab)
        self.blocks = nn.ModuleList(Block(dim, heads, kv, hidden) for _ in range(layers))
"""


def flat_block(ffn_dim: int = 192) -> dict[str, tuple[int, ...]]:
    """Shapes of a model of the default sizes, whose projections lie in the block itself."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (256, 64), "head.weight": (256, 64), "norm.weight": (64,)}
    for layer in range(2):
        block = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
        block |= {"gate_proj": (ffn_dim, 64), "up_proj": (ffn_dim, 64), "down_proj": (64, ffn_dim)}
        shapes |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
        shapes |= {f"blocks.{layer}.norm1.weight": (64,), f"blocks.{layer}.norm2.weight": (64,)}
    return shapes


def too_short(name: str) -> str:
    """A table that leaves out the modules of a layer."""
    return renamed(name, pairs(LINE.replace("attention.", "").replace("feed_forward.", "")))


def begun(text: str, folder: Path) -> tuple[str, str]:
    (folder / "train.py").write_text(text)
    facts = read(folder / "train.py")
    return skeleton.adapter(facts), skeleton.cases(facts)


def test_a_function_that_makes_batches_is_named_where_there_is_no_data_set(tmp_path: Path) -> None:
    adapter, _ = begun(f"def get_batch(size):\n    return size, size\n{FLAT}", tmp_path)
    assert 'self.script.replace("get_batch", answer)' in adapter
    assert "import os\n" in adapter and compile(adapter, "adapter.py", "exec")
    unnamed, _ = begun(FLAT, tmp_path)
    assert "TODO no Dataset was found" in unnamed


def test_accumulation_is_claimed_of_a_script_with_a_flag_for_it_alone(tmp_path: Path) -> None:
    flag = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--grad-accum', type=int)\n"
    claimed = ["accumulation" in begun(text, tmp_path)[0] for text in (FLAT, flag + FLAT)]
    assert claimed == [False, True]


def test_projections_that_lie_in_the_block_itself_get_the_module_before_them(tmp_path: Path) -> None:
    adapter, _ = begun(FLAT, tmp_path)
    written = pairs(adapter.partition('NAMES = pairs("""')[2].partition('"""')[0])
    assert written == pairs(LINE)


def test_sizes_that_a_constructor_has_are_requested_by_the_cases_and_alone_known_to_the_adapter(tmp_path: Path) -> None:
    adapter, cases = begun(FLAT, tmp_path)
    assert "  model: {n_heads: 4, n_kv_heads: 2, ffn_dim: 128}" in cases
    assert '"n_heads": (4,), "n_kv_heads": (2,), "ffn_dim": (128,)' in adapter
    adapter, cases = begun(f'{FLAT}\np.add_argument("--ffn")\nNet(heads=8, kv=a.kv, hidden=a.ffn)', tmp_path)
    assert "model: {norm_eps" in cases and "(128,)" not in adapter  # a flag tells, or what no literal tells


@pytest.mark.parametrize(("other", "field"), [("dim", "ffn_dim"), ("heads", "dim")])
def test_a_flag_for_a_hidden_size_is_the_feed_forwards_beside_one_for_the_models(
    other: str, field: str, tmp_path: Path
) -> None:
    flags = "\n".join(f'p.add_argument("--{name}", type=int)' for name in ("hidden", other))
    adapter, _ = begun(f"{FLAT}\n{flags}", tmp_path)
    assert f'f"--hidden={{case.model.{field}}}"' in adapter


def test_sizes_are_read_of_calls_constants_and_configurations() -> None:
    tree = ast.parse("H = 4\nclass Net(Module):\n  def __init__(self, d_model, n_head=8): pass\nNet(32, n_head=H)")
    assert constructors.sizes([tree], ["Net"]) == {"dim": 32, "n_heads": 4}
    tree = ast.parse("class ModelArgs:\n  dim: int = 48\n  n_layers: int = 3\nclass Net(Module):\n  pass")
    assert constructors.sizes([tree], ["Net"]) == {"dim": 48, "n_layers": 3}


OF_CONSTANTS = """
from torch import nn
VOCAB: int = 512
DIM, N_HEADS = 64, 4
FFN = 8 * DIM // 3
DEPTH = 3
class Net(nn.Module):
    def __init__(self):
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(DIM, N_HEADS, FFN) for _ in range(DEPTH))
"""


@pytest.mark.parametrize(
    "imported", ["from model import DIM, Net", "import model", "from model import DIM as D, Net as Net"]
)
def test_sizes_that_are_constants_of_a_module_which_the_script_imports_are_read(tmp_path: Path, imported: str) -> None:
    (tmp_path / "model.py").write_text(OF_CONSTANTS)
    (tmp_path / "train.py").write_text(f"{imported}\nnet = Net()\n")
    wanted = {"vocab_size": 512, "dim": 64, "n_heads": 4, "ffn_dim": 170, "n_layers": 3}
    assert read(tmp_path / "train.py").sizes == wanted


@pytest.mark.parametrize(
    ("script", "dim"),
    [
        ("from model import DIM as D\nnet = Net(dim=D)", {"dim": 64}),
        ("import model as m\nnet = m.Net(dim=m.DIM)", {"dim": 64}),
        ("from model import *\nDIM = 32\nnet = Net(dim=DIM)", {"dim": 32}),
        ("from model import DIM\nnet = Net(dim=read('dim'))", {}),
    ],
)
def test_a_constant_that_is_passed_is_the_scripts_and_what_no_literal_tells_is_left_out(
    tmp_path: Path, script: str, dim: dict[str, int]
) -> None:
    model = "from torch import nn\nDIM = 64\nclass Net(nn.Module):\n    def __init__(self, dim):\n        pass\n"
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "train.py").write_text(script)
    assert read(tmp_path / "train.py").sizes == dim


@pytest.mark.parametrize(
    ("call", "seed", "samples"),
    [
        ("DistributedSampler(data)", "seed: 0", "shuffled=True"),
        ("DistributedSampler(data, seed=7)", "seed: 7", "shuffled=True"),
        ("DistributedSampler(data, seed=a.seed)", "", "shuffled=True"),
        ("DistributedSampler(data, shuffle=False)", "", "RecipeSamples(case)"),
    ],
)
def test_a_sampler_that_shuffles_has_its_seed_requested(call: str, seed: str, samples: str, tmp_path: Path) -> None:
    text = f"class Rows(Dataset):\n  def __getitem__(self, i):\n    return self.x[i], self.y[i]\nsampler = {call}"
    adapter, cases = begun(text, tmp_path)
    assert samples in adapter
    assert seed in cases if seed else "seed" not in cases


def test_the_names_to_write_are_said_and_were_tried() -> None:
    line, becomes = name_table.proposed(flat_block(), CASE, too_short) or ("", "")
    assert pairs(line) == pairs(LINE)
    assert becomes == "by it 21 of its 21 parameters have a name of the reference's, now 7"
    assert name_table.proposed(flat_block(), CASE, lambda name: renamed(name, pairs(LINE))) is None


def test_names_that_nobody_spells_so_are_found_where_one_alone_has_the_shape() -> None:
    odd = {name.replace("embed.", "table.").replace("k_proj", "keys"): shape for name, shape in flat_block().items()}
    found = name_table.targets(odd, CASE.model, lambda name: name)
    assert found["table.weight"] == "tok_embeddings.weight"
    assert found["blocks.1.keys.weight"] == "layers.1.attention.wk.weight"


def test_a_gate_of_as_many_rows_as_wq_wk_and_wv_is_no_fused_weight() -> None:
    said = names.unfit(flat_block(ffn_dim=128), CASE, too_short)
    gate = next(sentence for sentence in said if "gate_proj" in sentence)
    assert gate == (
        "blocks.0.gate_proj.weight [128, 64] is mapped to layers.0.w1.weight, which there is not: "
        "by its name it is layers.0.feed_forward.w1.weight, which is [192, 64]; alike in 1 more"
    )
    assert not any("fused" in sentence for sentence in said)


def test_another_size_is_answered_with_the_case_that_has_it_and_what_the_adapter_must_know() -> None:
    def right(name: str) -> str:
        return renamed(name, pairs(LINE))

    shapes, refused = flat_block(ffn_dim=128), f"ffn_dim 128: train {NOT_PASSED_ON}"
    assert list(names.remedies(shapes, CASE, right, lambda case: refused, "a.py")) == [
        (
            "sizes",
            "its model has ffn_dim 128, requested 192; if a flag of the script tells, pass it on in `arguments`, else",
        ),
        ("", "case: model: {ffn_dim: 128}"),
        ("", 'adapter: add ffn_dim to KNOWN in a.py: "ffn_dim": (128,); or ... for any value, if it passes that on'),
    ]
    assert len(list(names.remedies(shapes, CASE, right, lambda case: None, "a.py"))) == 2
    assert list(names.remedies(flat_block(), CASE, right, lambda case: None, "a.py")) == []


def with_in_one(rows: int) -> dict[str, tuple[int, ...]]:
    """A flat block whose wk and wv lie in one tensor of so many rows."""
    return {n: s for n, s in flat_block().items() if "k_proj" not in n and "v_proj" not in n} | {
        f"blocks.{layer}.kv.weight": (rows, 64) for layer in range(2)
    }


def test_several_weights_in_one_tensor_are_no_other_weight_of_that_shape() -> None:
    shapes, right = with_in_one(64), lambda name: renamed(name, pairs(LINE + " kv=attention.wkv"))  # as wq and wo are
    assert "kv" not in pairs((name_table.proposed(shapes, CASE, too_short) or [""])[0])
    said = names.unfit(shapes, CASE, right)
    assert said[0] == (
        "blocks.0.kv.weight [64, 64] is mapped to layers.0.attention.wkv.weight: by its name it is wk and wv in one: say so in "
        "`fused`, where it is not sharded; alike in 1 more"
    )
    assert said[1].startswith("of the reference's 21 parameters 4 are nobody's")
    fused = {
        f"layers.{n}.attention.wkv.weight": tuple(f"layers.{n}.attention.{w}.weight" for w in ("wk", "wv"))
        for n in (0, 1)
    }
    assert names.unfit(shapes, CASE, right, fused) == []
    assert list(names.remedies(shapes, CASE, right, lambda case: None, "a.py", fused)) == []


def test_the_declaration_of_several_weights_in_one_tensor_is_a_line_that_declares_them() -> None:
    shapes, right = with_in_one(64), lambda name: renamed(name, pairs(LINE + " kv=attention.wkv"))
    (_, line), (_, imported) = names.remedies(shapes, CASE, right, lambda case: None, "a.py")
    assert line == 'def fused(self, case): return in_one(case, "attention.wkv.weight=wk+wv")'
    declared: dict[str, Any] = {}
    exec(f"{imported}\n{line}", declared)
    fused = declared["fused"](None, CASE)
    assert fused["layers.1.attention.wkv.weight"] == ("layers.1.attention.wk.weight", "layers.1.attention.wv.weight")
    assert names.unfit(shapes, CASE, right, fused) == []
    assert list(names.remedies(shapes, CASE, right, lambda case: None, "a.py", fused)) == []


def test_weights_in_one_tensor_are_declared_by_the_names_that_are_to_be_written() -> None:
    shapes = {name.replace("gate_proj", "both"): shape for name, shape in flat_block().items() if "up_proj" not in name}
    shapes = {name: (2 * 192, 64) if "both" in name else shape for name, shape in shapes.items()}
    (_, table), _, (_, line), (_, imported) = names.remedies(shapes, CASE, too_short, lambda case: None, "a.py")
    declared: dict[str, Any] = {}
    exec(f"{imported}\n{line}", declared)
    fused = declared["fused"](None, CASE)
    written = pairs(table.partition('"""')[2].partition('"""')[0])
    assert names.unfit(shapes, CASE, lambda name: renamed(name, written), fused) == []


def test_several_weights_in_one_tensor_of_other_sizes_say_which_the_case_has_to_request() -> None:
    shapes, right = with_in_one(32), lambda name: renamed(name, pairs(LINE + " kv=attention.wkv"))
    fused = {
        f"layers.{n}.attention.wkv.weight": tuple(f"layers.{n}.attention.{w}.weight" for w in ("wk", "wv"))
        for n in (0, 1)
    }
    (said,) = names.unfit(shapes, CASE, right, fused)
    assert (
        "by `fused` it is wk and wv in one, which are [64, 64] in this case: its dim, n_heads or n_kv_heads is another"
        in said
    )
    lines = [text for _, text in names.remedies(shapes, CASE, right, lambda case: None, "a.py", fused)]
    assert lines[-1] == "case: model: {n_kv_heads: 2}" and not any("NAMES" in line for line in lines)


def test_a_case_that_is_skipped_is_answered_with_what_the_adapter_must_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(case: Case, options: Options) -> Any:
        raise Unsupported(f"seed 0: train {NOT_PASSED_ON}")

    monkeypatch.setattr(examination, "run_case", skip)
    said: list[tuple[str, str]] = []
    case = replace(CASE, training=replace(CASE.training, seed=0))
    with pytest.raises(Unsupported):
        examination.examine([case], Options(trainer="a.py"), lambda label, text: said.append((label, text)), {})
    assert said[0][1].startswith('adapter: add seed to KNOWN in a.py: "seed": (0,);')


def received(places: list[int], *, shifted: int = 0) -> Trial:
    """A rank that received these of the whole data set in step 1."""
    data = build_dataset(TRAINING, MODEL)
    rows = np.stack([data[place][0].numpy() for place in places]) + shifted
    part, case = Microbatch(rows, rows, 1.0, rows.size), replace(CASE, model=MODEL, training=TRAINING)
    step = StepEvidence(1, (part,), None, None, None, {}, {}, {}, {})
    evidence = RankEvidence(0, 1, (), (), (), (step,))
    return Trial(case, make_plan(case, USUAL), Run("", 1, (), {0: evidence}), train(MODEL, TRAINING))


def drawn_by(seed: int | None, *, declared: bool) -> list[int]:
    """What a sampler draws first of RecipeSamples, shuffled or not."""
    n_samples = len(build_dataset(TRAINING, MODEL))
    places = range(n_samples) if seed is None else [int(place) for place in epoch_order(n_samples, seed)]
    order = range(n_samples) if declared else sample_order(TRAINING, n_samples, epoch=0)
    return [order[place] for place in places][: TRAINING.global_batch]


@pytest.mark.parametrize(
    ("seed", "declared", "lines"),
    [
        (
            0,
            False,
            ["with seed 0", "adapter: RecipeSamples(case, shuffled=True)", "case: training: {seed: 0}", "KNOWN"],
        ),
        (7, True, ["with seed 7", "case: training: {seed: 7}", "KNOWN"]),
        (None, True, ["leave shuffled=True out"]),
        (None, False, []),
    ],
)
def test_samples_in_another_order_are_answered_with_the_seed_and_only_what_is_not_so_yet(
    seed: int | None, declared: bool, lines: list[str]
) -> None:
    trial = received(drawn_by(seed, declared=declared))
    said = sample_orders.advice(trial, f"seed 1: train {NOT_PASSED_ON}", "RecipeSamples(case)", "a.py")
    assert len(said) == len(lines)
    assert all(line in sentence for line, sentence in zip(lines, said, strict=True))


@pytest.mark.parametrize("first", [1, 3])
def test_a_sampler_whose_epochs_do_not_begin_at_0_is_given_a_seed_as_much_smaller(first: int) -> None:
    trial = received(drawn_by(TRAINING.seed + first, declared=True))
    said = sample_orders.advice(trial, None, "RecipeSamples(case, shuffled=True) {case.training.seed}", "a.py")
    assert said == [
        f"they are the recipe's, shuffled by torch's DistributedSampler with seed {TRAINING.seed + first} (its epoch added)",
        f"its first epoch is {first}, not 0: adapter: in `arguments`, case.training.seed - {first} as its seed",
    ]
    written = sample_orders.advice(trial, f"seed 1: train {NOT_PASSED_ON}", "RecipeSamples(case)", "a.py")
    assert written[1].startswith(f"case: training: {{seed: {TRAINING.seed + first}}}, requested {TRAINING.seed};")


def test_samples_that_are_not_the_recipes_are_not_answered_with_what_the_adapter_has_already() -> None:
    trial = received(drawn_by(None, declared=False), shifted=1)
    assert sample_orders.advice(trial, None, "", "a.py")[0].startswith("adapter: put RecipeSamples in the place")
    assert sample_orders.advice(trial, None, "RecipeSamples(case)", "a.py")[0].startswith(
        "the adapter has RecipeSamples"
    )


def test_an_adapter_whose_todo_is_not_done_is_told_that_and_not_what_its_comment_names(tmp_path: Path) -> None:
    trial, (adapter, _) = received(drawn_by(None, declared=False), shifted=1), begun(FLAT, tmp_path)
    line = next(n for n, text in enumerate(adapter.splitlines(), 1) if "# TODO no Dataset" in text)
    said = sample_orders.advice(trial, None, adapter, "a.py")
    assert said[0] == f"the TODO in line {line} of a.py is not done: nothing hands the recipe's samples over"
    assert said[1].startswith("adapter: put RecipeSamples in the place")
