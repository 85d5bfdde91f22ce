"""Llama 3 as published, on one device: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, no biases.

Parameter names and the rotary layout (adjacent pairs turn together) are Meta's. The model is written so that parallelism
can be applied to it from outside, without edits. Heads are counted from what the projections return. The sequence length is
read where the whole sequence is. A pipeline stage may delete layers or set tok_embeddings, norm or output to None.

Where the published code computes in float32 (norms, rotary tables and rotation, loss) this one computes in *at least*
float32. So a float64 model is float64 throughout and 1e-12 means something.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Lora, ModelConfig, RopeScaling, TrainingConfig, is_trainable


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or x itself if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def rotary_frequencies(config: ModelConfig, like: Tensor) -> Tensor:
    """Return radians per position of each pair, theta ** (-2i / head_dim), rescaled if the config has rope_scaling.
    [head_dim / 2]

    Dtype and device are those of `like`.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=like.device, dtype=like.dtype) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else rescale(frequencies, config.rope_scaling)


def rescale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the frequencies of Llama 3.1: those of pairs that turn rarely are divided by `factor`, those that turn
    often stay.

    Between them it is linear. Meta's `apply_scaling` spells the two ends as branches; clamping `keep` to [0, 1] is the
    same.
    """
    keep = kept_share(frequencies, scaling).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def kept_share(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the share of each frequency that is not rescaled, before it is clamped to 0 and 1.

    `turns` is how often a pair goes round within the original context.
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    return (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x with each adjacent pair (x[2i], x[2i+1]) turned by its angle.

    x [b, s, heads, head_dim], angles [(b,) s, head_dim / 2].
    """
    return turn_by(x, angles.cos(), angles.sin())


def turn_by(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each adjacent pair turned, as `rotate` does, by the angles' cosines and sines, [(b,) s, head_dim /
    2] each.

    It computes in at least float32; the result has x's dtype.
    """
    cos = cos.unsqueeze(-2)  # [(b,) s, 1, head_dim / 2]
    sin = sin.unsqueeze(-2)
    even, odd = at_least_float32(x).unflatten(-1, (-1, 2)).unbind(-1)  # [b, s, heads, head_dim / 2] each
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    """x over its root mean square, in at least float32; then, in x's dtype, times the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v, each position seeing itself and earlier ones of the same document.

    q, k, v [b, heads, s, head_dim], documents int64 [b, s] or None: all of a row is one. No parameters: it is a module so
    that context parallel has something to replace.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # [b, s, s]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=same.tril().unsqueeze(1))


