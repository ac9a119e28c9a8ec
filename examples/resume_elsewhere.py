"""A training that changes its devices: it begins on four, continues on two and ends on one, each
time under another plan, with the losses of a run that was never interrupted.

    whale run -n 4 examples/resume_elsewhere.py --until 6        2 stages x 2 model replicas
    whale run -n 2 examples/resume_elsewhere.py --until 9        data parallel, ZeRO-1
    python examples/resume_elsewhere.py                          one process, up to step 12

A checkpoint holds tensors by their names in your own model, so any plan on any number of devices
loads it; the position in the data, the optimizer and the learning rate are part of it. The last of
the three prints

    continuing from step 9 on 1 device
    step 10/12  loss 0.4915
    step 11/12  loss 0.6277
    step 12/12  loss 0.6185
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import whale as wh

NUM_STEPS = 12
BATCH = 16
WIDTH = 32
PLANS: dict[int, dict[str, Any]] = {
    1: {},
    2: {"strategy": "data", "zero": 1},
    4: {"num_task_graph": 2, "num_micro_batch": 4},
}
"""number of devices -> settings; any other number is left to Whale"""


class Points(Dataset[dict[str, Tensor]]):
    """Points and the largest of their first four coordinates; made when asked for, by number."""

    def __len__(self) -> int:
        return 8 * BATCH  # an epoch is 8 steps: the run goes into its second

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
        return {"x": x, "labels": x[:4].argmax()}


class Net(nn.Module):
    """A residual perceptron that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=int, default=NUM_STEPS, help="step after which to stop")
    parser.add_argument("--folder", type=Path, default=Path("runs/resume_elsewhere/checkpoints"))
    options = parser.parse_args()
    data = Points()
    number = wh.num_devices()
    wh.init({"seed": 1, **PLANS.get(number, {})})
    sample = torch.utils.data.default_collate([data[place] for place in range(BATCH)])
    engine = wh.parallelize(
        Net,
        sample,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12),
    )
    loader = engine.loader(data, batch_size=BATCH, shuffle=True, seed=3)
    resumed = engine.load(options.folder, data=loader)
    if resumed is not None and wh.rank() == 0:
        devices = "1 device" if number == 1 else f"{number} devices"
        print(f"continuing from step {resumed} on {devices}", flush=True)
    while engine.step_count < options.until:
        for batch in loader:
            loss = engine.step(batch).loss
            if wh.rank() == 0:
                print(f"step {engine.step_count}/{NUM_STEPS}  loss {loss:.4f}", flush=True)
            if engine.step_count == options.until:
                break
    engine.save(options.folder, data=loader).wait()
    engine.close()


if __name__ == "__main__":
    main()
