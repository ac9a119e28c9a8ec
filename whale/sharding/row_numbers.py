"""What devices tell each other inside an operation that works along a dim which they cut: a few
numbers for each row.

On a line of g devices, with r rows on each of them (of batch norm: r channels, whose samples are
cut):

    layer_norm      gathers 2 r + 1      backward sums 2 r
    rms_norm        sums r + 1           backward sums r
    softmax         gathers 2 r          backward sums r
    cross_entropy   gathers 2 r; with class weights or probabilities 3 r + 1                                                        (1)
    argmax          gathers r, and r indices
    batch_norm      sums r + 1, then r   backward sums 2 r

What is gathered goes to each of the others. A small sum is gathered, too, and added up by everyone;
a large one goes around in a ring. The operations themselves: lowering/sharded_norms.py,
lowering/sharded_vocabulary.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from whale.operations.operation import Operation

DIRECT_UP_TO_BYTES = 1 << 20
"""up to here everyone sends everything to everyone and adds up itself: one hop instead of 2 (g - 1)
(research/tensor3d.md 4.3)
"""
LOCAL_FORMS = ("norm", "softmax", "class loss", "argmax", "batch norm")
"""local forms of operations (`Option.local`) that tell each other numbers"""


@dataclass(frozen=True)
class Told:
    """One message of each device of a line to all others."""

    num_bytes: float
    is_sum: bool

    def sent_bytes(self, num_devices: int) -> float:
        if self.is_sum and self.num_bytes > DIRECT_UP_TO_BYTES:
            return 2 * self.num_bytes * (num_devices - 1) / num_devices
        return self.num_bytes * (num_devices - 1)


def told(op: Operation, local: str, num_rows: float, has_backward: bool) -> list[Told]:
    """Lines (1) for one operation. `has_backward`: its first input has a gradient."""
    dtype: torch.dtype = op.inputs[0].meta["val"].dtype
    if local == "softmax":
        dtype = op.argument("dtype") or dtype
    size = torch.promote_types(dtype, torch.float32).itemsize
    row = num_rows * size
    if local == "argmax":
        return [
            Told(num_rows * dtype.itemsize, False),
            Told(num_rows * torch.int64.itemsize, False),
        ]
    if local == "class loss":
        has_weights = op.slot("weight") is not None or len(op.shapes[1]) == len(op.shapes[0])
        return [Told(3 * row + size if has_weights else 2 * row, False)]
    if local == "softmax":
        forward = [Told(2 * row, False)]
        backward = [Told(row, True)]
    elif local == "batch norm":
        forward = [Told(row + size, True), Told(row, True)]
        backward = [Told(2 * row, True)]
    elif op.name == "rms_norm":
        forward = [Told(row + size, True)]
        backward = [Told(row, True)]
    else:
        forward = [Told(2 * row + size, False)]
        backward = [Told(2 * row, True)]
    return forward + backward if has_backward else forward
