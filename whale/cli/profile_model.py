"""The program of each rank of `whale profile --model`: captures the model of a script, times its
layers, and rank 0 writes them beside the cluster file.

python profile_model.py cluster.yaml device train.py [arguments of the script]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from whale.calibration.layers import measure_layers
from whale.calibration.profile_command import profile_ranks
from whale.cluster.cluster import Cluster
from whale.cluster.layer_times import LayerTimes, beside, save_layer_times
from whale.cluster.matching import match, this_place
from whale.distributed.ranks import Ranks
from whale.launcher import run_script
from whale.session import CaptureReady, capturing_only
from whale.units import human_seconds


def captured_by(script: Path, arguments: list[str]) -> CaptureReady:
    """What the script gives to `wh.parallelize`, captured; a ValueError where it never calls it."""
    try:
        with capturing_only():
            run_script(script, arguments)
    except CaptureReady as ready:
        return ready
    except SystemExit:
        pass
    raise ValueError(f"{script} ended before it called wh.parallelize: there is no model to time")


def profile_model(path: Path, device: str, script: Path, arguments: list[str]) -> LayerTimes:
    """Times the layers of the script's model. A cluster file that is there already is kept."""
    ready = captured_by(script, arguments)
    ranks = Ranks(device)
    ranks.start_watch()
    if all(ranks.gather(path.exists())):
        cluster = match(Cluster.load(path), ranks.gather(this_place()))
    else:
        cluster = profile_ranks(path, device, ranks)
    start = time.monotonic()

    def progress(what: str) -> None:
        if ranks.rank == 0:
            print(f"{time.monotonic() - start:5.1f} s  {what}", file=sys.stderr, flush=True)

    times = measure_layers(ready.prepared.captured, ready.batch_size, cluster, ranks, progress)
    with ranks.together():
        if ranks.rank == 0:
            save_layer_times(times, beside(path))
            print(describe(times))
            print(f"written to {beside(path)}; whale plan --cluster {path} takes them")
    return times


def describe(times: LayerTimes) -> str:
    """One line for each layer: what it takes for the fewest and for the most samples."""
    lines = []
    for layer in times.layers:
        name = layer.modules[0] + (f" and {len(layer.modules) - 1} more" * (len(layer.modules) > 1))
        points = []
        for point in (layer.times[0], layer.times[-1]):
            forward = human_seconds(point.forward_s)
            points.append(f"{point.samples} samples {forward} + {human_seconds(point.backward_s)}")
        lines.append(f"{layer.kind}  {name}: {', '.join(dict.fromkeys(points))}")
    return "\n".join(lines)


if __name__ == "__main__":
    profile_model(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
