"""Whale: write a model for one device, mark parts of it with `replicate` and `split`, and train it
on the devices that you have.

Names are loaded when they are first used, so that `whale --help` and planning tools do not wait for
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whale.annotation import annotate, replicate, set_default_strategy, split
    from whale.api import init, num_devices, parallelize, plan, rank
    from whale.capture.batch import pad_lengths
    from whale.cluster.cluster import Cluster
    from whale.config import Config
    from whale.plans.file import diff
    from whale.plans.plan import Plan
    from whale.runtime.checkpoints import Pretrained
    from whale.runtime.engine import Engine
    from whale.runtime.result import EvaluationResult, StepResult
    from whale.simulation.simulate import simulate
    from whale.simulation.timeline import Timeline

__version__ = "0.2.0"

_MODULES = {
    "whale.annotation": ("annotate", "replicate", "set_default_strategy", "split"),
    "whale.api": ("init", "num_devices", "parallelize", "plan", "rank"),
    "whale.capture.batch": ("pad_lengths",),
    "whale.cluster.cluster": ("Cluster",),
    "whale.config": ("Config",),
    "whale.notebook": ("Plan", "Timeline", "diff", "simulate"),
    "whale.runtime.checkpoints": ("Pretrained",),
    "whale.runtime.engine": ("Engine",),
    "whale.runtime.result": ("EvaluationResult", "StepResult"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Cluster",
    "Config",
    "Engine",
    "EvaluationResult",
    "Plan",
    "Pretrained",
    "StepResult",
    "Timeline",
    "annotate",
    "diff",
    "init",
    "num_devices",
    "pad_lengths",
    "parallelize",
    "plan",
    "rank",
    "replicate",
    "set_default_strategy",
    "simulate",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from whale.names import nearest

        raise AttributeError(f"whale has no '{name}'.{nearest(name, _MODULE_OF)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not: what tab completion shows."""
    return sorted([*__all__, "__version__"])
