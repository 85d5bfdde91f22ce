"""Megatron-core 0.16.1: where psutil is not installed, saving a distributed checkpoint never ends.

Its writers are forked processes. Each asks psutil for its memory before the `try` in which it would report an error to its
parent. So it dies with a traceback, and the parent waits for it to count down. `pip install megatron-core` does not install
psutil. A report on a fork says that the dependency is not declared (flagos-ai/Megatron-LM-FL #158).

python upstream_bugs/megatron_save_without_psutil.py     exits with 1 while it is so, after 20 seconds of waiting
"""

from __future__ import annotations

import signal
import sys
import tempfile
from typing import Any

sys.modules["psutil"] = None  # type: ignore[assignment]  # also where something else has installed it

import megatron_on_cpu  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402

SECONDS = 20


class StillWaitingError(Exception):
    pass


def still_waiting(*_: Any) -> None:
    raise StillWaitingError


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", torch.ones(4, 4))
    signal.signal(signal.SIGALRM, still_waiting)
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dist_checkpointing.save({"weight": weight}, folder)
    except StillWaitingError:
        sys.exit(f"wrong: {SECONDS} s after its writers died the save of 16 numbers still waits for them")
    finally:
        signal.alarm(0)
    print("right: it was saved")


if __name__ == "__main__":
    main()
