"""The main job: a small M6 learns to say what is in a drawing. 2 stages x 2 model replicas on 4
processes, about 100 seconds of processor time in all. A second run continues from the last
checkpoint.

    python examples/train_m6.py                            one process: the same accuracy; losses
                                                           differ by rounding, more with each step
    whale run -n 4 examples/train_m6.py                    what `make train` does
    whale plan -n 4 examples/train_m6.py                   what would run where, without running it

The model (models/m6.py) knows nothing of Whale: it is annotated from outside. The data
(models/drawings.py) is drawn by code. The second command prints

    ...
    4 devices (4 x CPU): 2 stages x 2 model replicas, batch 64 in 4 micro-batches, schedule 1f1b
    ...
    step 1/400  loss 4.6457  529 samples/s  bubble 5%  48 s left
    ...
    step 400/400  loss 0.0034  350 samples/s  bubble 42%  0 s left
    ...
    captions right   99.2% of the held-out drawings, whole caption, greedy
    answers right    98.8% (questions about one side)
    loss             4.6457 at the start, 0.0034 at the end
    ...
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # models/ stands beside examples/

import whale as wh
from models.drawings import Drawings, decode, is_description
from models.m6 import M6, M6Config
from whale.report import print_plan
from whale.runtime.result import Timing

STAGES = {"encoder": wh.replicate(1), "decoder": wh.replicate(1)}
"""module names -> one TaskGraph each; on 4 devices the two stages are there twice. The table of
words is tied between them
"""
NUM_HELD_OUT = 1000
NUM_SHOWN = 3
"""held-out drawings whose captions are printed"""
LIVE_EVERY = 5
"""steps between two changes of the line on a terminal"""
PLAN = "plan.json"
TRACE = "trace.json"
CHECKPOINTS = "checkpoints"
"""in the run folder, beside the metrics"""
LAST_LR = 0.02
"""learning rate at the end, in units of its peak"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--batch", type=int, default=64, help="drawings in a mini-batch")
    parser.add_argument(
        "--micro-batches", type=int, default=4, help="into how many parts a mini-batch is cut"
    )
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=40, help="steps until the peak")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the drawings")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/m6"), help="where the files of this run go"
    )
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument(
        "--every",
        type=int,
        default=20,
        help="steps between two lines of progress, when not on a terminal",
    )
    return parser.parse_args()


def make_engine(options: argparse.Namespace, drawings: Drawings) -> wh.Engine:
    """The whole of Whale in this script."""
    wh.init(
        wh.Config(
            num_micro_batch=options.micro_batches,
            clip_grad_norm=1.0,
            seed=options.seed,
            run_folder=str(options.folder),
        )
    )

    def learning_rate(step: int) -> float:
        """Warm-up, then half a cosine; in units of the peak."""
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / options.steps)))
        return min(1.0, (step + 1) / options.warmup) * (LAST_LR + (1 - LAST_LR) * fall)

    return wh.parallelize(
        lambda: wh.annotate(M6(M6Config.small()), STAGES),
        drawings.batch(range(options.batch)),
        optimizer=lambda params: torch.optim.AdamW(
            params, lr=options.lr, betas=(0.9, 0.99), weight_decay=0.01
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate),
    )


# ---- training


@dataclass
class Spent:
    """Seconds of this rank over all steps."""

    total_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    bubble_s: float = 0.0

    def add(self, timing: Timing) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(timing, field.name))

    def share(self, seconds: float) -> float:
        return seconds / self.total_s if self.total_s else 0.0


class LiveLine:
    """Loss, samples/s, bubble and time left: one line that changes on a terminal, one line every
    `every` steps elsewhere.
    """

    def __init__(self, console: Console, options: argparse.Namespace) -> None:
        self.console = console
        self.options = options
        self.first_loss = self.last_loss = math.nan
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), console=console, transient=True
        )
        self._task = self._bar.add_task("", total=options.steps)
        self._since = time.perf_counter()
        self._steps_since = 0
        self._bubble_s = 0.0

    @contextmanager
    def shown(self) -> Iterator[LiveLine]:
        if not self.console.is_terminal:
            yield self
            return
        with self._bar:
            yield self

    def update(self, step: int, result: wh.StepResult) -> None:
        """After a step; `step` counts from 1."""
        self._steps_since += 1
        self._bubble_s += result.timing.bubble_s
        is_due = (
            step % (LIVE_EVERY if self.console.is_terminal else self.options.every) == 0
            or step == self.options.steps
        )
        if self.console.quiet or not (is_due or math.isnan(self.first_loss)):
            return
        self.last_loss = result.loss
        if math.isnan(self.first_loss):
            self.first_loss = self.last_loss
        elapsed = time.perf_counter() - self._since
        step_s = elapsed / self._steps_since
        text = (
            f"step {step}/{self.options.steps}  loss {self.last_loss:.4f}  "
            f"{self.options.batch / step_s:.0f} samples/s  "
            f"bubble {self._bubble_s / elapsed:.0%}  {(self.options.steps - step) * step_s:.0f} s "
            "left"
        )
        if self.console.is_terminal:
            self._bar.update(self._task, completed=step, description=text)
        else:
            self.console.print(text, highlight=False)
        self._since = time.perf_counter()
        self._steps_since = 0
        self._bubble_s = 0.0


