"""The start of a job on several ranks: what they must agree on, and which weights each of them
holds.
"""

from __future__ import annotations

import warnings

import torch

from whale.capture.batch import digest
from whale.capture.prepare import CapturedModel
from whale.config import Config
from whale.devices import float32_precision
from whale.distributed.ranks import Ranks
from whale.dtypes import as_moved, in_memory
from whale.lowering.weights import (
    Init,
    digest_weights,
    initialise_weights,
    named_tensors,
    take_weights,
)
from whale.plans.plan import Plan
from whale.plans.shards import Shards
from whale.runtime.captures import same_on_all_ranks


def check_same_job(ranks: Ranks, config: Config) -> None:
    """Refuses ranks that were given other settings or other versions of torch."""
    ranks.agree("the config", config.to_dict(), "Give every rank the same wh.Config")
    versions = {"torch": torch.__version__}
    ranks.agree("the software", versions, "Install the same versions on every host")


def one_precision(ranks: Ranks) -> str | None:
    """Sees to it that float32 products round alike on all ranks; gives what the plan says about it,
    None where it is what torch does by default.
    """
    precision = float32_precision()
    ranks.agree(
        "torch.get_float32_matmul_precision()",
        precision,
        "Call torch.set_float32_matmul_precision with the same value on every rank",
    )
    have_tf32 = ranks.gather(ranks.device.has_tf32)
    if any(have_tf32) and not all(have_tf32):
        ranks.device.forbid_tf32()
        return (
            'float32 products have precision "highest" on all devices, without TF32: rank '
            f"{have_tf32.index(False)} has no TF32"
        )
    if precision != "highest":
        return f'float32 products have precision "{precision}" on all devices, as torch is set'
    return None


def same_model(prepared: CapturedModel, ranks: Ranks) -> CapturedModel:
    """The captured model, after all ranks have found theirs to be the same."""
    ranks.agree(
        "a tensor attribute of the model that is neither parameter nor buffer",
        digest(
            [prepared.captured.constants[name] for name in sorted(prepared.captured.constants)]
        ).hex(),
        "Seed all ranks alike before building the model, or register it as a buffer",
    )
    advice = "All ranks must build the same model from the same script, torch and transformers"
    return same_on_all_ranks(prepared, ranks, "the model", advice)


def check_num_devices(chosen: Plan, ranks: Ranks) -> None:
    """Refuses a plan for another number of devices than the job has ranks."""
    if chosen.num_devices != ranks.num_ranks:
        raise ValueError(
            f"the plan is for {chosen.num_devices} devices, this job has {ranks.num_ranks}: start "
            "it with that many ranks"
        )


def own_weights(
    model: torch.nn.Module,
    names: dict[str, str],
    chosen: Plan,
    ranks: Ranks,
    is_real: bool,
    init: Init | None,
    config: Config,
) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers, by first name, of each the part that the plan gives it:
    values of rank 0, or where nobody has any, initialised by `init`.
    """
    view = chosen.of_rank(ranks.rank)
    own = set(view.stages_of_rank(ranks.rank))
    held = [name for name, stages in view.holders.items() if own & set(stages)]
    if 0 in own:  # what the graph does not use stays on stage 0, so that checkpoints are complete
        held.extend(first for first in dict.fromkeys(names.values()) if first not in chosen.holders)
    shards = Shards(chosen)

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return shards.on(name, ranks.rank).take(tensor)

    if is_real:
        _take_first_ranks_values(model, ranks)
        return take_weights(model, held, ranks.device.name, part)
    return initialise_weights(model, held, names, init, config.seed, ranks.device.name, part)


def _take_first_ranks_values(model: torch.nn.Module, ranks: Ranks) -> None:
    """Rank 0's values count; others that differ are overwritten, with a warning."""
    if not ranks.is_distributed:
        return
    digests = ranks.gather(digest_weights(model))
    different: dict[str, list[int]] = {}
    for name, first in digests[0].items():
        which = [rank for rank, own in enumerate(digests) if own.get(name) != first]
        if which:
            different[name] = which
    if not different:
        return
    if ranks.rank == 0:
        some = next(iter(different))
        warnings.warn(
            f"{len(different)} tensors differ between ranks (first: {some}, on ranks "
            f"{different[some]}): rank 0's values are used. Seed all ranks alike before building "
            "the model, or pass a function that builds it",
            stacklevel=3,
        )
    done: set[int] = set()
    for name, _, _, tensor in named_tensors(model):
        if name in different and id(tensor) not in done:
            done.add(id(tensor))
            moved = in_memory(tensor.detach()).contiguous().to(ranks.device.name)
            torch.distributed.broadcast(as_moved(moved), src=0, group=ranks.world)
            with torch.no_grad():
                tensor.copy_(moved)
