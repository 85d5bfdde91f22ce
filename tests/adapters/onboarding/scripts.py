"""Scripts that `harness init` is tried on: tests/script_trainer.py, changed, and one whose model is no Llama."""

from __future__ import annotations

from harness import ROOT

SCRIPT = (ROOT / "tests" / "script_trainer.py").read_text()

Change = tuple[str, str]


def changed(text: str, *changes: Change) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


INNER = """
        return self.norm(x)


class TinyLlama(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.model, self.lm_head = Inner(a), nn.Linear(a.dim, a.vocab, bias=False)

    def forward(self, idx):
        return self.lm_head(self.model(idx))
"""
MESH = """init_device_mesh("cpu", (a.dp_replicate, world // a.dp_replicate), mesh_dim_names=("r", "s"))
        mesh = mesh if a.dp_replicate > 1 else mesh["s"]"""
HUGGING_FACE: tuple[Change, ...] = (
    ("class TinyLlama(", "class Inner("),
    ("self.wte", "self.embed_tokens"),
    ("self.blocks", "self.layers"),
    (
        "self.ln_f = Norm(a.dim)\n        self.lm_head = nn.Linear(a.dim, a.vocab, bias=False)",
        "self.norm = Norm(a.dim)",
    ),
    ("\n        return self.lm_head(self.ln_f(x))\n", INNER),
    ("in model.blocks", "in model.model.layers"),
    ("self.scale", "self.weight"),
    ("self.ln_1", "self.input_layernorm"),
    ("self.ln_2", "self.post_attention_layernorm"),
    ("self.attn", "self.self_attn"),
    ('init_device_mesh("cpu", (world,))', MESH),
    (
        '    p.add_argument("--ddp"',
        '    p.add_argument("--dp-replicate", type=int, default=1)\n    p.add_argument("--ddp"',
    ),
)
"""Names with the prefix `model.`, and a degree of replication."""
RESUMES: tuple[Change, ...] = (
    (
        '    p.add_argument("--ddp"',
        '    p.add_argument("--resume")\n    p.add_argument("--save-to")\n    p.add_argument("--ddp"',
    ),
    ('    p.add_argument("--ddp"', '    p.add_argument("--tokens", required=True)\n    p.add_argument("--ddp"'),
    ("return p.parse_args()", "return p.parse_args(sys.argv[1:])"),
    ("import os\n", "import os\nimport sys\n"),
    ("def main():", "def save(model, folder):\n    torch.save(model.state_dict(), folder)\n\n\ndef main():"),
)
FUSED: tuple[Change, ...] = (
    ("        self.q_proj = nn.Linear(a.dim, a.dim, bias=False)\n", "        self.kv = a.kv_heads * self.head\n"),
    ("        self.k_proj = nn.Linear(a.dim, a.kv_heads * self.head, bias=False)\n", ""),
    ("self.v_proj = nn.Linear(a.dim, a.kv_heads * self.head", "self.c_in = nn.Linear(a.dim, a.dim + 2 * self.kv"),
    ("self.o_proj", "self.c_proj"),
    ("(p(x).view(", "(p.view("),
    ("for p in (self.q_proj, self.k_proj, self.v_proj))", "for p in self.c_in(x).split((d, self.kv, self.kv), -1))"),
    ("self.gate_proj = nn.Linear(a.dim, a.ffn, bias=False)", "self.c_fc = nn.Linear(a.dim, 2 * a.ffn, bias=False)"),
    ("        self.up_proj = nn.Linear(a.dim, a.ffn, bias=False)\n", ""),
    (
        "        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))",
        "        gate, up = self.c_fc(x).chunk(2, -1)\n        return self.c_proj(F.silu(gate) * up)",
    ),
    ("self.down_proj", "self.c_proj"),
)
"""wq, wk and wv in one, w1 and w3 in one, and one name for the two matrices behind them."""
PARALLEL: tuple[Change, ...] = (
    (
        "from torch.utils.data",
        "from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module\n"
        "from torch.utils.data",
    ),
    (
        '    p.add_argument("--ddp"',
        '    p.add_argument("--tensor-parallel-size", type=int)\n    p.add_argument("--ddp"',
    ),
    (
        "    if a.ddp:",
        "    if a.tensor_parallel_size > 1:\n"
        '        parallelize_module(model, None, {"ln_f": SequenceParallel(), "lm_head": ColwiseParallel()})\n'
        "    if a.ddp:",
    ),
)
"""Tensor parallel whose loss is computed on gathered logits."""

LITTLE = """
import torch
import torch.nn.functional as F
from torch import nn


def get_batch(split):
    raise FileNotFoundError(f"{split}.bin")


class Probe(nn.Linear):
    pass


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.wpe = nn.Embedding(256, dim), nn.Embedding(128, dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, x):
        x = self.embed(x) + self.wpe(torch.arange(x.shape[1]))
        return self.head(F.gelu(self.norm(x)))


if __name__ == "__main__":
    net, probe = Other(), Probe(1, 1)
    first = torch.optim.SGD(probe.parameters(), lr=1.0)
    never = torch.optim.AdamW(net.parameters(), betas=(0.6, 0.6))
    own = list(net.parameters())
    groups = [{"params": [p for p in own if p.dim() >= 2]}, {"params": [p for p in own if p.dim() < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.3)
    for step in range(1000):
        x, y = get_batch("train")
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        for one in (first, opt):
            one.step()
"""
"""A model with other parts than Llama's, and batches made by a function whose data are not there."""
