"""The search: what it may choose, that it holds what is fixed, that it is the same in every run."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import whale as wh
from whale import session
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link, device_kind
from whale.planning.problem import Problem
from whale.plans.plan import Plan
from whale.report import plan_page
from whale.search import choose, refusals, tries
from whale.search.candidate import Candidate, DeviceGroup, MemoryChoice, ReplicaChoice
from whale.search.drafting import Drafted, Drafting, actions_seconds, prove
from whale.search.hint import hint
from whale.search.point import Point, Shape
from whale.search.precision import precision_notes
from whale.search.search import Search, new_search, search
from whale.search.settings import OpenSettings
from whale.search.shapes import compositions, device_classes, shapes, subsets
from whale.simulation.simulate import peak_bytes

WIDTH = 64
LAYERS = 8
BATCH = 32
Hosts = tuple[tuple[tuple[str, int], ...], ...]
"""of every host: (kind, devices)"""
MIXED: Hosts = (("fast", 2), ("slow", 1)), (("old", 4),)
"""seven devices of three kinds on two hosts"""
KINDS = {
    "fast": DeviceKind("fast", 20e9, 10**9, 50e9),
    "slow": DeviceKind("slow", 12e9, 10**9, 40e9),
    "old": DeviceKind("old", 6e9, 10**9, 20e9),
}


class Net(nn.Module):
    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x).square().mean()
        return result


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x))).square().mean()
        return result


def mixed(memory_bytes: int = 10**9, between: float = 1e7, hosts: Hosts = MIXED) -> Cluster:
    """Seven devices; a slow network, so that data parallelism is not the best plan."""
    devices = []
    for host, parts in enumerate(hosts):
        names = [name for name, number in parts for _ in range(number)]
        for place, name in enumerate(names):
            kind = KINDS[name]
            kind = DeviceKind(name, kind.flop_per_s, memory_bytes, kind.bytes_per_s)
            devices.append(Device(len(devices), f"host{host}", place, kind))
    return Cluster(tuple(devices), Link(1e9, 1e-6), Link(between, 1e-5))


def plan_of(
    model: nn.Module | None = None, cluster: Cluster | None = None, **config: object
) -> Plan:
    return wh.plan(
        model or Net(), torch.randn(BATCH, WIDTH), cluster=cluster or mixed(), config=dict(config)
    )


def problem_of(made: Callable[[], object]) -> Problem:
    """What a call of `wh.plan` plans."""
    problems: list[Problem] = []
    with session.planning_only(7, None, problems.append):
        made()
    return problems[0]


def strategy_of(plan: Plan) -> str:
    return next(each.choice for each in plan.decisions if each.what == "strategy")


def test_the_search_beats_data_parallelism_and_every_even_pipeline() -> None:
    found = wh.simulate(plan_of()).step_s
    others = [plan_of(strategy="data")]
    others += [
        plan_of(num_task_graph=7, num_micro_batch=number, schedule=schedule)
        for number in (4, 16)
        for schedule in ("1f1b", "auto")
    ]
    assert found <= min(wh.simulate(plan).step_s for plan in others) * (1 + 1e-9)


def test_a_plan_says_why_a_shorter_step_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best other plan has a shorter simulated step, and loses by what the runtime adds."""

    def draft(self: Drafting, *args: object, **options: object) -> Drafted:
        made = whole(self, *args, **options)  # type: ignore[arg-type]
        return replace(made, step_s=0.99 * plain_s)

    whole = Drafting.draft
    plain = plan_of(Net(1), Cluster.uniform(2, kind="T4"), strategy="data")
    plain_s = wh.simulate(plain).step_s
    monkeypatch.setattr(Drafting, "draft", draft)
    monkeypatch.setattr(choose, "is_kept", lambda *_: True)
    plan = plan_of(Net(1), Cluster.uniform(2, kind="T4"))
    why = next(each.why for each in plan.decisions if each.what == "strategy")
    assert strategy_of(plan) == "data parallel"
    assert "the best other plan takes" in why and choose.RUNTIME_ADDS in why


