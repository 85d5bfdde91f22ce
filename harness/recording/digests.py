"""What a tensor holds, in one number: equal bytes give equal numbers, and other bytes, or in another order, others.

Computed where the tensor lies, and not read: who reads it waits. Sums and products of 64 bits wrap around.
"""

from __future__ import annotations

import functools
import threading

import torch

from harness.core.probe.structure import dense_tensors_of, local_tensor_of

CHUNK = 1 << 17
"""Elements that are looked at at once, so that little memory is needed beside the tensor."""
FIRST_FACTOR = 0x1E3779B97F4A7C15  # no multiples of 2; they mix high bits with low ones
SECOND_FACTOR = 0x3F58476D1CE4E5B9
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number for the bytes of this rank's part. int64 []"""
    first, *rest = dense_tensors_of(tensor)
    total = _plain_tensor_digest(first)
    for part in rest:
        total = total * SECOND_FACTOR + _plain_tensor_digest(part)
    return total


def _plain_tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all numbers of a plain tensor, each times a factor of its place. int64 []

    What a change adds up to is zero by chance alone.
    """
    integers = _as_eight_byte_integers(_integers(tensor))
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    factors = _place_factors(integers.device)
    for chunk_number, start in enumerate(range(0, integers.numel(), CHUNK)):
        chunk = integers[start : start + CHUNK]
        total += torch.mul(chunk, factors[: chunk.numel()], out=reused_buffer(torch.int64, chunk)).sum() * (
            2 * chunk_number + 1
        )
    return total


class _Buffers(threading.local):
    """Memory of this thread. Fresh one costs more than what is done with it."""

    def __init__(self) -> None:
        self.tensors: dict[torch.dtype, torch.Tensor] = {}


_buffers = _Buffers()


def reused_buffer(dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return memory for a copy of a tensor of at most CHUNK elements, in its shape; it is overwritten as this thread
    asks again.

    On a device it is fresh memory, for streams would write to one buffer at once. Trap: what is made in inference mode
    cannot be written outside of it.
    """
    if like.device.type != "cpu":
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    if dtype not in _buffers.tensors:
        with torch.inference_mode(False):
            _buffers.tensors[dtype] = torch.empty(CHUNK, dtype=dtype)
    return _buffers.tensors[dtype][: like.numel()].view(like.shape)


def _as_eight_byte_integers(integers: torch.Tensor) -> torch.Tensor:
    """Return the integers as int64: eight bytes as one number if their count allows it, else each by itself.

    Nothing but the count decides that, for equal bytes have equal digests.
    """
    elements_per_number = 8 // integers.element_size()
    if integers.numel() % elements_per_number or elements_per_number == 1:
        return integers.to(torch.int64)
    if integers.storage_offset() % elements_per_number:
        integers = integers.clone()
    return integers.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _place_factors(device: torch.device) -> torch.Tensor:
    """Return an odd number for each place of a chunk, as good as random. int64 [CHUNK]"""
    return hash_numbers(torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device)) | 1


@torch.no_grad()
def has_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether any number of this rank's part is infinite or NaN. bool []

    Trap: torch finds no extremes of float8.
    """
    values = local_tensor_of(tensor)
    if not (values.is_floating_point() or values.is_complex()) or not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.float() if values.element_size() == 1 else values
    return ~torch.isfinite(torch.stack(torch.aminmax(values))).all()


@torch.no_grad()
def is_constant_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether all numbers of this rank's part are equal, as those of a bias that begins with zeros. bool []"""
    flat = local_tensor_of(tensor).reshape(-1)
    return (flat == flat[:1]).all()


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor as a row of integers as wide as its elements. A copy where its stride is not
    1.
    """
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2 or flat.stride(0) != 1:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(INTEGER_OF_SIZE[flat.element_size()])


@torch.no_grad()
def row_digests(tensor: torch.Tensor) -> torch.Tensor:
    """Return two digests of each row of a batch. int64 [2, rows]

    The equal integers at a row's end may be padding, whose length depends on the batch. The first digest counts one of them,
    and the second none.
    """
    rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().unsqueeze(1)
    if not rows.numel():
        return torch.zeros(2, 0, dtype=torch.int64, device=rows.device)
    integers = _integers(rows).reshape(rows.shape[0], -1).to(torch.int64)
    position_terms = torch.arange(1, integers.shape[1] + 1, dtype=torch.int64, device=integers.device) * FIRST_FACTOR
    hashed = hash_numbers(integers + position_terms)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        differs = (integers != integers[:, -1:]).to(torch.int64)
        before_padding = differs.flip(1).cumsum(1).flip(1) > 0  # up to the last one that is not as the end is
        with_one_padding = before_padding.clone()
        with_one_padding[:, 1:] |= before_padding[:, :-1]
        with_one_padding[:, 0] = True
        return torch.stack([(hashed * with_one_padding).sum(1), (hashed * before_padding).sum(1)])
    return hashed.sum(1).expand(2, -1)


def generator_digest() -> torch.Tensor:
    """Return a digest of the states of torch's generators, which dropout draws from by default. int64 []"""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.stack([tensor_digest(state) for state in states]).sum()


@torch.no_grad()
def packed_digests(tokens: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Return what row_digests returns, for samples that lie end to end in one row. int64 [2, samples]

    begins: whether a sample begins at a token. bool [tokens]
    """
    integers = _integers(tokens).to(torch.int64)
    first = begins.clone()
    first[0] = True
    start = first.nonzero().flatten()
    sample = first.cumsum(0) - 1
    end = torch.cat([start[1:], start.new_tensor([len(integers)])])
    position = torch.arange(len(integers), dtype=torch.int64, device=integers.device) - start[sample]
    hashed = hash_numbers(integers + (position + 1) * FIRST_FACTOR)
    differs = torch.where(integers != integers[end - 1][sample], position, -1)
    last = torch.full_like(start, -1).scatter_reduce_(0, sample, differs, "amax")[sample]  # that is not as the end is
    masked_hashes = (hashed * (position <= last + 1), hashed * (position <= last))
    return torch.stack([torch.zeros_like(start).index_add_(0, sample, hashes) for hashes in masked_hashes])


@torch.no_grad()
def token_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number for all numbers of a batch, in whatever order they lie. int64 []"""
    return hash_numbers(_integers(tensor).to(torch.int64) + SECOND_FACTOR).sum()


def hash_numbers(integers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each number. int64, which wraps around."""
    hashes = integers * FIRST_FACTOR
    hashes = (hashes ^ (hashes >> 32)) * SECOND_FACTOR
    return hashes ^ (hashes >> 29)
