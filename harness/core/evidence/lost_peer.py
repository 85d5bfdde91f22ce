"""Errors that a rank raises because its peer raised before, or never came: seldom the cause of a failure."""

from __future__ import annotations

import re
from enum import Enum

PEER_GONE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|[Tt]imed ?out|[Tt]imeout|Socket closed|recvValue failed"
    r"|remote process exited|unhandled system error|NCCL communicator was aborted|failed to connect"
    r"|failed to pass monitoredBarrier|reached monitoredBarrier, but received errors"
)
"""Words of which an error of the network has some. Alone they show nothing: a loader times out, too."""
NETWORK_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Classes that torch's network raises."""
NETWORK_SIGNATURE = re.compile(
    r"\b([Gg]loo|NCCL|nccl)\b|\bby peer \[|monitoredBarrier|^[Ww]ait timeout( after \d+ ?ms, keys: |$)"
    r"|^Timed out waiting \d+ ?ms for (send|recv) operation|^Application timeout caused pair closure"
)
"""What C++ writes into a RuntimeError of the network. gloo names the peer: Connection closed by peer [10.0.0.1]."""


class RaisedIn(Enum):
    """Code in which an exception was raised, by its stack."""

    COLLECTIVE = "a call of torch.distributed, or a wait for one"
    OWN_CODE = "a raise statement of other code"
    UNKNOWN = "code of which the stack shows neither, or that has no stack on record"


def shows_lost_peer(kind: str, message: str, *, raised_in: RaisedIn = RaisedIn.UNKNOWN) -> bool:
    """Return whether an exception is raised because a peer is gone. kind: the exception's class name.

    False for what other code raises, whatever its words. If it is not known which code raised a RuntimeError, it has to be
    C++'s own text.
    """
    if not PEER_GONE.search(message):
        return False
    if kind in NETWORK_ERRORS or raised_in is RaisedIn.COLLECTIVE:
        return True
    return raised_in is RaisedIn.UNKNOWN and kind == "RuntimeError" and bool(NETWORK_SIGNATURE.search(message))


def is_lost_peer_error(error: str) -> bool:
    """Return whether an error was raised because a peer is gone. error: KIND: MESSAGE, as a recording has it."""
    kind, _, message = error.partition(": ")
    return shows_lost_peer(kind, message)
