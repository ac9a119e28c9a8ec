"""`WhaleStrategy` against Lightning in one process: logged losses, schedule, validation, resuming."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from tests.ranks import RankError, run_ranks  # noqa: E402

STAGES = {"num_task_graph": 2, "num_micro_batch": 2}
NUM_STEPS = 20


class Classifier(LightningModule):  # type: ignore[misc]
    """A module as people write them: a criterion, logs, a schedule, decay groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.top = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 3))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(F.gelu(self.bottom(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        loss = self.criterion(self(x), labels)
        self.log("train_loss", loss, prog_bar=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, labels = batch
        output = self(x)
        self.log("val_loss", self.criterion(output, labels))
        self.log("val_accuracy", (output.argmax(-1) == labels).float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.criterion(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.bottom.parameters(), "weight_decay": 0.1},
            {"params": self.top.parameters(), "lr": 5e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=2e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Record(Callback):  # type: ignore[misc]
    """What a logging callback sees."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))
        self.values.append(trainer.optimizers[0].param_groups[1]["lr"])

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            for name in ("val_loss", "val_accuracy"):
                self.values.append(float(trainer.callback_metrics[name]))


def loader(num_samples: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 8, generator=generator)
    labels = torch.randint(0, 3, (num_samples,), generator=generator)
    data = torch.utils.data.TensorDataset(x, labels)
    return torch.utils.data.DataLoader(data, batch_size=6, shuffle=False)


def fit(
    config: dict[str, Any] | None, folder: str, max_steps: int = NUM_STEPS, resume: str = ""
) -> tuple[list[float], list[float]]:
    """Values that callbacks saw, and the trained module's outputs after the fit. `config` None: in
    one process without Whale.
    """
    warnings.simplefilter("ignore")
    strategy: Any = "auto"
    if config is not None:
        from whale.integrations.lightning import WhaleStrategy

        strategy = WhaleStrategy(whale=config)
    record = Record()
    trainer = Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[record, ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1)],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, loader(35, 0), loader(11, 1), ckpt_path=resume or None)
    with torch.no_grad():
        outputs = module(next(iter(loader(6, 2)))[0]).flatten().tolist()
    return record.values, outputs


def check(
    found: tuple[list[float], list[float]], expected: tuple[list[float], list[float]]
) -> None:
    assert len(found[0]) == len(expected[0]) > 2 * NUM_STEPS
    assert found[0] == pytest.approx(expected[0], rel=2e-5)
    assert found[1] == pytest.approx(expected[1], rel=2e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "config"), [(1, {}), (2, {}), (2, STAGES)])
def test_fit(tmp_path: Path, num_ranks: int, config: dict[str, Any]) -> None:
    """35 samples in batches of 6: the last of an epoch has 5; accumulation over 2 batches."""
    expected = fit(None, str(tmp_path / "stock"))
    for found in run_ranks(fit, num_ranks, config, str(tmp_path / "whale")):
        check(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((2, STAGES), (1, {})), ((1, {}), (2, {})), ((2, {}), (2, STAGES))]
)
def test_resume_in_the_middle_on_other_ranks(
    tmp_path: Path, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]]
) -> None:
    """Against stock Lightning that was resumed at the same step: it reads its data from the start
    of the epoch again, whatever the strategy.
    """
    stock = str(tmp_path / "stock")
    fit(None, stock, 10)
    expected = fit(None, stock, NUM_STEPS, str(next(Path(stock).glob("*step=10.ckpt"))))
    folder = str(tmp_path / "whale")
    run_ranks(fit, before[0], before[1], folder, 10)
    (saved,) = Path(folder).glob("*step=10.ckpt")
    for values, outputs in run_ranks(fit, after[0], after[1], folder, NUM_STEPS, str(saved)):
        assert len(values) == len(expected[0]) > NUM_STEPS
        assert values == pytest.approx(expected[0], rel=2e-5)
        assert outputs == pytest.approx(expected[1], rel=2e-4, abs=1e-5)


class Changing(Classifier):
    """Its loss depends on where the loop is, and on numbers that hooks change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.save_hyperparameters({"weight": 0.0})
        self.beta = 0.0

    def on_train_epoch_start(self) -> None:
        self.beta = 0.5 * self.trainer.current_epoch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hparams.weight = 0.1 * batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        weights = {
            "attribute": self.beta,
            "hyperparameter": self.hparams.weight,
            "epoch": min(1.0, self.current_epoch / 2),
            "step": min(1.0, self.global_step / 3),
            "index": float(batch_idx),
        }
        output = self(x)
        loss = self.criterion(output, labels) + weights[self.kind] * output.square().mean()
        self.log("train_loss", loss)
        return loss


class WithoutIndex(Classifier):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


CHANGING: dict[str, Any] = {
    **{
        kind: lambda kind=kind: Changing(kind)
        for kind in ("attribute", "hyperparameter", "epoch", "step", "index")
    },
    "without an index": WithoutIndex,
}


def fit_changing(kind: str, is_stock: bool) -> list[float]:
    warnings.simplefilter("ignore")
    strategy: Any = "auto"
    if not is_stock:
        from whale.integrations.lightning import WhaleStrategy

        strategy = WhaleStrategy(whale={"num_micro_batch": 2})
    record = Record()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(CHANGING[kind](), loader(18, 0))
    return record.values


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGING)
def test_numbers_that_change_while_it_trains(kind: str) -> None:
    """The graph had those of the first batch for ever, and batch 0 as the number of every batch."""
    expected = fit_changing(kind, True)
    (found,) = run_ranks(fit_changing, 1, kind, False)
    assert found == pytest.approx(expected, rel=2e-5)


def test_a_step_that_leaves_out_a_batch_is_refused() -> None:
    from whale.integrations.lightning import WhaleStrategy

    class Leaving(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    trainer = Trainer(
        max_steps=1,
        accelerator="cpu",
        devices=1,
        strategy=WhaleStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError, match="training_step gave None"):
        trainer.fit(Leaving(), loader(12, 0))


def fit_averaged() -> None:
    from whale.integrations.lightning import WhaleStrategy

    warnings.simplefilter("ignore")
    Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        strategy=WhaleStrategy(whale=STAGES),
        callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Classifier(), loader(12, 0))


@pytest.mark.slow
def test_averages_of_weights_that_are_elsewhere_are_refused() -> None:
    """They ended in a traceback about meta tensors, in the second epoch."""
    with pytest.raises(RankError, match="StochasticWeightAveraging reads the weights"):
        run_ranks(fit_averaged, 2)


# ---- what scripts log of training


class Logging(Classifier):
    """Logs its loss in all the ways that are usual, and collects it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        loss = self.criterion(self(x), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("size", loss, on_step=True, on_epoch=True, batch_size=x.size(0))
        self.log("detached", loss.detach(), on_epoch=True, batch_size=x.shape[0])
        self.log("same weight", loss, on_epoch=True, batch_size=3)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(float(torch.stack(self.losses).mean()))
        self.losses.clear()


class AtEnds(Record):
    """Also what epochs give."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.values += [float(each) for _, each in sorted(trainer.callback_metrics.items())]


def fit_logging(folder: str, config: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    """In the form of scripts that say nothing about folders: those of loggers and checkpoints are
    found by looking at what is there.
    """
    warnings.simplefilter("ignore")
    strategy: Any = "auto"
    if config is not None:
        from whale.integrations.lightning import WhaleStrategy

        strategy = WhaleStrategy(whale=config)
    record = AtEnds()
    best = ModelCheckpoint(monitor="val_loss", save_top_k=1, save_last=True)
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[record, best, LearningRateMonitor("step")],
        accumulate_grad_batches=3,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Logging()
    trainer.fit(module, loader(20, 0), loader(11, 1))
    (at_best,) = trainer.test(module, loader(11, 2), ckpt_path="best", verbose=False)
    (at_end,) = trainer.test(module, loader(11, 2), verbose=False)
    outputs = trainer.predict(module, loader(7, 3))
    loaded = Logging.load_from_checkpoint(best.best_model_path)
    figures = [*record.values, *module.means, *at_best.values(), *at_end.values()]
    figures += torch.cat(outputs).flatten().tolist()
    figures += [float(best.best_model_score), float(loaded.top[1].weight.detach().sum())]
    paths = [best.best_model_path, best.last_model_path, str(trainer.log_dir)]
    header = (Path(folder) / "lightning_logs/version_0/metrics.csv").read_text().split()[0]
    return figures, [*(str(Path(path).relative_to(folder)) for path in paths), header]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "config"), [(1, {"num_micro_batch": 2}), (2, STAGES)])
def test_logs_and_folders_of_a_usual_script(
    tmp_path: Path, num_ranks: int, config: dict[str, Any]
) -> None:
    """A mean over an epoch weighed all batches alike where `batch_size=` was given; a detached loss
    was left out; rates were those of an `EngineOptimizer`. On two ranks each had a folder of its
    own, and the first checkpoint hung.
    """
    expected, names = fit_logging(str(tmp_path / "stock"), None)
    for found, found_names in run_ranks(fit_logging, num_ranks, str(tmp_path / "whale"), config):
        assert found_names == names
        assert found == pytest.approx(expected, rel=2e-4, abs=1e-5)


class Counting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.seen.compute()


class Keeping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outputs.append(self(batch[0]).detach())
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Counting, r"the metric self\.seen is updated in training_step"),
        (Keeping, r"appends to self\.outputs what is not the loss"),
    ],
)
def test_what_a_step_leaves_behind_is_refused(module: type[Classifier], message: str) -> None:
    """A metric gave the result of no batch: 0."""
    from whale.integrations.lightning import WhaleStrategy

    warnings.simplefilter("ignore")
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        strategy=WhaleStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module(), loader(12, 0))


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    from whale.integrations.lightning import WhaleStrategy

    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.bottom, self.top)]

    trainer = Trainer(
        max_steps=1,
        accelerator="cpu",
        devices=1,
        strategy=WhaleStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError, match="gave 2 optimizers, and needs one"):
        trainer.fit(Two(), loader(12, 0))
