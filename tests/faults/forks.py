"""Runs `tests/faults/train.py` under torch's elastic agent, with ranks forked from a process that
has torch and Whale warm.

A rank started by `whale run` needs some seconds until it trains; a forked one well below a second.
Everything else is the same: agent, restarts, signals. One request (JSON) a line on stdin, one
answer a line on stdout.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
import uuid
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import whale as wh
from tests.faults import train
from whale.distributed.watch import report_failure
from whale.launcher import GRACE_S, first_failure

os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
    "1"  # see docs/failures.md: restarted ranks would read addresses of the dead ones
)


def rank(arguments: list[str]) -> None:
    """One rank, in a forked process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's handler, which a fork inherits
    sys.argv = ["train.py", *arguments]
    try:
        train.main()
    except Exception as error:
        report_failure(error)
        traceback.print_exc()
        raise


def serve() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    sample = torch.utils.data.default_collate(
        [train.Samples()[index] for index in range(train.BATCH_SIZE)]
    )
    wh.plan(train.build(), sample, cluster=1)  # what the first capture of a process imports
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        print(json.dumps(_launch(request, folder)), file=answers, flush=True)


def _launch(request: dict[str, int], folder: Path) -> dict[str, object]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request["num_ranks"],
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=request["restarts"],
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        shutdown_timeout=GRACE_S,
    )
    try:
        elastic_launch(config, rank)(
            [str(folder), "--steps", str(request["steps"]), "--keep", str(request["keep"])]
        )
    except ChildFailedError as error:
        failure = first_failure(error.failures)
        return {"exit_code": failure.exit_code, "failure": str(failure)}
    return {"exit_code": 0, "failure": ""}


if __name__ == "__main__":
    serve()
