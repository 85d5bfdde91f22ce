"""Megatron-LM's own pretrain_gpt.py as it is, on a machine without accelerator: its loop, optimizer, schedule and mock data.

What `harness/adapters/megatron/cpu.py` stubs is stubbed here too. So is what else megatron.training asks a GPU: whether there
is one, its properties and memory. Triton, which it imports but does not call here, and CUDA kernels, which nothing here uses,
are stubbed as well. The compiler of small functions is off. The index helper of its data is the compiled one of the wheel, laid
beside its source.

PYTHONPATH=CHECKOUT torchrun --nproc-per-node 2 upstream_bugs/megatron_pretrain_on_cpu.py tp=2 --sequence-parallel
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # read when torch is imported

import torch

TRITON = ("triton", "triton.language")
MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")
SIZES = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"""
RECIPE = """--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --eval-iters 0 --eval-interval 1000 --log-interval 1 --split 1,0,0 --num-workers 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 32"""
WITHOUT_GPU = """--transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm"""


def asked_by_megatron() -> bool:
    """Whether there is a GPU: it requires one, others who ask are to hear the truth."""
    return str(sys._getframe(1).f_globals.get("__name__")).startswith("megatron")


def lend() -> None:
    cuda: Any = torch.cuda
    cuda.is_available = asked_by_megatron
    cuda.set_device = lambda *_: None
    cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1)
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.memory_stats = lambda *_: {}
    for name in MEMORY:
        setattr(cuda, name, lambda *_: 0)
    from harness.adapters.megatron import cpu

    cpu.arrange()
    for name in TRITON:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    import megatron.core.transformer.custom_layers.batch_invariant_kernels

    for name in TRITON:  # torch is to find none
        del sys.modules[name]
    import megatron.legacy.fused_kernels

    megatron.legacy.fused_kernels.load = lambda *_: None


def train(given: list[str]) -> None:
    """pretrain_gpt.py of the checkout that PYTHONPATH names, with degrees (tp=2) and options as Megatron spells them."""
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        lend()
    degrees = dict(each.split("=") for each in given if not each.startswith("-"))
    layout = [
        "--tensor-model-parallel-size",
        degrees.get("tp", "1"),
        "--pipeline-model-parallel-size",
        degrees.get("pp", "1"),
    ]
    script = Path(sys.modules["megatron.core"].__dict__["__file__"]).parents[2] / "pretrain_gpt.py"
    sys.path.insert(0, str(script.parent))
    options = [each for each in given if each.startswith("-")]
    sys.argv = [str(script), *f"{SIZES} {RECIPE} {WITHOUT_GPU}".split(), *layout, *options]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    train(sys.argv[1:])
