"""DeepSpeed 0.18.3 divides gradients by the accumulation although the caller asked it not to (accelerate #3877; 0.18.4 is
right).

`backward(loss, scale_wrt_gas=False)` is for a caller that has divided already, as transformers' Trainer does. 0.18.2 is right.
The loss that is shown is right.

torchrun --nproc-per-node 2 upstream_bugs/deepspeed_scaled_by_accumulation.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import deepspeed_on_cpu as on_cpu
import torch.distributed as dist


def norm(stage: int) -> float:
    inputs = on_cpu.samples(3)
    engine = on_cpu.engine(stage, accumulation=len(inputs))
    for each in inputs:
        engine.backward(engine(each).square().mean() / len(inputs), scale_wrt_gas=False)
        engine.step()
    return float(engine.get_global_grad_norm())


def main() -> int:
    on_cpu.start()
    inputs, wrong = on_cpu.samples(3), 0
    mean = on_cpu.norm_on_one_device(inputs) / len(inputs)
    for stage in (1, 3):
        found = norm(stage)
        wrong += abs(found - mean) > 1e-4
        on_cpu.told(f"ZeRO-{stage}: norm {found:.5f}; of three microbatches {mean:.5f}, a third of it {mean / 3:.5f}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
