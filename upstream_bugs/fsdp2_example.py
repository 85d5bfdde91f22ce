"""PyTorch's FSDP2 example trains 120 of its 125 parameters from uninitialised memory, and feeds all ranks the same batch.

Its Transformer is built on the meta device and made real by to_empty(), which allocates and fills nothing. What comes then,
reset_parameters(), looks at the model's own attributes, finds no such method on the ModuleList `layers`, and leaves all blocks
as they are. Every rank draws its batches after torch.manual_seed(0), so that data parallelism adds nothing. (pytorch/examples,
distributed/FSDP2, November 2026.)

git clone https://github.com/pytorch/examples
python upstream_bugs/fsdp2_example.py examples/distributed/FSDP2     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch


def main(folder: str) -> int:
    sys.path.insert(0, folder)
    from model import ModelArgs, Transformer

    with torch.device("meta"):
        model = Transformer(ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64, dropout_p=0))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # in the place of whatever was in memory
    model.reset_parameters()
    names = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    print(
        f"{len(names)} of {len(list(model.parameters()))} parameters are left as memory was: {', '.join(names[:3])}, .."
    )
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
