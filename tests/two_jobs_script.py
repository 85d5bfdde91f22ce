"""Two replica groups under one command: jobs of one rank each, both rank 0, which trains a small network without a group. The
second one is killed in its step 4 and started again. As a rank of one of them it is called with its number and how it ends."""

import os
import signal
import subprocess
import sys

RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def train(dies: bool) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 5):
        loss = model(torch.ones(2, 4)).sum()
        if dies and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def started(group: int, *how: str) -> subprocess.Popen[bytes]:
    its = {**os.environ, **RANK, "REPLICA_GROUP_ID": str(group), "MASTER_PORT": str(29500 + group)}
    return subprocess.Popen([sys.executable, __file__, "train", *how], env=its)


def main() -> None:
    assert started(0).wait() == 0
    assert started(1, "dies").wait() == -signal.SIGKILL
    assert started(1).wait() == 0


if __name__ == "__main__":
    train("dies" in sys.argv) if "train" in sys.argv else main()
