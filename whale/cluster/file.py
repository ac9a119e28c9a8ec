"""The cluster file: a short YAML that people write and `whale profile` writes. Read with pydantic;
a word that it does not know is refused.

    hosts:
      - {name: big1, kind: V100-32GB, count: 4}
      - name: small1
        devices: [{kind: P100, count: 2}, {kind: my-card}]
        intra_host: {gb_per_s: 10, latency_us: 12}      # of this host only
    links:
      intra_host: {gb_per_s: 12, latency_us: 10}
      inter_host: {gb_per_s: 6.25, latency_us: 30}
      pairs:                                            # between certain hosts; MB: GB/s
        - {hosts: [big*, small1], latency_us: 40, curve: {0.1: 0.8, 10: 2.1, 1000: 2.4}}
    host: {memory_gb: 512, memory_gb_per_s: 100, link_gb_per_s: 12}     # of every host; also in one
    disk: {memory_gb: 2000, gb_per_s: 3, folder: /scratch}
    kinds:
      my-card: {tflop_per_s: 14, memory_gb: 8, gb_per_s: 448}

GB is 10^9 bytes, TFLOP 10^12. Devices get ranks in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from whale.cluster.cluster import (
    ETHERNET_50G,
    PCIE_3_X16,
    Cluster,
    Device,
    HostLinks,
    Link,
    Memories,
    PairLink,
)
from whale.cluster.file_entries import (
    MEGA,
    DevicesEntry,
    DiskEntry,
    EfficiencyEntry,
    FileEntry,
    HostEntry,
    KindEntry,
    LinkEntry,
    LinksEntry,
    MemoryEntry,
    PairEntry,
)
from whale.cluster.kinds import (
    DEVICE_KINDS,
    EXACT,
    GIGA,
    TERA,
    DeviceKind,
    Efficiency,
    device_kind,
)
from whale.cluster.layer_times import beside, load_layer_times, save_layer_times
from whale.names import nearest
from whale.units import MICROSECONDS

SHOWN_HOSTS = 8
DIGITS = 6
"""significant digits that are written"""
HEADER = "# A cluster for Whale: docs/cluster.md. GB = 10^9 bytes, TFLOP = 10^12.\n"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML that refuses a key given twice, of which only the last would count."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def load(path: str | Path) -> Cluster:
    """The cluster of a file; a ValueError names the file, the place in it and what would
    be right.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"cluster file {path}: {reason}") from None
    try:
        cluster = loads(text)
    except ValueError as error:
        raise ValueError(f"cluster file {path}: {error}") from None
    layers = beside(path)
    return replace(cluster, layer_times=load_layer_times(layers)) if layers.exists() else cluster


def loads(text: str) -> Cluster:
    """The cluster that this YAML text describes."""
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader: nothing in the file is executed
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ValueError(
            f"cannot be read as YAML{where}: {getattr(error, 'problem', None) or error}"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            "it should start with `hosts:`, but holds "
            f"{'nothing' if content is None else repr(content)[:60]}"
        )
    if isinstance(content.get("host"), list):
        raise ValueError(
            "unknown key 'host'. Did you mean 'hosts'? A list of hosts stands there; `host` is the "
            "memory that each of them has"
        )
    try:
        file = FileEntry.model_validate(content)
    except ValidationError as error:
        raise ValueError(_explain(error)) from None
    return _cluster(file)


def _cluster(file: FileEntry) -> Cluster:
    own: dict[str, DeviceKind] = {}
    for name, figures in file.kinds.items():
        if name.lower() in {known.lower() for known in (*DEVICE_KINDS, *own)}:
            raise ValueError(
                f"kind {name!r} is there already (upper and lower case are the same); give yours "
                "another name"
            )
        own[name] = figures.kind(name)
    devices: list[Device] = []
    host_links: list[HostLinks] = []
    seen: set[str] = set()
    for host in file.hosts:
        if host.name in seen:
            raise ValueError(
                f"host {host.name!r} is there twice; list all its devices in one place, under "
                "`devices`"
            )
        seen.add(host.name)
        local_rank = 0
        for group in host.all_devices():
            try:
                kind = device_kind(group.kind, own)
            except ValueError as error:
                raise ValueError(f"host {host.name!r}: {error}") from None
            for _ in range(group.count):
                devices.append(Device(len(devices), host.name, local_rank, kind))
                local_rank += 1
        if host.intra_host or host.inter_host:
            host_links.append(
                HostLinks(
                    host.name,
                    *(link.link() if link else None for link in (host.intra_host, host.inter_host)),
                )
            )
    intra, inter, all_reduce = (
        link.link() if link else None
        for link in (file.links.intra_host, file.links.inter_host, file.links.all_reduce)
    )
    return Cluster(
        tuple(devices),
        intra or PCIE_3_X16,
        inter or ETHERNET_50G,
        tuple(host_links),
        all_reduce,
        tuple(_pair_links(file)),
        memories=tuple(_memories(file)),
    )