def test_one_device_has_no_states_to_share() -> None:
    """What is carried over to one card of several that share optimizer states."""
    problem = problem_of(lambda: plan_of(cluster=Cluster.uniform(1, kind="T4")))
    made = new_search(problem, OpenSettings.of(problem))
    alone = Candidate((ReplicaChoice((DeviceGroup((0,)),)),), MemoryChoice(zero=1))
    drafted = made.draft(alone)
    assert drafted is not None and drafted.plan.zero == 0
    assert "ZeRO" not in drafted.candidate.describe()


def test_the_plan_and_its_page_list_what_was_tried_besides() -> None:
    plan = plan_of()
    others = plan.alternatives
    plain_s = wh.simulate(plan_of(strategy="data")).step_s
    assert [each.step_s for each in others if each.what == "data parallel"] == [plain_s]
    assert len(others) > 2 and len({each.what for each in others}) == len(others)
    assert strategy_of(plan) not in {each.what for each in others}
    assert sorted(each.step_s for each in others) == [each.step_s for each in others]
    timeline = wh.simulate(plan)
    page = plan_page.html(plan, timeline)
    figures = plan_page.plan_json(plan, timeline)["alternatives"]
    for number, each in enumerate(others):
        assert figures[number] == {"what": each.what, "step_s": each.step_s}
        assert f'data-key="alternatives.{number}.step_s" data-value="{each.step_s}"' in page
        assert html.escape(each.what) in page
    assert plan_of(strategy="data").alternatives == ()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_no_equal_number_of_stages_is_faster(stages: int) -> None:
    """Whatever number of micro-batches a user takes by hand, by what the search makes small."""
    cluster = mixed(hosts=((("fast", 2),), (("old", 2),)))

    def score_s(plan: Plan) -> float:
        return wh.simulate(plan).step_s + actions_seconds(plan)

    found_s = score_s(plan_of(cluster=cluster))
    for number in (2, 4, 16):
        by_hand = {"num_task_graph": stages, "num_micro_batch": number, "schedule": "auto"}
        assert found_s <= score_s(plan_of(cluster=cluster, **by_hand)) * (1 + 1e-9)


def test_the_same_devices_under_another_name_are_drafted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One stage on all devices, as one replica or as several: which device is in which replica
    makes no difference to it.
    """
    done: list[Search] = []

    def kept(*args: object, **options: object) -> Search:
        done.append(new_search(*args, **options))  # type: ignore[arg-type]
        return done[-1]

    monkeypatch.setattr(choose, "new_search", kept)
    plan_of(cluster=mixed(hosts=((("old", 4),),)))
    whole = []
    for each in done[0].drafted:
        candidate = each.candidate
        first = candidate.replicas[0]
        is_plain = candidate.are_alike and len(candidate.ranks) == 4 and not candidate.memory.zero
        if is_plain and first.num_stages == 1 and first.groups[0].grid is None:
            whole.append(first.num_micro_batch)
    assert whole and len(whole) == len(set(whole))


def test_the_search_gives_the_same_plan_in_every_run() -> None:
    assert plan_of().to_json() == plan_of().to_json()


@pytest.mark.parametrize("stages", [2, 3, 4, 14])
def test_seven_devices_in_any_number_of_stages(stages: int) -> None:
    plan = plan_of(num_task_graph=stages, num_micro_batch=4)
    assert len(plan.stages) == stages and plan.num_micro_batch == 4
    ranks = [rank for device in plan.virtual_devices for rank in device.all_ranks]
    assert len(ranks) == len(set(ranks)) and set(ranks) <= set(range(7))


def test_what_is_fixed_holds() -> None:
    plan = plan_of(num_micro_batch=2, schedule="gpipe", recompute=True)
    assert plan.num_micro_batch == 2
    assert plan.schedule.name == "gpipe" or len(plan.stages) == 1
    assert plan.settings.recompute is True


def test_stages_may_have_unequal_widths() -> None:
    widths = set(compositions([3, 4]))
    assert (3, 4) in widths and (7,) in widths and (1, 2, 4) in widths
    assert len(widths) == 2**6


def test_devices_of_one_kind_on_one_host_are_one_class() -> None:
    assert [len(each.ranks) for each in device_classes(mixed())] == [2, 1, 4]
    uniform = Cluster.uniform(4)
    signatures = {tuple(map(len, shape.replicas[0])) for shape in shapes(uniform)}
    assert len(signatures) == len(list(shapes(uniform)))


def test_batch_norms_keep_one_micro_batch_unless_the_user_says_otherwise() -> None:
    plan = plan_of(Normed())
    assert plan.num_micro_batch == 1
    assert any("batch norm" in decision.why for decision in plan.decisions)
    assert plan_of(Normed(), num_micro_batch=4).num_micro_batch == 4


class Spectral(Normed):
    """The power iteration of a spectral norm continues in every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.last = nn.utils.parametrizations.spectral_norm(self.last)


