"""GPUs by name: the memory that they are sold with, and what they can do by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GPU_GIGABYTES = {"A100": 80, "H100": 80, "H200": 141, "B200": 180}
"""GB that they are sold with, of 10^9 bytes each. (80 GB are 80 GiB, 5.9e9 bytes more, of which a context, NCCL and an
allocator take some that cannot be computed.)"""


@dataclass(frozen=True)
class Machine:
    """What one GPU can do, by its data sheet."""

    operations_per_second: float
    """Operations in bfloat16 per second, not sparse."""
    bytes_per_second_in_node: float
    """Bytes per second that it sends to GPUs of its node."""
    bytes_per_second_across_nodes: float
    """Bytes per second that it sends to other nodes, with a network card for each GPU."""
    float8_speedup: float = 2.0
    """How many times as fast a matmul in float8 is."""


MACHINES = {
    "A100": Machine(312e12, 300e9, 25e9, float8_speedup=1.0),
    "H100": Machine(989e12, 450e9, 50e9),
    "H200": Machine(989e12, 450e9, 50e9),
    "B200": Machine(2250e12, 900e9, 50e9),
}
