"""An ordinary training script, which knows of no harness: FSDP2 or DDP around a Llama of its own, with its own loader.

Its rotary embedding turns halves of a head; names, defaults and schedule are its own.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Norm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale


def rope(x, theta):
    half = x.shape[-1] // 2
    freqs = theta ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] * freqs
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.head, self.theta = a.dim // a.heads, a.theta
        self.q_proj = nn.Linear(a.dim, a.dim, bias=False)
        self.k_proj = nn.Linear(a.dim, a.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(a.dim, a.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(a.dim, a.dim, bias=False)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (p(x).view(b, s, -1, self.head).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(rope(q, self.theta), rope(k, self.theta), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, d))


class MLP(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.gate_proj = nn.Linear(a.dim, a.ffn, bias=False)
        self.up_proj = nn.Linear(a.dim, a.ffn, bias=False)
        self.down_proj = nn.Linear(a.ffn, a.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = Norm(a.dim), SelfAttention(a), Norm(a.dim), MLP(a)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TinyLlama(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.wte = nn.Embedding(a.vocab, a.dim)
        self.blocks = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.ln_f = Norm(a.dim)
        self.lm_head = nn.Linear(a.dim, a.vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Tokens(Dataset):
    def __init__(self, vocab, seq, n=4096):
        self.data = torch.randint(vocab, (n, seq + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i, :-1], self.data[i, 1:]


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--kv-heads", type=int, default=4)
    p.add_argument("--ffn", type=int, default=192)
    p.add_argument("--vocab", type=int, default=256)
    p.add_argument("--seq-len", type=int, default=32)
    p.add_argument("--batch-size", type=int, default=8, help="per rank")
    p.add_argument("--max-steps", type=int, default=20)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--theta", type=float, default=10000.0)
    p.add_argument("--ddp", action="store_true")
    p.add_argument("--log-every", type=int, default=5)
    return p.parse_args()


def lr_at(step, a):
    if step < a.warmup:
        return a.lr * (step + 1) / (a.warmup + 1)
    return a.lr * 0.5 * (1 + math.cos(math.pi * (step - a.warmup) / max(1, a.max_steps - a.warmup)))


def main():
    a = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = TinyLlama(a)
    if a.ddp:
        model = DDP(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    data = Tokens(a.vocab, a.seq_len)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    loader = iter(DataLoader(data, batch_size=a.batch_size, sampler=sampler, num_workers=1))
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(a.max_steps):
        x, y = next(loader)
        for group in opt.param_groups:
            group["lr"] = lr_at(step, a)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if rank == 0 and step % a.log_every == 0:
            print(f"step {step} loss {loss.item():.4f} norm {float(norm):.3f} lr {lr_at(step, a):.2e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