def test_buffers_that_forward_changes_keep_one_micro_batch_unless_the_user_says_otherwise() -> None:
    plan = plan_of(Spectral())
    assert plan.num_micro_batch == 1
    assert any("0._u" in decision.why for decision in plan.decisions)
    asked = plan_of(Spectral(), num_micro_batch=4)
    assert asked.num_micro_batch == 4
    (note,) = [note for note in asked.notes if "spectral norm" in note]
    assert "2 buffers (first: last.parametrizations.weight.0._u" in note and "4 times" in note


def test_data_is_plain_data_parallelism() -> None:
    plan = plan_of(strategy="data")
    assert len(plan.stages) == 1 and plan.num_replicas == 7


def test_data_with_stages_contradicts_itself() -> None:
    with pytest.raises(ValueError, match=r'"strategy": "data".*"num_task_graph": 7'):
        plan_of(strategy="data", num_task_graph=7)


def test_a_model_too_large_for_each_device_is_cut_without_any_setting() -> None:
    """Data parallelism does not fit; the refusal of the fixed plan offers the one that does."""
    model = Net(layers=16, width=WIDTH)
    memory = 400_000
    with pytest.raises(ValueError, match=r'"strategy": "auto".*fits'):
        plan_of(model, mixed(memory), strategy="data")
    plan = plan_of(model, mixed(memory))
    assert len(plan.stages) > 1


def test_nothing_fits_is_proved() -> None:
    with pytest.raises(ValueError, match="No plan fits: weights, gradients and optimizer state"):
        plan_of(Net(layers=16), mixed(10_000))


def test_a_fixed_setting_that_makes_every_plan_impossible_is_named() -> None:
    with pytest.raises(ValueError, match=r'"num_task_graph": 2.*impossible'):
        plan_of(Net(layers=16), mixed(400_000), num_task_graph=2, num_micro_batch=1, zero=0)


def test_of_several_fixed_settings_those_to_blame_are_named() -> None:
    """More stages would fit, and so would ZeRO; other micro-batches or schedules would not."""
    fixed = {"num_task_graph": 2, "num_micro_batch": 1, "schedule": "1f1b", "zero": 0}
    blamed = (
        r'\. "num_task_graph": 2, "zero": 0 make every plan impossible together\. Try: leave one'
    )
    with pytest.raises(ValueError, match=blamed):
        plan_of(Net(layers=16), mixed(400_000), **fixed)


def test_zero_makes_a_fixed_number_of_stages_possible() -> None:
    plan = plan_of(Net(layers=16), mixed(400_000), num_task_graph=2, num_micro_batch=1)
    assert plan.zero > 0 and len(plan.stages) == 2


