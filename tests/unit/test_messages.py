"""Messages: packed without loss, not copied where one tensor goes alone, and with tags that tell
steps, edges and shapes apart.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from whale.distributed.message import (
    MOST_MESSAGES,
    NUM_EPOCHS,
    NUM_SHAPES,
    Message,
    MessagePiece,
    tag_of,
)


def message(
    tensors: list[Tensor], rows: list[tuple[int, int, int] | None] | None = None
) -> Message:
    pieces = [
        MessagePiece(index, cut, tuple(tensor.shape), tensor.dtype)
        for index, (tensor, cut) in enumerate(
            zip(tensors, rows or [None] * len(tensors), strict=True)
        )
    ]
    return Message(1, 0, tuple(pieces))


def test_different_tensors_come_out_of_one_message_to_the_bit() -> None:
    tensors = [
        torch.randn(2, 3, dtype=torch.complex128),
        torch.randint(0, 9, (5,)),
        torch.randn(3, 4).t(),  # not contiguous
        torch.randn((), dtype=torch.float32),
        torch.randn(0, 7),
        torch.randn(3, dtype=torch.bfloat16),
        torch.rand(5) > 0.5,
    ]
    sent = message(tensors)
    buffer = sent.pack(tensors)
    assert buffer.is_contiguous() and buffer.numel() * buffer.element_size() == sent.num_bytes
    landed = sent.empty("cpu")
    landed.copy_(buffer)
    got = sent.unpack(landed)
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(tensors, got, strict=True))
    assert {tensor.untyped_storage().data_ptr() for tensor in got if tensor.numel()} == {
        landed.data_ptr()
    }  # read in place


def test_operations_that_copy_a_whole_storage_take_what_was_received() -> None:
    """A storage of 51 bytes is no number of float64 to torch (fuzz, seed 700031)."""
    tensors = [torch.randn(2, 3, dtype=torch.float64), torch.rand(3) > 0.5]
    sent = message(tensors)
    landed = sent.empty("cpu")
    landed.copy_(sent.pack(tensors))
    got = sent.unpack(landed)[0]
    zeros = torch.zeros(2, dtype=torch.float64)
    expected = torch.select_scatter(tensors[0], zeros, 1, -1)
    assert torch.equal(torch.select_scatter(got, zeros, 1, -1), expected)


def test_a_tensor_that_goes_alone_is_not_copied() -> None:
    tensor = torch.randn(4, 3, requires_grad=True)
    packed = message([tensor]).pack([tensor])
    assert packed.data_ptr() == tensor.data_ptr() and not packed.requires_grad
    rows = message([tensor], [(0, 1, 2)])
    assert (
        rows.pack([tensor]).data_ptr() == tensor[1:].data_ptr()
    )  # rows are contiguous as they are
    assert torch.equal(rows.pack([tensor]), tensor[1:3])
    columns = message([tensor], [(1, 1, 2)])
    assert torch.equal(columns.pack([tensor]), tensor[:, 1:3]) and columns.num_bytes == 4 * 2 * 4


def test_tags_differ_between_messages_and_shapes_and_leave_numbers_for_the_epoch() -> None:
    tags = [tag_of(number, [(8, 16)]) for number in range(200)]
    for one, other in itertools.combinations(tags, 2):
        assert abs(one - other) >= NUM_EPOCHS  # no epoch of one message is an epoch of the other
    shapes = {tag_of(7, [(size, 16)]) for size in range(1, 50)}
    assert 30 < len(shapes) <= NUM_SHAPES
    assert tag_of(7, [(2, 3), (4,)]) != tag_of(7, [(2, 3, 4)])
    assert tag_of(MOST_MESSAGES - 1, [(1,)]) + NUM_EPOCHS - 1 < 2**31
    with pytest.raises(ValueError, match="Try: fewer micro-batches or fewer stages"):
        tag_of(MOST_MESSAGES, [(1,)])
