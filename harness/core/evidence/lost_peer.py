"""Errors that a rank raises because its peer raised before, or never came: seldom the cause of a failure."""

from __future__ import annotations

import re

PEER_GONE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|[Tt]imed ?out|[Tt]imeout|Socket closed|recvValue failed"
    r"|remote process exited|unhandled system error|NCCL communicator was aborted|failed to connect"
    r"|failed to pass monitoredBarrier|reached monitoredBarrier, but received errors"
)
NETWORK_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
NETWORK_WORDS = re.compile(r"gloo|nccl|store|keys:|by peer \[|monitoredBarrier|^Wait timeout$", re.IGNORECASE)
"""Words that show that a plain RuntimeError is the network's. gloo names the peer: Connection closed by peer [10.0.0.1]."""


def shows_lost_peer(kind: str, message: str, *, within: str = "") -> bool:
    """Return whether an exception is raised because a peer is gone.

    kind: the exception's class name. within: the file that raised it. A time-out of something else, as of a loader, is not.
    """
    is_of_network = kind in NETWORK_ERRORS or bool(NETWORK_WORDS.search(message)) or "/torch/distributed/" in within
    return is_of_network and bool(PEER_GONE.search(message))


def is_lost_peer_error(error: str) -> bool:
    """Return whether an error was raised because a peer is gone. error: KIND: MESSAGE, as a recording has it."""
    kind, _, message = error.partition(": ")
    return shows_lost_peer(kind, message)