def train(
    engine: wh.Engine, drawings: Drawings, options: argparse.Namespace, line: LiveLine
) -> Spent:
    """From the engine's step on to the last one. Which drawings a step sees depends on its number
    only, so a run can continue anywhere.
    """
    spent = Spent()
    with line.shown():
        while engine.step_count < options.steps:
            first = engine.step_count * options.batch
            result = engine.step(drawings.batch(range(first, first + options.batch)))
            spent.add(result.timing)
            line.update(engine.step_count, result)
            if engine.step_count % options.save_every == 0 or engine.step_count == options.steps:
                engine.save(options.folder / CHECKPOINTS)  # written in the background
    return spent


# ---- evaluation


@dataclass(frozen=True)
class Score:
    """How many held-out drawings got the right words, all of them and in order."""

    captions: float
    """share of right answers to "describe the picture\""""
    answers: float
    """share of right answers to questions about one side"""
    examples: tuple[tuple[str, str, str], ...]
    """(prompt, what the model said, what is right)"""


def score(state: dict[str, Tensor], options: argparse.Namespace) -> Score:
    """Greedy decoding by a local model with the trained weights."""
    model = M6(M6Config.small()).eval()
    model.load_state_dict(state)
    held_out = Drawings(NUM_HELD_OUT, options.seed, "held_out").batch(range(NUM_HELD_OUT))
    said = model.generate(held_out["pixels"], held_out["prompt_ids"])
    right = (said == held_out["labels"]).all(1)
    describes = is_description(held_out["prompt_ids"])
    examples = [
        (decode(held_out["prompt_ids"][i]), decode(said[i]), decode(held_out["labels"][i]))
        for i in describes.nonzero()[:NUM_SHOWN, 0].tolist()
    ]
    return Score(
        right[describes].float().mean().item(),
        right[~describes].float().mean().item(),
        tuple(examples),
    )


# ---- the end


def summary(
    engine: wh.Engine,
    result: Score,
    line: LiveLine,
    time_split: list[Spent],
    wall_s: float,
    folder: Path,
) -> Table:
    table = Table(title="M6 on drawings", show_header=False)
    table.add_row(
        "captions right",
        f"[bold]{result.captions:.1%}[/bold] of the held-out drawings, whole caption, greedy",
    )
    table.add_row("answers right", f"{result.answers:.1%} (questions about one side)")
    if not math.isnan(line.first_loss):
        table.add_row(
            "loss", f"{line.first_loss:.4f} at the start, {line.last_loss:.4f} at the end"
        )
    has_trained = any(spent.total_s for spent in time_split)
    table.add_row(
        "steps",
        f"{engine.step_count}, "
        + (
            f"trained in {wall_s:.0f} s on {wh.num_devices()} ranks"
            if has_trained
            else "all done before"
        ),
    )
    for rank, spent in enumerate(time_split if has_trained else ()):
        parts = [
            ("compute", spent.compute_s),
            ("all-reduce", spent.communication_s),
            ("bubble", spent.bubble_s),
        ]
        stages = ", ".join(str(stage) for stage in engine.plan.stages_of_rank(rank))
        table.add_row(
            f"time of rank {rank}, stage {stages}",
            ", ".join(f"{name} {spent.share(seconds):.0%}" for name, seconds in parts),
        )
    places = {
        "plan": PLAN,
        "checkpoint": f"{CHECKPOINTS}/step_{engine.step_count:08d}",
        "metrics": "metrics",
        "trace": TRACE,
    }
    for what, path in ((what, folder / name) for what, name in places.items()):
        table.add_row(what, str(path))
    for prompt, said, right in result.examples:
        table.add_row(prompt, f"{said}  {'(right)' if said == right else f'(wrong: {right})'}")
    return table


def gather(spent: Spent) -> list[Spent]:
    """Of every rank, on every rank."""
    if not dist.is_initialized():
        return [spent]
    everyone: list[Spent] = [spent] * dist.get_world_size()
    dist.all_gather_object(everyone, spent)
    return everyone


def main() -> None:
    options = arguments()
    is_first = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not is_first)
    drawings = Drawings(options.steps * options.batch, options.seed, "train")
    console.print("capturing and planning ...")
    engine = make_engine(options, drawings)
    if is_first:
        print_plan(engine.plan, console)
        options.folder.mkdir(parents=True, exist_ok=True)
        engine.plan.save(options.folder / PLAN)
    resumed = engine.load(options.folder / CHECKPOINTS)
    if resumed is not None:
        console.print(
            f"continuing from step {resumed}; remove {options.folder} to start anew",
            highlight=False,
        )
    line = LiveLine(console, options)
    start = time.perf_counter()
    spent = train(engine, drawings, options, line)
    wall_s = time.perf_counter() - start
    if engine.step_count != resumed:
        engine.trace(options.folder / TRACE)
    engine.close()
    time_split = gather(spent)
    state = engine.full_state_dict()
    if is_first:
        console.print(
            summary(engine, score(state, options), line, time_split, wall_s, options.folder)
        )


if __name__ == "__main__":
    main()
