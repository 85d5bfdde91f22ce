"""Muon of KellerJordan/Muon: a rank's state dict lacks the averages of matrices that other ranks step.

    PYTHONPATH=FOLDER_WITH_MUON_PY torchrun --nproc-per-node 2 keller_jordan_muon_state.py

Parameters are gathered, averages are not. So a checkpoint that rank 0 writes lacks those of all other ranks' matrices, and the
next step after resuming begins them at zero (reported as #46).
"""

import torch
import torch.distributed as dist
from muon import Muon

dist.init_process_group("gloo")
torch.manual_seed(0)
matrices = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
optimizer = Muon(matrices)
for matrix in matrices:
    matrix.grad = torch.randn(8, 8)
optimizer.step()
held = len(optimizer.state_dict()["state"])
if dist.get_rank() == 0:
    print(f"rank 0 saves averages of {held} of {len(matrices)} matrices")
    print("BUG" if held < len(matrices) else "right")
dist.destroy_process_group()
