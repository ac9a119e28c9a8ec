"""M6 and its drawings, against plain arguments about what they must do; Whale on M6, against the
model itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import whale as wh
from models import drawings as d
from models.drawings import Drawings, Scene, decode, encode, scenes_of_split
from models.m6 import END, M6, PAD, START, M6Config, cut_patches

BATCH = 12


def tiny(**changes: object) -> M6Config:
    return dataclasses.replace(
        M6Config.small(),
        width=16,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        **changes,
    )


def model_and_batch() -> tuple[M6, dict[str, Tensor]]:
    return M6(tiny()).eval(), Drawings(100).batch(range(BATCH))


def logits_of(model: M6, batch: dict[str, Tensor], **changes: Tensor) -> Tensor:
    inputs = {name: batch[name] for name in ("pixels", "prompt_ids", "caption_ids")} | changes
    return model(**inputs)


# ---- the model


def test_small_fits_the_drawings() -> None:
    config = M6Config.small()
    batch = Drawings(10).batch(range(3))
    assert config.vocabulary_size == len(d.WORDS)
    assert batch["pixels"].shape == (3, config.num_channels, config.image_size, config.image_size)
    assert batch["prompt_ids"].shape == (3, config.prompt_length)
    assert batch["caption_ids"].shape == batch["labels"].shape == (3, config.caption_length)
    assert M6(config)(batch["pixels"], batch["prompt_ids"], batch["caption_ids"]).shape == (
        3,
        config.caption_length,
        config.vocabulary_size,
    )


def test_patches_are_squares_of_the_image() -> None:
    pixels = torch.arange(2 * 3 * 6 * 6.0).view(2, 3, 6, 6)
    patches = cut_patches(pixels, 2)
    assert patches.shape == (2, 9, 12)
    assert torch.equal(patches[1, 5], pixels[1, :, 2:4, 4:6].flatten())  # row 1, column 2


def test_a_word_depends_on_no_later_word() -> None:
    model, batch = model_and_batch()
    for place in (1, 4, 10):
        changed = batch["caption_ids"].clone()
        changed[:, place] = (changed[:, place] + 5) % len(d.WORDS)
        before = logits_of(model, batch)
        after = logits_of(model, batch, caption_ids=changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.allclose(before[:, place], after[:, place])


@pytest.mark.parametrize("place", [0, 23])
def test_every_word_depends_on_the_whole_image_and_prompt(place: int) -> None:
    model, batch = model_and_batch()
    before = logits_of(model, batch)
    pixels = batch["pixels"].clone()
    pixels[:, :, place, place] += 1.0
    prompt_ids = (batch["prompt_ids"] + 1) % len(d.WORDS)
    for after in (
        logits_of(model, batch, pixels=pixels),
        logits_of(model, batch, prompt_ids=prompt_ids),
    ):
        assert ((before - after).abs().amax(-1) > 1e-6).all()


def test_padding_does_not_count_in_the_loss() -> None:
    model, batch = model_and_batch()
    log_probabilities = F.log_softmax(logits_of(model, batch), -1)
    chosen = [
        log_probabilities[b, t, label]
        for b, row in enumerate(batch["labels"].tolist())
        for t, label in enumerate(row)
        if label != PAD
    ]
    assert len(chosen) < batch["labels"].numel()  # there is padding
    assert torch.allclose(model(**batch), -torch.stack(chosen).mean())


def test_generate_follows_the_likeliest_word_and_stops_at_the_end() -> None:
    model, batch = model_and_batch()
    with torch.no_grad():
        model.head.weight[END] *= 3  # so that some captions end early
    said = model.generate(batch["pixels"], batch["prompt_ids"])
    assert said.shape == batch["labels"].shape
    inputs = torch.cat([torch.full((BATCH, 1), START), said[:, :-1]], 1)
    likeliest = logits_of(model, batch, caption_ids=inputs).argmax(-1)
    for row, best in zip(said.tolist(), likeliest.tolist(), strict=True):
        stop = row.index(END) + 1 if END in row else len(row)
        assert row[:stop] == best[:stop] and set(row[stop:]) <= {PAD}


def test_ties_and_sizes() -> None:
    tied = M6(tiny())
    untied = M6(tiny(tie_embeddings=False))
    assert tied.head.weight is tied.words.weight
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert extra == 16 * len(d.WORDS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 5}, "patch_size 5"),
        ({"num_heads": 3}, "num_heads 3"),
        ({"vocabulary_size": 2}, "vocabulary_size 2"),
    ],
)
def test_wrong_sizes_are_named(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(tiny(), **changes)


def test_every_module_with_parameters_can_initialise_itself() -> None:
    for module in M6(tiny()).modules():
        if any(True for _ in module.parameters(recurse=False)):
            assert callable(getattr(module, "reset_parameters", None)), type(module)


# ---- the drawings


def test_a_drawing_depends_on_its_number_only() -> None:
    all_at_once = Drawings(100, seed=3).batch(range(20))
    other_order = Drawings(50, seed=3).batch([7, 19, 7, 2])
    for name, tensor in all_at_once.items():
        assert torch.equal(tensor[[7, 19, 7, 2]], other_order[name])
        assert torch.equal(tensor[5], Drawings(10, seed=3)[5][name])
    for other in (Drawings(100, seed=4), Drawings(100, seed=3, split="held_out")):
        assert not torch.equal(other.batch(range(20))["pixels"], all_at_once["pixels"])


def test_splits_share_no_scene_and_no_caption() -> None:
    train = set(scenes_of_split("train").tolist())
    held_out = set(scenes_of_split("held_out").tolist())
    assert not train & held_out
    assert train | held_out == set(range(d.NUM_SCENES))
    assert 0.07 < len(held_out) / d.NUM_SCENES < 0.13
    captions = {Scene.of_number(number).caption() for number in range(d.NUM_SCENES)}
    assert len(captions) == d.NUM_SCENES  # another scene always has another caption
    described = [Drawings(500, 0, split).batch(range(500)) for split in d.SPLITS]
    seen, new = (
        {decode(b["labels"][i]) for i in d.is_description(b["prompt_ids"]).nonzero()[:, 0]}
        for b in described
    )
    assert seen and new and not seen & new


def test_captions_read_back_as_words() -> None:
    text = "a small red circle left of a large blue square"
    assert decode(encode(text, d.CAPTION_LENGTH, end=True)) == text
    batch = Drawings(50).batch(range(50))
    for caption_ids, labels in zip(
        batch["caption_ids"].tolist(), batch["labels"].tolist(), strict=True
    ):
        assert caption_ids == [START, *labels[:-1]]
        assert labels.count(END) == 1 and set(labels[labels.index(END) + 1 :]) <= {PAD}
    with pytest.raises(ValueError, match="11 tokens, more than 5"):
        encode(text, 5, end=True)


def test_captions_tell_what_the_pixels_show() -> None:
    """Reads sides, sizes, colours and shapes from the pixels alone, and compares with the
    caption.
    """
    batch = Drawings(400, seed=1).batch(range(400))
    for i in d.is_description(batch["prompt_ids"]).nonzero()[:, 0].tolist():
        pixels = batch["pixels"][i].permute(1, 2, 0).numpy() * d.DEVIATION + d.MEAN
        covered = np.ptp(pixels, axis=-1) > 0.2  # paper is grey
        middle = d.IMAGE_SIZE // 2
        text = decode(batch["labels"][i])
        axis = 0 if "above" in text or "at the" in text else 1
        halves = [np.take(covered, np.arange(start, start + middle), axis) for start in (0, middle)]
        colours = [np.take(pixels, np.arange(start, start + middle), axis) for start in (0, middle)]
        seen = [
            _seen(colour[half], half) if half.any() else None
            for half, colour in zip(halves, colours, strict=True)
        ]
        words = [thing for thing in seen if thing]
        if len(words) == 2:
            expected = f"{words[0]} {'above' if axis == 0 else 'left of'} {words[1]}"
        else:
            sides = (
                ("at the top", "at the bottom") if axis == 0 else ("on the left", "on the right")
            )
            expected = f"{words[0]} {sides[0] if seen[0] else sides[1]}"
        assert text == expected


def _seen(colours: np.ndarray, covered: np.ndarray) -> str:
    """`a small red circle`, from the pixels of one shape and where they are."""
    rows = covered.any(1).nonzero()[0]
    columns = covered.any(0).nonzero()[0]
    box = covered[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    size = "large" if box.shape[1] > 8 else "small"
    red, green, blue = colours.mean(0) > 0.45
    colour = {
        (True, False, False): "red",
        (False, True, False): "green",
        (False, False, True): "blue",
        (True, True, False): "yellow",
    }[(bool(red), bool(green), bool(blue))]
    if box[0, 0]:
        shape = "square"
    elif box[-1, 0] and box[-1, -1]:
        shape = "triangle"  # only its lower corners are there
    else:
        shape = "circle" if box.mean() > 0.7 else "cross"
    return f"a {size} {colour} {shape}"


def test_a_wrong_split_or_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'test'"):
        Drawings(10, split="test")
    with pytest.raises(IndexError, match="sample 10 of 10"):
        Drawings(10).batch([3, 10])


# ---- with Whale


def test_engine_gives_the_local_loss_and_weights() -> None:
    """One rank, 4 micro-batches, float64, 2 steps of SGD."""
    batches = [
        {**b, "pixels": b["pixels"].double()}
        for b in (Drawings(100).batch(range(i, i + BATCH)) for i in (0, 30))
    ]
    local = M6(tiny()).double()
    model = M6(tiny()).double()
    model.load_state_dict(local.state_dict())
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    wh.init(wh.Config(num_micro_batch=4))
    engine = wh.parallelize(
        model, batches[0], optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    for batch in batches:
        loss = local(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert engine.step(batch).loss == pytest.approx(loss.item(), rel=1e-12)
    largest = max(p.abs().max().item() for p in local.parameters())
    for name, value in engine.full_state_dict().items():
        assert (value - local.state_dict()[name]).abs().max().item() <= 1e-12 * largest, name


def test_plan_of_the_demo_has_two_stages_of_similar_time() -> None:
    plan = wh.plan(
        lambda: wh.annotate(
            M6(M6Config.small()), {"encoder": wh.replicate(1), "decoder": wh.replicate(1)}
        ),
        Drawings(100).batch(range(64)),
        cluster=4,
        config={"num_micro_batch": 4},
    )
    assert (len(plan.stages), plan.num_replicas) == (2, 2)
    first, second = (stage.forward_s for stage in plan.stages)
    # 1.29 by the cost model, 0.65 measured with 8 samples a micro-batch: the decoder has fewer FLOP
    # in more and smaller operations. Another
    # decoder layer would even out the estimate (0.87) and make the measured one worse.
    assert 1 / 1.35 < first / second < 1.35
    assert [name for name, stages in plan.holders.items() if len(stages) > 1] == ["words.weight"]


@pytest.mark.slow  # 12 s of one core
def test_m6_10b_is_planned_without_weights() -> None:
    config = M6Config.m6_10b()
    batch_size = 35
    ids = torch.ones(batch_size, config.caption_length, dtype=torch.long)
    batch = {
        "pixels": torch.zeros(batch_size, 3, config.image_size, config.image_size),
        "prompt_ids": ids,
        "caption_ids": ids,
        "labels": ids,
    }
    plan = wh.plan(
        lambda: M6(config), batch, cluster=8, config={"num_task_graph": 8, "num_micro_batch": 35}
    )
    assert (len(plan.stages), plan.num_micro_batch) == (8, 35)
    times = [stage.forward_s for stage in plan.stages]
    assert max(times) < 1.05 * min(times)
    layers = (
        12 * config.num_encoder_layers + 16 * config.num_decoder_layers
    ) * config.width**2  # without biases and norms
    held = sum(stage.parameter_bytes for stage in plan.stages) / 4
    words = config.vocabulary_size * config.width
    assert plan.holders["words.weight"][0] == 0 and len(plan.holders["words.weight"]) >= 2
    assert held == pytest.approx(layers + len(plan.holders["words.weight"]) * words, rel=2e-3)
