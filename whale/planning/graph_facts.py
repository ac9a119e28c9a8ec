"""What planning asks of a captured graph again and again: computed once for all drafts of a
problem, whatever their devices, cuts and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.costs.costs import NodeCost, node_costs
from whale.costs.saved import Saved, saved_for_backward
from whale.planning.stages import carries_gradient, live_operations


@dataclass(frozen=True)
class GraphFacts:
    """Facts of one captured graph."""

    captured: CapturedGraph
    _costs: dict[int, dict[Node, NodeCost]] = field(default_factory=dict, repr=False)
    _saved: dict[int, Saved] = field(default_factory=dict, repr=False)

    @cached_property
    def gradients(self) -> frozenset[Node]:
        """Values that carry a gradient."""
        return carries_gradient(self.captured)

    @cached_property
    def operations(self) -> tuple[Node, ...]:
        """Operations that results depend on, in their order."""
        return tuple(live_operations(self.captured))

    def costs(self, num_samples: int) -> dict[Node, NodeCost]:
        """Costs of every operation for so many samples."""
        if num_samples not in self._costs:
            self._costs[num_samples] = node_costs(self.captured, num_samples)
        return self._costs[num_samples]

    def saved(self, num_samples: int) -> Saved:
        """What autograd saves of so many samples."""
        if num_samples not in self._saved:
            self._saved[num_samples] = saved_for_backward(self.captured, num_samples)
        return self._saved[num_samples]
