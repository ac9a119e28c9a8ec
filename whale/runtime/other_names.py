"""Methods that models and the engines of other frameworks have, and what a Whale engine has for
them: for the message of whoever types one by habit.
"""

from __future__ import annotations

import torch

TRAINS = "engine.step(batch): forward, backward, all-reduce and update of one mini-batch"
MODES = "engine.step(batch) to train, engine.evaluate(batch) to evaluate; each sets its own mode"
PLACED = "leave it out: the plan says where everything is, and batches may be on the host"
INSTEAD = {
    "backward": f"{TRAINS}; engine.forward_backward and engine.update do it in parts",
    "forward": TRAINS,
    "zero_grad": f"leave it out. {TRAINS}",
    "train": MODES,
    "eval": MODES,
    "no_sync": '"num_micro_batch" in the config accumulates gradients inside of engine.step',
    "parameters": "engine.named_parameters(): those of this rank",
    "state_dict": "engine.full_state_dict() on all ranks, or engine.save(folder)",
    "load_state_dict": "engine.load(folder), or wh.parallelize(..., weights=folder)",
    "save_checkpoint": "engine.save(folder) on all ranks",
    "load_checkpoint": "engine.load(folder) on all ranks",
    "generate": "engine.module() on all ranks: a whole local model on rank 0",
    "to": PLACED,
    "cpu": PLACED,
}
"""name -> what to try"""


def instead(name: str) -> str:
    """What is said of an attribute that an engine does not have."""
    advice = INSTEAD.get(name)
    if advice is None and hasattr(torch.nn.Module, name):
        advice = "leave it out, or engine.module() on all ranks: a whole local model that has it"
    return f"a Whale engine has no {name!r}" + (f". Try: {advice}" if advice else "")
