"""DeepSpeed's ZeRO-2 drops all microbatches of a step but the last (0.17.6 to 0.18.2; reported as #7718, fixed in 0.18.3).

With gradient_accumulation_steps 2 and the documented loop, `backward` and `step` for each microbatch. The buffer in which
gradients are added up begins anew with every microbatch before the last, so that the optimizer is given the last one's alone.
The loss that is shown is right. ZeRO-1 and 3 are right.

torchrun --nproc-per-node 2 upstream_bugs/deepspeed_zero2_accumulation.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import deepspeed_on_cpu as on_cpu
import torch.distributed as dist


def norm(stage: int) -> float:
    inputs = on_cpu.samples(3)
    engine = on_cpu.engine(stage, accumulation=len(inputs))
    for each in inputs:
        engine.backward(engine(each).square().mean())
        engine.step()
    return float(engine.get_global_grad_norm())


def main() -> int:
    on_cpu.start()
    inputs, wrong = on_cpu.samples(3), 0
    mean = on_cpu.norm_on_one_device(inputs) / len(inputs)
    for stage in (1, 2, 3):
        found = norm(stage)
        wrong += abs(found - mean) > 1e-4
        last = on_cpu.norm_on_one_device(inputs[-1:]) / len(inputs)
        on_cpu.told(f"ZeRO-{stage}: norm {found:.5f}; of three microbatches {mean:.5f}, of the last alone {last:.5f}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
