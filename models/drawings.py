"""Drawings with captions, made by code: one or two shapes side by side or one above the other, and
what there is to say about them.

    describe the picture      a small red circle left of a large blue square
    what is on the right      a large blue square
    what is at the top        nothing

A *scene* is what a caption can tell: sizes, colours, shapes and where they are. One scene gives
many drawings: exact places and shades differ. One scene in ten is held out, so that no caption of
the `held_out` split has been seen in training.

Sample i is a pure function of (seed, split, i), by hashing: every rank can draw any sample.

Suffixes of arrays: B samples, O = 2 objects, Y and X pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from models.m6 import END, PAD, START

IMAGE_SIZE = 24
"""pixels, in both directions"""

SIZES = ("small", "large")
COLOURS = {
    "red": (0.9, 0.15, 0.15),
    "green": (0.15, 0.75, 0.2),
    "blue": (0.2, 0.3, 0.95),
    "yellow": (0.95, 0.85, 0.15),
}
SHAPES = ("circle", "square", "triangle", "cross")
RADIUS = (3.0, 5.0)
"""pixels, of a small and of a large shape"""

RELATIONS = ("left of", "above")
"""of the first object to the second; by axis: 0 side by side, 1 one above the other"""
SIDES = (("on the left", "on the right"), ("at the top", "at the bottom"))
"""where the first and the second object are, by axis"""

DESCRIBE = "describe the picture"
QUESTION = "what is"
NOTHING = "nothing"
DESCRIBED_SHARE = 0.75
"""share of samples whose prompt is `DESCRIBE`; the others ask for one side"""

SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 10

_TEXTS = (
    DESCRIBE,
    QUESTION,
    NOTHING,
    "a",
    *SIZES,
    *COLOURS,
    *SHAPES,
    *RELATIONS,
    *SIDES[0],
    *SIDES[1],
)
WORDS = ("<pad>", "<start>", "<end>", *dict.fromkeys(" ".join(_TEXTS).split()))
"""the vocabulary; its first three are `PAD`, `START` and `END`"""
_ID = {word: number for number, word in enumerate(WORDS)}

PROMPT_LENGTH = 5
CAPTION_LENGTH = 11
"""ten words and the end"""

NUM_OBJECTS = len(SIZES) * len(COLOURS) * len(SHAPES)
_NUM_PLACES = NUM_OBJECTS + 1  # an object, or nothing there

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Object:
    """One shape."""

    size: str
    colour: str
    shape: str

    @staticmethod
    def of_number(number: int) -> Object:
        rest, shape = divmod(number, len(SHAPES))
        size, colour = divmod(rest, len(COLOURS))
        return Object(SIZES[size], tuple(COLOURS)[colour], SHAPES[shape])

    def text(self) -> str:
        return f"a {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One or two objects on one axis."""

    axis: int
    objects: tuple[Object | None, Object | None]
    """on the left and on the right, or at the top and at the bottom"""

    @staticmethod
    def of_number(number: int) -> Scene:
        axis, first, second = _scene_parts(np.array([number]))[0].tolist()
        return Scene(axis, (_object(first), _object(second)))

    def caption(self) -> str:
        """All there is to say."""
        first, second = self.objects
        if first is not None and second is not None:
            return f"{first.text()} {RELATIONS[self.axis]} {second.text()}"
        side = 0 if first is not None else 1
        return f"{self.answer(side)} {SIDES[self.axis][side]}"

    def answer(self, side: int) -> str:
        """What is on one side."""
        thing = self.objects[side]
        return thing.text() if thing is not None else NOTHING


NUM_SCENES = 2 * (_NUM_PLACES**2 - 1)
"""two axes; each side holds one of the objects or nothing, but not nothing on both"""


