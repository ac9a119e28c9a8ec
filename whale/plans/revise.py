"""A plan with some of its parts exchanged, and everything that follows from them brought up to
date: the samples of its ranks and the boxes of its tensors.

Adapting exchanges the times of devices, a rehearsal the model, a test whatever it needs. Parts are
named as the properties of `Plan` name them, also where the plan stores them elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from whale.plans.plan import (
    WHOLE,
    Boxes,
    Decision,
    Holding,
    Plan,
    PlannedDevice,
    Replica,
    ReplicaTemplate,
)
from whale.plans.samples import with_samples
from whale.plans.sharding import StoredLayout
from whale.plans.virtual_devices import VirtualDevice

DIVIDED_BY = frozenset(("virtual_devices", "batch_size", "num_micro_batch", "least_samples"))
"""parts that decide who gets which samples, with those of a device"""
HELD_BY = frozenset(("virtual_devices", "holders", "shardings", "stages"))
"""parts that decide who holds what"""
OF_DEVICE = {
    "device_kinds": "kind",
    "device_seconds": "sample_s",
    "device_fixed_seconds": "fixed_s",
    "device_flop_per_s": "flop_per_s",
    "memory": "memory",
}
"""values by rank -> field of `PlannedDevice`"""
OWN_PARTS = frozenset(field.name for field in fields(Plan)) - {"templates"}
TEMPLATE_PARTS = frozenset(field.name for field in fields(ReplicaTemplate))
DERIVED_PARTS = frozenset(("holders", "virtual_devices"))
"""properties of `Plan` that are made of several of its fields"""


def revise(plan: Plan, **changes: Any) -> Plan:
    """The plan with these parts; raises TypeError for a part that plans do not have."""
    unknown = changes.keys() - OF_DEVICE.keys() - OWN_PARTS - TEMPLATE_PARTS - DERIVED_PARTS
    if unknown:
        raise TypeError(f"a plan has no part {sorted(unknown)[0]!r}")
    by_rank = {OF_DEVICE[name]: changes[name] for name in changes.keys() & OF_DEVICE.keys()}
    of_template = {name: changes[name] for name in changes.keys() & TEMPLATE_PARTS}
    template = replace(plan.template, **of_template)
    changed = replace(plan, **{name: changes[name] for name in changes.keys() & OWN_PARTS})
    if by_rank:
        changed = with_devices(changed, by_rank)
    if "holders" in changes:
        tensors = {name: Holding(stages) for name, stages in changes["holders"].items()}
        template = replace(template, tensors=tensors)
    if "virtual_devices" in changes:
        devices: Sequence[VirtualDevice] = changes["virtual_devices"]
        template = replace(template, grids=tuple(device.grid for device in devices))
        changed = replace(changed, replicas=replicas_on(devices))
    if HELD_BY & changes.keys():
        template = with_boxes(template)
    changed = replace(changed, templates=(template,))
    if by_rank or DIVIDED_BY & changes.keys():
        changed = with_samples(changed)
    return changed


def replicas_on(devices: Sequence[VirtualDevice]) -> tuple[Replica, ...]:
    """Alike model replicas on the ranks of these VirtualDevices, without samples yet."""
    number = len(devices[0].ranks)
    return tuple(
        Replica(0, tuple(device.ranks[replica] for device in devices)) for replica in range(number)
    )


def with_devices(plan: Plan, by_rank: Mapping[str, Sequence[Any]]) -> Plan:
    """The plan with other values for fields of `PlannedDevice`, each by rank.

    An empty sequence means that no value is known.
    """
    number = max([len(values) for values in by_rank.values()] + [plan.num_devices])
    if by_rank.get("kind"):
        number = len(by_rank["kind"])
    devices = []
    for rank in range(number):
        before = plan.devices[plan.device_of_rank[rank % plan.num_devices]]
        new: dict[str, Any] = {}
        for name, values in by_rank.items():
            absent = None if name == "memory" else 0.0
            new[name] = values[rank] if values else absent
        devices.append(replace(before, **new))
    return replace(plan, **different_devices(devices))


def different_devices(devices: Sequence[PlannedDevice]) -> dict[str, Any]:
    """The fields `devices` and `device_of_rank` of a plan, from the device of every rank."""
    index_of = {device: index for index, device in enumerate(dict.fromkeys(devices))}
    return {
        "devices": tuple(index_of),
        "device_of_rank": tuple(index_of[device] for device in devices),
    }


def with_boxes(template: ReplicaTemplate) -> ReplicaTemplate:
    """The template with the boxes of every tensor that its grids cut."""
    stored_on = {sharding.stage: sharding.stored for sharding in template.shardings}
    index_of: dict[Boxes, int] = {}
    known: dict[tuple[int, StoredLayout], int] = {}
    tensors = {}
    for name, holding in template.tensors.items():
        numbers = []
        for stage in holding.stages:
            stored = stored_on.get(stage, {}).get(name)
            if stored is None:
                numbers.append(WHOLE)
                continue
            device = template.stages[stage].virtual_device
            if (device, stored) not in known:
                boxes = boxes_of(template, device, stored)
                known[device, stored] = index_of.setdefault(boxes, len(index_of))
            numbers.append(known[device, stored])
        is_cut = any(number != WHOLE for number in numbers)
        tensors[name] = replace(holding, boxes=tuple(numbers) if is_cut else ())
    return replace(template, tensors=tensors, boxes=tuple(index_of))


def boxes_of(template: ReplicaTemplate, device: int, stored: StoredLayout) -> Boxes:
    """What each device of a VirtualDevice on a grid holds of a tensor with this layout."""
    grid = template.grids[device]
    assert grid is not None, f"VirtualDevice {device} has no grid, but a stage on it is sharded"
    layout = stored.layout()
    return Boxes(layout.shape, layout.held_ranges(grid))


def plan_for_longer(plan: Plan, made: Plan, lengths: str) -> Plan | None:
    """The plan with the samples, times and memory of one that was made for longer batches; None
    where that one would place weights or ranks elsewhere, or recompute other operations.
    """
    if len(plan.templates) > 1 or len(made.templates) > 1:
        return None
    mine = plan.templates[0]
    other = made.templates[0]
    if (mine.tensors, mine.boxes, mine.grids) != (other.tensors, other.boxes, other.grids):
        return None
    if [replica.ranks for replica in plan.replicas] != [each.ranks for each in made.replicas]:
        return None
    regions = [(stage.virtual_device, stage.num_recomputed) for stage in mine.stages]
    if regions != [(stage.virtual_device, stage.num_recomputed) for stage in other.stages]:
        return None
    why = "a batch was longer than all before"
    return replace(
        plan,
        devices=made.devices,
        device_of_rank=made.device_of_rank,
        shares=made.shares,
        replicas=made.replicas,
        decisions=(*plan.decisions, Decision("planned for", lengths, why)),
    )
