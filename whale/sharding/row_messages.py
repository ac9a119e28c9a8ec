"""Messages inside of an operation that works along a dim which devices cut: a few numbers for each
row are exchanged.

In a subgroup of g devices, with r rows on each of them (for batch norm: r channels, whose samples
are cut):

    layer_norm      all-gathers 2 r + 1        backward all-reduces 2 r
    rms_norm        all-reduces r + 1          backward all-reduces r
    softmax         all-gathers 2 r            backward all-reduces r
    cross_entropy   all-gathers 2 r; with class weights or probabilities 3 r + 1                (1)
    argmax          all-gathers r, and r indices
    batch_norm      all-reduces r + 1, then r  backward all-reduces 2 r

A small all-reduce is an all-gather whose terms every device adds; a large one goes around in a
ring. The operations themselves: lowering/sharded_norms.py, lowering/sharded_vocabulary.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from whale.operations.operation import Operation

DIRECT_UP_TO_BYTES = 1 << 20
"""up to here everyone sends everything to everyone and adds: one hop instead of 2 (g - 1)
(research/tensor3d.md 4.3)
"""
LOCAL_FORMS = ("norm", "softmax", "class loss", "argmax", "batch norm")
"""local forms of operations (`Option.local`) that exchange numbers of rows"""


@dataclass(frozen=True)
class RowMessage:
    """One message of each device of a subgroup to all others."""

    num_bytes: float
    is_sum: bool
    """an all-reduce; otherwise an all-gather"""

    def sent_bytes(self, num_devices: int) -> float:
        """Bytes that one of so many devices sends."""
        if self.is_sum and self.num_bytes > DIRECT_UP_TO_BYTES:
            return 2 * self.num_bytes * (num_devices - 1) / num_devices
        return self.num_bytes * (num_devices - 1)


def row_messages(
    op: Operation, local: str, num_rows: float, has_backward: bool
) -> list[RowMessage]:
    """Lines (1) for one operation. `has_backward`: its first input has a gradient."""
    dtype: torch.dtype = op.inputs[0].meta["val"].dtype
    if local == "softmax":
        dtype = op.argument("dtype") or dtype
    size = torch.promote_types(dtype, torch.float32).itemsize
    row = num_rows * size
    if local == "argmax":
        indices = num_rows * torch.int64.itemsize
        return [RowMessage(num_rows * dtype.itemsize, False), RowMessage(indices, False)]
    if local == "class loss":
        has_weights = op.slot("weight") is not None or len(op.shapes[1]) == len(op.shapes[0])
        return [RowMessage(3 * row + size if has_weights else 2 * row, False)]
    if local == "softmax":
        forward = [RowMessage(2 * row, False)]
        backward = [RowMessage(row, True)]
    elif local == "batch norm":
        forward = [RowMessage(row + size, True), RowMessage(row, True)]
        backward = [RowMessage(2 * row, True)]
    elif op.name == "rms_norm":
        forward = [RowMessage(row + size, True)]
        backward = [RowMessage(row, True)]
    else:
        forward = [RowMessage(2 * row + size, False)]
        backward = [RowMessage(2 * row, True)]
    return forward + backward if has_backward else forward
