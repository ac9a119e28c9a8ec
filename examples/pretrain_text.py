"""Pre-trains a small GPT on a text file, character by character, and lets it write.

    python examples/pretrain_text.py                          trains on whales.txt beside it
    whale run -n 4 examples/pretrain_text.py my_book.txt      any text, on 4 ranks
    whale board runs                                          its curves in a browser

A second run continues where the first one ended, on as many ranks as it has. It prints

    step 20/100  loss 2.4283
    step 40/100  loss 2.2242
    ...
    step 100/100  loss 2.0863
    the model writes: 'The the the the ...'
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh

TEXT = Path(__file__).parent / "whales.txt"
WIDTH = 64
NUM_HEADS = 4
NUM_BLOCKS = 4
LENGTH = 64
EVERY = 20  # steps

# Suffixes of tensors: B samples, T characters, D features, V characters of the alphabet.


class Block(nn.Module):
    """One transformer block that looks back only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class CharacterGPT(nn.Module):
    """Scores of the next character; with targets, their mean cross entropy."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_characters, bias=False)

    def forward(self, x_BT: Tensor, target_BT: Tensor | None = None) -> Tensor:
        places = torch.arange(x_BT.shape[1], device=x_BT.device)
        x_BTD = self.embedding(x_BT) + self.positions(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        scores_BTV = self.head(self.norm(x_BTD))
        if target_BT is None:
            return scores_BTV
        return F.cross_entropy(scores_BTV.flatten(0, 1), target_BT.flatten())


def draw_batch(text: Tensor, size: int, step: int) -> dict[str, Tensor]:
    """Pieces of the text from random places, the same for a step in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (size, 1), generator=generator)
    pieces = text[starts + torch.arange(LENGTH + 1)]
    return {"x_BT": pieces[:, :-1].contiguous(), "target_BT": pieces[:, 1:].contiguous()}


def write(model: nn.Module, alphabet: str, start: str, number: int) -> str:
    """So many characters after `start`, always the likeliest one."""
    words = [alphabet.index(character) for character in start]
    with torch.no_grad():
        for _ in range(number):
            scores = model(torch.tensor([words[-LENGTH:]]))
            words.append(int(scores[0, -1].argmax()))
    return "".join(alphabet[word] for word in words)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--folder", default="runs/pretrain_text")
    options = parser.parse_args()
    content = options.text.read_text(encoding="utf-8")
    alphabet = "".join(sorted(set(content)))
    text = torch.tensor([alphabet.index(character) for character in content])

    wh.init({"seed": 1, "run_folder": options.folder, "clip_grad_norm": 1.0})
    engine = wh.parallelize(
        lambda: CharacterGPT(len(alphabet)),
        draw_batch(text, options.batch, 0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )
    checkpoints = Path(options.folder) / "checkpoints"
    if engine.load(checkpoints) is not None and wh.rank() == 0:
        print(f"continuing from step {engine.step_count}; remove {options.folder} to start anew")
    while engine.step_count < options.steps:
        result = engine.step(draw_batch(text, options.batch, engine.step_count))
        if engine.step_count % EVERY == 0:
            engine.save(checkpoints)
            if wh.rank() == 0:
                print(
                    f"step {engine.step_count}/{options.steps}  loss {result.loss:.4f}", flush=True
                )
    weights = engine.full_state_dict()
    if wh.rank() == 0:
        model = CharacterGPT(len(alphabet))
        model.load_state_dict(weights)
        print(f"the model writes: {write(model, alphabet, content[:1], 60)!r}")


if __name__ == "__main__":
    main()