def test_the_plan_that_is_taken_is_within_every_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that would be the fastest is over-full: the account of its devices was wrong."""
    fastest = wh.simulate(plan_of()).step_s
    draft = Drafting.draft

    def over_full(self: Drafting, *args: object, **options: object) -> Drafted:
        made = draft(self, *args, **options)  # type: ignore[arg-type]
        if made.step_s > (1 + 1e-9) * fastest:
            return made
        assert made.plan.figures is not None
        peak = max(peak_bytes(made.plan))
        tight = tuple(int(0.99 * peak) for _ in made.plan.figures.memory_bytes)
        figures = replace(made.plan.figures, memory_bytes=tight)
        return replace(made, plan=replace(made.plan, figures=figures))

    monkeypatch.setattr(Drafting, "draft", over_full)
    found = wh.simulate(plan_of())
    assert found.step_s > fastest
    assert all(device.peak_total_bytes <= device.memory_bytes for device in found.devices)


def test_memory_is_proved_without_times() -> None:
    """The account is the same as that of the simulation, device by device."""
    for plan in (plan_of(), plan_of(zero=3, strategy="data"), plan_of(Normed())):
        simulated = [device.peak_total_bytes for device in wh.simulate(plan).devices]
        assert peak_bytes(plan) == pytest.approx(simulated, rel=1e-12)


def test_an_interrupted_search_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = 0
    draft = Search.draft

    def interrupted(self: Search, *args: object, **options: object) -> object:
        nonlocal drafts
        drafts += 1
        if drafts == 3:
            raise KeyboardInterrupt
        return draft(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Search, "draft", interrupted)
    plan = plan_of()
    why = next(each.why for each in plan.decisions if each.what == "strategy")
    assert "interrupted" in why and drafts == 3


@pytest.mark.parametrize("what", ["new_search", "_is_good_enough"])
def test_an_interrupt_before_the_search_gives_data_parallelism(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(choose, what, interrupted)
    plan = plan_of()
    why = next(each.why for each in plan.decisions if each.what == "strategy")
    assert strategy_of(plan) == "data parallel" and "interrupted" in why


def test_an_interrupted_proof_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = 0

    def interrupted(plan: Plan) -> None:
        nonlocal proofs
        proofs += 1
        if proofs == 1:
            raise KeyboardInterrupt
        prove(plan)

    monkeypatch.setattr(tries, "prove", interrupted)
    why = next(each.why for each in plan_of().decisions if each.what == "strategy")
    assert "interrupted" in why and proofs == 2


def test_one_large_device_beside_a_pipeline_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that are not alike are tried, and beat all pipelines over the slow network."""
    large = DeviceKind("large", 16e10, 10**9, 4e12)
    small = DeviceKind("small", 4e10, 6_000_000, 4e12)
    devices = [Device(0, "a", 0, large)]
    devices += [Device(1 + place, "b", place, small) for place in range(4)]
    cluster = Cluster(tuple(devices), Link(1e10, 1e-6), Link(1e8, 1e-5))
    done: list[Search] = []

    def kept(*args: object, **options: object) -> Search:
        done.append(new_search(*args, **options))  # type: ignore[arg-type]
        return done[-1]

    monkeypatch.setattr(choose, "new_search", kept)
    wh.plan(Net(layers=16), torch.randn(BATCH, 512, WIDTH), cluster=cluster, config={})
    unlike = [each for each in done[0].drafted if not each.candidate.are_alike]
    assert unlike and len(unlike[0].plan.templates) == 2
    pipelines = [
        each.step_s
        for each in done[0].drafted
        if each.candidate.are_alike
        and len(each.candidate.ranks) == 5
        and not each.candidate.memory.zero  # states in parts need no pipeline
    ]
    assert unlike[0].step_s < min(pipelines)


def test_a_device_that_makes_the_step_longer_is_left_out() -> None:
    kinds = [DeviceKind("quick", 20e9, 10**9, 50e9)] * 2 + [DeviceKind("crawling", 1e8, 10**9, 1e9)]
    devices = tuple(Device(rank, "a", rank, kind) for rank, kind in enumerate(kinds))
    plan = plan_of(cluster=Cluster(devices, Link(1e9, 1e-6), Link(1e9, 1e-6)))
    used = {rank for replica in plan.replicas for ranks in replica.ranks for rank in ranks}
    assert used == {0, 1}
    assert any(decision.what == "devices left out" for decision in plan.decisions)


def test_devices_are_left_out_of_a_fixed_number_of_stages() -> None:
    """Four devices behind a slow network: two stages are faster without them."""
    fixed = {"num_task_graph": 2, "num_micro_batch": 4}
    plan = plan_of(**fixed)
    alone = plan_of(cluster=mixed().first(2), strategy="auto", **fixed)
    assert len(plan.stages) == 2 and plan.num_micro_batch == 4
    assert wh.simulate(plan).step_s <= wh.simulate(alone).step_s * (1 + 1e-9)
    assert not set(plan.ranks) & {3, 4, 5, 6}