def _memories(file: FileEntry) -> Iterator[Memories]:
    """What each host has beside its devices, where something is said of it."""
    for host in file.hosts:
        memory = host.host or file.host
        disk = host.disk or file.disk
        if memory is not None or disk is not None:
            yield Memories(
                host.name,
                memory.memory() if memory is not None else None,
                disk.disk() if disk is not None else None,
            )


def _pair_links(file: FileEntry) -> Iterator[PairLink]:
    """Links between certain hosts; one whose pattern fits no host is a slip of the keyboard."""
    names = [host.name for host in file.hosts]
    for number, pair in enumerate(file.links.pairs):
        for name in pair.hosts:
            if not any(fnmatchcase(host, name) for host in names):
                raise ValueError(
                    f"links.pairs[{number}]: no host is called {name!r}.{nearest(name, names)} The "
                    f"file has {', '.join(names[:SHOWN_HOSTS])}"
                )
        yield PairLink(pair.hosts, pair.link())


def _explain(error: ValidationError) -> str:
    """The first problem in plain words: `hosts[1].count must be at least 1, not 0`."""
    # a wrong word first: what is missing then is usually that word
    problem = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    place = problem["loc"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(
        "."
    )
    kind = problem["type"]
    value = problem.get("input")
    more = error.error_count() - 1
    context = problem.get("ctx", {})
    if kind == "extra_forbidden":
        allowed = _fields_at(place[:-1])
        inside = f" in {where.rpartition('.')[0]}" if len(place) > 1 else ""
        text = (
            f"unknown key {str(place[-1])!r}{inside}.{nearest(str(place[-1]), allowed)} It may "
            f"have: {', '.join(allowed)}"
        )
    elif kind == "missing":
        text = f"{where} is missing"
    elif kind in ("greater_than", "greater_than_equal", "less_than_equal"):
        (sign, limit), *_ = context.items()
        bound = {"gt": "more than", "ge": "at least", "le": "at most"}[sign] + f" {limit:g}"
        text = f"{where} must be {bound}, not {value!r}"
    elif kind == "value_error":
        text = f"{where}: {context.get('error', problem['msg'])}"
    elif kind in ("string_type", "string_too_short"):
        text = f"{where} must be text, not {value!r}; put it in quotes"
    elif kind in ("too_short",):
        text = f"{where} is empty; it needs at least 1 entry"
    else:
        text = f"{where} is {value!r}: {problem['msg'][0].lower() + problem['msg'][1:]}"
    return text + (f" (and {more} more problem{'s' * (more > 1)})" if more else "")


def _fields_at(place: tuple[int | str, ...]) -> list[str]:
    """Keys that are allowed at a place of the file."""
    names = [part for part in place if isinstance(part, str)]
    model: type[BaseModel] = FileEntry
    by_name: dict[str, type[BaseModel]] = {
        "links": LinksEntry,
        "pairs": PairEntry,
        "hosts": HostEntry,
        "devices": DevicesEntry,
        "host": MemoryEntry,
        "disk": DiskEntry,
    }
    if names and names[0] == "kinds":
        model = EfficiencyEntry if names[-1] == "efficiency" else KindEntry
    elif names and names[-1] in ("intra_host", "inter_host", "all_reduce"):
        model = LinkEntry
    elif names and names[-1] in by_name:
        model = by_name[names[-1]]
    return list(model.model_fields)


def save(cluster: Cluster, path: str | Path) -> None:
    Path(path).write_text(dumps(cluster))
    if cluster.layer_times is not None:
        save_layer_times(cluster.layer_times, beside(path))


def dumps(cluster: Cluster) -> str:
    """The cluster as YAML text; `loads(dumps(c)) == c` up to DIGITS digits, for devices that stand
    host by host.
    """
    own_links = {links.host: links for links in cluster.host_links}
    memories = [cluster.memories_of(host) for host in cluster.hosts]
    are_alike = len({(each.memory, each.disk) for each in memories}) == 1
    hosts = []
    for host in cluster.hosts:
        entry: dict[str, Any] = {"name": host}
        groups: list[dict[str, Any]] = []
        for device in (device for device in cluster.devices if device.host == host):
            if groups and groups[-1]["kind"] == device.kind.name:
                groups[-1]["count"] += 1
            else:
                groups.append({"kind": device.kind.name, "count": 1})
        entry |= groups[0] if len(groups) == 1 else {"devices": groups}
        links = own_links.get(host, HostLinks(host))
        entry |= _named_links(intra_host=links.intra_host, inter_host=links.inter_host)
        if not are_alike:
            entry |= _named_memories(cluster.memories_of(host))
        hosts.append(entry)
    content: dict[str, Any] = {"hosts": hosts}
    content["links"] = _named_links(
        intra_host=cluster.intra_host, inter_host=cluster.inter_host, all_reduce=cluster.all_reduce
    )
    if cluster.pair_links:
        content["links"]["pairs"] = [
            {"hosts": list(pair.hosts)} | _named_links(pair=pair.link)["pair"]
            for pair in cluster.pair_links
        ]
    if are_alike:
        content |= _named_memories(memories[0])
    own = {
        device.kind.name: device.kind
        for device in cluster.devices
        if DEVICE_KINDS.get(device.kind.name) != device.kind
    }
    built_in = {known.lower() for known in DEVICE_KINDS}
    clash = next((name for name in own if name.lower() in built_in), None)
    if clash is not None:
        raise ValueError(
            f"kind {clash!r} has other figures than the built-in kind of that name; give it "
            "another name"
        )
    if own:
        content["kinds"] = {name: _figures(kind) for name, kind in own.items()}
    return HEADER + str(
        yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=140)
    )


