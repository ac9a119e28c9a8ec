"""Numbers that may stand in a cluster file and in the file of measured layers beside it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

MOST_DEVICES = 10**5
"""on one host; more is a slip of the keyboard"""


def _no_truth_value(value: Any) -> Any:
    """YAML reads `yes` as a truth value, and Python takes those for numbers."""
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, not {str(value).lower()}")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ValueError(f"a finite number is needed, not {value}")
    return value


Positive = Annotated[float, BeforeValidator(_no_truth_value), BeforeValidator(_finite), Field(gt=0)]
NotNegative = Annotated[
    float, BeforeValidator(_no_truth_value), BeforeValidator(_finite), Field(ge=0)
]
Count = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=MOST_DEVICES)]
Size = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1)]