class Adapted(nn.Linear):
    """A matrix with an adapter of low rank: W x + scale * B (A x), without bias.

    The adapter's parts are modules, so that they are wrapped and cut like others.
    """

    def __init__(self, inputs: int, outputs: int, lora: Lora) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = lora.scale
        self.lora_a = nn.Linear(inputs, lora.rank, bias=False)
        self.lora_b = nn.Linear(lora.rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * self.lora_b(self.lora_a(x))


def block_matrix(config: ModelConfig, name: str, inputs: int, outputs: int) -> nn.Linear:
    """Return a matrix without bias for a block; with an adapter if the config's `lora` targets its name."""
    if config.lora is not None and name in config.lora.targets:
        return Adapted(inputs, outputs, config.lora)
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Grouped-query attention. Under tensor parallel the projections return this rank's heads only, hence the view with -1.

    Positions travel down to here as integers and become angles here, not in a table beside the model. A buffer would be
    lost between the meta device and to_empty. Mixed precision would cast a float argument. Under sequence parallel only this
    input is the whole sequence. Document numbers travel down for the same reasons.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = block_matrix(config, "wq", config.dim, config.dim)
        self.wk = block_matrix(config, "wk", config.dim, kv_dim)
        self.wv = block_matrix(config, "wv", config.dim, kv_dim)
        self.wo = block_matrix(config, "wo", config.dim, config.dim)
        self.inner_attention = CausalAttention()

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        heads = (-1, self.config.head_dim)
        q, k, v = (project(x).unflatten(-1, heads) for project in (self.wq, self.wk, self.wv))
        angles = self.angles(torch.arange(s, device=q.device) if positions is None else positions, at_least_float32(q))
        q = self.turn(q, angles)
        k = self.turn(k, angles)
        repeats = q.shape[2] // k.shape[2]  # query heads per key head; head i reads key head i // repeats
        k = k.repeat_interleave(repeats, dim=2)
        v = v.repeat_interleave(repeats, dim=2)
        q = q.transpose(1, 2)  # [b, heads, s, head_dim], so are k and v
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        out = self.inner_attention(q, k, v) if documents is None else self.inner_attention(q, k, v, documents)
        return self.wo(out.transpose(1, 2).flatten(2))

    def angles(self, positions: Tensor, like: Tensor) -> Tensor:
        """Return the angle of each pair at each position, in like's dtype. positions [(b,) s] -> [(b,) s, head_dim / 2]"""
        return positions.unsqueeze(-1).to(like.dtype) * rotary_frequencies(self.config, like)

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        return rotate(x, angles)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = block_matrix(config, "w1", config.dim, config.ffn_dim)
        self.w2 = block_matrix(config, "w2", config.ffn_dim, config.dim)
        self.w3 = block_matrix(config, "w3", config.dim, config.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Dropout(nn.Module):
    """Zeroes each entry with probability p, the same ones in every sample, so that it does not matter how a batch is divided.

    For debugging: its mask [s, dim] is the only thing here that is drawn from the default generator. In eval mode all is kept.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[1:], device=x.device) >= self.p
        return x * kept / (1 - self.p)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); with dropout on what attention and feed-forward add."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention_dropout = Dropout(config.dropout) if config.dropout else nn.Identity()
        self.ffn_dropout = Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), positions, documents))
        return x + self.ffn_dropout(self.feed_forward(self.ffn_norm(x)))


class TiedOutput(nn.Module):
    """The output projection through the embedding's weight, which the caller passes.

    It owns no parameter on purpose: a Parameter shared by two modules is silently untied by to_empty and by
    parallelize_module. The embedding must therefore be whole (unsharded by FSDP) when this runs.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class Llama(nn.Module):
    """tokens int64 [b, s] -> logits [b, s, vocab].

    positions: int64 [s] or [b, s], where each column sits in the whole sequence; None means 0 .. s-1. documents: int64
    [b, s], which document of its row each token is in; None means that attention looks past separators. On a pipeline
    stage that is not the first, `tokens` is the previous stage's activations. mask_seed: dropout's masks are drawn anew
    from it in every forward pass, so all microbatches of a step have the same; see `seed_masks`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mask_seed = 0
        table = torch.zeros(
            config.vocab_size, config.dim
        )  # to draw it on meta imports torch's compiler, which takes seconds
        self.tok_embeddings: nn.Embedding | None = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config) for i in range(config.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.dim, config.norm_eps)
        output = nn.Linear(config.dim, config.vocab_size, bias=False) if not config.tied_embeddings else None
        self.output: nn.Module | None = output or TiedOutput()

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if self.config.dropout:
            torch.manual_seed(self.mask_seed)
        x = tokens  # [b, s, dim] of a stage that is not the first, which may have the embedding for its output
        if self.tok_embeddings is not None and not tokens.is_floating_point():
            x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, positions, documents)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """Return the logits [b, s, vocab], by the embedding's weight if embeddings are tied."""
        assert self.output is not None
        if not self.config.tied_embeddings:
            return self.output(x)
        assert self.tok_embeddings is not None, "tied embeddings: the stage with the output needs tok_embeddings too"
        return self.output(x, self.tok_embeddings.weight)


def freeze(model: nn.Module, training: TrainingConfig) -> None:
    """Set whether each parameter requires a gradient: only those that the recipe trains do."""
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(is_trainable(training, fqn))


def mask_seed(seed: int, step: int) -> int:
    """Return the seed of a step's dropout masks, from the recipe's seed."""
    return zlib.crc32(f"{seed} {step}".encode())


def seed_masks(model: nn.Module, seed: int, step: int) -> None:
    """Set the seed of a step's dropout masks in every Llama inside `model`, which may be wrapped."""
    for module in model.modules():
        if isinstance(module, Llama):
            module.mask_seed = mask_seed(seed, step)


def initial_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Return seed weights by fqn, float64: normal with std 1 / sqrt(columns); norms 1 + 0.1 * normal, so that slices differ.

    At published widths that is the customary 0.02. A fixed 0.02 at debug's 64 columns would leave attention all but
    uniform. Without the rotary embedding gradients would then change by less than 1%; now they change by half.
    Each parameter has its own generator, seeded by (seed, crc32(fqn)): its values depend on no other parameter. The B of an
    adapter is zero, so that the model begins as it is without adapters.
    """
    return {fqn: _initial_weight(fqn, shape, seed) for fqn, shape in config.parameter_shapes().items()}


def _initial_weight(fqn: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the initial value of a parameter, float64. It depends on its fqn, shape and seed alone.

    Zeros for lora_b; about 1, with deviation 0.1, for a vector; else about 0, with deviation 1 / sqrt(shape[1]).
    """
    if fqn.endswith(".lora_b.weight"):
        return np.zeros(shape)
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(fqn.encode())]))
    normal = generator.standard_normal(shape)
    return 1 + 0.1 * normal if len(shape) == 1 else normal / math.sqrt(shape[1])


def llama_from(
    weights: Mapping[str, np.ndarray], *, config: ModelConfig, dtype: torch.dtype, device: str = "cpu"
) -> Llama:
    """Return a model with these weights, rounded to dtype, on `device`. No random number is drawn.

    RuntimeError for a missing or extra name.
    """
    with torch.device("meta"):
        model = Llama(config)
    state = {fqn: torch.tensor(value).to(device, dtype) for fqn, value in weights.items()}
    model.load_state_dict(state, assign=True)
    return model
