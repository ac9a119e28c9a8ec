"""Random small models, written as Python source; each follows from its seed alone.

A model is a chain of two to four blocks. A block gets `h` (batch, LENGTH, WIDTH), the batch's
`ids` and `mask`, and what blocks before it left over (of any type: such values cross cuts). Inside,
every line applies one operation of `OPERATIONS` to values that are there. Lines are run as they are
written: one that torch refuses, or that gives something too large or not finite, is left out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fuzz.operations import (
    LENGTH,
    NUM_SAMPLES,
    NUM_WORDS,
    OPERATIONS,
    WIDTH,
    Block,
    Operation,
    over_samples,
    state,
)

NUM_CLASSES = 3

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_default_dtype(torch.float64)
"""


@dataclass(frozen=True)
class FuzzModel:
    """A model as source, and what a test must know of it."""

    seed: int
    source: str
    num_blocks: int
    is_stateful: bool
    """buffers change with each micro-batch: the reference has the same ones"""
    mixes: bool
    """samples know of each other: for one micro-batch only"""


def make_model(seed: int) -> FuzzModel:
    """The model of this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return _make_model(seed)
        finally:
            torch.set_default_dtype(before)


def _make_model(seed: int) -> FuzzModel:
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 4)
    mixes = rng.random() < 0.12
    stateless = rng.random() < 0.7
    blocks: list[Block] = []
    texts: list[str] = []
    calls: list[str] = []
    extra: dict[str, Tensor] = {}
    for number in range(num_blocks):
        block = Block(rng)
        block.values = {
            "h": torch.randn(NUM_SAMPLES, LENGTH, WIDTH),
            "ids": torch.randint(0, NUM_WORDS, (NUM_SAMPLES, LENGTH)),
            "mask": torch.rand(NUM_SAMPLES, LENGTH) > 0.4,
        }
        taken = [name for name in extra if rng.random() < 0.7]
        block.values |= {name: extra[name] for name in taken}
        operations = [(op, w) for op, w in OPERATIONS if not (stateless and op is state)]
        operations += [(over_samples, 6)] if mixes else []
        _write_lines(block, operations, rng.randint(2, 7))
        left = _left_over(block, number, last=number == num_blocks - 1)
        outputs = _outputs(block)
        results = ["out", *left.values()]
        block.lines.append(f"out = {outputs}")
        block.lines.append(f"return {', '.join(results)}")
        texts.append(_block_text(number, block, taken))
        arguments = ", ".join(["h", "ids", "mask", *taken])
        call = f"self.b{number}({arguments})"
        # torch's own checkpoint updates buffers once more in the recomputation, Whale never does
        if rng.random() < 0.06 and not block.is_stateful:
            call = f"checkpoint(self.b{number}, {arguments}, use_reentrant=False)"
        calls.append(f"{', '.join(['h', *left])} = {call}")
        calls += _between(rng, number)
        extra |= {name: block.values[value] for name, value in left.items()}
        blocks.append(block)
    is_stateful = any(block.is_stateful for block in blocks)
    texts.append(_model_text(rng, num_blocks, calls, is_stateful))
    return FuzzModel(seed, HEAD + "\n\n".join(["", *texts]), num_blocks, is_stateful, mixes)


def _write_lines(block: Block, operations: list[tuple[Operation, int]], count: int) -> None:
    made = 0
    for _ in range(20 * count):
        operation = block.rng.choices([op for op, _ in operations], [w for _, w in operations])[0]
        try:
            line = operation(block)
        except (KeyError, IndexError):
            continue
        made += block.add(line)
        if made == count:
            return


def _left_over(block: Block, number: int, last: bool) -> dict[str, str]:
    """Values that later blocks may take: name outside -> name inside."""
    own = [name for name in block.values if name.startswith("v")]
    if last or not own:
        return {}
    count = block.rng.choice([0, 0, 1, 1, 2])
    chosen = block.rng.sample(own, min(count, len(own)))
    return {f"e{number}{place}": name for place, name in enumerate(chosen)}


def _outputs(block: Block) -> str:
    """Everything that nothing else has used, as one tensor (batch, LENGTH, WIDTH)."""
    text = "\n".join(block.lines)
    own = [name for name in block.values if name.startswith("v") and text.count(name) == 1]
    parts = []
    for name in own[-3:] or ["h"]:
        value = block.values[name]
        expression = name
        size = value.numel() // NUM_SAMPLES
        if value.is_complex():
            expression = f"torch.view_as_real({name}.resolve_conj())"
            size *= 2
        elif not value.is_floating_point():
            expression = f"{name}.to(torch.float64)"
        if tuple(value.shape[1:]) == (LENGTH, WIDTH) and not value.is_complex():
            parts.append(expression)
            continue
        module = block.attribute()
        block.init.append(f"{module} = nn.Linear({size}, {LENGTH * WIDTH})")
        rows = (
            f"{expression}.flatten(1)" if size > 1 or value.ndim > 1 else f"{expression}[:, None]"
        )
        parts.append(f"{module}({rows}).unflatten(1, ({LENGTH}, {WIDTH}))")
    joined = " + ".join(parts)
    return block.rng.choice(
        [
            f"torch.tanh({joined})",
            f"h + torch.tanh({joined})",
            f"F.layer_norm({joined}, ({WIDTH},))",
        ]
    )


def _between(rng: random.Random, number: int) -> list[str]:
    """Lines of the model itself after a block."""
    kind = rng.random()
    if kind < 0.15:
        return [f"kept{number} = h", "h = torch.where(mask[..., None], h, 0.5 * h)"]
    if kind < 0.3:
        return ["h = h + 0.5 * x"]
    if kind < 0.4:
        return ["h = h + self.shared(h)", "h = h / (1 + h.abs())"]
    if kind < 0.48:
        return ["h = h + self.words(ids)"]
    if kind < 0.56:
        return ["h = h * self.scale", "h = h / (1 + h.abs())"]
    return []


def _block_text(number: int, block: Block, taken: list[str]) -> str:
    arguments = ", ".join(["self", "h", "ids", "mask", *taken])
    rows = [
        f"class Block{number}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
    ]
    rows += [f"        {line}" for line in block.init]
    rows += [f"    def forward({arguments}):"]
    rows += [f"        {line}" for line in block.lines]
    return "\n".join(rows)


LOSSES = [
    "F.cross_entropy(self.head(h.mean(1)), labels)",
    "F.mse_loss(self.head(h).mean((1, 2)), target)",
    "(self.head(h).square().mean(-1) * mask).sum() / mask.sum()",
    "F.cross_entropy(self.head(h).flatten(0, 1), (ids % 3).flatten())",
    "self.head(h).square().flatten(1).sum(1).mean()",
    "F.l1_loss(self.head(h[:, 0])[:, 0], target)",
    "F.binary_cross_entropy_with_logits(self.head(h)[..., 0], mask.to(h.dtype))",
    "F.smooth_l1_loss(self.head(h[:, -1]), target[:, None].expand(-1, 3))",
    "F.nll_loss(self.head(h.amax(1)).log_softmax(-1), labels)",
    "-(F.logsigmoid(self.head(h).sum(-1)) * mask).mean()",
    "F.cross_entropy(self.head(h).transpose(1, 2), torch.where(mask, ids % 3, -100))",
    "self.head(h).abs().sum() / x.shape[0]",
    "F.cross_entropy((h @ self.words.weight.t()).flatten(0, 1), ids.flatten())",
    "F.cross_entropy(self.head(h.mean(1)), labels, label_smoothing=0.1)",
    "F.kl_div(self.head(h).log_softmax(-1).flatten(0, 1), self.head(x).softmax(-1).flatten(0, 1), reduction='batchmean')",
    "F.mse_loss(h, x, reduction='sum') / x.size(0)",
    "(F.huber_loss(self.head(h)[..., 0], x[..., 0], reduction='none') * (1 + target[:, None].abs())).mean()",
    "F.cross_entropy(self.head(h.mean(1)), labels, weight=torch.tensor([0.2, 0.5, 1.0]), reduction='sum') / x.shape[0]",
    "(self.head(h).square().mean(-1) * mask).sum(1).div(mask.sum(1).clamp(min=1)).mean()",
    "F.cross_entropy(self.head(h.mean(1)), labels, weight=torch.tensor([0.2, 0.5, 1.0]))",
    "(self.head(h).square() * mask[..., None]).sum() / (3 * mask.sum().clamp(min=1))",
    "F.multilabel_soft_margin_loss(self.head(h.amin(1)), (ids[:, :3] > 3).to(h.dtype))",
    "torch.stack([self.head(h).mean(), self.head(h).square().mean()]).sum()",
]
COUNTED = ("mask.sum()", "-100", "1.0]))")
"""losses with another denominator than the samples: local micro-batches would not give the same"""
PENALTIES = [
    "0.01 * self.scale.square().sum()",
    "0.02 * self.head.weight.abs().sum()",
    "0.01 * sum(p.square().sum() for p in self.b0.parameters() if p.is_floating_point())",
]


def _model_text(rng: random.Random, num_blocks: int, calls: list[str], is_stateful: bool) -> str:
    losses = [
        loss for loss in LOSSES if not (is_stateful and any(each in loss for each in COUNTED))
    ]
    terms = rng.sample(losses, rng.choice([1, 1, 2, 3]))
    terms += rng.sample(PENALTIES, rng.choice([0, 0, 1]))
    rows = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    rows += [f"        self.b{number} = Block{number}()" for number in range(num_blocks)]
    rows += [
        f"        self.scale = nn.Parameter(torch.randn({WIDTH}))",
        f"        self.head = nn.Linear({WIDTH}, {NUM_CLASSES})",
        f"        self.shared = nn.Linear({WIDTH}, {WIDTH})",
        f"        self.words = nn.Embedding({NUM_WORDS}, {WIDTH})",
    ]
    if rng.random() < 0.2:
        rows.append("        tie(self)")
    rows += ["    def forward(self, x, ids, mask, labels, target):", "        h = x"]
    rows += [f"        {line}" for line in calls]
    rows += [f"        return {' + '.join(terms)}", "", TIE]
    return "\n".join(rows)


TIE = '''
def tie(model):
    """One parameter for the first two of the same shape in two blocks."""
    seen = {}
    for name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            key = (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            if key in seen and seen[key][0].split(".")[0] != name.split(".")[0]:
                setattr(module, leaf, seen[key][1])
                return
            seen.setdefault(key, (name, parameter))
'''


def make_batch(seed: int, num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_samples, LENGTH, generator=generator) > 0.4
    mask[0, 0] = True
    return {
        "x": torch.randn(num_samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64),
        "ids": torch.randint(0, NUM_WORDS, (num_samples, LENGTH), generator=generator),
        "mask": mask,
        "labels": torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator),
        "target": torch.randn(num_samples, generator=generator, dtype=torch.float64),
    }
