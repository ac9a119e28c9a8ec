"""Where the figures of a run go besides its metrics files: TensorBoard, Weights & Biases, MLflow,
or whatever has `log` and `close`. Each is an extra; rank 0 alone opens and writes it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

TRACKED = ("loss", "grad_norm", "lr", "samples_per_s", "model_flop_utilisation")
"""figures of a step that are the same on every rank"""


class Tracker(Protocol):
    """Takes the figures of every step."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Figures of one step, counted from 0."""

    def close(self) -> None:
        """The run is over."""


TrackerFactory = Callable[[], Tracker]


class TensorBoard:
    """Writes event files for TensorBoard."""

    def __init__(self, folder: str | Path) -> None:
        need("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._board.close()  # type: ignore[no-untyped-call]


class Wandb:
    """Logs to Weights & Biases. `options` are those of `wandb.init`: project, name,
    `mode="offline"` for a run that is sent later.
    """

    def __init__(self, **options: Any) -> None:
        need("wandb", "wandb")
        import wandb

        self._run = wandb.init(**options)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Logs to MLflow. `uri`: the server, or a folder of this machine; `name` of the run."""

    def __init__(
        self,
        uri: str | Path | None = None,
        experiment: str = "whale",
        name: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        need("mlflow", "mlflow")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(None if uri is None else str(uri))
        known = self._client.get_experiment_by_name(experiment)
        where = (
            known.experiment_id if known is not None else self._client.create_experiment(experiment)
        )
        self._run = self._client.create_run(where, run_name=name).info.run_id
        for key, value in (parameters or {}).items():
            self._client.log_param(self._run, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def need(package: str, extra: str) -> None:
    """Refuses a tracker whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f'this tracker needs the package {package}. Try: pip install "whale-parallel[{extra}]"'
        )