class Drawings(Dataset[dict[str, Tensor]]):
    """Samples as M6 takes them: `pixels`, `prompt_ids`, `caption_ids` (begins with `START`),
    `labels` (the next words).
    """

    def __init__(self, num_samples: int, seed: int = 0, split: str = "train") -> None:
        if split not in SPLITS:
            raise ValueError(f"Drawings: split must be one of {', '.join(SPLITS)}, not {split!r}")
        self.num_samples = num_samples
        self.scenes = scenes_of_split(split)
        self._key = _hash(_hash(np.array([seed], dtype=np.uint64)) + np.uint64(SPLITS.index(split)))
        self._prompt_ids, self._label_ids = _all_texts()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Many samples at once: under 0.1 ms each, more than ten times faster than one by one."""
        for index in (min(indices), max(indices)):
            if not 0 <= index < self.num_samples:
                raise IndexError(f"sample {index} of {self.num_samples} drawings")
        draw = _Numbers(self._key, np.asarray(indices, dtype=np.uint64))
        scene_B = self.scenes[draw.below(len(self.scenes))]
        parts = _scene_parts(scene_B)
        pixels = torch.from_numpy(_paint(parts, draw))
        prompt_B = np.where(
            draw.uniform() < DESCRIBED_SHARE, 0, 1 + draw.below(2)
        )  # describe, ask for the first, for the second side
        prompt_ids = self._prompt_ids[parts[:, 0], prompt_B]
        labels = self._label_ids[scene_B, prompt_B]
        caption_ids = torch.cat([torch.full((len(labels), 1), START), labels[:, :-1]], 1)
        return {
            "pixels": pixels,
            "prompt_ids": prompt_ids,
            "caption_ids": caption_ids,
            "labels": labels,
        }


def scenes_of_split(split: str) -> Numbers:
    """Numbers of the scenes that a split draws from."""
    numbers = np.arange(NUM_SCENES)
    held_out = _hash(numbers.astype(np.uint64)) % np.uint64(HELD_OUT_EVERY) == 0
    return numbers[held_out] if split == "held_out" else numbers[~held_out]


def is_description(prompt_ids: Tensor) -> Tensor:
    """(B,) whether each prompt asks for the whole caption."""
    return prompt_ids[:, 0] == _ID[DESCRIBE.split()[0]]


def encode(text: str, length: int, end: bool = False) -> list[int]:
    """Numbers of the words, filled up to `length`."""
    ids = [_ID[word] for word in text.split()] + [END] * end
    if len(ids) > length:
        raise ValueError(f"{text!r} has {len(ids)} tokens, more than {length}")
    return ids + [PAD] * (length - len(ids))


def decode(ids: Sequence[int] | Tensor) -> str:
    """The words up to the end, as text."""
    numbers = [int(number) for number in ids]
    stop = numbers.index(END) if END in numbers else len(numbers)
    return " ".join(WORDS[number] for number in numbers[:stop] if number not in (PAD, START))


def _all_texts() -> tuple[Tensor, Tensor]:
    """Prompts by (axis, which) and captions by (scene, which); which: 0 describe, 1 and 2 ask for a
    side.
    """
    prompts = [[DESCRIBE, *(f"{QUESTION} {side}" for side in sides)] for sides in SIDES]
    scenes = [Scene.of_number(number) for number in range(NUM_SCENES)]
    captions = [[scene.caption(), scene.answer(0), scene.answer(1)] for scene in scenes]
    return (
        torch.tensor([[encode(text, PROMPT_LENGTH) for text in texts] for texts in prompts]),
        torch.tensor(
            [[encode(text, CAPTION_LENGTH, end=True) for text in texts] for texts in captions]
        ),
    )


def _scene_parts(scene_B: Numbers) -> Numbers:
    """(B, 3): axis, number of the first object, of the second; `NUM_OBJECTS` where there
    is none.
    """
    axis_B, places_B = np.divmod(scene_B, _NUM_PLACES**2 - 1)
    first_B, second_B = np.divmod(places_B, _NUM_PLACES)
    return np.stack([axis_B, first_B, second_B], 1)


def _object(number: int) -> Object | None:
    return Object.of_number(number) if number < NUM_OBJECTS else None


# ---- painting

ALONG = 1
ACROSS = 1
"""whole pixels by which a shape is moved at most, along the axis and across it: every shape stays
in its half, and left is never top. With 2 across, M6Config.small() needs about twice as many
samples to tell the shapes apart"""
SHADES = (0.8, 1.0)
"""brightness of a shape"""
BACKGROUND = (0.0, 0.25)
"""grey of the paper"""
MEAN = np.float32(0.2)
DEVIATION = np.float32(0.2)
"""of all pixels"""


def _paint(parts: Numbers, draw: _Numbers) -> Floats:
    """(B, 3, Y, X) pixels, shifted and scaled from 0..1 to mean 0 and deviation 1."""
    axis_B1 = parts[:, :1]
    object_BO = parts[:, 1:]
    rest_BO, shape_BO = np.divmod(object_BO, len(SHAPES))
    size_BO, colour_BO = np.divmod(rest_BO, len(COLOURS))
    there_BO = object_BO < NUM_OBJECTS
    radius_BO = np.array(RADIUS, np.float32)[np.where(there_BO, size_BO, 0)]
    quarter = IMAGE_SIZE / 4
    along_BO = np.array([quarter, 3 * quarter], np.float32) + draw.whole(-ALONG, ALONG, 2)
    across_BO = IMAGE_SIZE / 2 + draw.whole(-ACROSS, ACROSS, 2)
    x_BO = np.where(axis_B1 == 0, along_BO, across_BO)
    y_BO = np.where(axis_B1 == 0, across_BO, along_BO)
    pixel = np.arange(IMAGE_SIZE, dtype=np.float32) + 0.5
    inside_BOYX = _inside(
        pixel[:, None] - y_BO[..., None, None],
        pixel - x_BO[..., None, None],
        radius_BO[..., None, None],
        shape_BO,
    )
    inside_BOYX &= there_BO[..., None, None]
    colours = (
        np.array([*COLOURS.values()], np.float32)[np.where(there_BO, colour_BO, 0)]
        * draw.between(*SHADES, 2)[..., None]
    )
    image = np.broadcast_to(
        draw.between(*BACKGROUND, 1)[..., None, None], (len(parts), 3, IMAGE_SIZE, IMAGE_SIZE)
    )
    for which in range(2):
        image = np.where(inside_BOYX[:, which, None], colours[:, which, :, None, None], image)
    return (image - MEAN) / DEVIATION


def _inside(
    down: Floats, right: Floats, radius: Floats, shape_BO: Numbers
) -> npt.NDArray[np.bool_]:
    """(B, O, Y, X) which pixels a shape covers, given their distances from its middle."""
    y = np.abs(down)
    x = np.abs(right)
    box = np.maximum(y, x) <= radius
    forms = (
        y**2 + x**2 <= radius**2,  # circle
        box,  # square
        box & (2 * x <= down + radius),  # triangle, standing on its side
        box & (np.minimum(y, x) <= 0.35 * radius),  # cross
    )
    covered = np.zeros_like(box)
    for number, form in enumerate(forms):
        covered |= form & (shape_BO == number)[..., None, None]
    return covered


# ---- random numbers by hashing


class _Numbers:
    """Random numbers for a set of samples; each call draws new ones. The same for a sample whatever
    the others are.
    """

    def __init__(self, key: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> None:
        self._of_sample = _hash(key + _hash(indices))
        self._calls = 0

    def _next(self) -> npt.NDArray[np.uint64]:
        self._calls += 1
        return _hash(self._of_sample + np.uint64(self._calls))

    def below(self, limit: int) -> Numbers:
        return (self._next() % np.uint64(limit)).astype(np.int64)

    def uniform(self) -> Floats:
        return (self._next() >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)

    def whole(self, low: int, high: int, count: int) -> Floats:
        """(B, count), `high` included"""
        return np.stack([low + self.below(high - low + 1) for _ in range(count)], 1).astype(
            np.float32
        )

    def between(self, low: float, high: float, count: int) -> Floats:
        """(B, count)"""
        return np.stack([low + (high - low) * self.uniform() for _ in range(count)], 1).astype(
            np.float32
        )


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scrambles 64-bit numbers, one to one: the finaliser of SplitMix64 (Steele, Lea,
    Flood 2014).
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
