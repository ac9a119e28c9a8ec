"""`WhaleTrainer` against the stock `Trainer` in one process: logged losses, gradient norms, learning
rates, evaluations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tests.integration import trainers  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from whale.integrations.transformers import WhaleTrainer  # noqa: E402

STAGES = {"num_task_graph": 2, "num_micro_batch": 2}
TASKS = {"language_model": trainers.language_model, "classification": trainers.classification}
Lines = list[dict[str, float]]


def stock(task: str, folder: str, changes: dict[str, Any]) -> Lines:
    lines, _ = TASKS[task](transformers.Trainer, folder, {}, **changes)
    return trainers.kept(lines)


def whale(task: str, folder: str, config: dict[str, Any], changes: dict[str, Any]) -> Lines:
    lines, trainer = TASKS[task](WhaleTrainer, folder, {"whale": config}, **changes)
    trainer.save_model(str(Path(folder) / "saved"))
    return trainers.kept(lines)


def check_same(found: Lines, expected: Lines, tolerance: float = 2e-5) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=1e-9), (name, theirs)


def compare(
    task: str,
    folder: Path,
    num_ranks: int,
    config: dict[str, Any],
    tolerance: float = 2e-5,
    **changes: Any,
) -> None:
    (expected,) = run_ranks(stock, 1, task, str(folder / "stock"), changes)
    assert len([line for line in expected if "loss" in line]) == 20
    for found in run_ranks(whale, num_ranks, task, str(folder / "whale"), config, changes):
        check_same(found, expected, tolerance)


def test_language_model_data_parallel(tmp_path: Path) -> None:
    """Warm-up, decay groups, clipping, accumulation with `num_items_in_batch`, a last batch of
    three samples, shuffling.
    """
    compare("language_model", tmp_path, 2, {})
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whale" / "saved")
    assert isinstance(saved, transformers.GPT2LMHeadModel)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "config"), [(1, {}), (2, STAGES)])
def test_language_model(tmp_path: Path, num_ranks: int, config: dict[str, Any]) -> None:
    compare("language_model", tmp_path, num_ranks, config)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "config"), [(1, {}), (2, {}), (2, STAGES)])
def test_classification_with_metrics(
    tmp_path: Path, num_ranks: int, config: dict[str, Any]
) -> None:
    """An evaluation of 9 samples in batches of 4: the last one has fewer samples than devices."""
    compare("classification", tmp_path, num_ranks, config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, STAGES])
def test_bf16(tmp_path: Path, config: dict[str, Any]) -> None:
    compare("language_model", tmp_path, 2, config, tolerance=2e-2, bf16=True)


@pytest.mark.slow
def test_label_smoothing_and_no_clipping(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0}
    compare("language_model", tmp_path, 2, STAGES, **changes)


# ---- checkpoints


def resumed(folder: str, config: dict[str, Any], checkpoint: str) -> Lines:
    lines, _ = trainers.language_model(
        WhaleTrainer, folder, {"whale": config}, save_strategy="steps", resume=checkpoint
    )
    return trainers.kept(lines)


def interrupted(folder: str, config: dict[str, Any]) -> Lines:
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 10, "save_total_limit": 2}
    log = trainers.Log()
    trainer = WhaleTrainer(
        model=trainers.model(transformers.GPT2LMHeadModel),
        args=trainers.settings(folder, **changes),
        train_dataset=trainers.Sentences(23),
        data_collator=trainers.padded,
        callbacks=[log, _StopAfter(11)],
        whale=config,
    )
    trainer.train()
    return trainers.kept(log.lines)


class _StopAfter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, STAGES), (1, {})), ((1, {}), (2, {})), ((2, {}), (2, STAGES))],
)
def test_resume_in_the_middle_on_other_ranks(
    tmp_path: Path, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]]
) -> None:
    (expected,) = run_ranks(stock, 1, "language_model", str(tmp_path / "stock"), {})
    folder = str(tmp_path / "whale")
    run_ranks(interrupted, before[0], folder, before[1])
    checkpoint = f"{folder}/checkpoint-10"
    for lines in run_ranks(resumed, after[0], folder, after[1], checkpoint):
        check_same(lines, expected[10:])


# ---- what a script brings along


class _Stream(torch.utils.data.IterableDataset[Any]):
    """Samples that come one after the other, of which nobody knows the number."""

    def __iter__(self) -> Any:
        return iter(trainers.Sentences(23))


def with_own(is_stock: bool, folder: str, streamed: bool) -> Lines:
    """An optimizer with a schedule, as in `optimizers=`; streamed data."""
    log = trainers.Log()
    model = trainers.model(transformers.GPT2LMHeadModel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    named: dict[str, Any] = {} if is_stock else {"whale": {}}
    trainer = (transformers.Trainer if is_stock else WhaleTrainer)(
        model=model,
        args=trainers.settings(folder, max_steps=6),
        train_dataset=_Stream() if streamed else trainers.Sentences(23),
        data_collator=trainers.padded,
        optimizers=(optimizer, schedule),
        callbacks=[log],
        **named,
    )
    trainer.train()
    return trainers.kept(log.lines)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_an_own_schedule_and_streamed_data(tmp_path: Path, streamed: bool) -> None:
    """The schedule went on with the optimizer of the whole model, which nobody steps: the rate stayed
    what it was. Of streamed data every rank but the first one waited for batches from it.
    """
    (expected,) = run_ranks(with_own, 1, True, str(tmp_path), streamed)
    assert expected[0]["learning_rate"] != expected[1]["learning_rate"]
    for lines in run_ranks(with_own, 2, False, str(tmp_path), streamed):
        check_same(lines, expected)


# ---- own losses


class _Weighted(WhaleTrainer):
    """A script's own loss, as many have it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0, 3.0], device=labels.device)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weights)
        return (loss, outputs) if return_outputs else loss


