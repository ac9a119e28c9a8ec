"""Optimizer states whose home is the memory of the host or a disk: the update goes through blocks
of parameters, and the states of one are on the device from just before its update to just after it,
those of the next on their way (docs/memory.md).

Where the plan updates a block on the host, and its parameters are in host memory, too, the
optimizer works on its states where they lie, by torch's fused kernels for CPUs; under the next
forward where the plan says so (`runtime/updates_ahead.py`), but for the first update of a
parameter.

States come to be in the first update of a block: then it gets its layout, the tensors of its states
one behind the other, and its place at home. From then on they lie in a slot of a pool during the
update. Counters (one number) stay with the optimizer. Between steps `optimizer.state` has these
only; `expand` puts the others back, as they lie at home, for checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from whale.compat import has_step_hooks
from whale.costs.optimizer_factory import BY_PARAMETER
from whale.devices import LocalDevice
from whale.plans.blocks import slots_of
from whale.runtime.homes import (
    BlockHomes,
    HostHome,
    aligned,
    bytes_of,
    contiguous_strides,
    tensor_in,
)
from whale.runtime.job import Job
from whale.runtime.residence import Pool, Residence
from whale.runtime.stage_updates import step_some
from whale.runtime.updates_ahead import OptimizerNow, UpdatesAhead

STREAMED = BY_PARAMETER | {torch.optim.Adafactor, torch.optim.Muon}
"""optimizers that update each parameter by its own gradient and state only"""


@dataclass(frozen=True)
class StateBlock:
    """Parameters of this rank whose states come and go together."""

    parameters: tuple[torch.nn.Parameter, ...]
    home: HostHome
    at_home: bool = False
    """it is updated where it lies: its parameters are in the memory of the host, too"""
    ahead: AheadBlock | None = None
    """how it is updated under the next forward; None: before the step is over"""


@dataclass(frozen=True)
class AheadBlock:
    """What the next forward waits for."""

    number: int
    """of the block among those of this rank (`Zero.blocks`)"""
    names: tuple[str, ...]
    copy_behind: Callable[[int], Callable[[], None] | None]
    """called when its update is queued: gives what takes the new weights to the device"""


@dataclass(frozen=True)
class _State:
    """A tensor of the optimizer state in a block."""

    parameter: torch.nn.Parameter
    key: str
    start: int
    """byte of the block at which it lies"""
    empty: Tensor
    """of its dtype"""
    shape: tuple[int, ...]

    def inside(self, buffer: Tensor) -> Tensor:
        """Where it lies in the bytes of its block."""
        return tensor_in(buffer, self.start, self.empty, self.shape, contiguous_strides(self.shape))

    @property
    def kind(self) -> tuple[object, ...]:
        """What is the same in two layouts where a state is."""
        return (id(self.parameter), self.key, self.shape, self.empty.dtype)


@dataclass(frozen=True)
class _Layout:
    states: tuple[_State, ...]
    num_bytes: int


class OffloadedStates:
    """Steps an optimizer whose states live elsewhere."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        blocks: Sequence[StateBlock],
        device: LocalDevice,
        ahead: UpdatesAhead | None = None,
    ) -> None:
        """`blocks`: in the order of their update; parameters of no block keep their states.
        `ahead`: runs updates under the next forward.
        """
        self._optimizer = optimizer
        self._ahead = ahead
        refuse(optimizer)
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._blocks: list[StateBlock] = []
        for block in blocks:
            parameters = tuple(each for each in block.parameters if id(each) in own)
            if parameters:
                self._blocks.append(replace(block, parameters=parameters))
        self._device = device
        self._layouts: dict[int, _Layout] = {}
        self._residence: Residence | None = None
        """None until all blocks have had a layout, and after one has changed"""
        self._known: set[int] = set()
        """ids of parameters that have had an update, and so the states that they will have"""
        self._changed: list[int] = []
        """blocks that got other states under a forward, which are still with the optimizer"""

    @property
    def pool_bytes(self) -> int:
        """Bytes on the device through which states come and go."""
        return self._residence.pool.num_bytes if self._residence is not None else 0

    def step(self, ahead: bool = False) -> None:
        """One step of the optimizer. `ahead`: blocks that may be are updated under what follows, up
        to `finish`.
        """
        self.finish()
        inside = {id(each) for block in self._blocks for each in block.parameters}
        rest = {
            id(each)
            for group in self._optimizer.param_groups
            for each in group["params"]
            if id(each) not in inside
        }
        if rest:
            step_some(self._optimizer, rest)
        # of a block without gradients nothing changes
        due = [
            number
            for number, block in enumerate(self._blocks)
            if any(each.grad is not None for each in block.parameters)
        ]
        later: list[int] = []
        if ahead:
            later = [number for number in due if self._may_wait(self._blocks[number])]
        now = [number for number in due if number not in later]
        residence = self._residence or self._made()
        streamed = [number for number in now if not self._blocks[number].at_home]
        residence.begin([(number,) for number in streamed if number in self._layouts])
        is_old = False
        for number in now:
            is_old |= self._step_block(number, residence)
        if is_old:
            residence.drain()
            self._residence = None
        if later:
            self._begin_later(later)

    # ---- under the next forward

    def _may_wait(self, block: StateBlock) -> bool:
        """Whether a block may be updated under the next forward: all its states are known."""
        trained = [each for each in block.parameters if each.grad is not None]
        return block.ahead is not None and all(id(each) in self._known for each in trained)

    def _begin_later(self, numbers: Sequence[int]) -> None:
        """Queues the updates of these blocks, with the gradients and options of now."""
        assert self._ahead is not None
        now = OptimizerNow(self._optimizer)
        for number in numbers:
            block = self._blocks[number]
            assert block.ahead is not None
            optimizer = now.of(each for each in block.parameters if each.grad is not None)
            copy = block.ahead.copy_behind(block.ahead.number)
            update = partial(self._step_later, number, optimizer, copy)
            self._ahead.begin(block.ahead.number, block.ahead.names, update)

    def _step_later(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        copy: Callable[[], None] | None,
    ) -> None:
        """Updates a block, in the thread. `optimizer`: for its parameters alone."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        before = self._layouts.get(number)
        buffer = self._attached(number, before, None)
        with self._kernels(self._blocks[number], optimizer, parameters):
            optimizer.step()
        if not self._stored(number, before, buffer):
            self._changed.append(number)
        if copy is not None:
            copy()

    def finish(self) -> None:
        """Returns when all updates are over, and raises what went wrong with one."""
        if self._ahead is not None:
            self._ahead.wait_for_all()
        for number in self._changed:
            self._take_home(number, self._layout(self._blocks[number]))
        if self._changed:
            self._settle()
            self._residence = None
            self._changed.clear()

    def forget(self) -> None:
        """All states are replaced, by a checkpoint: what became of the last update no longer
        counts.
        """
        if self._ahead is not None:
            self._ahead.forget()
        self._changed.clear()

    # ---- one block

    def _step_block(self, number: int, residence: Residence) -> bool:
        """Updates the parameters of a block; whether its layout has changed."""
        block = self._blocks[number]
        before = self._layouts.get(number)
        buffer = self._attached(number, before, residence)
        with self._kernels(block, self._optimizer, block.parameters):
            step_some(self._optimizer, {id(each) for each in block.parameters})
        self._known.update(id(each) for each in block.parameters if each.grad is not None)
        if before is not None and self._stored(number, before, buffer):
            if not block.at_home:
                residence.changed(number)
            return False
        self._take_home(number, self._layout(block))
        return True

    def _attached(
        self, number: int, layout: _Layout | None, residence: Residence | None
    ) -> Tensor | None:
        """Gives the optimizer the states of a block, in the bytes that this returns. `residence`:
        brings them where they are not used at home.
        """
        if layout is None:
            return None
        buffer = self._bring(number, residence)
        for state in layout.states:
            self._optimizer.state[state.parameter][state.key] = state.inside(buffer)
        return buffer

    def _stored(self, number: int, before: _Layout | None, buffer: Tensor | None) -> bool:
        """Takes the states of a block from the optimizer, if they are those that it had; else they
        stay there.
        """
        after = self._layout(self._blocks[number])
        if before is None or buffer is None:
            return not after.states
        if not _is_same(before, after):
            return False
        for state in before.states:
            slot = state.inside(buffer)
            now = self._optimizer.state[state.parameter][state.key]
            if now.data_ptr() != slot.data_ptr():  # an optimizer that makes new tensors
                slot.copy_(now)
        self._detach(before)
        return True

    @staticmethod
    def _kernels(
        block: StateBlock, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, a block that is updated at home takes the fused kernels."""
        is_fused = block.at_home and not _begins_momentum(optimizer, parameters)
        return fused(optimizer) if is_fused else contextlib.nullcontext()

    def _bring(self, number: int, residence: Residence | None) -> Tensor:
        """The bytes of a block, where the optimizer may write to them."""
        block = self._blocks[number]
        if block.at_home:
            block.home.check(number)
            return block.home.where(number)
        assert residence is not None
        residence.need(number)
        return residence.pool.buffer(number)

    def _layout(self, block: StateBlock) -> _Layout:
        """The states that the parameters of a block have now, one behind the other."""
        found = []
        start = 0
        for parameter in block.parameters:
            for key, state in self._optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor) and state.numel() > 1:
                    empty = state.new_empty(0)
                    found.append(_State(parameter, key, start, empty, tuple(state.shape)))
                    start += aligned(state.nbytes)
        return _Layout(tuple(found), start)

    def _take_home(self, number: int, layout: _Layout) -> None:
        """The states of a block go where its home is, straight from the optimizer."""
        if not layout.states:
            self._layouts.pop(number, None)
            return
        home = self._blocks[number].home
        is_there = self._blocks[number].at_home and number in self._layouts
        pieces = []
        for state in layout.states:
            tensor = self._optimizer.state[state.parameter][state.key].contiguous()
            # a copy of what lies in its home: it moves there, over what is still to be moved
            pieces.append((state.start, bytes_of(tensor.clone() if is_there else tensor)))
        home.begin_store_pieces(number, pieces, layout.num_bytes).wait()
        self._layouts[number] = layout
        self._detach(layout)

    def _detach(self, layout: _Layout) -> None:
        for state in layout.states:
            self._optimizer.state[state.parameter].pop(state.key)

    def _made(self) -> Residence:
        """The pool for the layouts of now, and what brings blocks into it."""
        sizes = [
            self._layouts[number].num_bytes if number in self._layouts and not block.at_home else 0
            for number, block in enumerate(self._blocks)
        ]
        slot_of = slots_of(sizes, [0] * len(sizes))
        dtypes = [torch.uint8] * len(sizes)
        pool = Pool(sizes, slot_of, dtypes, self._device.name)
        self._residence = Residence(pool, BlockHomes([block.home for block in self._blocks]))
        return self._residence

    # ---- checkpoints

    def expand(self) -> None:
        """Gives the optimizer its states as they lie at home, to be read."""
        self.finish()
        self._settle()
        for number, layout in self._layouts.items():
            home = self._blocks[number].home
            home.check(number)
            where = home.where(number)
            for state in layout.states:
                self._optimizer.state[state.parameter][state.key] = state.inside(where)

    def collapse(self) -> None:
        """Takes back what `expand` gave."""
        for layout in self._layouts.values():
            self._detach(layout)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those whose states live elsewhere."""
        return [each for block in self._blocks for each in block.parameters]

    def loaded_in_portions(self) -> Iterator[Sequence[torch.nn.Parameter]]:
        """Parameters, block by block. When the next are asked for, the optimizer has the states of
        these from a checkpoint, and they go home.
        """
        self.forget()
        self._settle()
        self._residence = None
        self._layouts.clear()
        self._known.clear()
        for number, block in enumerate(self._blocks):
            yield block.parameters
            self._take_home(number, self._layout(block))

    def close(self) -> None:
        """Waits for everything on its way, and raises what went wrong."""
        try:
            if self._ahead is not None:
                self._ahead.close()
        finally:
            self._settle()

    def _settle(self) -> None:
        if self._residence is not None:
            self._residence.drain()
        self._device.synchronise()


def _is_same(before: _Layout, after: _Layout) -> bool:
    return [each.kind for each in before.states] == [each.kind for each in after.states]


FUSED_ON_HOST = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""optimizers of which torch has a fused kernel for CPUs"""
FUSED_DTYPES = (torch.float32, torch.float64)
"""in which it rounds as finely as the other forms do; of 16 bits it computes in float32"""


