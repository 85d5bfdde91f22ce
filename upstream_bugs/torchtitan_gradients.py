"""What torchtitan 0.1.0 to 0.2.2 does wrong with gradients, on two CPU ranks, by its own functions and nothing of this project.

    replicas   0.2.2: data_parallel_replicate_degree alone divides gradients by the number of ranks twice
    labels     up to 0.2.1: ranks with unequally many valid labels average their losses as if they had equally many
    pipeline   0.2.2: gradients are those of the loss's sum, which is divided by the valid tokens after the backward passes

The model is its Llama 3, parallelized by its `parallelize_llama`. Loss and backward are the lines of its train.py; under a
pipeline, they are one step of its schedule. `pipeline` is for 0.2.0 and later.

PYTHONPATH=WHERE_IT_LIES torchrun --nproc-per-node 2 upstream_bugs/torchtitan_gradients.py replicas     exits with 1 if it is so
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]  # it falls back to "cuda"
IGNORED, WORDS, LENGTH = -100, 16, 8
ASKED = {
    "replicas": {"replicate": 2, "shard": 1, "pp": 1, "hidden": 0},
    "labels": {"replicate": 1, "shard": 2, "pp": 1, "hidden": LENGTH - 1},
    "pipeline": {"replicate": 1, "shard": 1, "pp": 2, "hidden": 0},
}


def lend() -> None:
    """What is imported for kernels of experts, which a dense model has none of, and for text, where it is not installed."""
    if importlib.util.find_spec("triton") is None:
        sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
    if importlib.util.find_spec("tiktoken") is None:
        sys.modules |= {"tiktoken": MagicMock(), "tiktoken.load": MagicMock()}


def torchtitan() -> SimpleNamespace:
    lend()
    try:
        config = importlib.import_module("torchtitan.config")
    except ImportError:
        config = importlib.import_module("torchtitan.config_manager")
    parts = {
        "llama3": "torchtitan.models.llama3",
        "loss": "torchtitan.components.loss",
        "mesh": "torchtitan.distributed",
    }
    return SimpleNamespace(config=config, **{name: importlib.import_module(path) for name, path in parts.items()})


def parallelized(
    titan: SimpleNamespace, replicate: int = 1, shard: int = 1, pp: int = 1, cp: int = 1, rotation: str = "allgather"
) -> tuple[Any, Any]:
    """(the model, or how a pipeline's step is taken, the same as one device has it)"""
    job = titan.config.JobConfig()
    job.parallelism.context_parallel_degree, job.parallelism.context_parallel_rotate_method = cp, rotation
    job.parallelism.pipeline_parallel_degree, job.training.local_batch_size = pp, 2
    job.training.seq_len, job.activation_checkpoint.mode = LENGTH, "none"
    job.training.mixed_precision_param = job.training.mixed_precision_reduce = "float32"
    degrees = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": 1, "pp": pp, "world_size": 2}
    degrees |= {"ep": 1, "etp": 1, "enable_loss_parallel": False}
    taken = inspect.signature(titan.mesh.ParallelDims).parameters
    dims = titan.mesh.ParallelDims(**{name: value for name, value in degrees.items() if name in taken})
    given = {"parallel_dims": dims, "job_config": job}
    if "world_mesh" in inspect.signature(titan.llama3.parallelize_llama).parameters:
        given["world_mesh"] = (
            dims.build_mesh(device_type="cpu")
            if "device_type" in inspect.signature(dims.build_mesh).parameters
            else dims.world_mesh
        )
    arguments = titan.llama3.TransformerModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=WORDS, max_seq_len=LENGTH)
    torch.manual_seed(0)
    one = titan.llama3.Transformer(arguments)
    with torch.no_grad():
        one.init_weights()
    if pp == 1:
        return titan.llama3.parallelize_llama(copy.deepcopy(one), **given), one
    pipelined = importlib.import_module("torchtitan.distributed.pipeline_parallel").pipeline_llm
    given |= {"device": torch.device("cpu"), "model_args": arguments, "loss_fn": titan.loss.cross_entropy_loss}
    return pipelined(copy.deepcopy(one), parallelize_fn=titan.llama3.parallelize_llama, **given), one


def backward(titan: SimpleNamespace, model: Any, tokens: Tensor, labels: Tensor, valid: int) -> None:
    """Run backward as train.py does: up to 0.2.1 from the loss function's mean, in 0.2.2 from its sum over the valid tokens of
    all ranks."""
    loss = titan.loss.cross_entropy_loss(model(tokens), labels)
    if hasattr(titan.loss, "IGNORE_INDEX"):
        loss = loss / valid
    loss.backward()


def pipeline_step(pipelined: Any, tokens: Tensor, labels: Tensor) -> Any:
    """The stage that this rank has, after what train.py does up to clipping: the last one's targets are the labels."""
    schedule, (stage,), first, last = pipelined
    schedule.step(*([tokens] if first else []), target=labels if last else None, losses=[] if last else None)
    return stage


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def ratio_of_gradients(titan: SimpleNamespace, replicate: int, shard: int, pp: int, hidden: int) -> float:
    """Return the norm of the first attention_norm's gradient here, divided by the norm on one device with all samples. hidden:
    how many labels of the first sample do not count."""
    rank = dist.get_rank()
    model, one = parallelized(titan, replicate, shard, pp)
    torch.manual_seed(1)
    tokens, labels = torch.randint(WORDS, (2, 2, LENGTH))
    labels[0, :hidden] = IGNORED
    valid = int((labels != IGNORED).sum())
    if pp > 1:
        model = pipeline_step(model, tokens, labels)
    else:
        backward(titan, model, tokens[rank : rank + 1], labels[rank : rank + 1], valid)
    torch.nn.functional.cross_entropy(one(tokens).flatten(0, 1), labels.flatten()).backward()
    name, gradient = next(
        (name, p.grad) for name, p in model.named_parameters() if name.endswith("attention_norm.weight")
    )
    expected = dict(one.named_parameters())[name].grad
    return float(whole(gradient).norm() / expected.norm())


def without_premultiplied_sum() -> None:
    """Make FSDP2 divide separately, as on devices without a premultiplied sum. gloo has none."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    original = _fsdp_collectives._get_gradient_divide_factors

    def divide_apart(scatter: Any, reduce: Any, dtype: Any, device_type: str = "", *rest: Any, **named: Any) -> Any:
        return original(scatter, reduce, dtype, "mtia", *rest, **named)

    _fsdp_collectives._get_gradient_divide_factors = divide_apart  # type: ignore[assignment]


def main(what: str) -> int:
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo")
    without_premultiplied_sum()
    titan = torchtitan()
    ratio = ratio_of_gradients(titan, **ASKED[what])
    print(f"rank {dist.get_rank()}: {what}: gradient {ratio:.6f} times that of one device", flush=True)
    dist.destroy_process_group()
    return int(abs(ratio - 1) > 1e-4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