def test_one_of_many_devices_may_train_alone() -> None:
    """A model so small that any message takes longer than all of its work."""
    cluster = mixed(hosts=((("fast", 2), ("slow", 2)), (("old", 4),)), between=1e6)
    plan = plan_of(Net(layers=2), cluster)
    alone = plan_of(Net(layers=2), cluster.first(1))
    assert wh.simulate(plan).step_s <= 1.01 * wh.simulate(alone).step_s


def test_parts_of_a_large_cluster_that_may_train_alone() -> None:
    """Any classes and any hosts, where they are few; each without one device, and the first few."""
    two_hosts = mixed(hosts=((("fast", 2), ("slow", 2)), (("old", 4),)))
    parts = subsets(two_hosts)
    assert len(set(parts)) == len(parts) and all(0 < len(ranks) < 8 for ranks in parts)
    for ranks in [(0,), (2,), (4,), (4, 5), (0, 1), (0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 4, 5, 6, 7)]:
        assert ranks in parts
    assert (0, 2, 3, 4, 5, 6, 7) in parts or (0, 1, 2, 4, 5, 6, 7) in parts
    many_hosts = mixed(hosts=((("fast", 2),),) * 3 + ((("old", 4),),) * 3)
    parts = subsets(many_hosts)
    for ranks in [(0, 1), (0,), (6, 7, 8, 9), tuple(range(6)), tuple(range(6, 18))]:
        assert ranks in parts
    assert tuple(range(14)) in parts  # all but one host


@pytest.mark.parametrize(
    ("settings", "groups", "chunks"),
    [
        (OpenSettings(num_stages=4), 4, [1]),
        (OpenSettings(num_stages=4), 2, [2]),
        (OpenSettings(num_stages=4, schedule="wave"), 4, [2]),
        (OpenSettings(num_stages=4, schedule="1f1b"), 4, [1]),
        (OpenSettings(num_stages=4, num_waves=2), 4, [4]),
        (OpenSettings(num_stages=4, num_waves=2), 2, []),
        (OpenSettings(num_stages=8, num_waves=2), 2, [4]),
        (OpenSettings(num_stages=4, asks_for_auto_schedule=True), 4, [1, 2, 4]),
        (OpenSettings(num_stages=4, asks_for_auto_schedule=True), 3, []),
    ],
)
def test_a_fixed_number_of_stages_with_waves(
    settings: OpenSettings, groups: int, chunks: list[int]
) -> None:
    assert settings.chunk_counts(groups) == chunks


@pytest.mark.parametrize("schedule", [None, "1f1b", "gpipe"])
def test_waves_without_a_schedule_that_has_them_are_refused(schedule: str | None) -> None:
    """They were ignored before."""
    config = {} if schedule is None else {"schedule": schedule}
    said = (
        f'"num_waves": 2 asks for 4 chunks on each device, but "schedule": "{schedule or "1f1b"}"'
    )
    with pytest.raises(ValueError, match=said):
        plan_of(num_task_graph=7, num_micro_batch=4, num_waves=2, **config)


@pytest.mark.parametrize("schedule", ["wave", "auto"])
def test_no_plan_by_hand_with_the_same_settings_is_faster(schedule: str) -> None:
    """By hand each of the stages that are asked for becomes a group of devices with chunks."""
    settings = {"num_task_graph": 4, "num_micro_batch": 4, "schedule": schedule}
    cluster = mixed(hosts=((("fast", 4),),))
    by_hand = wh.simulate(plan_of(cluster=cluster, **settings)).step_s
    found = wh.simulate(plan_of(cluster=cluster, strategy="auto", **settings)).step_s
    assert found <= 1.01 * by_hand


