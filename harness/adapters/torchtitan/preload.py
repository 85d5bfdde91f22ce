"""The imports of the rank server before it forks: torchtitan, which would take each rank half a second.

It also reads which version of torchtitan the files are. Where torch is built with CUDA, torchtitan itself is not
imported: its import asks for the device, and nothing may touch CUDA before a fork.
"""

from __future__ import annotations

import torch

from harness.adapters.torchtitan import cpu, source

source.find_source(None)
if not torch.backends.cuda.is_built():
    cpu.before_import()
    import torchtitan.models.llama3.config_registry
    import torchtitan.trainer  # noqa: F401
