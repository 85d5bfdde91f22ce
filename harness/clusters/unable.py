"""Reasons why a rank could not be run alone, where its error says nothing of the trainer.

It may need a tensor's values, and a tensor without memory has none. Or torch refuses something where tensors have no
memory, or ranks are not there. A trainer's use of shapes is its own: two that do not fit are its failure, here as on a
cluster.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator
from types import CodeType, FrameType

from torch._subclasses import fake_tensor

from harness.core.launch.rank import linked_exceptions

TRAINER_ERRORS = (fake_tensor.FakeTensorDeviceMismatchError,)
"""Raised by what answers for tensors without memory, of something that a kernel refuses as well."""
ASKED_FOR_CONTENTS = re.compile(
    r"\.numpy\(\) is not supported for tensor subclasses"
    r"|Not available for 'meta' device type"
    r"|Cannot copy out of meta tensor"
    r"|Cannot access data pointer of"
    r"|its data is not allocated"
    r"|with arguments from the 'Meta' backend"
    r"|_share_fd_: only available on CPU"
)
"""torch's words where it is C++ that would read what is not there."""
REFUSED_ALONE = re.compile(
    r"torch dispatch mode present"
    r"|found no compiled frames"
    r"|[Mm]ixing fake modes"
    r"|fake mode .*doesn't match"
    r"|Expected fake mode of"
    r"|Backend fake |[Ff]ake ?(?:ProcessGroup|Store|Work)"
    r"|monitored_barrier is only implemented for"
    r"|c10d/init\.cpp.*Not implemented",
    re.DOTALL,
)
"""torch's words where the pre-flight's own modes, process group or store cannot do a thing. Such are torch.compile of a
whole graph under a dispatch mode, a backend without a barrier, a store to which no other rank writes."""
KERNEL_MODULES = (
    "torch._subclasses",
    "torch._ops",
    "torch._prims_common",
    "torch.utils._stats",
    "torch._compile",
    "torch._dynamo",
)
"""Frames of what answers in place of a kernel."""


def why_unable(error: BaseException, asked: Collection[CodeType]) -> str:
    """Return why a rank could not be run alone, in one sentence. Empty if the failure is the trainer's own.

    asked: the code that a number was answered to, which was 1. The errors while handling which this one was raised
    count too.
    """
    for link in (error, *linked_exceptions(error)):
        error_text = f"{type(link).__name__}: {str(link).strip() or 'no words'}".splitlines()[0]
        if _needs_tensor_contents(link):
            return f"it asks for what is in a tensor ({error_text}), and alone nothing is"
        if REFUSED_ALONE.search(str(link)):
            return f"torch refuses it to a rank alone, whatever the trainer is ({error_text})"
        if _is_of_saving(link):
            return f"it saves tensors ({error_text}), and alone there is nothing in them"
        if any(frame.f_code in asked for frame in _raising_frames(link)):
            return f"it asks a tensor for a number, which alone is 1, and goes on by it ({error_text})"
    return ""


def codes_that_ask() -> Iterator[CodeType]:
    """Yield the code that needs the number that is being answered; call it while answering.

    It is the function that called torch's operator, and if that is torch's own, the trainer's function that called it.
    """
    frames = [frame for frame, _ in traceback.walk_stack(None)][1:]
    return (frame.f_code for frame in _answerable_frames(frames))


def _needs_tensor_contents(error: BaseException) -> bool:
    """Return whether an error says that the contents of a tensor without memory were needed."""
    if type(error).__module__ == fake_tensor.__name__:
        return not isinstance(error, TRAINER_ERRORS)
    return bool(ASKED_FOR_CONTENTS.search(str(error)))


def _is_of_saving(error: BaseException) -> bool:
    """Return whether an error was raised inside torch.serialization, while tensors were saved or loaded."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_globals.get("__name__") == "torch.serialization" for frame in frames[-1:])


def _raising_frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that an error is attributed to: at most torch's that called an operator, and the trainer's."""
    return _answerable_frames([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1])


def _answerable_frames(frames: list[FrameType]) -> Iterator[FrameType]:
    """Yield, of frames from the innermost: the first above those that replace a kernel, and the first that is not torch's.

    The same frame may come twice.
    """
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    above_kernel = [
        index
        for index, name in enumerate(names)
        if not name.startswith((*KERNEL_MODULES, "harness.clusters", "harness.core.probe"))
    ]
    yield from (frames[index] for index in above_kernel[:1])
    yield from [frames[index] for index in above_kernel if names[index].partition(".")[0] != "torch"][:1]
