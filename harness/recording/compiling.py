"""What torch.compile finds of the recorder: nothing. Frames of ours are neither compiled nor the beginning of a graph.

Trap: a compiler that gives up on a frame of torch's (all of nn.Sequential's are) goes on to those that it calls. One of ours
among them would be compiled, where without the recorder nothing is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import set_eval_frame

F = TypeVar("F", bound=Callable[..., Any])

COMPILER = "torch._dynamo.decorators"
_skipped_codes: list[CodeType] = []


def not_compiled(function: F) -> F:
    """Keep the compiler from starting at this function. A compiler that traces into it may: a refusal would break the graph."""
    _skipped_codes.append(function.__code__)
    if COMPILER in sys.modules:
        compiler_imported()
    return function


def compiler_imported() -> None:
    """Tell torch's compiler, which is now imported, to skip all functions that `not_compiled` got so far."""
    for code in _skipped_codes:
        sys.modules[COMPILER].skip_code(code)


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """Turn the compiler off for the recorder's own computations, for the caller may be compiled."""
    compiler = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(compiler)
