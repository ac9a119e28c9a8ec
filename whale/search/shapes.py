"""Which devices may stand where: shapes of replicas and stages, enumerated.

Devices of one kind on one host are a class, and nothing depends on which of them is taken. Classes
are laid in a line, in every order that differs; a line is cut into model replicas,

    slices   every replica gets the same number of every class
    blocks   the first replica gets the first devices of the line, the next the next ones

and the devices of a replica into stages: in all ways where they are few, else into stages of about
equal width for each class. Shapes that differ only in which device of a class is where are one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

from whale.cluster.cluster import Cluster, Device, DeviceKind
from whale.search.point import Shape, Stages

FEW_DEVICES = 8
"""of a replica: so many are cut into stages in all ways"""
MOST_CLASSES = 4
"""so many are laid in lines in all orders"""
MANY_DEVICES = 256
"""of so many, three or more classes are laid in some good orders only, else in all
"""
STAGE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""stages of one class that are tried in a long line"""
FEW_PARTS = 6
"""devices of a cluster: of so many all parts are looked at, not only whole classes"""
MOST_LEFT_ALONE = 64
"""devices of a cluster: of so many one alone may be left out; of more, one changes little
"""
FIRST_FEW = (1, 2, 4, 8, 16)
"""so many devices of a class, or hosts, are tried without all others"""
MOST_SHAPES = 20_000
"""so many are enumerated at most"""


@dataclass(frozen=True)
class DeviceClass:
    """Devices that nothing distinguishes."""

    kind: DeviceKind
    ranks: tuple[int, ...]


def device_classes(
    cluster: Cluster, ranks: Collection[int] | None = None
) -> tuple[DeviceClass, ...]:
    """Devices of one kind on one host; of one kind on all hosts, where there are many hosts.
    `ranks`: only these.
    """
    found: dict[tuple[DeviceKind, str], list[int]] = {}
    for device in cluster.devices:
        if ranks is not None and device.rank not in ranks:
            continue
        found.setdefault((device.kind, device.host), []).append(device.rank)
    if len(found) > MOST_CLASSES:
        merged: dict[DeviceKind, list[int]] = {}
        for (kind, _), members in found.items():
            merged.setdefault(kind, []).extend(members)
        found = {(kind, ""): ranks for kind, ranks in merged.items()}
    return tuple(DeviceClass(kind, tuple(members)) for (kind, _), members in found.items())


def lines(classes: Sequence[DeviceClass]) -> list[tuple[DeviceClass, ...]]:
    """The classes in every order that differs; in some good ones where there are many."""
    number = sum(len(each.ranks) for each in classes)
    if len(classes) > MOST_CLASSES or (len(classes) > 2 and number > MANY_DEVICES):
        by_memory = sorted(classes, key=lambda each: (-each.kind.memory_bytes, each.kind.name))
        return list(dict.fromkeys([tuple(classes), tuple(by_memory), tuple(by_memory[::-1])]))
    found: dict[tuple[tuple[DeviceKind, int], ...], tuple[DeviceClass, ...]] = {}
    for order in permutations(classes):
        key = tuple((each.kind, len(each.ranks)) for each in order)
        found.setdefault(key, order)
    return list(found.values())


def shapes(cluster: Cluster, ranks: Collection[int] | None = None) -> Iterator[Shape]:
    """All shapes on all devices of the cluster, or on these, each once."""
    seen: set[int] = set()
    numbers: dict[tuple[DeviceKind, str], int] = {}
    labels = [
        numbers.setdefault((device.kind, device.host), len(numbers)) for device in cluster.devices
    ]

    def signature(shape: Shape) -> object:
        """What tells two shapes apart: kinds and hosts of every stage, in any order of the
        replicas.
        """
        replicas = []
        for stages in shape.replicas:
            replicas.append(tuple(tuple(sorted(map(labels.__getitem__, each))) for each in stages))
        return tuple(sorted(replicas))

    for line in lines(device_classes(cluster, ranks)):
        for shape in _on_line(line):
            key = hash(signature(shape))  # of whole numbers, so the same in every run
            if key not in seen:
                seen.add(key)
                yield shape
            if len(seen) >= MOST_SHAPES:
                return


