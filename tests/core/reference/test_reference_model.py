"""The reference model computes what transformers' LlamaForCausalLM, which nobody here wrote, computes."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import ROOT, reference
from harness.reference.config import PRESETS, ModelConfig, RopeScaling
from harness.reference.model import (
    Llama,
    initial_weights,
    llama_from,
    rotary_frequencies,
    seed_masks,
)
from harness.reference.train import forward_loss

if TYPE_CHECKING:
    from transformers import LlamaConfig

SEED, SEQ_LEN = 7, 48
# With theta 100 debug's four pairs turn 4.1, 1.3, 0.4 and 0.1 times in 26 positions: one is kept, one blended, two slowed.
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=26)
CONFIGS = {
    "plain": ModelConfig(),
    "scaled": ModelConfig(rope_scaling=SCALED, rope_theta=100.0),
    "tied": ModelConfig(tied_embeddings=True),
    "one_kv_head": ModelConfig(n_kv_heads=1),
    "as_many_kv_heads": ModelConfig(n_kv_heads=8, n_layers=1),
    "3.2_in_small": ModelConfig(
        n_heads=4, n_kv_heads=2, rope_scaling=replace(SCALED, factor=32.0), tied_embeddings=True
    ),
}


@contextmanager
def float32_means_float64() -> Iterator[None]:
    """transformers casts to torch.float32 inside its norm, rotary table and softmax: let that name mean float64."""
    kept = torch.float32, torch.float
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    try:
        yield
    finally:
        torch.float32, torch.float = kept  # type: ignore[misc]


def their_config(config: ModelConfig) -> LlamaConfig:
    from transformers import LlamaConfig  # seconds, which only who needs it takes

    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return LlamaConfig(  # type: ignore[call-arg]
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        max_position_embeddings=1024,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tied_embeddings,
        attn_implementation="eager",
        use_cache=False,
    )


THEIR_NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "output.": "lm_head.",
    ".attention.wq": ".self_attn.q_proj",
    ".attention.wk": ".self_attn.k_proj",
    ".attention.wv": ".self_attn.v_proj",
    ".attention.wo": ".self_attn.o_proj",
    ".feed_forward.w1": ".mlp.gate_proj",
    ".feed_forward.w2": ".mlp.down_proj",
    ".feed_forward.w3": ".mlp.up_proj",
    ".attention_norm": ".input_layernorm",
    ".ffn_norm": ".post_attention_layernorm",
}


def their_name(fqn: str) -> str:
    for ours, theirs in THEIR_NAMES.items():
        fqn = theirs + fqn.removeprefix(ours) if not ours.startswith(".") and fqn.startswith(ours) else fqn
        fqn = fqn.replace(ours, theirs) if ours.startswith(".") else fqn
    return fqn


def their_layout(fqn: str, value: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rows of wq, wk: Meta pairs neighbours (2i, 2i+1), transformers pairs halves (i, i + head_dim / 2)."""
    if not fqn.endswith(("wq.weight", "wk.weight")):
        return value
    pairs = value.reshape(-1, config.head_dim // 2, 2, config.dim)  # [heads, pair, even or odd, dim]
    return pairs.swapaxes(1, 2).reshape(value.shape)


def tokens_and_labels(config: ModelConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(config.vocab_size, (3, SEQ_LEN), generator=generator)
    labels = torch.randint(config.vocab_size, (3, SEQ_LEN), generator=generator)
    labels[0, :20] = labels[2, 40:] = -100
    return tokens, labels


def ours_and_theirs(config: ModelConfig, dtype: torch.dtype) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The logits and every gradient, in their names and layout."""
    tokens, labels = tokens_and_labels(config)
    weights = initial_weights(config, SEED)
    ours = llama_from(weights, config=config, dtype=dtype)
    forward_loss(ours, tokens, labels).backward()
    found = {"logits": ours(tokens).detach().numpy()}
    for fqn, parameter in ours.named_parameters():
        assert parameter.grad is not None
        found[their_name(fqn)] = their_layout(fqn, parameter.grad.numpy(), config)
    return found, theirs(config, weights, tokens, labels, dtype)


def theirs(
    config: ModelConfig, weights: dict[str, np.ndarray], tokens: Tensor, labels: Tensor, dtype: torch.dtype
) -> dict[str, np.ndarray]:
    from transformers import LlamaForCausalLM

    with float32_means_float64() if dtype == torch.float64 else nullcontext():
        model = LlamaForCausalLM(their_config(config)).to(dtype)  # type: ignore[arg-type]
        state = {their_name(f): torch.tensor(their_layout(f, w, config)).to(dtype) for f, w in weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"] if config.tied_embeddings else [], [])
        logits = model(input_ids=tokens).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().numpy()} | gradients


def disagreement(config: ModelConfig, dtype: torch.dtype) -> float:
    """The largest difference of any tensor, relative to that tensor's largest value."""
    ours, others = ours_and_theirs(config, dtype)
    assert ours.keys() == others.keys()
    assert {value.dtype for value in others.values()} == {value.dtype for value in ours.values()}
    return max(float(np.abs(ours[k] - others[k]).max() / np.abs(others[k]).max()) for k in ours)


@pytest.mark.slow("a model of transformers each; the first is compared in the same way", after=1)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient_equal_transformers_in_float64(name: str) -> None:
    assert disagreement(CONFIGS[name], torch.float64) < 1e-12  # seen: 3e-15


@pytest.mark.slow("a model of transformers each; the first is compared in the same way", after=1)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient_agree_with_transformers_as_shipped_in_float32(name: str) -> None:
    assert disagreement(CONFIGS[name], torch.float32) < 1e-5  # seen: 2e-6


def test_the_comparison_notices_a_model_without_rope_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.reference.model.rescale", lambda frequencies, scaling: frequencies)
    assert disagreement(CONFIGS["scaled"], torch.float64) > 1e-2


def test_scaled_frequencies_keep_the_fast_pair_slow_the_slow_ones_and_blend_between() -> None:
    like = torch.zeros((), dtype=torch.float64)
    plain = [1.0, 100.0**-0.25, 100.0**-0.5, 100.0**-0.75]
    keep = (26 * plain[1] / (2 * math.pi) - 1) / (4 - 1)
    expected = [plain[0], keep * plain[1] + (1 - keep) * plain[1] / 8, plain[2] / 8, plain[3] / 8]
    assert rotary_frequencies(CONFIGS["scaled"], like).tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_names_shapes_and_order_are_those_of_the_config(name: str) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == list(PRESETS[name].parameter_shapes().items())
    assert list(model.state_dict()) == list(PRESETS[name].parameter_shapes())


@pytest.mark.parametrize(
    "name, published",
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert sum(math.prod(shape) for shape in PRESETS[name].parameter_shapes().values()) == published


def test_a_later_token_never_moves_an_earlier_logit() -> None:
    model = llama_from(initial_weights(ModelConfig(), SEED), config=ModelConfig(), dtype=torch.float64)
    tokens, _ = tokens_and_labels(ModelConfig())
    changed = tokens.clone()
    changed[:, 30] = (changed[:, 30] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :30], after[:, :30])
    assert (before[:, 30:] - after[:, 30:]).abs().amin(dim=(0, 2)).min() > 0


def test_only_distances_between_positions_matter_and_they_do() -> None:
    model = llama_from(initial_weights(ModelConfig(), SEED), config=ModelConfig(), dtype=torch.float64)
    tokens, _ = tokens_and_labels(ModelConfig())
    positions = torch.arange(SEQ_LEN)
    logits = model(tokens)
    assert torch.equal(model(tokens, positions), logits)
    assert torch.equal(model(tokens, positions.expand(3, -1)), logits)
    assert (model(tokens, positions + 1000) - logits).abs().max() < 1e-10
    assert (model(tokens, positions * 2) - logits).abs().max() > 1e-2


def test_two_stages_with_deleted_layers_compute_what_the_whole_model_does() -> None:
    tokens, _ = tokens_and_labels(ModelConfig())
    weights = initial_weights(ModelConfig(), SEED)
    whole, first, last = (llama_from(weights, config=ModelConfig(), dtype=torch.float64) for _ in range(3))
    del first.layers["1"], last.layers["0"]
    first.norm = first.output = last.tok_embeddings = None
    assert torch.equal(last(first(tokens)), whole(tokens))
    assert "layers.1.attention.wq.weight" in dict(last.named_parameters())


def test_a_model_built_on_meta_emptied_and_loaded_is_right() -> None:
    tokens, _ = tokens_and_labels(CONFIGS["3.2_in_small"])
    expected = llama_from(
        initial_weights(CONFIGS["3.2_in_small"], SEED), config=CONFIGS["3.2_in_small"], dtype=torch.float64
    )
    with torch.device("meta"):
        model = Llama(CONFIGS["3.2_in_small"])
    model.to(torch.float64).to_empty(device="cpu").load_state_dict(expected.state_dict())
    assert torch.equal(model(tokens), expected(tokens))


def test_a_model_is_built_without_torchs_compiler_which_takes_seconds_to_import() -> None:
    program = (
        "import sys, torch; from harness.reference.config import ModelConfig as C;"
        "from harness.reference.model import initial_weights, llama_from;"
        "llama_from(initial_weights(C(), 0), config=C(), dtype=torch.float64); print('torch._dynamo' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert said.stdout.strip() == "False"


def test_float64_is_float64_throughout_and_bfloat16_stays_bfloat16() -> None:
    tokens, labels = tokens_and_labels(ModelConfig())
    weights = initial_weights(ModelConfig(), SEED)
    for dtype, loss_dtype in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        model = llama_from(weights, config=ModelConfig(), dtype=dtype)
        assert (model(tokens).dtype, forward_loss(model, tokens, labels).dtype) == (dtype, loss_dtype)


def test_a_parameters_seed_values_depend_on_its_name_and_the_seed_alone() -> None:
    two, four = initial_weights(ModelConfig(), 1), initial_weights(ModelConfig(n_layers=4), 1)
    assert all(np.array_equal(two[fqn], four[fqn]) for fqn in two)
    assert not np.array_equal(two["norm.weight"], initial_weights(ModelConfig(), 2)["norm.weight"])
    assert not np.array_equal(two["layers.0.ffn_norm.weight"], two["layers.1.ffn_norm.weight"])


def test_no_two_rows_of_any_seed_weight_are_equal_not_even_in_bfloat16() -> None:
    for fqn, value in initial_weights(ModelConfig(), 1234).items():
        if value.ndim == 2:
            rows = torch.tensor(value).bfloat16().float().numpy()
            assert len(np.unique(rows, axis=0)) == len(rows), fqn
        else:
            slices = torch.tensor(value).bfloat16().reshape(16, -1).float().numpy()  # slices of 4 at 16 ranks
            assert len(np.unique(slices, axis=0)) == 16, fqn


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(RuntimeError, match="layers.1.attention.wq.weight"):
        llama_from(initial_weights(ModelConfig(n_layers=1), 1), config=ModelConfig(), dtype=torch.float32)


def imports(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = [n for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]  # relative ones are its own
    return plain | {f"{n.module}.{a.name}" for n in named for a in n.names}


def test_no_source_of_the_reference_names_torch_distributed_or_the_harness() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "torchao", "numpy"}
    files = sorted(Path(reference.__path__[0]).glob("**/*.py"))
    assert {f.name for f in files} >= {"__init__.py", "config.py", "model.py", "data.py", "train.py"}
    for file in files:
        named = imports(file.read_text())
        foreign = {name for name in named if name.split(".")[0] not in allowed}
        assert not foreign, f"{file}: imports {foreign}"
        assert not {n for n in named if n.startswith("torch.distributed")}, file
        body = file.read_text().split('"""', 2)[2]
        assert "distributed." not in body and "importlib" not in body and "__import__" not in body, file


def test_importing_the_reference_does_not_load_the_harness() -> None:
    program = (
        "import sys, reference.model, reference.data, reference.train, reference.config\n"
        "print([m for m in sys.modules if m.split('.')[0] == 'harness'])"
    )
    root = Path(reference.__path__[0]).resolve().parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_dropout_zeroes_the_same_entries_of_every_sample_and_others_in_every_step() -> None:
    config = ModelConfig(dropout=0.5)
    model = llama_from(initial_weights(config, SEED), config=config, dtype=torch.float32)
    dropout, ones = model.layers["0"].attention_dropout, torch.ones(3, 8, 64)
    torch.manual_seed(1)
    dropped = dropout(ones)
    assert dropped.unique().tolist() == [0.0, 2.0]
    assert torch.equal(dropped[0], dropped[2])
    assert not torch.equal(dropped, dropout(ones))
    tokens = torch.arange(8).repeat(2, 1)
    seed_masks(model, 1234, 1)
    first, again = model(tokens), model(tokens)
    seed_masks(model, 1234, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, model(tokens))


def test_without_dropout_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    llama_from(initial_weights(ModelConfig(), 1), config=ModelConfig(), dtype=torch.float32)(
        torch.zeros(1, 4, dtype=int)
    )
    assert torch.equal(before, torch.get_rng_state())
