"""The plan for what the user gave: by the settings alone where these say everything, by the search
where they leave something open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from whale.config import Config
from whale.planning.planner import make_plan
from whale.planning.problem import Problem
from whale.planning.schedules import ACTION_S
from whale.planning.stages import Assignment
from whale.plans.plan import LEFT_OUT, Alternative, Decision, Plan
from whale.plans.shares import DoesNotFit
from whale.search.drafting import Drafted, actions_seconds
from whale.search.marked import LONGER, new_marked_search
from whale.search.micro_batches import MICRO_BATCHES, plan_by_hand, why_unknown
from whale.search.point import Point, Shape
from whale.search.refusals import as_written, is_annotated, nothing_fits, with_offer
from whale.search.search import Search, new_search
from whale.search.settings import AUTO, OpenSettings, is_open, settled
from whale.search.tries import SearchProgress, Tries
from whale.simulation.simulate import step_seconds
from whale.units import human_seconds, ranges

STRATEGY = "strategy"
"""what the decision of the search is called in a plan"""
LEAST_GAIN = 0.01
"""of the step: data parallelism is kept where nothing is faster by more"""
GAIN = f"{100 * LEAST_GAIN:g} %"
DATA_PARALLEL = "data parallel"
"""what this plan is called, beside those of the search"""
RUNTIME_ADDS = (
    f"the search also counts {human_seconds(ACTION_S)} that the runtime adds to each forward and "
    f"backward, and keeps data parallelism where nothing is faster by more than {GAIN}"
)
"""why a plan with a shorter simulated step is not the best"""
MOST_ALTERNATIVES = 12
"""of the plans that a search made, so many are listed in the one that is taken"""

Report = Callable[[SearchProgress], None]


def silent(_: SearchProgress) -> None:
    """Takes the progress of a search and says nothing."""


def choose_plan(problem: Problem, progress: Report = silent) -> tuple[Plan, Assignment]:
    """The plan, and where every operation of the graph runs."""
    is_searched = why_fixed(problem) is None
    _refuse_unused_waves(problem.config, is_searched)
    if not is_searched:
        try:
            return plan_by_hand(problem)
        except DoesNotFit as error:
            raise with_offer(problem, error) from None
    if is_annotated(problem):
        return _with_annotations(problem, progress)
    plain, refused = data_parallel(problem)
    if plain is not None and not problem.updates_alone:
        return _with_decision(problem, plain, "the optimizer looks at all parameters at once")
    try:
        done = new_search(problem, OpenSettings.of(problem), progress=progress)
        is_enough = plain is not None and _is_good_enough(done, plain[0])
    except KeyboardInterrupt:
        if plain is None:
            raise  # there is no plan yet that could be given
        return _with_decision(problem, plain, "interrupted before other plans were made")
    if plain is not None and is_enough:
        return _with_decision(problem, plain, f"no other plan can be faster by more than {GAIN}")
    done.run()
    return _best_of(problem, done, plain, refused)


def why_fixed(problem: Problem) -> str | None:
    """Why nothing is searched; None: the search chooses."""
    config = problem.config
    if config.strategy == "data":
        _refuse_contradiction(problem)
        return '"strategy": "data"'
    if config.replicas is not None:
        _refuse_beside_replicas(config)
        return '"replicas" is set'
    if isinstance(config.offload, dict):
        return f'"offload": {config.offload!r} is set'
    has_auto = any(
        config.is_given(key) and getattr(config, key) == AUTO
        for key in ("num_micro_batch", "num_task_graph")
    )
    if config.strategy == AUTO or has_auto:
        return None
    if config.zero != 0:  # who names a level of ZeRO and nothing else wants data parallelism
        return f'"zero": {config.zero!r} is set'
    if is_annotated(problem):
        return "the model is annotated"
    if config.colocate:
        return '"colocate" is set'
    stages = config.num_task_graph
    number = problem.cluster.num_devices
    if stages is not None:
        # what a hand-made plan can do is done as it always was
        return f'"num_task_graph": {stages}' if number % stages == 0 or number == 1 else None
    if number == 1:
        return "there is one device"
    return why_unknown(problem.cluster)


def _refuse_unused_waves(config: Config, is_searched: bool) -> None:
    """Refuses a number of waves beside a schedule that has none."""
    is_chosen = is_searched and is_open(config, "schedule")
    has_none = config.schedule in ("1f1b", "gpipe") and config.replicas is None
    if config.num_waves is None or not has_none or is_chosen:
        return
    given = "" if config.is_given("schedule") else ", which is taken where none is given,"
    raise ValueError(
        f'"num_waves": {config.num_waves} asks for {2 * config.num_waves} chunks on each device, '
        f'but "schedule": "{config.schedule}"{given} runs one. Try: "schedule": "wave", '
        '"interleaved", "zero-bubble" or "auto", or leave "num_waves" out'
    )


def _refuse_beside_replicas(config: Config) -> None:
    """Refuses settings that "replicas" would take no notice of."""
    for key in ("num_task_graph", "colocate"):
        if config.is_given(key) and getattr(config, key):
            raise ValueError(
                f'"replicas" says which stages every model replica has, and '
                f"{as_written(config, key)} says it, too: leave one of the two out"
            )
    if config.is_given("num_micro_batch") and config.num_micro_batch == AUTO:  # type: ignore[comparison-overlap]
        raise ValueError(
            '"num_micro_batch": "auto" is chosen by the search, which does not run where "replicas" '
            "is set. Try: a number, also one for each of the replicas"
        )


def _refuse_contradiction(problem: Problem) -> None:
    """Refuses data parallelism for what asks for something else."""
    stages = problem.config.num_task_graph
    other = None
    if is_annotated(problem):
        other = "the model is annotated"
    elif problem.config.replicas is not None:
        other = '"replicas" asks for model replicas with stages of their own'
    elif problem.config.is_given("num_task_graph") and stages not in (None, 1):
        other = f"{as_written(problem.config, 'num_task_graph')} asks for stages"
    if other is not None:
        raise ValueError(
            f'"strategy": "data" is plain data parallelism, but {other}: leave one of the two out'
        )


def _data_config(config: Config, settings: OpenSettings) -> Config:
    """The config of plain data parallelism with what the user fixed."""
    return settled(config).replace(
        num_task_graph=None, num_micro_batch=settings.num_micro_batch or 1, strategy="data"
    )


def data_parallel(
    problem: Problem,
) -> tuple[tuple[Plan, Assignment] | None, ValueError | None]:
    """The plan of data parallelism, or why there is none."""
    settings = OpenSettings.of(problem)
    if settings.num_stages is not None:
        return None, None
    config = _data_config(problem.config, settings)
    try:
        return make_plan(replace(problem, config=config, is_advised=False)), None
    except ValueError as error:
        return None, error


def _is_good_enough(made: Search, plan: Plan) -> bool:
    """Whether no plan on these devices can be faster by more than `LEAST_GAIN`: the step is near to
    what it takes with all devices busy all the time.
    """
    everything = tuple(range(made.problem.cluster.num_devices))
    least = made.estimator.bound(Point(Shape(((everything,),)), 1))
    return least >= (1 - LEAST_GAIN) * step_seconds(plan).step_s


def _best_of(
    problem: Problem,
    done: Search,
    plain: tuple[Plan, Assignment] | None,
    refused: ValueError | None,
) -> tuple[Plan, Assignment]:
    """The best plan of a search, or data parallelism where that is as good; raises where there is
    neither.
    """
    best = done.best
    if best is None and plain is None and done.is_interrupted:
        raise KeyboardInterrupt  # there is no plan yet that could be given
    if best is None and plain is None:
        raise nothing_fits(problem, done, refused)
    if best is None:
        assert plain is not None
        return _with_decision(problem, plain, f"{done.summary}; no other plan could be made")
    if plain is not None:
        if is_kept(plain[0], best):
            why = f"{done.summary}; the best other plan takes {human_seconds(best.step_s)}"
            if best.step_s < step_seconds(plain[0]).step_s:
                why += f"; {RUNTIME_ADDS}"
            return _with_decision(problem, plain, why, others=_drafted_besides(done, None))
    others = _drafted_besides(done, best)
    compared = others[:2]
    if plain is not None:
        plain_s = step_seconds(plain[0]).step_s
        compared = [Alternative(DATA_PARALLEL, plain_s), *compared]
        # what most people would take instead is listed, however slow it is
        listed = [compared[0], *others[: MOST_ALTERNATIVES - 1]]
        others = sorted(listed, key=lambda each: each.step_s)
    why = _why(done, best, compared)
    made = (best.plan, best.assignment)
    left_over = () if done.slices is None else done.slices.left_over
    return _with_decision(problem, made, why, best, left_over, others)


def is_kept(plain: Plan, best: Drafted) -> bool:
    """Whether data parallelism is as good as the best other plan."""
    score_s = step_seconds(plain).step_s + actions_seconds(plain)
    return best.score_s > (1 - LEAST_GAIN) * score_s


def _drafted_besides(done: Tries, best: Drafted | None) -> list[Alternative]:
    """The plans of a search without the one that is taken, fastest first; of those with the same
    description the fastest.
    """
    taken = None if best is None else best.candidate.describe()
    steps_s: dict[str, float] = {}
    for each in sorted(done.drafted, key=lambda each: each.step_s):
        steps_s.setdefault(each.candidate.describe(), each.step_s)
    return [Alternative(what, step_s) for what, step_s in steps_s.items() if what != taken]


def _why(done: Tries, best: Drafted, compared: list[Alternative]) -> str:
    texts = [f"{each.what} {human_seconds(each.step_s)}" for each in compared]
    if any(each.step_s < best.step_s for each in compared):
        texts.append(RUNTIME_ADDS)
    following = f"; next: {'; '.join(texts)}" if texts else ""
    return f"{done.summary}; a step takes {human_seconds(best.step_s)}{following}"


def _with_decision(
    problem: Problem,
    made: tuple[Plan, Assignment],
    why: str,
    best: Drafted | None = None,
    left_over: Sequence[int] = (),
    others: Sequence[Alternative] = (),
    why_left_out: str = LONGER,
) -> tuple[Plan, Assignment]:
    """The plan with what the search says of it. `left_over`: ranks that are in no slice of a large
    cluster; `others`: plans that were drafted besides.
    """
    plan, assignment = made
    choice = DATA_PARALLEL if best is None else best.candidate.describe()
    decisions = [Decision(STRATEGY, choice, why)]
    left_out = () if best is None else best.candidate.left_out(problem.cluster.num_devices)
    slower = [rank for rank in left_out if rank not in left_over]
    over = [rank for rank in left_out if rank in left_over]
    if slower:
        decisions.append(Decision(LEFT_OUT, f"rank {ranges(slower)}", why_left_out))
    if over:
        text = (
            "their hosts are too many or too few for equal slices of the cluster, and plans with "
            "them were not searched"
        )
        decisions.append(Decision(LEFT_OUT, f"rank {ranges(over)}", text))
    why_one = OpenSettings.of(problem).why_one_micro_batch
    if why_one is not None:
        decisions.append(Decision(MICRO_BATCHES, "1", why_one))
    explained = replace(
        plan,
        decisions=(*decisions, *plan.decisions),
        alternatives=tuple(others[:MOST_ALTERNATIVES]),
    )
    return explained, assignment


def _with_annotations(problem: Problem, progress: Report) -> tuple[Plan, Assignment]:
    """The best plan of an annotated model: what is marked stays."""
    done = new_marked_search(problem, progress)
    done.run()
    best = done.best
    if best is None:
        if done.is_interrupted:
            raise KeyboardInterrupt  # there is no plan yet that could be given
        refused = done.refusal
        raise with_offer(problem, refused) if isinstance(refused, DoesNotFit) else refused
    others = _drafted_besides(done, best)
    why = f"{done.why}; {_why(done, best, others[:2])}"
    made = (best.plan, best.assignment)
    return _with_decision(problem, made, why, best, (), others, done.why_left_out)