class _StockWeighted(transformers.Trainer):  # type: ignore[misc, name-defined]
    compute_loss = _Weighted.compute_loss


def weighted(own: bool, folder: str) -> Lines:
    named = {"whale": STAGES} if own else {}
    trainer = _Weighted if own else _StockWeighted
    lines, _ = trainers.classification(trainer, folder, named, gradient_accumulation_steps=1)
    return trainers.kept(lines)


@pytest.mark.slow
def test_a_subclass_with_its_own_loss(tmp_path: Path) -> None:
    (expected,) = run_ranks(weighted, 1, False, str(tmp_path))
    for lines in run_ranks(weighted, 2, True, str(tmp_path)):
        check_same(lines, expected)


class _Noisy(WhaleTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**{**inputs, "input_ids": inputs["input_ids"] * 1}).loss


def test_a_loss_that_changes_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another 'input_ids' than the collator gives"):
        trainers.language_model(_Noisy, str(tmp_path), {})


class _WithoutMask(WhaleTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss


class _Twice(WhaleTrainer):
    """As in R-Drop: two outputs of one batch that differ by dropout."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        first, second = model(**inputs), model(**inputs)
        return first.loss + (first.logits - second.logits).square().mean()


class _Plain(WhaleTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs).loss


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (_WithoutMask, "without 'attention_mask'"),
        (_Twice, "calls the model 2 times"),
        (_Plain, "with labels and without num_items_in_batch"),
    ],
)
def test_a_loss_of_another_call_is_refused(
    tmp_path: Path, trainer: type[WhaleTrainer], message: str
) -> None:
    """The mask counted all the same, both outputs were the same one, and the loss of accumulated
    batches was half of the stock trainer's.
    """
    with pytest.raises(ValueError, match=message):
        trainers.language_model(trainer, str(tmp_path), {})


@pytest.mark.parametrize("name", ["auto_find_batch_size", "bf16_full_eval", "fp16_full_eval"])
def test_what_the_plan_decides_is_refused(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = {name: True}
    with pytest.raises(ValueError, match=f"leave {name} out"):
        WhaleTrainer(
            model=trainers.model(transformers.GPT2LMHeadModel),
            args=trainers.settings(tmp_path, **changes),
        )


def test_a_second_model_of_model_init_is_refused(tmp_path: Path) -> None:
    trainer = WhaleTrainer(
        model_init=lambda: trainers.model(transformers.GPT2LMHeadModel),
        args=trainers.settings(tmp_path, max_steps=1),
        train_dataset=trainers.Sentences(8),
        data_collator=trainers.padded,
    )
    trainer.train()
    with pytest.raises(ValueError, match="a new trainer for each training"):
        trainer.train()


class _HeadRate:
    """A script's own groups: the head has another rate."""

    def create_optimizer(self, model: Any = None) -> Any:
        own: Any = self
        if own.optimizer is None:
            head = [each for name, each in own.model.named_parameters() if "score" in name]
            rest = [each for name, each in own.model.named_parameters() if "score" not in name]
            groups = [{"params": head, "lr": 0.05}, {"params": rest}]
            own.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        return own.optimizer


class _StockHeadRate(_HeadRate, transformers.Trainer):
    pass


class _WhaleHeadRate(_HeadRate, WhaleTrainer):
    pass


class _NewEachTime(WhaleTrainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        return self.optimizer


def test_an_optimizer_of_a_subclass(tmp_path: Path) -> None:
    """It ended in an assertion: only the Trainer's own `create_optimizer` made the engine."""
    changes: dict[str, Any] = {"max_steps": 3, "eval_steps": 2}
    expected, _ = trainers.classification(_StockHeadRate, str(tmp_path / "stock"), {}, **changes)
    found, trainer = trainers.classification(_WhaleHeadRate, str(tmp_path / "w"), {}, **changes)
    for ours, theirs in zip(trainers.kept(found), trainers.kept(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    trainer.train()


def test_another_optimizer_for_the_second_training_is_refused(tmp_path: Path) -> None:
    """It would update a rank's own weights by gradients that are not the engine's."""
    trainer = _NewEachTime(
        model=trainers.model(transformers.GPT2LMHeadModel),
        args=trainers.settings(tmp_path, max_steps=1),
        train_dataset=trainers.Sentences(8),
        eval_dataset=trainers.Sentences(8),
        data_collator=trainers.padded,
    )
    trainer.evaluate()
    with pytest.raises(ValueError, match=r"another AdamW.*Try: .*if self\.optimizer is None"):
        trainer.train()


def test_a_first_prediction_without_labels_is_refused(tmp_path: Path) -> None:
    """It ended in a KeyError inside of a capture."""

    def collate(samples: Any) -> dict[str, Any]:
        batch = trainers.classified(samples)
        del batch["labels"]
        return batch

    trainer = WhaleTrainer(
        model=trainers.model(transformers.GPT2ForSequenceClassification),
        args=trainers.settings(tmp_path),
        data_collator=collate,
    )
    with pytest.raises(ValueError, match=r"has no 'labels'.*Try: trainer\.train\(\) or"):
        trainer.predict(trainers.Sentences(8))


def test_a_checkpoint_of_the_stock_trainer_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainers.language_model(transformers.Trainer, str(tmp_path), {}, **changes)
    with pytest.raises(ValueError, match="was not saved by WhaleTrainer"):
        trainers.language_model(
            WhaleTrainer, str(tmp_path), {}, max_steps=4, resume=str(tmp_path / "checkpoint-2")
        )
