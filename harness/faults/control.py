"""The catalogue's control: it fires and changes nothing. If that were CAUGHT, a catch would prove nothing."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(breaks="nothing: clipping is called through one more function", bug="", case="fsdp_2", caught_by="", named="")
def nothing_is_wrong(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def unchanged(*args: Any, **kwargs: Any) -> Any:
            fired()
            return original(*args, **kwargs)

        return unchanged

    replace(torch.nn.utils, "clip_grads_with_norm_", make)