def test_a_model_that_just_does_not_fit_gets_the_least_change() -> None:
    """Weights fit, activations do not: what is offered was tried."""
    devices = tuple(
        Device(rank, "a", rank, DeviceKind("tiny", 1e10, 300_000, 1e10)) for rank in (0, 1)
    )
    cluster = Cluster(devices, Link(1e9, 1e-6), Link(1e9, 1e-6))
    sample = torch.randn(BATCH, 512, WIDTH)
    with pytest.raises(ValueError, match=r"the rest must hold activations. Try: (.*)") as refusal:
        wh.plan(Net(), sample, cluster=cluster, config={"strategy": "auto"})
    change = str(refusal.value).rpartition("Try: ")[2]
    assert "further tiny" in change


def test_what_is_missing_is_said_in_devices() -> None:
    with pytest.raises(ValueError, match=r"Try: .* more memory, so at least \d+ further fast"):
        plan_of(Net(layers=16), mixed(10_000))


def test_an_interrupt_before_the_first_plan_stays_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Data parallelism does not fit, so there is nothing to give."""

    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "draft", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_of(Net(layers=16), mixed(400_000))


@pytest.mark.parametrize("replicas", [[[0]], [[0], [1]]])
def test_annotations_contradict_replicas_that_are_given(replicas: list[list[int]]) -> None:
    """Alike ones as well: they would be ignored in silence."""
    model = wh.annotate(Net(), {"layers.[0-3]": wh.replicate(1), "layers.[4-7]": wh.replicate(1)})
    given = [{"stages": [ranks]} for ranks in replicas]
    cluster = Cluster.uniform(len(replicas))
    with pytest.raises(ValueError, match=r'"replicas".*the model is annotated'):
        plan_of(model, cluster, replicas=given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "data"}, '"strategy": "data" .* "replicas" asks for'),
        ({"num_task_graph": 3}, '"replicas" says .* "num_task_graph": 3 says it, too'),
        ({"colocate": True}, '"replicas" says .* "colocate": True says it, too'),
        ({"num_micro_batch": "auto"}, '"num_micro_batch": "auto" is chosen by the search'),
    ],
)
def test_settings_that_replicas_would_ignore_are_refused(
    settings: dict[str, object], message: str
) -> None:
    replicas = [{"stages": [[0]]}, {"stages": [[1], [2]]}]
    with pytest.raises(ValueError, match=message):
        plan_of(cluster=Cluster.uniform(3), replicas=replicas, **settings)


def test_a_stage_that_saves_nothing_has_memory_for_any_number_of_samples() -> None:
    """The last stages of seven save nothing of a sample, whose number a refusal names."""
    by_hand = {"num_task_graph": 7, "schedule": "gpipe", "recompute": False}
    with pytest.raises(ValueError, match=r"rank 6 \(old\) has memory for any number \(250 KB"):
        plan_of(cluster=mixed(250_000), **by_hand)


def test_float32_products_are_explained_where_a_device_without_tf32_is_left_out() -> None:
    quick = DeviceKind("quick", 20e9, 10**9, 50e9, tf32_flop_per_s=80e9)
    kinds = [quick, quick, DeviceKind("crawling", 1e8, 10**9, 1e9)]
    devices = tuple(Device(rank, "a", rank, kind) for rank, kind in enumerate(kinds))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        plan = plan_of(cluster=Cluster(devices, Link(1e9, 1e-6), Link(1e9, 1e-6)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert any(decision.what == "devices left out" for decision in plan.decisions)
    said = [each for each in plan.decisions if each.what == "float32 products"]
    assert [each.choice for each in said] == ["float32"] and "rank 2" in said[0].why
    assert plan.settings.float32_precision == "high"


def test_sixteen_bits_without_tensor_cores_are_said() -> None:
    """V100 multiplies bf16 at the rate of float32, and fp16 eight times as fast."""
    cluster = Cluster.uniform(2, kind="V100-16GB")

    def notes(precision: str) -> list[str]:
        """Whatever the plan is."""
        plan = plan_of(cluster=cluster, strategy="data", precision=precision)
        return [note for note in plan.notes if "tensor cores" in note]

    (said,) = notes("bf16")
    assert "V100-16GB has no tensor cores for bf16" in said and 'Try: "precision": "fp16"' in said
    assert not notes("fp16")


def test_an_interrupted_comparison_says_nothing() -> None:
    """What half a search did not find must not be taken for what is not there."""
    problem = problem_of(plan_of)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(problem, OpenSettings.of(problem), progress=interrupted)


def test_the_refusal_survives_an_interrupt_of_the_search_for_an_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(refusals, "search", interrupted)
    with pytest.raises(ValueError, match="does not fit"):
        plan_of(Net(layers=16), mixed(400_000), strategy="data")


def test_what_annotations_keep_from_fitting_gets_an_offer_without_them() -> None:
    model = wh.annotate(Net(layers=16), {"*": wh.replicate(7)})
    with pytest.raises(ValueError, match='"strategy": "auto" without annotations finds a plan'):
        plan_of(model, mixed(400_000))


def test_an_offer_names_settings_only_where_there_are_some() -> None:
    """One device is not searched: what fits on it in several micro-batches is offered."""
    model = Net(layers=2)
    batch = torch.zeros(4096, WIDTH)
    cluster = mixed(1_500_000, hosts=((("fast", 1),),))
    with pytest.raises(ValueError, match='"strategy": "auto" finds a plan that fits: 1 stage on 1'):
        wh.plan(model, batch, cluster=cluster, config={})
    with pytest.raises(ValueError, match='"auto" without these settings finds a plan that fits'):
        wh.plan(model, batch, cluster=cluster, config={"num_micro_batch": 1})


def test_the_hint_compares_an_annotated_plan_with_the_search() -> None:
    """All on each device, over a slow network: a pipeline is faster."""
    model = wh.annotate(Net(), {"*": wh.replicate(7)})
    made: list[Plan] = []
    problem = problem_of(lambda: made.append(plan_of(model)))
    text = hint(problem, made[0])
    assert text is not None and text.startswith('"strategy": "auto" without annotations would give')


def test_one_precision_for_cards_that_want_different_ones() -> None:
    """RTX 3090 is as fast in bf16 as in fp16, V100 is not: fp16 for all."""
    kinds = ["RTX-3090", "V100-16GB"]
    devices = tuple(Device(rank, "a", rank, device_kind(kind)) for rank, kind in enumerate(kinds))
    cluster = Cluster(devices, Link(1e9, 1e-6), Link(1e9, 1e-6))
    each, other, together, caveat = precision_notes(problem_of(lambda: plan_of(cluster=cluster)))
    assert each.startswith('RTX-3090: fp32 multiplies at 35.6 TFLOP/s; "precision": "bf16" at 71')
    assert other.startswith(
        'V100-16GB: fp32 multiplies at 15.7 TFLOP/s; "precision": "fp16" at 125'
    )
    assert other.endswith("a peak rate of products 7.96 times higher")
    assert "Peak rates are not steps" in caveat and "`whale plan`" in caveat
    assert '"fp16" has the highest peak rate' in together
    assert "fp32 51.3, bf16 86.7, fp16 196" in together
    bf16 = precision_notes(problem_of(lambda: plan_of(cluster=cluster, precision="bf16")))
    assert bf16[1:] == [caveat]
    assert "V100-16GB: bf16 (it has no tensor cores for it)" in bf16[0]


def test_estimates_count_links_that_every_micro_batch_takes() -> None:
    """Two stages on one host, 8 micro-batches one after the other over a slow link: no step is
    shorter than the activations of the whole mini-batch take.
    """
    cluster = replace(mixed(hosts=((("fast", 2),),)), intra_host=Link(1e5, 1e-6))
    problem = refusals.opened_up(problem_of(lambda: plan_of(cluster=cluster)))
    made = new_search(problem, OpenSettings.of(problem))
    point = Point(Shape((((0,), (1,)),)), 8)
    estimate = made.estimator.estimate(point)
    least_s = BATCH * WIDTH * 4 / 1e5
    assert estimate.step_s >= least_s
    drafted = made.draft(made.candidate_of(estimate))
    assert drafted is not None and drafted.step_s >= least_s
    assert estimate.step_s == pytest.approx(drafted.step_s, rel=0.3)
