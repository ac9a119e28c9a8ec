"""A plan as a JSON file: written, read with all checks, compared value by value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from whale.names import count
from whale.plans.check import contradiction, number_problem
from whale.plans.plan import PLAN_FORMAT, Plan

FIGURES = {"summary", "batch_size", "devices", "network"}
"""keys of what `whale plan --json` writes, which is no plan"""
_PLAN = TypeAdapter(Plan)


def plan_json(plan: Plan) -> str:
    """The plan as the text of its file."""
    return _PLAN.dump_json(plan, indent=1).decode()


def load_plan(path: str | Path) -> Plan:
    """The plan in a file. It is checked as a whole (`check.py`), and nothing is executed."""
    content = Path(path).read_bytes()
    data = _read_json(path, content)
    if data["format"] != PLAN_FORMAT:
        raise ValueError(
            f"{path} has plan format {data['format']}, this Whale reads {PLAN_FORMAT}: make "
            "the plan again. Try: whale plan TRAIN.PY --save plan.json"
        )
    if problem := number_problem(data):
        raise ValueError(f"{path} is not a plan: {problem}")
    try:
        plan = _PLAN.validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        num_more = error.error_count() - 1
        more = f" ({count(num_more, 'more problem')})" if num_more else ""
        raise ValueError(
            f"{path} is not a plan of `whale plan --save`: {where}: {first['msg']}{more}"
        ) from None
    if problem := contradiction(plan):
        raise ValueError(
            f"{path} contradicts itself: {problem}. Make the plan again. "
            "Try: whale plan TRAIN.PY --save plan.json"
        )
    return plan


def _read_json(path: str | Path, content: bytes) -> dict[str, Any]:
    """The fields of a plan file; raises ValueError where it is none, or has other fields."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or "format" not in data:
        what = ""
        if isinstance(data, dict) and data.keys() >= FIGURES:
            what = ": it holds the figures of `--json`. Try: the file of `whale plan --save`"
        raise ValueError(f"{path} is not a plan of `whale plan --save`{what}")
    unknown = sorted(data.keys() - {field.name for field in fields(Plan)})
    if unknown and data["format"] == PLAN_FORMAT:
        raise ValueError(
            f"{path} is not a plan: it has fields that a plan does not have: "
            f"{', '.join(unknown[:5])}"
        )
    return data


def diff(a: Plan, b: Plan) -> list[str]:
    """One line for each value that differs: `stages[1].parameter_bytes: 400 -> 800`."""
    return list(_differences("", json.loads(a.to_json()), json.loads(b.to_json())))


def _differences(path: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys(), key=str):
            yield from _differences(
                f"{path}.{key}" if path else str(key), a.get(key, "absent"), b.get(key, "absent")
            )
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for place, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}[{place}]", left, right)
    elif a != b:
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _short(value: Any) -> str:
    text = str(value)
    return (
        text
        if len(text) <= 80
        else f"{text[:60]}... ({len(value) if hasattr(value, '__len__') else len(text)} long)"
    )
