"""Trackers of a run's figures, by `engine.track(lambda: Wandb(project="mine"))`."""

from __future__ import annotations

from whale.runtime.trackers import Mlflow, TensorBoard, Tracker, TrackerFactory, Wandb

__all__ = ["Mlflow", "TensorBoard", "Tracker", "TrackerFactory", "Wandb"]
