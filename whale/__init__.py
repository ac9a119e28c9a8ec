"""Whale: write a model for one device, mark parts of it with `replicate` and `split`, and train it on the devices that you have."""

from whale.annotation import annotate, replicate, set_default_strategy, split
from whale.api import Engine, Plan, init, num_devices, parallelize, plan
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.planning.plan import diff
from whale.runtime.checkpoints import Pretrained
from whale.runtime.result import EvaluationResult, StepResult

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Config",
    "Engine",
    "EvaluationResult",
    "Plan",
    "Pretrained",
    "StepResult",
    "annotate",
    "diff",
    "init",
    "num_devices",
    "parallelize",
    "plan",
    "replicate",
    "set_default_strategy",
    "split",
]
