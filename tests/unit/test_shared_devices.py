"""Two ranks with one accelerator are refused by name, before they share a communicator."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from whale.distributed.ranks import note_device, refuse_shared_devices


def _arrive(identities: list[str]) -> dist.Store:
    store = dist.HashStore()
    for rank, identity in enumerate(identities):
        note_device(store, "whale/0", rank, identity)
    return store


def test_ranks_that_share_a_device_are_named() -> None:
    store = _arrive(["GPU-1", "GPU-2", "GPU-3", "GPU-2"])
    for _ in range(4):  # every rank raises
        with pytest.raises(ValueError, match=r"ranks 1 and 3 have the same device \(GPU-2\)"):
            refuse_shared_devices(store, "whale/0")


def test_ranks_with_devices_of_their_own_are_not_refused() -> None:
    store = _arrive(["GPU-1", "GPU-2", "GPU-3"])
    refuse_shared_devices(store, "whale/0")
    refuse_shared_devices(store, "whale/1")  # joined again: nobody has arrived
