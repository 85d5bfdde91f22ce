"""torchrun that dies with the harness: `python -m harness.core.launch.agent PARENT_PID ARGUMENTS OF TORCHRUN`."""

from __future__ import annotations

import os
import sys

from harness.core.launch.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ["HARNESS_AGENT"] = str(os.getpid())
    from torch.distributed.run import main

    main(sys.argv[2:])
