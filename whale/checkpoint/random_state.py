"""The random number generators of this process: torch (CPU and GPU), numpy and Python, as tensors
and numbers, never as pickles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whale.checkpoint.errors import CheckpointError

NUMPY_GENERATOR = "MT19937"  # the only one behind `np.random.seed`
NUM_WORDS = 624  # of its state


def pack_rng(prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, values). Their names start with `prefix`, for example `rng/3/`."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    if name != NUMPY_GENERATOR:
        raise CheckpointError(
            f"numpy's global generator is {name}, only {NUMPY_GENERATOR} can be saved: do not "
            "call np.random.set_bit_generator"
        )
    tensors = {
        f"{prefix}torch": torch.get_rng_state(),
        f"{prefix}python": torch.tensor(words, dtype=torch.int64),
        f"{prefix}numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    if has_gpu:  # a rank uses one device, the current one
        tensors[f"{prefix}cuda"] = torch.cuda.get_rng_state()
    values = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
        "cuda": has_gpu,
    }
    return tensors, values


def unpack_rng(prefix: str, read: Callable[[str], Tensor], values: Mapping[str, Any]) -> None:
    """Sets all generators to the saved state. Everything is read and checked before the first one
    changes.
    """
    try:
        python = (
            int(values["python"]["version"]),
            tuple(_words(read(f"{prefix}python"), NUM_WORDS + 1)),
            values["python"]["gauss"],
        )
        saved = values["numpy"]
        words = np.array(_words(read(f"{prefix}numpy"), NUM_WORDS), dtype=np.uint32)
        if (
            not 0 <= int(saved["position"]) <= NUM_WORDS
        ):  # numpy does not look, and would read beyond the end of its memory
            raise ValueError(f"numpy's position is {saved['position']}, not 0 to {NUM_WORDS}")
        numpy = (
            NUMPY_GENERATOR,
            words,
            int(saved["position"]),
            int(saved["has_gauss"]),
            float(saved["cached"]),
        )
        own = read(f"{prefix}torch")
        cuda = read(f"{prefix}cuda") if values["cuda"] and torch.cuda.is_available() else None
        torch.Generator().set_state(own)  # each of these refuses a state that is none
        random.Random().setstate(python)
        np.random.RandomState(0).set_state(numpy)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the random number state {prefix}* of the checkpoint is not one: {error}"
        ) from None
    torch.set_rng_state(own)
    random.setstate(python)
    np.random.set_state(numpy)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def _words(tensor: Tensor, count: int) -> list[int]:
    words: list[int] = tensor.tolist()
    if tensor.dim() != 1 or len(words) != count or any(not 0 <= word < 1 << 32 for word in words):
        raise ValueError(
            f"{count} numbers of 32 bits were expected, got a tensor of shape {list(tensor.shape)}"
        )
    return words