def _on_line(line: Sequence[DeviceClass]) -> Iterator[Shape]:
    number = sum(len(each.ranks) for each in line)
    for num_replicas in range(1, number + 1):
        slices = _slices(line, num_replicas)
        if slices is not None:
            yield from _with_stages(slices, [len(each.ranks) // num_replicas for each in line])
        blocks = _blocks(line, num_replicas)
        if blocks is not None and blocks != slices:
            runs = [len(blocks[0])]
            yield from _with_stages(blocks, runs)


def _slices(line: Sequence[DeviceClass], num_replicas: int) -> list[tuple[int, ...]] | None:
    """The ranks of every replica; None where a class does not divide."""
    if any(len(each.ranks) % num_replicas for each in line):
        return None
    found = []
    for replica in range(num_replicas):
        ranks: list[int] = []
        for each in line:
            part = len(each.ranks) // num_replicas
            ranks.extend(each.ranks[replica * part : (replica + 1) * part])
        found.append(tuple(ranks))
    return found


def _blocks(line: Sequence[DeviceClass], num_replicas: int) -> list[tuple[int, ...]] | None:
    ranks = [rank for each in line for rank in each.ranks]
    if len(ranks) % num_replicas:
        return None
    part = len(ranks) // num_replicas
    return [tuple(ranks[start : start + part]) for start in range(0, len(ranks), part)]


def _with_stages(replicas: Sequence[tuple[int, ...]], runs: Sequence[int]) -> Iterator[Shape]:
    """Shapes with the devices of every replica cut alike. `runs`: devices of each class in a
    replica, in their order.
    """
    for widths in compositions(runs):
        found: list[Stages] = []
        for ranks in replicas:
            stages = []
            start = 0
            for width in widths:
                stages.append(ranks[start : start + width])
                start += width
            found.append(tuple(stages))
        yield Shape(tuple(found))


def compositions(runs: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Widths of stages on devices that come in runs of equal ones."""
    if sum(runs) <= FEW_DEVICES:
        yield from _all_compositions(sum(runs))
    else:
        yield from _even_compositions(runs)


def _all_compositions(number: int) -> Iterator[tuple[int, ...]]:
    if number == 0:
        yield ()
        return
    for first in range(number, 0, -1):
        for rest in _all_compositions(number - first):
            yield (first, *rest)


def _even_compositions(runs: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every run in some number of stages of about equal width; and all of them together."""
    counts = [[each for each in STAGE_COUNTS if each < run] + [run] for run in runs]
    if len(runs) > 1:
        yield (sum(runs),)
    is_long = len(runs) > 2 and sum(runs) > FEW_DEVICES**2
    for chosen in product(*counts):
        means = [run / stages for run, stages in zip(runs, chosen, strict=True)]
        if is_long and max(means) > 2 * min(means):
            continue
        widths: list[int] = []
        for run, stages in zip(runs, chosen, strict=True):
            width, rest = divmod(run, stages)
            widths.extend([width + 1] * rest + [width] * (stages - rest))
        yield tuple(widths)


def subsets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Devices that could train without the others, each set once, the largest first: some of the
    classes, some of the hosts, on up to `MOST_LEFT_ALONE` all but one device of a class, and a few
    devices of one class alone.
    """
    everything = set(range(cluster.num_devices))
    if len(everything) <= FEW_PARTS:
        return _all_subsets(cluster)
    classes = device_classes(cluster)
    members = [set(each.ranks) for each in classes]
    kept = _unions(cluster, members)
    kept += [everything - own for own in members]
    if len(everything) <= MOST_LEFT_ALONE:
        kept += [everything - set(each.ranks[-1:]) for each in classes]
        kept += [everything - set(hosts[-1]) for hosts in hosts_alike(cluster)]
    kept += _unions(cluster, [set(ranks) for hosts in hosts_alike(cluster) for ranks in hosts])
    for each in classes:
        kept += [set(each.ranks[:number]) for number in FIRST_FEW if number < len(each.ranks)]
    found = dict.fromkeys(tuple(sorted(ranks)) for ranks in kept if ranks and ranks != everything)
    return sorted(found, key=lambda each: (-len(each), each))


def _unions(cluster: Cluster, parts: Sequence[set[int]]) -> list[set[int]]:
    """Some of the parts together: in all ways where they are few (of many devices each part alone
    and all but one, since what there is to enumerate grows with both), else the first few by speed.
    """
    if len(parts) <= MOST_CLASSES:
        numbers: Sequence[int] = range(1, len(parts))
        if cluster.num_devices > MOST_LEFT_ALONE:
            numbers = sorted({1, len(parts) - 1} - {0})
        chosen = [each for number in numbers for each in combinations(parts, number)]
    else:
        devices = cluster.devices
        by_speed = sorted(
            parts, key=lambda ranks: -sum(devices[rank].kind.flop_per_s for rank in ranks)
        )
        chosen = [tuple(by_speed[:number]) for number in FIRST_FEW if number < len(parts)]
    return [set().union(*each) for each in chosen]


def hosts_alike(cluster: Cluster) -> list[list[tuple[int, ...]]]:
    """The ranks of every host, those of hosts that are alike together."""
    by_host: dict[str, list[Device]] = {}
    for device in cluster.devices:
        by_host.setdefault(device.host, []).append(device)
    links = {each.host: replace(each, host="") for each in cluster.host_links}
    found: dict[object, list[tuple[int, ...]]] = {}
    for host, devices in by_host.items():
        kinds = tuple(device.kind for device in devices)
        key = (kinds, links.get(host), replace(cluster.memories_of(host), host=""))
        found.setdefault(key, []).append(tuple(device.rank for device in devices))
    return list(found.values())


def _all_subsets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Every part of a small cluster but the whole, once for devices that nothing tells apart."""
    found: dict[tuple[tuple[DeviceKind, str], ...], tuple[int, ...]] = {}
    for number in range(cluster.num_devices - 1, 0, -1):
        for devices in combinations(cluster.devices, number):
            labels = sorted(((each.kind, each.host) for each in devices), key=str)
            found.setdefault(tuple(labels), tuple(each.rank for each in devices))
    return list(found.values())


def partitions_of(cluster: Cluster) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Two or more parts of the devices, each of which may have model replicas of its own shape:
    whole classes, and on small clusters any devices. Devices in none of them do not train.
    """
    everything = tuple(range(cluster.num_devices))
    if len(everything) > FEW_PARTS:
        yield from class_partitions(device_classes(cluster))
        return
    labels = [str((device.kind, device.host)) for device in cluster.devices]
    seen: set[object] = set()
    for ranks in (everything, *_all_subsets(cluster)):
        for parts in _set_partitions(ranks):
            key = tuple(sorted(tuple(sorted(labels[rank] for rank in each)) for each in parts))
            if len(parts) > 1 and key not in seen:
                seen.add(key)
                yield parts


def _set_partitions(ranks: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put ranks into parts."""
    if not ranks:
        yield ()
        return
    first = ranks[:1]
    rest = ranks[1:]
    for parts in _set_partitions(rest):
        yield (first, *parts)
        for place, part in enumerate(parts):
            yield (*parts[:place], first + part, *parts[place + 1 :])


def class_partitions(
    classes: Sequence[DeviceClass], most: int = MOST_CLASSES
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The ranks of some classes in two or more parts, each part some of the classes."""
    if len(classes) > most:
        return

    def assign(place: int, parts: list[list[int]]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if place == len(classes):
            if len(parts) > 1:
                yield tuple(tuple(sorted(part)) for part in parts)
            return
        ranks = list(classes[place].ranks)
        for index in range(len(parts)):
            yield from assign(
                place + 1, [*parts[:index], parts[index] + ranks, *parts[index + 1 :]]
            )
        yield from assign(place + 1, [*parts, ranks])

    yield from assign(0, [])
