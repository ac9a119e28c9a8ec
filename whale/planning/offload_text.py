"""What a plan says of what is at home elsewhere: how much, what it saves and what it costs."""

from __future__ import annotations

from whale.planning.balance import DeviceLoads
from whale.planning.offload_account import OffloadAccount
from whale.plans.plan import Decision
from whale.units import human_bytes

WORDS = {
    "optimizer": "optimizer state",
    "weights": "weights",
    "gradients": "gradients",
    "activations": "activations",
}


def offload_decisions(
    account: OffloadAccount, devices: DeviceLoads, whole: DeviceLoads
) -> list[Decision]:
    """What is at home where, and what that leaves free on a device. `whole`: the devices if they
    held everything.
    """
    offload = account.offload
    if not offload.is_any:
        return []
    parts = []
    for key, words in WORDS.items():
        home = getattr(offload, key)
        if home != "device":
            rest = ", the rest on disk" if offload.spills and home == "host" else ""
            parts.append(f"{words} on {home}{rest}")
    saved = 0.0
    for before, after in zip(whole.memory, devices.memory, strict=True):
        saved = max(saved, before.static_bytes - after.static_bytes)
    why = f"{human_bytes(saved)} less on a device before the first sample"
    if offload.activations != "device":
        per_sample = max(
            before.sample_bytes - after.sample_bytes
            for before, after in zip(whole.memory, devices.memory, strict=True)
        )
        why += f", {human_bytes(per_sample)} less for each sample of a micro-batch"
    if offload.optimizer != "device":
        other = "device" if account.updated_on == "host" else "host"
        why += f"; the optimizer runs on the {account.updated_on}, which takes less than on the "
        why += f"{other}"
    return [Decision("offload", "; ".join(parts), why)]
