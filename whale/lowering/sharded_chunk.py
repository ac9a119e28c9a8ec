"""One stage on a grid as the modules that one of its devices runs: one for each number of
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from whale.capture.prepare import CapturedModel
from whale.lowering.blocks import BlockWeights, Use
from whale.lowering.chunk import Chunk, crossing_values
from whale.lowering.communication import RealCommunication
from whale.lowering.overlap import overlap
from whale.lowering.sharded_blocks import bring_blocks
from whale.lowering.sharded_experts import stay_at_experts
from whale.operations.table import is_random
from whale.planning.recompute import Regions
from whale.planning.split import stage_program
from whale.planning.stages import Assignment
from whale.plans.layout import Cut, whole
from whale.plans.sharding import Sharding, StageSharding
from whale.sharding.emit import emit
from whale.sharding.solve import solve
from whale.sharding.space import Space, StageProgram


@dataclass(frozen=True)
class OnGrid:
    """What a chunk needs to know of the place that it runs on."""

    weights: Mapping[str, torch.Tensor]
    """this rank's parts"""
    planned: StageSharding
    is_planned_graph: bool
    """the plan was made for the operations of this graph, at this length or another; otherwise (an
    evaluation, a graph of a step with outputs) only the parameters lie as it says, and the rest is
    chosen here
    """
    communication: RealCommunication
    regions: Regions = field(default_factory=dict)
    """operations that are recomputed in backward"""
    blocks: BlockWeights | None = None
    """weights that are not always here; None: all are"""


def build_sharded_chunk(
    prepared: CapturedModel,
    assignment: Assignment,
    stage: int,
    terms: Sequence[Node],
    outputs: Sequence[Node],
    around: OnGrid,
) -> Chunk:
    """Lowers one stage for one place of its grid."""
    captured = prepared.captured
    program = stage_program(captured, prepared.kinds, assignment, stage, terms, outputs)
    values = crossing_values(captured, assignment)
    modules = ShardedModules(program, around)
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    return Chunk(
        stage=stage,
        module_for=modules,
        received=tuple(values[node] for node in program.received),
        inputs=tuple(placeholders.index(node) for node in program.inputs),
        sent=tuple(values[node] for node in program.sent),
        num_outputs=len(outputs),
        has_loss=bool(terms),
        updates=tuple(around.weights[name] for name in program.updates),
        is_random=any(is_random(node) for node in program.operations),
        uses=modules.uses,
        is_sharded=True,
    )


class ShardedModules:
    """Makes the module for a number of samples when it is first asked for."""

    def __init__(self, program: StageProgram, around: OnGrid) -> None:
        self.around = around
        self.space = Space(program)
        self.sharding = self._sharding(program)
        self.weights = {**program.captured.constants, **around.weights}
        self.made: dict[int, GraphModule] = {}
        self.uses: list[Use] = []
        """of blocks of weights, the same for every number of samples"""

    def _sharding(self, program: StageProgram) -> Sharding:
        """The layouts of the stage: as planned; or, where the plan was made for another graph
        (evaluation, outputs), solved from this one, which gives the same on all ranks.
        """
        planned = self.around.planned
        grid = self.around.communication.grid
        if self.around.is_planned_graph:
            return planned.sharding(grid)
        fixed = {name: stored.layout() for name, stored in planned.stored.items()}
        for node in self.space.parameters:  # one that training does not use is held whole
            fixed.setdefault(str(node.target), whole(map(Cut, node.meta["val"].shape)))
        return solve(program, grid, planned.num_samples, fixed=fixed, space=self.space)

    def __call__(self, num_samples: int) -> GraphModule:
        if num_samples not in self.made:
            communication = self.around.communication
            place = communication.place
            regions = self.around.regions
            module = emit(
                self.space, self.sharding, place, num_samples, self.weights, communication, regions
            )
            stay_at_experts(module)
            blocks = self.around.blocks
            away = blocks.block_of if blocks is not None else ()
            overlap(module, self.around.planned.keeps_gathered, away)
            if blocks is not None:
                self.uses[:] = bring_blocks(module, blocks)
            self.made[num_samples] = module
        return self.made[num_samples]