def _named_links(**links: Link | None) -> dict[str, Any]:
    return {name: _link(link) for name, link in links.items() if link is not None}


def _named_memories(memories: Memories) -> dict[str, Any]:
    """The entries `host` and `disk`, as far as something is known."""
    found: dict[str, Any] = {}
    memory = memories.memory
    if memory is not None:
        found["host"] = {
            "memory_gb": _short(memory.memory_bytes / GIGA, 12),
            "memory_gb_per_s": _short(memory.memory_bytes_per_s / GIGA),
            "link_gb_per_s": _short(memory.link_bytes_per_s / GIGA),
        }
        if memory.links_bytes_per_s is not None:
            found["host"]["links_gb_per_s"] = _short(memory.links_bytes_per_s / GIGA)
    disk = memories.disk
    if disk is not None:
        found["disk"] = {
            "memory_gb": _short(disk.memory_bytes / GIGA, 12),
            "gb_per_s": _short(disk.read_bytes_per_s / GIGA),
            "write_gb_per_s": _short(disk.write_bytes_per_s / GIGA),
        }
        if disk.folder is not None:
            found["disk"]["folder"] = disk.folder
    return found


def _link(link: Link) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gb_per_s": _short(link.bytes_per_s / GIGA),
        "latency_us": _short(link.latency_s * MICROSECONDS),
    }
    if link.curve:
        found["curve"] = {_short(size / MEGA): _short(rate / GIGA) for size, rate in link.curve}
    if link.card_bytes_per_s is not None:
        found["card_gb_per_s"] = _short(link.card_bytes_per_s / GIGA)
    return found


def _figures(kind: DeviceKind) -> dict[str, Any]:
    figures: dict[str, Any] = {"tflop_per_s": _short(kind.flop_per_s / TERA)}
    for dtype, rate in (
        ("tf32", kind.tf32_flop_per_s),
        ("bf16", kind.bf16_flop_per_s),
        ("fp16", kind.fp16_flop_per_s),
    ):
        if rate is not None:
            figures[f"{dtype}_tflop_per_s"] = _short(rate / TERA)
    figures |= {
        "memory_gb": _short(kind.memory_bytes / GIGA, 12),
        "gb_per_s": _short(kind.bytes_per_s / GIGA),
    }
    measured: dict[str, dict[int, float]] = {}
    for point in kind.matmul_rates:
        measured.setdefault(point.dtype, {})[point.size] = _short(point.flop_per_s / TERA)
    operations: dict[str, list[list[float]]] = {}
    for each in kind.operations:
        times = [
            _short(each.work),
            _short(each.forward_s * MICROSECONDS),
            _short(each.backward_s * MICROSECONDS),
        ]
        operations.setdefault(each.name, []).append(times)
    if kind.efficiency != EXACT:
        figures["efficiency"] = _reached(kind.efficiency)
    figures |= {"matmul_tflop_per_s": measured} if measured else {}
    return figures | ({"operations": operations} if operations else {})


def _reached(efficiency: Efficiency) -> dict[str, Any]:
    found: dict[str, Any] = {
        "products": _short(efficiency.products),
        "memory": _short(efficiency.memory),
    }
    if efficiency.on_chip_bytes_per_s is not None:
        found["on_chip_gb_per_s"] = _short(efficiency.on_chip_bytes_per_s / GIGA)
    return found | {"operation_us": _short(efficiency.operation_s * MICROSECONDS)}


def _short(value: float, digits: int = DIGITS) -> float | int:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded
