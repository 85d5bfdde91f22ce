"""DeepSpeed: of two calls of engine.backward() before one engine.step(), ZeRO-1 and 2 drop the first, ZeRO-3 adds both up.

With gradient_accumulation_steps 1 every backward is taken for a step's last, and what is there begins anew. The documented loop
has one `backward` and `step` a microbatch, or `set_gradient_accumulation_boundary`. Nothing warns about this one: a hazard
(0.19.8). Others met it: allenai/open-instruct #1498.

torchrun --nproc-per-node 2 upstream_bugs/deepspeed_two_backwards.py     exits with 1 while stages differ
"""

from __future__ import annotations

import sys

import deepspeed_on_cpu as on_cpu
import torch.distributed as dist


def main() -> int:
    on_cpu.start()
    inputs, wrong = on_cpu.samples(2), 0
    both, second = on_cpu.norm_on_one_device(inputs), on_cpu.norm_on_one_device(inputs[1:])
    for stage in (1, 2, 3):
        engine = on_cpu.engine(stage)
        for each in inputs:
            engine.backward(engine(each).square().mean())
        engine.step()
        found = float(engine.get_global_grad_norm())
        wrong += abs(found - both) > 1e-4
        on_cpu.told(f"ZeRO-{stage}: norm {found:.5f}; of both {both:.5f}, of the second alone {second:.5f}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
