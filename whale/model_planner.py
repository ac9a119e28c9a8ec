"""The plan for a captured model on a cluster: what is to be planned, with what the user's optimizer
needs, and the search for the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from whale.annotation import default_strategy
from whale.capture.clean import operation_marks
from whale.capture.lengths import Numbers
from whale.capture.prepare import CapturedModel
from whale.capture.sizes import refuse_unknown_sizes
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.costs.optimizers import (
    MATRIX_DIMS,
    keeps_whole,
    looks_at_others,
    note_on_parts,
    state_ratio,
    takes_norms_of_the_whole,
    update_work,
)
from whale.costs.update_work import UpdateWork
from whale.devices import float32_precision
from whale.names import count
from whale.planning.planner import fingerprint
from whale.planning.problem import Problem, slow_products
from whale.planning.workload import ADAM_STATE
from whale.planning.zero import plan_with_owners
from whale.plans.plan import Decision, Plan
from whale.plans.shards import Shards
from whale.runtime.update import OptimizerFactory
from whale.search.choose import choose_plan
from whale.search.tries import SearchProgress

logger = logging.getLogger("whale")


@dataclass(frozen=True)
class ModelPlanner:
    """Plans one model onto one cluster, for any lengths of its batches."""

    model: torch.nn.Module
    cluster: Cluster
    config: Config
    batch_size: int
    optimizer: OptimizerFactory | None = None
    ratio_without: float = ADAM_STATE
    """bytes of optimizer state for each byte of parameters where there is no optimizer"""
    on_problem: Callable[[Problem], None] | None = None
    """sees what is to be planned, before it is"""
    on_progress: Callable[[SearchProgress], None] | None = None
    """sees how far a search has come; None: that goes to the log"""

    def plan(self, prepared: CapturedModel, numbers: Numbers) -> Plan:
        """The plan for this capture with these numbers as lengths."""
        refuse_unknown_sizes(prepared.captured)
        config = self.config
        problem = self._problem(prepared, numbers)
        if self.on_problem is not None:
            self.on_problem(problem)
        made, _ = choose_plan(problem, self.on_progress or _log_progress)
        # the same for every length: a plan for one is a plan for the model
        made = replace(made, model=fingerprint(prepared.captured))
        made = replace(made, notes=(*made.notes, *slow_products(problem)))
        if config.optimizer_state != "fp32":
            note = (
                f"optimizer states are held in {config.optimizer_state} between steps "
                '("optimizer_state"): they are rounded, and results are not those of local training'
            )
            made = replace(made, notes=(*made.notes, note))
        made = self._with_owners(made, prepared)
        self.check_optimizer(made, prepared)
        return made

    def _problem(self, prepared: CapturedModel, numbers: Numbers) -> Problem:
        planned = prepared.at(numbers) if numbers else prepared
        return Problem(
            captured=planned.captured,
            kinds=planned.kinds,
            marks=operation_marks(planned.capture, self.model),
            default_strategy=default_strategy(),
            term_texts=prepared.term_texts(),
            not_additive=prepared.not_additive,
            cluster=self.cluster,
            config=self.config,
            batch_size=self.batch_size,
            optimizer_ratio=self._state_ratio(prepared),
            update_work=self._update_work(prepared),
            updates_whole=self._updates_whole(prepared),
            updates_alone=self._updates_alone(prepared),
            float32_precision=float32_precision(),
        )

    def _state_ratio(self, prepared: CapturedModel) -> float:
        """Bytes of optimizer state for each byte of parameters; refuses fewer bits for states that
        are not there.
        """
        ratio = self.ratio_without
        if self.optimizer is not None:
            known = state_ratio(prepared.captured, self.optimizer)
            ratio = ADAM_STATE if known is None else known
        kind = self.config.optimizer_state
        if kind == "fp32":
            return ratio
        if ratio == 0.0:
            raise ValueError(
                f'"optimizer_state": "{kind}" holds the states of the optimizer in fewer bits, and '
                'this optimizer has none of the size of a parameter. Try: "optimizer_state": '
                '"fp32", or AdamW, or SGD with momentum'
            )
        bytes_of_four = {"bf16": 2.0, "int8": 1.0 + 4.0 / 256}[kind]
        return ratio * bytes_of_four / 4

    def _update_work(self, prepared: CapturedModel) -> UpdateWork | None:
        """What an update of the user's optimizer launches; None where there is none, or nothing is
        trained.
        """
        names = _trained_names(prepared)
        if self.optimizer is None or not names:
            return None
        is_masked = self.config.on_nonfinite != "continue" or self.config.precision == "fp16"
        return update_work(self.optimizer, names, is_masked)

    def _updates_whole(self, prepared: CapturedModel) -> bool:
        """Whether under ZeRO each parameter must stay whole on the rank that updates it; refuses an
        optimizer that looks at parameters of other ranks where that was asked for.
        """
        config = self.config
        asked = f'"zero": {config.zero!r}' if config.zero != 0 else None
        if isinstance(config.offload, dict):
            asked = f'"offload": {config.offload!r}'
        if self.optimizer is None:
            return False
        names = _trained_names(prepared)
        others = looks_at_others(self.optimizer, names) if asked is not None else None
        if others is not None:
            raise ValueError(
                f"{others}, and with {asked} these are updated by other ranks. "
                'Try: "zero": 0, or an optimizer that treats every parameter by itself'
            )
        return bool(names) and keeps_whole(self.optimizer, names)

    def _updates_alone(self, prepared: CapturedModel) -> bool:
        """Whether the optimizer treats every parameter by itself, so that a search may put them on
        different ranks, or block by block elsewhere.
        """
        if self.optimizer is None:
            return True
        return looks_at_others(self.optimizer, _trained_names(prepared)) is None

    def check_optimizer(self, plan: Plan, prepared: CapturedModel, is_given: bool = False) -> None:
        """Refuses an optimizer that would give other values under this plan than local training,
        since it looks at numbers that are updated by other ranks. `is_given`: the plan was made
        earlier, perhaps for another optimizer.
        """
        names = _trained_names(prepared)
        if self.optimizer is None or not names:
            return
        shards = Shards(plan, "owned")
        whole = []
        for name in names:
            # some ranks hold nothing
            parts = [each for each in shards.held(name) if each.boxes(())]
            if all(each.ranges is None for each in parts):
                whole.append(name)
        holders = {each.ranks for name in names for each in shards.held(name)}
        if len(whole) < len(names) or len(holders) > 1:
            others = looks_at_others(self.optimizer, names)
            if others is not None:
                raise ValueError(
                    f"{others}, and under this plan no rank holds them all. Try: "
                    '"strategy": "data" without "zero", or an optimizer that treats every '
                    "parameter by itself"
                )
        in_parts = set(plan.summed_norms)
        if not all(takes_norms_of_the_whole(self.optimizer, name) for name in in_parts):
            in_parts = set()
        uncut = {*whole, *in_parts}
        cut = [name for name in names if name not in uncut]
        if is_given and cut and keeps_whole(self.optimizer, cut):
            raise ValueError(
                f"this plan cuts {cut[0]} and was made for an optimizer that treats every number "
                "alone; this one looks at whole parameters. Try: a new plan by wh.plan with this "
                "optimizer"
            )

    def _with_owners(self, made: Plan, prepared: CapturedModel) -> Plan:
        """The plan with an owner for each parameter that a grid cuts and the optimizer wants whole,
        but for stacks that it updates in parts by norms of the whole; and a note where it sees
        parts all the same.
        """
        if self.optimizer is None or not made.is_uniform:
            return self._with_note_on_parts(made, _first_cut_weight(made))
        states = prepared.captured.state
        trained = []
        in_parts = []
        for sharding in made.shardings:
            for name, stored in sharding.stored.items():
                if stored.is_cut and states[name].trainable:
                    trained.append(name)
                    if not any(stored.axes[-MATRIX_DIMS:]):
                        in_parts.append(name)
        if not trained or not keeps_whole(self.optimizer, trained):
            return made
        summed = [name for name in in_parts if takes_norms_of_the_whole(self.optimizer, name)]
        stacks = [name for name in trained if len(states[name].shape) > MATRIX_DIMS]
        stacks = [name for name in stacks if name not in summed]
        with_owners = plan_with_owners(made, prepared.captured, stacks)
        summed = list(dict.fromkeys(name for name in summed if name not in with_owners.owners))
        if summed:
            decision = Decision(
                "update of cut stacks",
                f"{count(len(summed), 'parameter')} in parts, by norms of the whole",
                "the optimizer factors each matrix of a stack by itself: holders sum two numbers "
                "for each parameter",
            )
            decisions = (*with_owners.decisions, decision)
            with_owners = replace(with_owners, summed_norms=tuple(summed), decisions=decisions)
        parts = [name for name in trained if name not in {*with_owners.owners, *summed}]
        return self._with_note_on_parts(with_owners, parts[0]) if parts else with_owners

    def _with_note_on_parts(self, made: Plan, cut: str | None) -> Plan:
        """The plan with a note where the optimizer sees parts of a parameter, `cut` say, and gives
        other values on them.
        """
        if self.optimizer is None or cut is None:
            return made
        note = note_on_parts(self.optimizer, cut)
        return made if note is None else replace(made, notes=(*made.notes, note))


def _trained_names(prepared: CapturedModel) -> list[str]:
    """Names of all parameters that are trained."""
    states = prepared.captured.state.values()
    return [state.name for state in states if state.trainable]


def _first_cut_weight(plan: Plan) -> str | None:
    """Name of a parameter that is stored in parts; None where all are whole."""
    for template in plan.templates:
        for sharding in template.shardings:
            for name, stored in sharding.stored.items():
                if stored.is_cut:
                    return name
    return None


def _log_progress(progress: SearchProgress) -> None:
    """What a search tries, and the best so far: for those who look at the log."""
    logger.info("%s", progress.text)
