"""What a tensor holds, in one number: equal bytes give equal numbers, and other bytes, or in another order, others.

Computed where the tensor lies, and not read: who reads it waits. Sums and products of 64 bits wrap around.
"""

from __future__ import annotations

import functools
import threading

import torch

from harness.core.probe.structure import local, stored

CHUNK = 1 << 17
"""Elements that are looked at at once, so that little memory is needed beside the tensor."""
FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # no multiples of 2; they mix high bits with low ones
BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """int64 []: of this rank's part."""
    first, *rest = stored(tensor)
    total = _digest(first)
    for part in rest:
        total = total * SECOND + _digest(part)
    return total


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all numbers, each times what belongs to its place. What a change adds up to is zero by chance alone."""
    whole = _eight_bytes(_integers(tensor))
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    times = _times(whole.device)
    for number, start in enumerate(range(0, whole.numel(), CHUNK)):
        part = whole[start : start + CHUNK]
        total += torch.mul(part, times[: part.numel()], out=room(torch.int64, part)).sum() * (2 * number + 1)
    return total


class _Rooms(threading.local):
    """Memory of this thread. Fresh one costs more than what is done with it."""

    def __init__(self) -> None:
        self.held: dict[torch.dtype, torch.Tensor] = {}


_rooms = _Rooms()


def room(dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return where a tensor of at most CHUNK elements can be copied to, until this thread asks again. Trap: streams of a device
    would write there at once; there it is fresh. Trap: what is made in inference mode cannot be written outside of it."""
    if like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    if dtype not in _rooms.held:
        with torch.inference_mode(False):
            _rooms.held[dtype] = torch.empty(CHUNK, dtype=dtype)
    return _rooms.held[dtype][: like.numel()].view(like.shape)


def _eight_bytes(whole: torch.Tensor) -> torch.Tensor:
    """Return eight bytes as one number, if their count allows it. Nothing else decides that, for equal bytes have equal
    digests."""
    each = 8 // whole.element_size()
    if whole.numel() % each or each == 1:
        return whole.to(torch.int64)
    if whole.storage_offset() % each:
        whole = whole.clone()
    return whole.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _times(device: torch.device) -> torch.Tensor:
    """Return a number for each place, as good as random and no multiple of 2. int64 [CHUNK]"""
    return mixed(torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device)) | 1


@torch.no_grad()
def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """bool []: whether any number of this rank's part is infinite or none. Trap: torch finds no extremes of float8."""
    held = local(tensor)
    if not (held.is_floating_point() or held.is_complex()) or not held.numel():
        return torch.zeros((), dtype=torch.bool, device=held.device)
    held = torch.view_as_real(held) if held.is_complex() else held
    held = held.float() if held.element_size() == 1 else held
    return ~torch.isfinite(torch.stack(torch.aminmax(held))).all()


@torch.no_grad()
def constant(tensor: torch.Tensor) -> torch.Tensor:
    """bool []: whether all numbers of this rank's part are the same, as those of a bias that begins with zeros."""
    flat = local(tensor).reshape(-1)
    return (flat == flat[:1]).all()


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a row of integers. Trap: what has fewer than two elements may have a stride that forbids it."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2 or flat.stride(0) != 1:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(BY_SIZE[flat.element_size()])


@torch.no_grad()
def row_digests(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [2, rows]: two numbers for each row of a batch. The equal integers at a row's end may be padding, whose length
    depends on the batch. The first number counts one of them, and the second none."""
    rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().unsqueeze(1)
    if not rows.numel():
        return torch.zeros(2, 0, dtype=torch.int64, device=rows.device)
    numbers = _integers(rows).reshape(rows.shape[0], -1).to(torch.int64)
    place = torch.arange(1, numbers.shape[1] + 1, dtype=torch.int64, device=numbers.device) * FIRST
    hashed = mixed(numbers + place)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        differs = (numbers != numbers[:, -1:]).to(torch.int64)
        own = differs.flip(1).cumsum(1).flip(1) > 0  # up to the last one that is not as the end is
        counts = own.clone()
        counts[:, 1:] |= own[:, :-1]
        counts[:, 0] = True
        return torch.stack([(hashed * counts).sum(1), (hashed * own).sum(1)])
    return hashed.sum(1).expand(2, -1)


def generators() -> torch.Tensor:
    """int64 []: of the states of torch's generators that dropout draws from by default."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.stack([digest(state) for state in states]).sum()


@torch.no_grad()
def packed_digests(tokens: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """int64 [2, samples]: what row_digests makes of samples that lie end to end. begins: where they do. bool [tokens]"""
    numbers = _integers(tokens).to(torch.int64)
    first = begins.clone()
    first[0] = True
    start, row = first.nonzero().flatten(), first.cumsum(0) - 1
    end = torch.cat([start[1:], start.new_tensor([len(numbers)])])
    place = torch.arange(len(numbers), dtype=torch.int64, device=numbers.device) - start[row]
    hashed = mixed(numbers + (place + 1) * FIRST)
    differs = torch.where(numbers != numbers[end - 1][row], place, -1)
    last = torch.full_like(start, -1).scatter_reduce_(0, row, differs, "amax")[row]  # that is not as the end is
    kept = (hashed * (place <= last + 1), hashed * (place <= last))
    return torch.stack([torch.zeros_like(start).index_add_(0, row, each) for each in kept])


@torch.no_grad()
def token_sum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 []: of all numbers of a batch, in whatever order they lie."""
    return mixed(_integers(tensor).to(torch.int64) + SECOND).sum()


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each. int64, which wraps around."""
    found = numbers * FIRST
    found = (found ^ (found >> 32)) * SECOND
    return found ^ (found >> 29)
