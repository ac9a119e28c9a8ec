"""What may stand in a cluster file, entry by entry, and what each becomes in a `Cluster`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from whale.cluster.cluster import Disk, HostMemory, Link
from whale.cluster.file_numbers import Count, NotNegative, Positive, Size
from whale.cluster.kinds import (
    DTYPES,
    EXACT,
    GIGA,
    TERA,
    DeviceKind,
    Efficiency,
    MatmulRate,
    OperationPoint,
)
from whale.units import MICROSECONDS

MEGA = 10**6

Name = Annotated[str, Field(min_length=1)]


class FileObject(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LinkEntry(FileObject):
    gb_per_s: Positive | None = None
    """of large messages; may be left out beside a curve"""
    latency_us: NotNegative = 0.0
    curve: dict[Positive, Positive] = {}
    """MB of a message -> GB/s"""
    card_gb_per_s: Positive | None = None
    """what all devices of a host reach together, where one of them does not fill the card"""

    def link(self) -> Link:
        points = tuple((size * MEGA, rate * GIGA) for size, rate in sorted(self.curve.items()))
        if self.gb_per_s is None and not points:
            raise ValueError("a link needs `gb_per_s`, or a `curve` of MB: GB/s")
        largest = points[-1][1] if points else 0.0
        return Link(
            largest if self.gb_per_s is None else self.gb_per_s * GIGA,
            self.latency_us / MICROSECONDS,
            points,
            None if self.card_gb_per_s is None else self.card_gb_per_s * GIGA,
        )


class PairEntry(LinkEntry):
    hosts: tuple[Name, Name]
    """names of two hosts, or patterns of names (`gpu*`)"""


class DevicesEntry(FileObject):
    kind: Name
    count: Count = 1


class MemoryEntry(FileObject):
    memory_gb: Positive
    memory_gb_per_s: Positive
    """what the host itself reads and writes"""
    link_gb_per_s: Positive
    """between one device and this memory, each way"""
    links_gb_per_s: Positive | None = None
    """all devices of the host together; without it they share one link"""

    def memory(self) -> HostMemory:
        together = self.links_gb_per_s
        return HostMemory(
            round(self.memory_gb * GIGA),
            self.memory_gb_per_s * GIGA,
            self.link_gb_per_s * GIGA,
            None if together is None else together * GIGA,
        )


class DiskEntry(FileObject):
    memory_gb: Positive
    gb_per_s: Positive
    """read, and written where nothing else is said"""
    write_gb_per_s: Positive | None = None
    folder: Name | None = None
    """where files go; without it into the run folder"""

    def disk(self) -> Disk:
        return Disk(
            round(self.memory_gb * GIGA),
            self.gb_per_s * GIGA,
            (self.write_gb_per_s or self.gb_per_s) * GIGA,
            self.folder,
        )


class HostEntry(FileObject):
    name: Name
    kind: Name | None = None
    count: Count | None = None
    devices: Annotated[list[DevicesEntry], Field(min_length=1)] | None = None
    intra_host: LinkEntry | None = None
    inter_host: LinkEntry | None = None
    host: MemoryEntry | None = None
    disk: DiskEntry | None = None

    def all_devices(self) -> list[DevicesEntry]:
        if self.devices is not None:
            if self.kind is not None or self.count is not None:
                raise ValueError(
                    f"host {self.name!r} has both `devices` and `kind` or `count`; put all into "
                    "`devices`"
                )
            return self.devices
        if self.kind is None:
            raise ValueError(
                f"host {self.name!r} has no devices; give it a `kind` and a `count`, or a list of "
                "`devices`"
            )
        return [DevicesEntry(kind=self.kind, count=self.count or 1)]


class LinksEntry(FileObject):
    intra_host: LinkEntry | None = None
    inter_host: LinkEntry | None = None
    all_reduce: LinkEntry | None = None
    pairs: list[PairEntry] = []


class EfficiencyEntry(FileObject):
    products: Positive = 1.0
    memory: Positive = 1.0
    on_chip_gb_per_s: Positive | None = None
    operation_us: NotNegative = 0.0

    def efficiency(self) -> Efficiency:
        on_chip = self.on_chip_gb_per_s
        return Efficiency(
            self.products,
            self.memory,
            None if on_chip is None else on_chip * GIGA,
            self.operation_us / MICROSECONDS,
        )


class KindEntry(FileObject):
    tflop_per_s: Positive
    memory_gb: Positive
    gb_per_s: Positive
    tf32_tflop_per_s: Positive | None = None
    bf16_tflop_per_s: Positive | None = None
    fp16_tflop_per_s: Positive | None = None
    matmul_tflop_per_s: dict[str, dict[Size, Positive]] = {}
    """measured: dtype -> size of square matrices -> rate"""
    operations: dict[Name, list[tuple[Positive, Positive, Positive]]] = {}
    """measured: operation -> (FLOP or bytes, microseconds of its forward, of its backward) at
    several sizes
    """
    efficiency: EfficiencyEntry | None = None
    """how much of these figures is reached; without it they are taken as they are"""

    def kind(self, name: str) -> DeviceKind:
        for dtype in self.matmul_tflop_per_s:
            if dtype not in DTYPES:
                raise ValueError(
                    f"kind {name!r}: matmul_tflop_per_s has no dtype {dtype!r}; it may have "
                    f"{', '.join(DTYPES)}"
                )
        rates = []
        for dtype, sizes in self.matmul_tflop_per_s.items():
            rates += [MatmulRate(dtype, size, rate * TERA) for size, rate in sizes.items()]
        tf32, bf16, fp16 = (
            None if rate is None else rate * TERA
            for rate in (self.tf32_tflop_per_s, self.bf16_tflop_per_s, self.fp16_tflop_per_s)
        )
        memory_bytes = round(self.memory_gb * GIGA)
        points = []
        for operation, measured in self.operations.items():
            for work, forward_us, backward_us in measured:
                forward_s = forward_us / MICROSECONDS
                points.append(
                    OperationPoint(operation, work, forward_s, backward_us / MICROSECONDS)
                )
        return DeviceKind(
            name,
            self.tflop_per_s * TERA,
            memory_bytes,
            self.gb_per_s * GIGA,
            tf32,
            bf16,
            fp16,
            tuple(rates),
            tuple(points),
            self.efficiency.efficiency() if self.efficiency else EXACT,
        )


class FileEntry(FileObject):
    hosts: Annotated[list[HostEntry], Field(min_length=1)]
    links: LinksEntry = LinksEntry()
    host: MemoryEntry | None = None
    """of every host that says nothing of its own"""
    disk: DiskEntry | None = None
    kinds: dict[Name, KindEntry] = {}
