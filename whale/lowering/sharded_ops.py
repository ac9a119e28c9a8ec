"""All local operations that contain communication, in one place: what the lowering of `split`
calls.
"""

from whale.lowering.exchange import Groups, exchange
from whale.lowering.lines import Line, line_places, sum_over_line
from whale.lowering.sharded_experts import (
    ExpertProduct,
    Experts,
    expert_mm,
    grouped_mm_of_same_tokens,
)
from whale.lowering.sharded_linear import LinearPlan, sharded_linear
from whale.lowering.sharded_norms import batch_norm, layer_norm, rms_norm
from whale.lowering.sharded_random import Draw, drawing
from whale.lowering.sharded_vocabulary import argmax, cross_entropy, embedding, log_softmax, softmax
from whale.lowering.summa import Plane, summa_linear

__all__ = [
    "Draw",
    "ExpertProduct",
    "Experts",
    "Groups",
    "Line",
    "LinearPlan",
    "Plane",
    "argmax",
    "batch_norm",
    "cross_entropy",
    "drawing",
    "embedding",
    "exchange",
    "expert_mm",
    "grouped_mm_of_same_tokens",
    "layer_norm",
    "line_places",
    "log_softmax",
    "rms_norm",
    "sharded_linear",
    "softmax",
    "sum_over_line",
    "summa_linear",
]
