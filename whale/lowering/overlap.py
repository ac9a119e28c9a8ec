"""Messages under the work: a pass over the graph of one device on a grid, after `sharding/emit.py`.

An exchange is taken apart into its beginning and its end:

    weights        begin when the weight before is taken, one ahead, so that a gather travels
                   under the product before it                                                   (1)
    activations    begin where they are, end in front of their first reader
    linear layers  whose input is gathered for them alone become one function: the reduce-scatter
                   of dX travels under the product of dW (`sharded_linear`)                    (2)
    gathers        whose results the plan does not save for backward are watched, and gathered
                   again there                                                                   (3)

Autograd goes through the two halves in reverse, so in backward a gradient leaves at the end's place
and is waited for at the beginning's: what was early in forward is late in backward. All devices
have the same nodes in the same order, hence the same messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node

from whale.capture.graph import name_at
from whale.devices import backend_of
from whale.lowering.exchange import Groups, run
from whale.lowering.sharded_linear import LinearPlan, Under, sharded_linear
from whale.sharding.redistribution import plan_nothing
from whale.sharding.redistribution_steps import Redistribution

aten = torch.ops.aten

CHUNKS = 4
"""in which a linear layer gathers its input where collectives run beside compute. On gloo, which
computes and sends on the same core, chunks do not pay (docs/log.md)
"""


class Underway:
    """An exchange between its beginning and its end; in backward between its end and its
    beginning.
    """

    def __init__(self, plan: Redistribution, groups: Groups) -> None:
        self.plan = plan
        self.groups = groups
        self.way: Under | None = None
        self.token: Tensor | None = None
        """carries the history from one half to the other"""
        self.gathered: RepeatedGather | None = None
        """where the result is not to be saved for backward"""


class Begin(nn.Module):
    """Sends what has to be sent; `end_exchange` gives the result."""

    def __init__(self, plan: Redistribution, groups: Groups, again: bool) -> None:
        super().__init__()
        self.plan = plan
        self.groups = groups
        self.again = again

    def forward(self, x: Tensor) -> Underway:
        underway = Underway(self.plan, self.groups)
        underway.gathered = (
            RepeatedGather(x, self.plan, self.groups)
            if self.again and torch.is_grad_enabled()
            else None
        )
        underway.token = _Begin.apply(x, underway)  # type: ignore[no-untyped-call]
        return underway


def end_exchange(underway: Underway) -> Tensor:
    result: Tensor = _End.apply(underway.token, underway)  # type: ignore[no-untyped-call]
    underway.token = None
    if underway.gathered is not None:
        note_gathered(result, underway.gathered)
        underway.gathered = None
    return result


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, underway: Underway) -> Tensor:
        ctx.underway = underway
        underway.way = Under(x, underway.plan.forward, underway.groups)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _arrived(ctx.underway), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, underway: Underway) -> Tensor:
        ctx.underway = underway
        ctx.shape = token.shape
        result = _arrived(underway)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.underway.way = Under(gradients[0], ctx.underway.plan.backward, ctx.underway.groups)
        # never read: the gradient itself is on its way
        return gradients[0].new_empty(()).expand(ctx.shape), None


def _arrived(underway: Underway) -> Tensor:
    way = underway.way
    underway.way = None
    assert way is not None
    return way.wait()


class ShardedLinear(nn.Module):
    """A linear layer and the exchanges around it as one function, line (2)."""

    def __init__(self, plan: LinearPlan, groups: Groups) -> None:
        super().__init__()
        self.plan = plan
        self.groups = groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return sharded_linear(x, weight, bias, self.plan, self.groups)


# ---- gathered tensors that are gathered again in backward: less memory for more messages
#
# Between `begin_watching` and `end_watching` autograd asks about every tensor that it wants to
# save. One that lies in the memory of a gathered tensor is not saved; a note of its place in it is.
# The first backward that reads such a note sends the messages of the gather once more, and all who
# read the same tensor share the result, which goes with the last of them.
#
# All devices run the same operations in the same order, so they also gather again in that order.


class RepeatedGather:
    """One gather that can be repeated."""

    def __init__(self, source: Tensor, plan: Redistribution, groups: Groups) -> None:
        self.source = source.detach()
        self.plan = plan
        self.groups = groups
        self.num_readers = 0
        self._value: Tensor | None = None

    def take(self) -> Tensor:
        """The gathered tensor, for one of its readers."""
        value = (
            run(self.source, self.plan.forward, self.groups).contiguous()
            if self._value is None
            else self._value
        )
        self.num_readers -= 1
        self._value = value if self.num_readers > 0 else None
        return value


@dataclass(frozen=True)
class _Note:
    """A part of a gathered tensor, as a view of its memory."""

    gathered: RepeatedGather
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """from the first number of the gathered tensor"""

    def tensor(self) -> Tensor:
        whole = self.gathered.take()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class GatherWatch:
    """What was gathered in one forward of a chunk, by address."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], RepeatedGather]] = {}
        self.hooks = saved_tensors_hooks(self._keep, self._bring_back)

    def add(self, result: Tensor, gathered: RepeatedGather) -> None:
        self._found[result.untyped_storage().data_ptr()] = weakref.ref(result), gathered

    def _keep(self, tensor: Tensor) -> Any:
        found = self._found.get(tensor.untyped_storage().data_ptr())
        whole = found[0]() if found is not None else None
        # another tensor, perhaps where a gathered one was
        if found is None or whole is None or tensor.dtype != whole.dtype:
            return tensor
        found[1].num_readers += 1
        return _Note(
            found[1],
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset() - whole.storage_offset()),
        )

    @staticmethod
    def _bring_back(saved: Any) -> Tensor:
        return saved.tensor() if isinstance(saved, _Note) else saved


_open: list[GatherWatch] = []


def begin_watching() -> GatherWatch:
    watch = GatherWatch()
    watch.hooks.__enter__()
    _open.append(watch)
    return watch


def end_watching(watch: GatherWatch) -> None:
    _open.pop()
    watch.hooks.__exit__()


def note_gathered(result: Tensor, gathered: RepeatedGather) -> None:
    """Called with what a gather gave, while it is watched."""
    if _open:
        _open[-1].add(result, gathered)


# ---- the pass


def overlap(module: GraphModule, keep: bool = True, away: Collection[str] = ()) -> None:
    """Changes the graph in place. `keep`: gathered tensors stay until backward instead of being
    gathered again there. `away`: weights whose memory other weights take in turns; they are
    gathered at once.
    """
    for node in list(module.graph.nodes):
        if node.target is aten.linear.default:
            _fuse(module, node, keep)
    plans = {node: plan for node in module.graph.nodes if (plan := _plan(module, node)) is not None}
    exchanges = []  # on all devices the same ones
    for node, plan in plans.items():
        if plan.sends or plan.sends_back:
            exchanges.append(node)
    weights = [node for node in exchanges if node.args[0].op == "get_attr"]
    at_once = {node for node in weights if name_at(node.args[0].target) in away}
    ends = [_take_apart(module, node, keep, node in at_once) for node in exchanges]
    if not keep:
        _watch(module.graph)
    ahead = set(weights) - at_once
    _prefetch(module.graph, [pair for node, pair in zip(exchanges, ends) if node in ahead])
    module.graph.lint()
    module.recompile()


def _plan(module: GraphModule, node: Any) -> Redistribution | None:
    """The plan of the exchange that a node calls; None for any other node."""
    if not isinstance(node, Node) or node.op != "call_module":
        return None
    plan: Any = getattr(module.get_submodule(str(node.target)), "plan", None)
    return plan if isinstance(plan, Redistribution) else None


def _fuse(module: GraphModule, node: Node, keep: bool) -> None:
    """A linear layer and the exchange of its input, when nobody else reads that; and that of its
    weight.
    """
    x, weight, *rest = node.args
    plan_x = _plan(module, x)
    plan_w = _plan(module, weight)
    if plan_x is None or not plan_x.sends_back or len(x.users) > 1:  # type: ignore[union-attr]
        return
    fuses_weight = plan_w is not None and len(weight.users) == 1  # type: ignore[union-attr]
    groups = module.get_submodule(str(x.target)).groups  # type: ignore[union-attr]
    own: list[Any] = [groups[step.places] for step in plan_x.forward if step.places]  # type: ignore[index]
    num_chunks = CHUNKS if own and backend_of(own[0]).runs_beside_compute else 1
    plan = LinearPlan(
        plan_x,
        plan_w if fuses_weight and plan_w is not None else plan_nothing(),
        plan_nothing(),
        keep,
        num_chunks,
    )
    name = f"linear_of_{node.name}"
    module.add_module(name, ShardedLinear(plan, groups))  # type: ignore[arg-type]
    own_x = x.args[0]  # type: ignore[union-attr]
    own_w = weight.args[0] if fuses_weight else weight  # type: ignore[union-attr]
    with module.graph.inserting_before(node):
        fused = module.graph.call_module(name, (own_x, own_w, *rest))
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    for unused in (node, x, *([weight] if fuses_weight else [])):
        module.graph.erase_node(unused)  # type: ignore[arg-type]


def _take_apart(module: GraphModule, node: Node, keep: bool, at_once: bool) -> tuple[Node, Node]:
    """The beginning where the exchange was, the end in front of its first reader, or right behind
    the beginning.
    """
    plan = _plan(module, node)
    exchange = module.get_submodule(str(node.target))
    assert plan is not None
    name = f"{str(node.target).replace('.', '_')}_begins"
    module.add_module(name, Begin(plan, exchange.groups, not keep and bool(exchange.is_gather)))  # type: ignore[arg-type]
    with module.graph.inserting_before(node):
        begin = module.graph.call_module(name, node.args)
    first = node
    if not at_once:
        first = next(other for other in _following(node) if other in node.users)
    with module.graph.inserting_before(first):
        end = module.graph.call_function(end_exchange, (begin,))
    end.meta = dict(node.meta)
    node.replace_all_uses_with(end)
    module.graph.erase_node(node)
    return begin, end


def _watch(graph: Graph) -> None:
    """Line (3): over the whole graph."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        watch = graph.call_function(begin_watching, ())
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
        graph.call_function(end_watching, (watch,))


def _following(node: Node) -> list[Node]:
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) + 1 :]


def _prefetch(graph: Graph, weights: list[tuple[Node, Node]]) -> None:
    """Line (1): the next weight begins behind the end of the one before it."""
    start = next(node for node in graph.nodes if node.op != "placeholder")
    for begin, _ in weights:
        if (source := begin.args[0]) is not start:
            start.prepend(source)  # type: ignore[arg-type]
    for (_, taken), (begin, _) in zip(weights, weights[1:]):
        taken.append(begin)
