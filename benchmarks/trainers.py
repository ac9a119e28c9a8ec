"""A step of three trainers on 1 and 2 ranks, with Whale behind them against as they come (one
process, or DistributedDataParallel): an Accelerate loop, the Trainer of transformers and Lightning,
each with accumulation over two batches, clipping and a schedule. At least as fast.

The sides of an Accelerate loop take turns in the same processes. Trainers own their loop: each side
has processes of its own, in turns, and both trainers run in these. Ceiling: `engine.step` of Whale
itself on both batches at once.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/trainers.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import (
    Claim,
    Side,
    Times,
    alternate,
    check_losses,
    report,
    run_ranks,
    say,
)

# trainers are an extra (`make setup-integrations`): the benchmark can be imported without them
if TYPE_CHECKING:
    from accelerate import Accelerator

RANKS = (1, 2)
BATCH_SIZE = 8
"""of each of the two batches of a step, over all ranks: a step of a third of a second on one core,
so that all twelve starts are over within 5 minutes
"""
LENGTH = 64
NUM_BATCHES = 2
MAX_NORM = 1.0
TARGET = 1.00
NUM_STARTS = 2
NUM_ROUNDS = 10
STEPS_PER_BLOCK = 2
LIMIT_S = 12.0
NUM_STEPS = 12
"""of a run of a trainer"""
WARM_UP = 3
"""steps of such a run that are not timed"""
ALONE = "engine.step"


def main() -> None:
    claims = []
    for num_ranks in RANKS:
        claims.append(accelerate_claim(num_ranks))
        claims += trainer_claims(num_ranks)
    report("trainers", claims)


def stock_name(num_ranks: int) -> str:
    return "with ddp" if num_ranks > 1 else "in one process"


def join_job(num_ranks: int) -> int:
    """What a launcher would have said to this rank; gives its number."""
    rank = dist.get_rank() if num_ranks > 1 else 0
    if num_ranks > 1:
        said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
        said["LOCAL_WORLD_SIZE"] = num_ranks
        os.environ.update({name: str(value) for name, value in said.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="here")
    warnings.simplefilter("ignore")
    return rank


# ---- a loop of Accelerate


def accelerate_claim(num_ranks: int) -> Claim:
    runs = [run_ranks(measure, num_ranks, num_ranks) for _ in range(NUM_STARTS)]
    times: Times = reduce(Times.join, runs)
    stock = stock_name(num_ranks)
    details = {"ceiling": round(times.ratio(stock, ALONE), 4), **times.details()}
    name = f"accelerate, {num_ranks} ranks: {stock} / with whale"
    return Claim(name, times.ratio(stock, "with whale"), TARGET, at_most=False, details=details)


def measure(num_ranks: int) -> Times:
    """Runs on every rank."""
    rank = join_job(num_ranks)
    say(f"preparing an Accelerate loop on {num_ranks} ranks")
    # the stock side first: afterwards Accelerate takes every rank for a process of its own
    sides = [stock_side(rank, num_ranks), adapted_side(), engine_side()]
    return alternate(sides, NUM_ROUNDS, STEPS_PER_BLOCK, LIMIT_S)


def stock_side(rank: int, num_ranks: int) -> Side:
    accelerator, model, optimizer, scheduler = parts()
    if accelerator.num_processes != num_ranks:
        raise SystemExit(f"Accelerate sees {accelerator.num_processes} ranks of {num_ranks}")
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    own = slice(rank * BATCH_SIZE // num_ranks, (rank + 1) * BATCH_SIZE // num_ranks)

    def of_rank(step: int) -> dict[str, torch.Tensor]:
        whole = gpt2.batch(step, BATCH_SIZE, LENGTH)
        return {name: tensor[own] for name, tensor in whole.items()}

    def mean(loss: torch.Tensor) -> float:
        if num_ranks > 1:
            dist.all_reduce(loss)
        return float(loss) / num_ranks

    return Side(
        stock_name(num_ranks), loop(accelerator, model, optimizer, scheduler, of_rank), mean
    )


def adapted_side() -> Side:
    accelerator, model, optimizer, scheduler = parts()
    sample = gpt2.batch(0, BATCH_SIZE, LENGTH)
    from whale.integrations.accelerate import prepare

    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler, sample=sample)

    def whole(step: int) -> dict[str, torch.Tensor]:
        return gpt2.batch(step, BATCH_SIZE, LENGTH)

    return Side("with whale", loop(accelerator, model, optimizer, scheduler, whole), float)


def engine_side() -> Side:
    wh.init({"clip_grad_norm": MAX_NORM})
    engine = wh.parallelize(
        gpt2.build(LENGTH),
        gpt2.batch(0, NUM_BATCHES * BATCH_SIZE, LENGTH),
        optimizer=gpt2.make_optimizer,
    )
    return Side(ALONE, lambda step: engine.step(joined(step)))


def joined(step: int) -> dict[str, torch.Tensor]:
    batches = [gpt2.batch(NUM_BATCHES * step + k, BATCH_SIZE, LENGTH) for k in range(NUM_BATCHES)]
    return {name: torch.cat([each[name] for each in batches]) for name in batches[0]}


def parts() -> tuple[Accelerator, Any, torch.optim.Optimizer, Any]:
    """What the script has before it is prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_BATCHES)
    model = gpt2.build(LENGTH)
    optimizer = gpt2.make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return accelerator, model, optimizer, scheduler


