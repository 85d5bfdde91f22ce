"""What a rank raises whose peer raised before, or never came: seldom the cause."""

from __future__ import annotations

import re

PEER_GONE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|[Tt]imed ?out|[Tt]imeout|Socket closed|recvValue failed"
    r"|remote process exited|unhandled system error|NCCL communicator was aborted|failed to connect"
    r"|failed to pass monitoredBarrier|reached monitoredBarrier, but received errors"
)
NETWORK_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
NETWORK_WORDS = re.compile(r"gloo|nccl|store|keys:|by peer \[|monitoredBarrier|^Wait timeout$", re.IGNORECASE)
"""A plain RuntimeError is one of gloo's if it says so, or names the peer as gloo does: Connection closed by peer [10.0.0.1]."""


def tells_of_lost_peer(kind: str, message: str, *, within: str = "") -> bool:
    """kind: the exception's. within: the file that raised it. A time-out of something else, as of a loader, is none."""
    network = kind in NETWORK_ERRORS or bool(NETWORK_WORDS.search(message)) or "/torch/distributed/" in within
    return network and bool(PEER_GONE.search(message))


def lost_a_peer(error: str) -> bool:
    """error: KIND: MESSAGE, as a recording has it."""
    kind, _, message = error.partition(": ")
    return tells_of_lost_peer(kind, message)
