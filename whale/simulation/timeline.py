"""The result of a simulation: what every device does when, how full it is, and what limits the
step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from whale.plans.away import AwayFigures
from whale.plans.blocks import Memory
from whale.simulation.communication import TimedMessage
from whale.units import MICROSECONDS

ALL_REDUCE = "all-reduce"
UPDATE = "update"
"""events beside the actions of the schedule: waiting for gradients, and the optimizer"""
COMPUTE_LETTERS = frozenset("FBIW")
ELSEWHERE: tuple[Memory, ...] = ("host", "disk")
"""memories beside those of the devices"""
MOSTLY = 0.7
"""a device that computes for so much of the step is what limits it"""
MAINLY_FIXED = 0.5
"""where so much of its work does not depend on the samples, that is what limits it"""


class Event(NamedTuple):
    """Something that a device does, or waits for (`receive ...`, `all-reduce`)."""

    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_compute(self) -> bool:
        return self.name[0] in COMPUTE_LETTERS

    @property
    def is_wait(self) -> bool:
        return self.name.startswith(("receive", ALL_REDUCE))


class MemoryPoint(NamedTuple):
    """What a device holds from this moment on, until the next point."""

    time_s: float
    total_bytes: float
    activation_bytes: float


@dataclass(frozen=True)
class DeviceTimeline:
    """One device in one step."""

    rank: int
    kind: str
    host: str
    events: tuple[Event, ...]
    """in the order of time: compute actions, waiting for messages and all-reduces, update"""
    memory: tuple[MemoryPoint, ...]
    peak_bytes: dict[str, float]
    """class of memory -> bytes at the fullest moment"""
    memory_bytes: int
    """capacity of the device; 0: not known"""
    away: AwayFigures | None = None
    """what this rank has in the memories of its host; None: nothing"""
    moved_s: float = 0.0
    """seconds of its transfers from and to them in forwards and backwards, one after the other"""
    exposed_s: float = 0.0
    """seconds by which its forwards and backwards are longer for these transfers: the rest is
    hidden under compute
    """
    fixed_s: float = 0.0
    """seconds of its forwards and backwards that any number of samples takes: launches of
    operations, reads of weights
    """
    ahead_s: float = 0.0
    """seconds of its updates on the host that run under the next forward, as far as that does not
    wait for them (which is an update, too)
    """

    @cached_property
    def compute_s(self) -> float:
        return sum(event.seconds for event in self.events if event.is_compute)

    @cached_property
    def update_s(self) -> float:
        return sum(event.seconds for event in self.events if event.name == UPDATE)

    @property
    def busy_s(self) -> float:
        """Forwards, backwards and the update."""
        return self.compute_s + self.update_s

    @cached_property
    def wait_s(self) -> float:
        """Seconds of waiting for messages and for all-reduces."""
        return sum(event.seconds for event in self.events if event.is_wait)

    @cached_property
    def all_reduce_s(self) -> float:
        """The part of `wait_s` that is for all-reduces of gradients."""
        return sum(event.seconds for event in self.events if event.name == ALL_REDUCE)

    @property
    def peak_total_bytes(self) -> float:
        return sum(self.peak_bytes.values())

    @property
    def elsewhere_bytes(self) -> dict[str, float]:
        """Memory of the host -> bytes that this rank has there."""
        if self.away is None:
            return dict.fromkeys(ELSEWHERE, 0.0)
        return {memory: self.away.in_memory(memory) for memory in ELSEWHERE}

    @property
    def traffic_bytes(self) -> float:
        """Bytes that move in a step between this device and the memories of its host, both ways."""
        if self.away is None:
            return 0.0
        return sum(each.in_bytes + each.out_bytes for each in self.away.traffic)


@dataclass(frozen=True)
class Timeline:
    """One step of a plan."""

    devices: tuple[DeviceTimeline, ...]
    """by rank"""
    messages: tuple[TimedMessage, ...]
    gradients_s: float
    """when all gradients are reduced everywhere"""
    step_s: float
    """with the update"""
    batch_size: int

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step_s if self.step_s else 0.0

    @property
    def bubble(self) -> float:
        """Part of their time in which devices compute nothing, 0 to 1. Only devices that have
        samples count, and not those that the plan leaves out.
        """
        busy_s = [device.busy_s for device in self.devices if device.compute_s > 0]
        total_s = self.step_s * len(busy_s)
        return 1 - sum(busy_s) / total_s if total_s else 0.0

    def idle_s(self, rank: int) -> float:
        device = self.devices[rank]
        return max(0.0, self.step_s - device.busy_s - device.wait_s)

    def on_the_way_s(self, rank: int) -> float:
        """How long a device waits for messages that were sent already; the rest of its waiting is
        for devices that are not ready.
        """
        sent = self._last_sent
        waits = (event for event in self.devices[rank].events if event.name.startswith("receive"))
        return sum(
            event.end_s - max(event.start_s, sent[rank, event.name.removeprefix("receive ")])
            for event in waits
        )

    @cached_property
    def _last_sent(self) -> dict[tuple[int, str], float]:
        """(rank that receives, message without its first word) -> when the last piece of it was
        sent
        """
        found: dict[tuple[int, str], float] = {}
        for message in self.messages:
            key = (message.destination, message.name.removeprefix("send "))
            found[key] = max(message.sent_s, found.get(key, 0.0))
        return found

    @property
    def busiest(self) -> DeviceTimeline:
        return max(self.devices, key=lambda device: device.busy_s)

    @cached_property
    def limit(self) -> str:
        """What to change first: the part of the step in which the busiest device waits or computes
        most.
        """
        device = self.busiest
        if not self.step_s:
            return "nothing takes time"
        on_the_way = self.on_the_way_s(device.rank)
        parts = {
            "messages on their way": on_the_way,
            "all-reduce of gradients": device.all_reduce_s,
            "the update of the weights": device.update_s,
            "transfers from and to the host": device.exposed_s,
            "other devices (bubble)": self.idle_s(device.rank)
            + device.wait_s
            - device.all_reduce_s
            - on_the_way,
        }
        name = f"rank {device.rank} ({device.kind})"
        share = (device.compute_s - device.exposed_s) / self.step_s
        worst = max(parts, key=parts.__getitem__)
        if share >= MOSTLY or parts[worst] <= 0:
            if device.fixed_s >= MAINLY_FIXED * device.compute_s:
                return (
                    "launches of operations and reads of weights: the busiest device, "
                    f"{name}, spends {device.fixed_s / self.step_s:.0%} of the step on them, "
                    "however few samples a micro-batch has"
                )
            return f"compute: the busiest device, {name}, computes {share:.0%} of the step"
        waits = "spends" if "update" in worst or "transfers" in worst else "waits"
        how = f"{waits} {parts[worst] / self.step_s:.0%} of the step for {worst}"
        return (
            f"{worst}: the busiest device, {name}, is busy for {device.busy_s / self.step_s:.0%} "
            f"of the step and {how}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, with everything that a page shows."""
        return {
            "step_s": self.step_s,
            "gradients_s": self.gradients_s,
            "samples_per_s": self.samples_per_s,
            "bubble": self.bubble,
            "limit": self.limit,
            "devices": [
                {
                    **asdict(device),
                    "busy_s": device.busy_s,
                    "wait_s": device.wait_s,
                    "idle_s": self.idle_s(device.rank),
                    "peak_total_bytes": device.peak_total_bytes,
                    "elsewhere_bytes": device.elsewhere_bytes,
                    "traffic_bytes": device.traffic_bytes,
                }
                for device in self.devices
            ],
            "messages": [asdict(message) for message in self.messages],
        }

    def save_trace(self, path: str | Path) -> None:
        """A Chrome trace (ui.perfetto.dev, chrome://tracing): a process for each host, a row for
        each device, memory as a curve.
        """
        Path(path).write_text(
            json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ms"})
        )

    def trace_events(self) -> list[dict[str, Any]]:
        """The events of a Chrome trace: a process for each host, two threads for each rank, one of
        them for what it sends, and a counter of its memory.
        """
        hosts = {
            host: place
            for place, host in enumerate(dict.fromkeys(device.host for device in self.devices))
        }
        rows: list[dict[str, Any]] = []
        for host, process in hosts.items():
            name = {"name": f"host {host}"}
            rows.append({"name": "process_name", "ph": "M", "pid": process, "args": name})
        for device in self.devices:
            rows += _device_events(device, hosts[device.host])
        for message in self.messages:
            process = hosts[self.devices[message.source].host]
            to = f"{message.name} to rank {message.destination}, {message.num_bytes:.0f} bytes"
            rows.append(
                _slice(
                    to,
                    "message",
                    process,
                    2 * message.source + 1,
                    message.start_s,
                    message.arrival_s,
                )
            )
        return rows


def _device_events(device: DeviceTimeline, process: int) -> list[dict[str, Any]]:
    """Names of the threads of one rank, what it does, and how full its memory is."""
    row = 2 * device.rank
    rows: list[dict[str, Any]] = []
    for number, name in (
        (row, f"rank {device.rank} {device.kind}"),
        (row + 1, f"rank {device.rank} sends"),
    ):
        thread = {"name": "thread_name", "ph": "M", "pid": process, "tid": number}
        rows.append({**thread, "args": {"name": name}})
    for event in device.events:
        kind = "wait" if event.is_wait else "compute"
        rows.append(_slice(event.name, kind, process, row, event.start_s, event.end_s))
    for point in device.memory:
        rows.append(
            {
                "name": f"memory of rank {device.rank}, bytes",
                "ph": "C",
                "pid": process,
                "ts": point.time_s * MICROSECONDS,
                "args": {
                    "activations": point.activation_bytes,
                    "other": point.total_bytes - point.activation_bytes,
                },
            }
        )
    return rows


def _slice(
    name: str, kind: str, process: int, row: int, start_s: float, end_s: float
) -> dict[str, Any]:
    times = {"ts": start_s * MICROSECONDS, "dur": (end_s - start_s) * MICROSECONDS}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": row, **times}