def loop(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    batch: Callable[[int], dict[str, torch.Tensor]],
) -> Callable[[int], torch.Tensor]:
    """The body of the training loop, the same for both sides: one update."""

    def train(step: int) -> torch.Tensor:
        losses = []
        for k in range(NUM_BATCHES):
            with accelerator.accumulate(model):
                loss = model(**batch(NUM_BATCHES * step + k)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return train


# ---- trainers that own their loop


Result = tuple[list[float], list[float]]
"""seconds of each timed step, losses of all"""


def trainer_claims(num_ranks: int) -> list[Claim]:
    sides: dict[bool, list[dict[str, Result]]] = {False: [], True: []}
    for number in range(NUM_STARTS):
        for adapted in (False, True) if number % 2 == 0 else (True, False):
            sides[adapted].append(run_ranks(trainer_runs, num_ranks, num_ranks, adapted))
    claims = []
    for name in TRAINERS:
        as_it_comes = [each[name] for each in sides[False]]
        with_whale = [each[name] for each in sides[True]]
        claims.append(trainer_claim(name, num_ranks, as_it_comes, with_whale))
    return claims


def trainer_runs(num_ranks: int, adapted: bool) -> dict[str, Result]:
    """Every trainer one after the other. Runs on every rank."""
    return {name: run(num_ranks, adapted) for name, run in TRAINERS.items()}


def trainer_claim(
    name: str, num_ranks: int, as_it_comes: list[Result], with_whale: list[Result]
) -> Claim:
    for (_, expected), (_, got) in zip(as_it_comes, with_whale, strict=True):
        for step, pair in enumerate(zip(expected, got, strict=True)):
            check_losses(pair, step)
    stock = stock_name(num_ranks)
    stock_s = statistics.median(second for seconds, _ in as_it_comes for second in seconds)
    whale_s = statistics.median(second for seconds, _ in with_whale for second in seconds)
    details = {
        f"{stock} ms": round(stock_s * 1e3, 1),
        "with whale ms": round(whale_s * 1e3, 1),
        "steps": sum(len(seconds) for seconds, _ in with_whale),
    }
    claim = f"{name}, {num_ranks} ranks: {stock} / with whale"
    return Claim(claim, stock_s / whale_s, TARGET, at_most=False, details=details)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sample after sample of the batches of the other trainers."""

    def __len__(self) -> int:
        return NUM_STEPS * NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        number, row = divmod(place, BATCH_SIZE)
        return {name: each[row] for name, each in gpt2.batch(number, BATCH_SIZE, LENGTH).items()}


class Clock:
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def note(self) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        timed = self.ends[WARM_UP:]
        return [after - before for before, after in zip(timed, timed[1:])]


def transformers_run(num_ranks: int, adapted: bool) -> Result:
    """Runs on every rank."""
    join_job(num_ranks)
    import transformers

    from whale.integrations.transformers import WhaleTrainer

    say(f"transformers on {num_ranks} ranks, {'with whale' if adapted else 'as it comes'}")
    clock = Clock()
    losses: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note()

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE // (1 if adapted else num_ranks),
            gradient_accumulation_steps=NUM_BATCHES,
            max_steps=NUM_STEPS,
            learning_rate=gpt2.LEARNING_RATE,
            weight_decay=0.01,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            ddp_backend="gloo" if num_ranks > 1 else None,
        )
        trainer = WhaleTrainer if adapted else transformers.Trainer
        made = trainer(
            model=gpt2.build(LENGTH), args=args, train_dataset=Sentences(), callbacks=[Watch()]
        )
        made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(Sentences())
        made.train()
    return clock.seconds(), losses


def lightning_run(num_ranks: int, adapted: bool) -> Result:
    """Runs on every rank."""
    rank = join_job(num_ranks)
    import logging

    import lightning.pytorch as pl

    from whale.integrations.lightning import WhaleStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    say(f"lightning on {num_ranks} ranks, {'with whale' if adapted else 'as it comes'}")
    clock = Clock()
    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2.build(LENGTH)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.log("loss", loss, sync_dist=not adapted and num_ranks > 1)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = gpt2.make_optimizer(self.parameters())
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))
            if len(losses) % NUM_BATCHES == 0:
                clock.note()

    in_processes: Any = "ddp" if num_ranks > 1 else "auto"
    trainer = pl.Trainer(
        max_steps=NUM_STEPS,
        accelerator="cpu",
        devices=1 if adapted else num_ranks,
        strategy=WhaleStrategy() if adapted else in_processes,
        callbacks=[Watch()],
        accumulate_grad_batches=NUM_BATCHES,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # Lightning's own one shuffles what is trained on, whatever the loader says
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), loader_of(rank, 1 if adapted else num_ranks))
    return clock.seconds(), losses


def loader_of(rank: int, num_parts: int) -> DataLoader[dict[str, torch.Tensor]]:
    """The batches in their order, or every rank's part of each."""
    data = Sentences()
    sampler: Any = DistributedSampler(data, num_parts, rank % num_parts, shuffle=False)
    return DataLoader(data, BATCH_SIZE // num_parts, sampler=sampler)


TRAINERS: dict[str, Callable[[int, bool], Result]] = {
    "transformers": transformers_run,
    "lightning": lightning_run,
}


if __name__ == "__main__":
    main()
