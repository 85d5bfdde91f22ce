"""Bytes of tensors without memory that are there at once."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.core.probe.storages import Peak, StorageRecorder

KB = 256  # float32


def test_the_most_that_is_there_at_once_is_counted_each_storage_once_until_it_is_freed() -> None:
    step = 0
    recorder = StorageRecorder(lambda: (step, "forward"))
    with FakeTensorMode(), recorder.noting_resizes():
        recorder.note_results(kept := torch.empty(3 * KB))
        recorder.note_results(kept.view(3, KB))  # no storage of its own
        step = 1
        recorder.note_results(freed := torch.empty(2 * KB))
        recorder.note_results([freed[1:], torch.empty(KB)])  # the second is gone at once
        del freed
        recorder.note_results(torch.empty(KB))
    assert recorder.peak == Peak(6 * 1024, "forward")
    assert recorder.peak_outside_of_steps == 3 * 1024
    assert kept.numel() == 3 * KB


def test_a_storage_that_is_emptied_and_filled_again_counts_what_it_has() -> None:
    recorder = StorageRecorder(lambda: (1, "backward"))
    with FakeTensorMode(), recorder.noting_resizes():
        recorder.note_results(unit := torch.empty(4 * KB))
        unit.untyped_storage().resize_(0)
        recorder.note_results(other := torch.empty(3 * KB))
        assert recorder.peak.bytes == 4 * 1024
        unit.untyped_storage().resize_(4 * 1024)
    assert recorder.peak.bytes == 7 * 1024
    assert other.numel() == 3 * KB


def test_a_tensor_that_says_only_its_shape_takes_no_bytes() -> None:
    recorder = StorageRecorder(lambda: (1, "forward"))
    with FakeTensorMode(), recorder.noting_resizes():
        recorder.note_results(torch.empty(KB, device="meta"))
    assert recorder.peak.bytes == 0
