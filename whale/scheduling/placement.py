"""Which device holds which stage, apart from the order in which devices work.

P devices, C chunks on each, S = P C stages. Stage s is chunk c = s // P of its device:

    loop   device s mod P: each chunk starts again at device 0 (interleaved 1F1B)
    wave   even chunks go down the devices, odd ones come back up: device s mod P, or
           P - 1 - (s mod P). W waves are 2 W chunks. The stages at a turn are neighbours on one
           device, so W waves have 2 W - 1 hops without a message, and device 0 holds the first and
           the last stage

    P = 4, 2 waves
    device 0: 0 7 8 15   device 1: 1 6 9 14   device 2: 2 5 10 13   device 3: 3 4 11 12

Any other map is as good to everything that does not ask for one of these: it is a tuple with the
device of each stage.
"""

from __future__ import annotations

from whale.scheduling.action import StageGraph

DeviceOfStage = tuple[int, ...]
"""the device of each stage"""


def loop(num_devices: int, num_chunks: int = 1) -> DeviceOfStage:
    """Each chunk starts again at device 0."""
    _require(num_devices, num_chunks, "chunk")
    return tuple(range(num_devices)) * num_chunks


def zigzag(num_devices: int, num_chunks: int) -> DeviceOfStage:
    """Even chunks go down the devices, odd ones come back up."""
    _require(num_devices, num_chunks, "chunk")
    down = tuple(range(num_devices))
    return tuple(
        device for chunk in range(num_chunks) for device in (down if chunk % 2 == 0 else down[::-1])
    )


def wave(num_devices: int, num_waves: int) -> DeviceOfStage:
    """Stages that go down the devices and up again, `num_waves` times."""
    _require(num_devices, num_waves, "wave")
    return zigzag(num_devices, 2 * num_waves)


def two_pipelines(num_devices: int) -> StageGraph:
    """Chimera's two replicas of a model, one down the devices and one up: stages 0..P-1 and
    P..2P-1, joined by nothing.

    A micro-batch of this graph is two of the user's, one for each replica. Only for comparisons:
    Whale does not run it.
    """
    _require(num_devices, 1, "chunk")
    edges = tuple(
        (stage, stage + 1) for stage in range(2 * num_devices - 1) if stage != num_devices - 1
    )
    return StageGraph(zigzag(num_devices, 2), edges, edges)


def num_waves_of(placement: DeviceOfStage) -> int | None:
    """How many waves this placement has; None when it is no wave."""
    num_devices = max(placement) + 1
    num_waves, rest = divmod(len(placement), 2 * num_devices)
    return (
        num_waves if not rest and num_waves and placement == wave(num_devices, num_waves) else None
    )


def num_loops_of(placement: DeviceOfStage) -> int | None:
    """How many chunks each device has in this loop; None when it is no loop."""
    num_devices = max(placement) + 1
    num_chunks, rest = divmod(len(placement), num_devices)
    return num_chunks if not rest and placement == loop(num_devices, num_chunks) else None


def _require(num_devices: int, count: int, what: str) -> None:
    if num_devices < 1:
        raise ValueError(f"{num_devices} devices: at least 1 is needed")
    if count < 1:
        raise ValueError(f"{count} {what}s on each device: at least 1 is needed")
