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
from whale.devices import ACCELERATORS, find_device, used_accelerator

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
    accelerator = used_accelerator()
    if accelerator is not None:  # a rank uses one device, the current one
        tensors[prefix + accelerator.type] = accelerator.random_states()[1]
    values: dict[str, Any] = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
        **{kind.type: False for kind in ACCELERATORS},
    }
    if accelerator is not None:
        values[accelerator.type] = True
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
        accelerator = used_accelerator() or find_device()
        has_state = accelerator.is_accelerator and values.get(accelerator.type, False)
        of_accelerator = read(prefix + accelerator.type) if has_state else None
        torch.Generator().set_state(own)  # each of these refuses a state that is none
        random.Random().setstate(python)
        np.random.RandomState(0).set_state(numpy)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the random number state {prefix}* of the checkpoint is not one: {error}"
        ) from None
    random.setstate(python)
    np.random.set_state(numpy)
    if of_accelerator is not None:
        accelerator.set_random_states([own, of_accelerator])
    else:
        torch.set_rng_state(own)


def _words(tensor: Tensor, count: int) -> list[int]:
    words: list[int] = tensor.tolist()
    if tensor.dim() != 1 or len(words) != count or any(not 0 <= word < 1 << 32 for word in words):
        raise ValueError(
            f"{count} numbers of 32 bits were expected, got a tensor of shape {list(tensor.shape)}"
        )
    return words
