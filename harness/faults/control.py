"""The catalogue's control: it fires and changes nothing. If that were CAUGHT, a catch would prove nothing."""

from __future__ import annotations

from harness.faults import fault
from harness.faults.operators import before_call

nothing_is_wrong = fault(
    breaks="nothing: clipping is called through one more function",
    bug="",
    case="fsdp_2",
    caught_by="",
    named="",
    does=before_call("torch.nn.utils:clip_grads_with_norm_", lambda *_, **__: None),
)
