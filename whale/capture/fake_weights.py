"""The model with weights that have shapes and no data, while it is exported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whale.compat import tensor_stores


@contextlib.contextmanager
def fake_weights(model: torch.nn.Module, mode: Any, device: str) -> Iterator[Callable[[], None]]:
    """Swaps parameters and buffers for fake ones on `device`, tied ones staying tied; real ones
    come back at exit. Gives a function that takes back what a forward has put in their place.
    """
    fakes: dict[int, torch.Tensor] = {}
    before: Stores = []
    try:
        for module in model.modules():
            for store in tensor_stores(module):
                before.append((store, dict(store)))
                for name, value in store.items():
                    if value is None:
                        continue
                    if id(value) not in fakes:
                        fakes[id(value)] = _fake_like(value, mode, device)
                    store[name] = fakes[id(value)]
        swapped = [(store, dict(store)) for store, _ in before]
        yield lambda: refill(swapped)
    finally:
        refill(before)  # what forward put there, a table it made, is fake as well


Stores = list[tuple[dict[str, Any], dict[str, Any]]]
"""(dict of the parameters or buffers of a module, what is to be in it)"""


def refill(stores: Stores) -> None:
    for store, own in stores:
        store.clear()
        store.update(own)


def _fake_like(value: torch.Tensor, mode: Any, device: str) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(
            tuple(value.shape), value.stride(), dtype=value.dtype, device=device
        )
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake
