"""Room that a backward works in, beside what the forward kept: gradients on their way, while kept
tensors go one after the other.

Backward goes through the operations from the last to the first. While it does operation i there
are, of the samples,

    kept(i)       what operations up to i saved; the rest was let go. Not so what crosses into the stage or out of it: the runtime
                  holds what came in until the backward is over, and for every result the gradient that came back, of the same size
    pending(i)    gradients of values that were made before i and read behind it: a residual waits while its branch is differentiated
    work(i)       COPIES of the largest of its result and its inputs: a gradient that comes in and one that goes out

so that the backward needs  max_i kept(i) + pending(i) + work(i),  which is counted as room beside
all that is kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from torch.fx import Node

from whale.costs.saved import Saved

COPIES = 2
COPIES_OF_CONVOLUTION = 3
"""beside the gradient that comes in: the one that goes out, and copies of its input and of that
one, laid out as it likes
"""
CONVOLUTIONS = frozenset(
    f"aten.conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)
)


def room_beside_kept(
    operations: Sequence[Node],
    gradients: Container[Node],
    saved: Saved,
    crossing: Iterable[Node] = (),
) -> float:
    """Bytes for each sample. `gradients`: values that carry a gradient; `crossing`: values that the
    stage receives or sends.
    """
    place = {node: index for index, node in enumerate(operations)}
    held = {storage for node in crossing for storage in saved.result_of_node.get(node, ())}
    first_saved: dict[int, int] = {}
    made: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for index, node in enumerate(operations):
        for storage in saved.of_node.get(node, frozenset()) - held:
            first_saved.setdefault(storage, index)
        for storage in saved.result_of_node.get(node, ()):
            made.setdefault(storage, index)
        for source in node.all_input_nodes if node in gradients else ():
            if source in place and source in gradients:
                last_read |= dict.fromkeys(saved.result_of_node.get(source, ()), index)
    size = [kept.sample_bytes for kept in saved.kept]
    let_go: dict[int, float] = {}  # by operation: what is not needed any more once it is done
    for storage, index in first_saved.items():
        let_go[index] = let_go.get(index, 0.0) + size[storage]
    begins: dict[
        int, float
        # gradients that are there once this operation is done, until the one that made the value
    ] = {}
    ends: dict[int, float] = {}
    for storage, index in last_read.items():
        begins[index] = begins.get(index, 0.0) + size[storage]
        ends[made.get(storage, 0)] = ends.get(made.get(storage, 0), 0.0) + size[storage]
    room = freed = pending = 0.0
    for index in reversed(range(len(operations))):
        node = operations[index]
        pending -= ends.get(index, 0.0)  # its own gradient is what it works on
        if node in gradients:
            room = max(room, pending + _work(node, gradients, saved) - freed)
        pending += begins.get(index, 0.0)
        freed += let_go.get(index, 0.0)
    return room


def _work(node: Node, gradients: Container[Node], saved: Saved) -> float:
    sources = [
        source
        for source in node.all_input_nodes
        if source in gradients and source.op == "call_function"
    ]
    own, *others = (saved.results([value]).sample_bytes for value in (node, *sources))
    largest = max(own, *others) if others else own
    if str(getattr(node.target, "overloadpacket", "")) in CONVOLUTIONS:
        return own + COPIES_OF_CONVOLUTION * largest
    return COPIES * largest
