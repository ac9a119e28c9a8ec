"""Python values as JSON and back, exactly: tuples, infinities, dicts with number keys, counters and
0-dim tensors included.

What JSON cannot hold is written as `{"!tuple": [1, 2]}`: an object with one key that starts with
"!". Reading makes only the kinds listed here, so nothing from a file is ever called or imported.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from whale.checkpoint.errors import CheckpointError

SCALAR_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


def encode(value: Any, where: str) -> Any:
    """`value` in terms of JSON. `where` names it in the refusal of what cannot be held: functions,
    open files, whole tensors.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if value.dim() != 0 or str(value.dtype) not in SCALAR_DTYPES:
            raise CheckpointError(
                f"{where} is a tensor of shape {list(value.shape)} and {value.dtype}: "
                f"only a 0-dim tensor can stand among the values. Save it as a tensor, or drop it"
            )
        return {"!tensor": [str(value.dtype), encode(value.item(), where)]}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{place}]") for place, item in enumerate(value)]
        return {"!tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return _encode_dict(value, where)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold (numbers, text, lists, dicts "
        f"and 0-dim tensors can). Leave it out of the state, and build it again before loading"
    )


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not tag.startswith("!"):
        return {key: decode(item) for key, item in value.items()}
    inner = value[tag]
    try:
        if tag == "!tuple":
            return tuple(decode(item) for item in inner)
        if tag == "!float" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if tag == "!dict":
            return {decode(key): decode(item) for key, item in inner}
        if tag == "!counter":
            return Counter({decode(key): decode(item) for key, item in inner})
        if tag == "!tensor":
            return torch.tensor(decode(inner[1]), dtype=SCALAR_DTYPES[inner[0]])
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError):
        pass
    raise CheckpointError(
        f"a value of the checkpoint is marked {tag!r} but is not one: the file was damaged or "
        "made by something else"
    )


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    plain = not isinstance(value, Counter) and all(
        isinstance(key, str) and not key.startswith("!") for key in value
    )
    if plain:
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {"!counter" if isinstance(value, Counter) else "!dict": pairs}