@contextlib.contextmanager
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, groups take the fused kernel whose form of update the user has left open."""
    open_groups = []
    if type(optimizer) in FUSED_ON_HOST:
        for group in optimizer.param_groups:
            is_open = group.get("fused") is None and group.get("foreach") is None
            is_plain = all(each.is_floating_point() for each in group["params"])
            if is_open and is_plain and not group.get("differentiable"):
                open_groups.append(group)
    for group in open_groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in open_groups:
            group["fused"] = None


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fused kernels give what the user's form of the update gives, up to rounding in the
    dtype of the parameters. They go through memory entry by entry, whatever the strides.
    """
    if type(optimizer) not in FUSED_ON_HOST:
        return False
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for each in parameters:
        is_sparse = each.grad is not None and each.grad.is_sparse
        if each.dtype not in FUSED_DTYPES or is_sparse or not each.is_contiguous():
            return False
    return not _begins_momentum(optimizer, parameters)


def _begins_momentum(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether some of these get their first momentum in this step and others have one: torch's
    fused SGD takes either all or none.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    known = set()
    for parameter in parameters:
        if parameter.grad is not None:
            known.add(optimizer.state.get(parameter, {}).get("momentum_buffer") is not None)
    return len(known) > 1


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raises where a step in pieces is not known to be the same."""
    name = type(optimizer).__name__
    if type(optimizer) not in STREAMED:
        known = ", ".join(sorted(kind.__name__ for kind in STREAMED))
        raise ValueError(
            f'"offload" of optimizer states updates some parameters at a time, and nothing says '
            f"that {name} treats each by itself. Try: one of {known}, or "
            '"offload": {"optimizer": "device"}'
        )
    if has_step_hooks(optimizer):
        raise ValueError(
            f'"offload" of optimizer states calls {name}.step() several times in a step, so that '
            "its hooks would run several times. Try: no step hooks, or "
            '"offload": {"optimizer": "device"}'
        )


def offloaded_states(
    job: Job, optimizer: torch.optim.Optimizer, updated: Mapping[str, torch.nn.Parameter]
) -> OffloadedStates | None:
    """What steps an optimizer whose states the plan gives a home elsewhere; None: there are none.
    `updated`: by name, the parameters of this optimizer, whole ones that this rank owns included.
    """
    rank = job.ranks.rank
    maker = job.homes("states")
    ahead = job.zero.ahead if job.zero is not None else None
    found = []
    for block in job.plan.blocks:
        if rank in block.ranks and block.states != "device":
            parameters = [updated[name] for name in block.parameters if name in updated]
            on_host = all(each.device.type == "cpu" for each in parameters)
            # weights that are at home on the host of an accelerator are updated there
            at_home = on_host and (block.updated_on == "host" or job.ranks.device.is_accelerator)
            state = StateBlock(tuple(parameters), maker.home(block.states), at_home)
            if ahead is not None and job.zero is not None and at_home and block.may_wait:
                number = job.zero.block_of[block.parameters[0]]
                later = AheadBlock(number, block.parameters, job.zero.copy_behind)
                state = replace(state, ahead=later)
            found.append(state)
    if not found:
        return None
    if job.config.optimizer_state != "fp32":
        raise ValueError(
            f'"optimizer_state": "{job.config.optimizer_state}" and "offload" of optimizer states '
            'cannot both be set. Try: "optimizer_state": "fp32", or '
            '"offload": {"optimizer": "device"}'
        )
    return OffloadedStates(optimizer, found, job.ranks.device, ahead)
