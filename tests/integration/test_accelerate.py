"""`whale.integrations.accelerate.prepare` against `accelerator.prepare` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tests.integration import trainers  # noqa: E402
from tests.ranks import RankError, run_ranks  # noqa: E402

STAGES = {"num_task_graph": 2, "num_micro_batch": 2}
NUM_STEPS = 20


def train(
    config: dict[str, Any] | None, folder: str, start: int = 0, stop: int = NUM_STEPS
) -> list[float]:
    """A plain loop of Accelerate: accumulation, clipping, a schedule, checkpoints. `config` None:
    the stock one.
    """
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = trainers.model(transformers.GPT2LMHeadModel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.DataLoader(
        trainers.Sentences(23), 4, shuffle=True, generator=generator, collate_fn=trainers.padded
    )
    if config is None:
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    else:
        from whale.integrations.accelerate import prepare

        model, optimizer, data, scheduler = prepare(
            accelerator, model, optimizer, data, scheduler, whale=config
        )
    if start:
        accelerator.load_state(folder)
    losses: list[float] = []
    step = 0
    while step < stop:
        for batch in data:
            if step == stop:
                break
            if step < start:  # the loader of a resumed run goes over what was trained on
                step += 1
                continue
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    losses.append(norm.item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += 1
            if step == stop < NUM_STEPS:
                accelerator.save_state(folder)
    model.eval()
    with torch.no_grad():
        last = next(iter(data))
        output = model(**last)
        losses.append(output.loss.item())
        losses.append(accelerator.gather_for_metrics(output.logits).double().sum().item())
    return losses


def test_stages(tmp_path: Path) -> None:
    (expected,) = run_ranks(train, 1, None, str(tmp_path))
    for found in run_ranks(train, 2, STAGES, str(tmp_path)):
        assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_data_parallel(tmp_path: Path, num_ranks: int) -> None:
    (expected,) = run_ranks(train, 1, None, str(tmp_path))
    for found in run_ranks(train, num_ranks, {}, str(tmp_path)):
        assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((2, STAGES), (1, {})), ((1, {}), (2, {})), ((2, {}), (2, STAGES))]
)
def test_resume_in_the_middle_on_other_ranks(
    tmp_path: Path, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]]
) -> None:
    """Saved after 10 of 20 batches."""
    (expected,) = run_ranks(train, 1, None, str(tmp_path))
    folder = str(tmp_path / "state")
    run_ranks(train, before[0], before[1], folder, 0, 10)
    for found in run_ranks(train, after[0], after[1], folder, 10):
        assert found == pytest.approx(expected[15:], rel=2e-5)


def own_loss(num: int) -> list[float]:
    """A model without a loss in its forward, trained by `loss=`."""
    from whale.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, torch.arange(12) % 3), batch_size=6
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    local = torch.nn.Linear(4, 3)
    local.load_state_dict(model.state_dict())
    own = torch.optim.SGD(local.parameters(), lr=0.5)
    model, optimizer, data = prepare(
        accelerator,
        model,
        optimizer,
        data,
        loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1]),
    )
    differences = []
    for batch in data:
        loss = model(*batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected = torch.nn.functional.cross_entropy(local(batch[0]), batch[1])
        own.zero_grad()
        expected.backward()
        own.step()
        differences.append((loss - expected).item())
    return differences


def test_a_loss_outside_of_the_model() -> None:
    for differences in run_ranks(own_loss, 2, 0):
        assert differences == pytest.approx([0.0, 0.0], abs=1e-6)


def draw_after(folder: str, is_saved: bool) -> list[float]:
    """A number that is drawn behind a checkpoint, and losses of streamed data."""
    from whale.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    torch.manual_seed(1 if is_saved else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.utils.data.DataLoader(_Stream(), batch_size=5)
    model, optimizer, data = prepare(
        accelerator, model, optimizer, data, loss=lambda output, batch: output.square().mean()
    )
    losses = []
    for batch in data:
        loss = model(batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if is_saved:
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return [torch.rand(()).item(), *losses]


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from torch.arange(48.0).view(12, 4) / 20

    def __len__(self) -> int:
        return 12


class _Batches(_Stream):
    def __iter__(self) -> Any:
        yield from torch.arange(48.0).view(3, 4, 4) / 20


@pytest.mark.parametrize(
    ("dataset", "settings"),
    [
        (_Stream(), {"batch_size": 5}),
        (_Batches(), {"batch_size": None}),
        (torch.ones(3, 5, 4), {"batch_size": None}),
    ],
)
def test_samples_of_loaders(dataset: Any, settings: dict[str, Any]) -> None:
    """Streams that know their length, and datasets of whole batches."""
    from whale.integrations.one_process import sample_of

    loader = torch.utils.data.DataLoader(dataset, **settings)
    sample = sample_of(loader, 5)
    first = next(iter(loader))
    assert sample.shape == first.shape


def test_a_schedule_of_the_first_optimizer_sets_the_rates() -> None:
    """A schedule that `prepare` was not given holds the optimizer that the script has made."""
    from whale.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 3)
    first = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    model, optimizer = prepare(
        accelerator,
        model,
        first,
        sample=torch.ones(4, 4),
        loss=lambda output, batch: output.square().mean(),
    )
    accelerator.backward(model(torch.ones(4, 4)).loss)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_more_ranks_go_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    """A rank that was not there before had numbers of its own, and another order of samples. Of
    streamed data every rank but the first one waited for batches from it.
    """
    (expected,) = run_ranks(draw_after, 1, str(tmp_path), True)
    assert len(expected) == 4
    for found in run_ranks(draw_after, 2, str(tmp_path), False):
        assert found == pytest.approx(expected, rel=1e-5)


def test_clipping_some_of_the_parameters_is_refused() -> None:
    from whale.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before, lr=0.1)
    model, optimizer = prepare(
        accelerator,
        model,
        optimizer,
        sample=torch.ones(4, 4),
        loss=lambda output, batch: output.square().mean(),
    )
    accelerator.backward(model(torch.ones(4, 4)).loss)
    first = accelerator.clip_grad_norm_(before, 1.0).item()
    second = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    assert second == pytest.approx(min(first, 1.0), rel=1e-5)
    with pytest.raises(ValueError, match="given 2 parameters, some of those that are trained"):
        accelerator.clip_grad_norm_(before[:2], 1.0)


def named_folders(config: dict[str, Any] | None, folder: str) -> list[Any]:
    """A script in the form of Accelerate's examples: seeds, samples in random order, clipping in
    every turn of the loop, checkpoints that are numbered, a model that is saved at the end.
    """
    project = accelerate.utils.ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, project_config=project
    )
    accelerate.utils.set_seed(7)
    model = trainers.model(transformers.GPT2ForSequenceClassification)
    accelerate.utils.set_seed(8)
    loaders = [
        torch.utils.data.DataLoader(
            trainers.Sentences(number), 4, shuffle=number == 23, collate_fn=trainers.classified
        )
        for number in (23, 9)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = transformers.get_scheduler("cosine", optimizer, 2, 9)
    prepared = (model, optimizer, *loaders, scheduler)
    if config is None:
        prepared = accelerator.prepare(*prepared)
    else:
        from whale.integrations.accelerate import prepare

        prepared = prepare(accelerator, *prepared, whale=config)
    model, optimizer, data, others, scheduler = prepared
    found: list[Any] = []
    for _ in range(3):
        model.train()
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                found.append(loss.item())
                found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                found.append(scheduler.get_last_lr()[0])
        model.eval()
        for batch in others:
            with torch.no_grad():
                output = model(**batch)
            both = (output.logits.argmax(-1), batch["labels"])
            predicted, labels = accelerator.gather_for_metrics(both)
            found += [float((predicted == labels).sum()), len(labels), output.loss.item()]
        accelerator.save_state()
    whole = accelerator.unwrap_model(model)
    whole.save_pretrained(Path(folder) / "saved", is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    saved = transformers.GPT2ForSequenceClassification.from_pretrained(Path(folder) / "saved")
    found.append(saved.score.weight.double().sum().item())
    found.append(len(list((Path(folder) / "checkpoints").iterdir())))
    accelerator.end_training()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, STAGES])
def test_a_usual_script_with_numbered_checkpoints(tmp_path: Path, config: dict[str, Any]) -> None:
    """Ranks did not wait for each other: one found the folder that another had just made, and
    refused to write into it.
    """
    (expected,) = run_ranks(named_folders, 1, None, str(tmp_path / "stock"))
    for found in run_ranks(named_folders, 2, config, str(tmp_path / "whale")):
        assert found == pytest.approx(expected, rel=2e-5)


PENALTIES = {
    "parameters": lambda model, first: model.parameters(),
    "named_parameters": lambda model, first: [each for _, each in model.named_parameters()],
    "before": lambda model, first: first,
}
"""how a script names the parameters of the model that it penalizes"""


def penalized(
    config: dict[str, Any] | None, form: str | None, is_apart: bool = False
) -> list[float]:
    """Losses and gradient norms with a penalty on weights, added by the loop to half of the loss.
    `form` None: in the loss that `prepare` is given. `is_apart`: it has a backward of its own.
    """
    from whale.integrations.accelerate import prepare

    def penalty(parameters: Any) -> torch.Tensor:
        return 0.1 * torch.stack([each.square().sum() for each in parameters]).sum().sqrt()

    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = first = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    batches = torch.linspace(-1, 1, 48).view(3, 4, 4)
    if config is not None:
        model, optimizer = prepare(
            accelerator,
            model,
            optimizer,
            sample=batches[0],
            loss=lambda output, batch: (
                output.square().mean() / 2 + (0.0 if form else penalty(first.parameters()))
            ),
            whale=config,
        )
    found = []
    for batch in batches:
        output = model(batch)
        loss = output.square().mean() / 2 if config is None else output.loss
        if form is not None:
            extra = penalty(PENALTIES[form](model, parameters))
            if is_apart:
                accelerator.backward(loss)
                accelerator.backward(extra)
            else:
                accelerator.backward(loss + extra)
        else:
            accelerator.backward(loss)
        found.append((loss + (extra if form else 0.0)).item())
        found.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("form", PENALTIES)
def test_a_penalty_outside_of_the_model_is_refused(form: str, is_apart: bool) -> None:
    """Its gradient was multiplied by what the batch's is multiplied by; with stages each rank saw
    the weights of its own stages alone; and `named_parameters` gave none at all.
    """
    with pytest.raises(ValueError, match=r"backward reaches .* of shape \[.*Try: .*loss="):
        penalized({}, form, is_apart)


@pytest.mark.slow
def test_a_penalty_outside_of_the_model_is_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match=r"Try: .*loss="):
        run_ranks(penalized, 2, STAGES, "parameters")


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, STAGES, {"zero": 3}])
def test_a_penalty_in_the_loss(config: dict[str, Any]) -> None:
    """What the refusal of one outside says to try."""
    (expected,) = run_ranks(penalized, 1, None, "parameters")
    for found in run_ranks(penalized, 2, config, None):
        assert found == pytest.approx(expected, rel=2e-5)


def test_a_model_that_gives_no_loss_is_refused() -> None:
    """A script that makes the loss of the model's output was told to call the model without Whale,
    which it can.
    """
    from whale.integrations.accelerate import prepare

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = (torch.ones(4, 4), torch.arange(4) % 3)
    with pytest.raises(ValueError, match=r"prepare\(\.\.\., loss=lambda output, batch"):
        prepare(accelerate.Accelerator(cpu=True), model, optimizer, sample=sample)


def test_a_call_without_labels_is_refused() -> None:
    """A script with a loss of its own of the logits was told to change a sample batch."""
    from whale.integrations.accelerate import prepare

    model = trainers.model(transformers.GPT2ForSequenceClassification)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = trainers.classified(trainers.Sentences(4).samples)
    model, _ = prepare(accelerate.Accelerator(cpu=True), model, optimizer, sample=batch)
    labels = batch.pop("labels")
    with pytest.raises(ValueError, match=r"without 'labels'.*Try: .*loss=lambda output, batch"):
        model(**batch)
    model.eval()
    assert model(**batch).logits.shape == (*labels.shape, 3)


def test_two_forwards_before_a_backward_are_refused() -> None:
    from whale.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model = trainers.model(transformers.GPT2LMHeadModel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = trainers.Sentences(4)
    batch = trainers.padded([samples[place] for place in range(4)])
    model, optimizer = prepare(accelerator, model, optimizer, sample=batch)
    first = model(**batch).loss
    model(**batch)
    with pytest.raises(RuntimeError, match="call backward before the model is called again"):
        first.backward()
    with pytest.raises(AttributeError, match=r"model\.eval\(\) for other outputs"):
        model(**batch).logits  # noqa: B018
