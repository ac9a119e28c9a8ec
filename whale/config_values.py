"""What the values of settings may be: types with their limits, and the words of a refusal where a
setting takes more than one type.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, PlainSerializer, WrapValidator

LARGEST_SEED = 2**63 - 1
"""torch generators take a seed of 64 bits"""

REDUCE_OVERHEAD = "reduce-overhead"
"""what torch.compile calls its mode with graphs of launches"""


@dataclass(frozen=True)
class Values:
    """Stands beside a type that does not show what a setting may be: the words for a reader."""

    words: tuple[str, ...]


def _plain_integer(value: Any) -> Any:
    """`value` as an int where it is a whole number of numpy; anything else as it is."""
    if hasattr(value, "__index__") and not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # arrays and tensors have the method, too
            return operator.index(value)
    return value


def _recompute(value: Any) -> bool | str | list[str]:
    if isinstance(value, bool) or value == "auto":
        return value  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(name, str) and name for name in value):
            return list(value)
    raise ValueError("'auto', True, False or a list of module names")


def _zero(value: Any) -> int | str:
    if value == "auto" or (type(value) is int and value in (0, 1, 2, 3)):
        return value  # type: ignore[no-any-return]
    raise ValueError("0, 1, 2, 3 or 'auto'")


OFFLOADED = ("optimizer", "weights", "gradients", "activations")
"""classes of tensors that may be at home outside of the device"""


def _offload(value: Any) -> bool | str | dict[str, str]:
    if value is False or value == "auto":
        return value  # type: ignore[no-any-return]
    form = f"'auto', False or a dict like {{'optimizer': 'host'}} with {', '.join(OFFLOADED)}"
    if not isinstance(value, Mapping) or not value:
        raise ValueError(form)
    for key, memory in value.items():
        if key not in OFFLOADED or memory not in ("device", "host", "disk"):
            raise ValueError(f"{form}, each 'device', 'host' or 'disk'")
    return {key: value[key] for key in OFFLOADED if key in value}


def _or_auto(value: Any, check: Callable[[Any], Any]) -> Any:
    """The value as checked, or "auto" as it is."""
    return value if isinstance(value, str) and value == "auto" else check(value)


def _keep_gathered(value: Any) -> bool | str:
    if isinstance(value, bool) or value == "auto":
        return value  # type: ignore[no-any-return]
    raise ValueError("'auto', True or False")


def _compile(value: Any) -> bool | str:
    if isinstance(value, bool) or value == REDUCE_OVERHEAD:
        return value  # type: ignore[no-any-return]
    raise ValueError(f"True, False or {REDUCE_OVERHEAD!r}")


def _device(value: Any) -> str:
    if value in ("auto", "cpu"):
        return str(value)
    from whale.devices import device_types  # brings torch, which few commands need

    known = device_types()
    if value not in known:
        raise ValueError(f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
    return str(value)


REPLICA_KEYS = ("stages", "samples", "num_micro_batch", "schedule", "num_waves", "recompute")
STAGE_KEYS = ("ranks", "start", "split", "grid")


def _replicas(value: Any) -> list[dict[str, Any]] | None:
    """Model replicas that are given one by one, each with its stages."""
    if value is None:
        return None
    form = (
        'a list like [{"stages": [[0]]}, {"stages": [[1], [2, 3]], "samples": 8}], in which every '
        "stage has the ranks of its devices"
    )
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(form)
    return [_replica(each, form) for each in value]


def _replica(value: Any, form: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("stages"), (list, tuple)):
        raise ValueError(form)
    for key in value:
        if key not in REPLICA_KEYS:
            raise ValueError(f"{form}, with the keys {', '.join(REPLICA_KEYS)}")
    for key in ("samples", "num_micro_batch", "num_waves"):
        if key in value and not _is_count(value[key], least=1):
            raise ValueError(f"{form}, with a whole number of at least 1 as {key!r}")
    schedules = get_args(ScheduleName)
    if value.get("schedule", "1f1b") not in schedules:
        raise ValueError(f"{form}, with one of {', '.join(schedules)} as 'schedule'")
    if "recompute" in value:
        _recompute(value["recompute"])
    stages = [_stage(stage, form) for stage in value["stages"]]
    if not stages:
        raise ValueError(form)
    return {**value, "stages": stages}


def _stage(value: Any, form: str) -> list[int] | dict[str, Any]:
    if isinstance(value, Mapping):
        if not set(value) <= set(STAGE_KEYS) or "ranks" not in value:
            raise ValueError(f"{form}, or the keys {', '.join(STAGE_KEYS)}")
        start = value.get("start")
        if start is not None and not isinstance(start, str) and not _is_count(start, least=1):
            raise ValueError(f"{form}, and starts with a module or the number of an operation")
        return {**value, "ranks": _stage(value["ranks"], form)}
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(form)
    if not all(_is_count(rank, least=0) for rank in value) or len(set(value)) < len(value):
        raise ValueError(form)
    return [int(rank) for rank in value]


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# Strict: True is no number, "8" is no number, 8.0 is not whole. Values come from scripts and JSON,
# where such a value is a mistake.
Whole = Annotated[int, BeforeValidator(_plain_integer), Field(strict=True)]
Count = Annotated[Whole, Field(ge=1)]
AboveZero = Annotated[
    float, BeforeValidator(_plain_integer), Field(strict=True, gt=0, allow_inf_nan=False)
]
CountOrAuto = Annotated[
    Count,
    WrapValidator(_or_auto),
    PlainSerializer(lambda value: value, return_type=Any),
    Values(("int", '"auto"')),
]
"""a number, or "auto" until the search has chosen one (`whale/search`): planning sees numbers"""
Switch = Annotated[bool, Field(strict=True)]
Words = Annotated[str, Field(strict=True)]
ScheduleName = Literal["1f1b", "gpipe", "interleaved", "wave", "zero-bubble", "auto"]
Replicas = Annotated[
    list[dict[str, Any]] | None, BeforeValidator(_replicas), Values(("list of dicts", "None"))
]
RecomputeSetting = Annotated[
    bool | str | list[str],
    BeforeValidator(_recompute),
    Values(('"auto"', "True", "False", "list of names")),
]
KeepGathered = Annotated[
    bool | str, BeforeValidator(_keep_gathered), Values(('"auto"', "True", "False"))
]
ZeroLevel = Annotated[int | str, BeforeValidator(_zero), Values(("0", "1", "2", "3", '"auto"'))]
OffloadSetting = Annotated[
    bool | str | dict[str, str], BeforeValidator(_offload), Values(('"auto"', "False", "dict"))
]
DeviceType = Annotated[str, BeforeValidator(_device)]
Compile = Annotated[
    bool | str, BeforeValidator(_compile), Values(("True", "False", f'"{REDUCE_OVERHEAD}"'))
]
Seed = Annotated[Whole, Field(ge=0, le=LARGEST_SEED)]
