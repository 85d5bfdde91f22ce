"""A digest tells bytes apart, and leaves the trainer's tensor as it is."""

from __future__ import annotations

import pytest
import torch

from harness.recording.digests import has_nonfinite, is_constant_tensor, packed_digests, row_digests, tensor_digest

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_leaves_the_tensor_as_it_is(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    before = tensor.clone()
    assert tensor_digest(tensor).item() == tensor_digest(before).item()
    assert torch.equal(tensor, before)


def test_other_bytes_or_another_order_give_another_digest() -> None:
    tensor = torch.arange(12.0)
    seen = {tensor_digest(one).item() for one in (tensor, tensor.flip(0), tensor + 1e-6, tensor[:11], tensor.double())}
    assert len(seen) == 5


def test_a_slice_that_does_not_begin_at_a_round_address_has_the_digest_of_its_copy() -> None:
    whole = torch.arange(101.0)
    assert tensor_digest(whole[1:]).item() == tensor_digest(whole[1:].clone()).item()
    assert tensor_digest(whole.reshape(1, -1).t()).item() == tensor_digest(whole).item()


def test_tensors_without_elements_have_a_digest() -> None:
    assert tensor_digest(torch.zeros(0)).item() == 0


def test_infinite_numbers_are_noticed_and_integers_are_finite() -> None:
    assert has_nonfinite(torch.tensor([1.0, float("inf")]))
    assert not has_nonfinite(torch.tensor([1.0]))
    assert not has_nonfinite(torch.tensor([1]))


def test_numbers_that_are_all_the_same_are_no_sign_of_a_replica() -> None:
    assert [
        bool(is_constant_tensor(t)) for t in (torch.zeros(3, 2), torch.ones(1), torch.empty(0), torch.arange(3))
    ] == [
        True,
        True,
        True,
        False,
    ]


def test_a_sparse_tensor_is_told_by_its_indices_and_its_values() -> None:
    def sparse(rows: list[int], values: list[float]) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([rows]), torch.tensor(values), (4,))

    seen = [tensor_digest(one).item() for one in (sparse([0, 2], [1.0, 2.0]), sparse([0, 2], [1.0, 2.0]))]
    others = [tensor_digest(one).item() for one in (sparse([0, 3], [1.0, 2.0]), sparse([0, 2], [1.0, 3.0]))]
    assert seen[0] == seen[1] and len({seen[0], *others}) == 3


def test_a_row_without_what_it_ends_with_is_that_row_before_it_was_padded() -> None:
    rows = torch.tensor([[3, 1, 2], [4, 4, 5]])
    padded = torch.cat([rows, torch.zeros(2, 2, dtype=rows.dtype)], 1)
    assert row_digests(padded)[1].tolist() == row_digests(rows)[0].tolist()
    longer = torch.cat([padded, torch.zeros(2, 3, dtype=rows.dtype)], 1)
    assert row_digests(longer).tolist() == row_digests(padded).tolist()
    assert len({*row_digests(rows).flatten().tolist()}) == 4


def test_samples_that_lie_end_to_end_have_the_digests_of_rows() -> None:
    rows = [torch.tensor([row]) for row in ([3, 1, 2, 2], [7], [4, 4, 4], [0, 5], [6, 6, 0, 0, 0])]
    packed = torch.cat([row.flatten() for row in rows])
    begins = torch.tensor([True, 0, 0, 0, True, True, 0, 0, True, 0, True, 0, 0, 0, 0]).bool()
    expected = torch.cat([row_digests(row) for row in rows], 1)
    assert packed_digests(packed, begins).tolist() == expected.tolist()
    begins[0] = False  # as if the first sample began on another rank
    assert packed_digests(packed, begins).tolist() == expected.tolist()


def test_what_was_looked_at_in_inference_mode_can_be_looked_at_again() -> None:
    tensor = torch.randn(64)
    with torch.inference_mode():
        found = int(tensor_digest(tensor))
    assert int(tensor_digest(tensor)) == found


@pytest.mark.parametrize("shape", [(0, 16), (0,), (3, 0)])
def test_a_batch_without_samples_has_no_rows(shape: tuple[int, ...]) -> None:
    assert row_digests(torch.zeros(shape, dtype=torch.int64)).shape == (2, 0)
