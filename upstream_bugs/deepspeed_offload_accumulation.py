"""DeepSpeed's ZeRO-2 with offload drops all microbatches of a step but the first and the last (#6550 to #7967; 0.19 is right).

With `offload_optimizer`, what a microbatch adds to the gradients is copied to the host for the first one alone. So with an
accumulation of three the second is lost. It began with c85c8703b (0.15.2), and 9d632f103 (0.19.0) fixed it. ZeRO-1 is right,
and so is an accumulation of two. The loss that is shown is right.

torchrun --nproc-per-node 2 upstream_bugs/deepspeed_offload_accumulation.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import deepspeed_on_cpu as on_cpu
import torch.distributed as dist


def norm(stage: int, count: int) -> float:
    engine = on_cpu.engine(stage, accumulation=count, offload_optimizer={"device": "cpu"})
    for each in on_cpu.samples(count):
        engine.backward(engine(each).square().mean())
        engine.step()
    return float(engine.get_global_grad_norm())


def main() -> int:
    on_cpu.start()
    wrong = 0
    for stage, count in ((1, 3), (2, 2), (2, 3)):
        inputs = on_cpu.samples(count)
        mean, ends = (on_cpu.norm_on_one_device(part) / count for part in (inputs, [inputs[0], inputs[-1]]))
        found = norm(stage, count)
        wrong += abs(found - mean) > 1e-4
        on_cpu.told(f"ZeRO-{stage}: norm {found:.5f}; of {count} microbatches {mean:.5f}, of first and last {ends:.5f}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
