"""The harness that runs functions on several ranks: results, failures, hangs, leftovers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ModelServer, RankError, run_ranks


def sum_of_ranks(offset: float) -> torch.Tensor:
    value = torch.tensor([float(os.environ["RANK"]) + offset])
    dist.all_reduce(value)
    return value


def who_am_i() -> tuple[int, int, str, int]:
    return dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], torch.get_num_threads()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the lost weight")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def wait_for_rank_1() -> None:
    """Rank 0 stands inside gloo, not inside Python."""
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        time.sleep(1000)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def pid() -> int:
    return os.getpid()


def hang_after_writing_the_pid(path: str) -> None:
    with open(f"{path}/{dist.get_rank()}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.prepared_in = os.getpid()


def prepare_model(value: float) -> Model:
    """Runs a backward before the fork, as the check of a capture does."""
    model = Model()
    torch.nn.init.constant_(model.linear.weight, value)
    torch.nn.init.zeros_(model.linear.bias)
    model.linear(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    return model


def gradient_over_ranks(model: Model, scale: float) -> tuple[int, float, list[float]]:
    inputs = torch.full((1, 3), (dist.get_rank() + 1) * scale)
    loss = model.linear(inputs).sum()
    loss.backward()
    assert model.linear.weight.grad is not None
    dist.all_reduce(model.linear.weight.grad)
    return model.prepared_in, loss.item(), model.linear.weight.grad[0].tolist()


def change_weight(model: Model) -> float:
    with torch.no_grad():
        model.linear.weight += 1
    return model.linear.weight[0, 0].item()


def is_grouped(model: Model) -> bool:
    return dist.is_initialized()


def fail_to_prepare() -> None:
    raise ValueError("no such model")


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_model, 2.0) as server:
        yield server


def test_all_reduce_over_three_ranks() -> None:
    results = run_ranks(sum_of_ranks, 3, 10.0)
    assert [result.item() for result in results] == [33.0, 33.0, 33.0]


def test_ranks_know_who_they_are() -> None:
    assert run_ranks(who_am_i, 2) == [(0, 2, "0", 1), (1, 2, "1", 1)]


def test_one_rank() -> None:
    assert run_ranks(sum_of_ranks, 1, 5.0)[0].item() == 5.0


def test_an_exception_is_shown_and_ends_the_others() -> None:
    start_s = time.monotonic()
    with pytest.raises(
        RankError, match=r"(?s)Rank 1 of 3 failed.*fail_on_rank_1.*KeyError: 'the lost weight'"
    ) as caught:
        run_ranks(fail_on_rank_1, 3, timeout_s=60)
    assert caught.value.rank == 1 and isinstance(caught.value.original, KeyError)
    assert time.monotonic() - start_s < 30, "the other ranks stood in a barrier and were not ended"


def test_a_hang_is_ended_and_its_stack_shown() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)within 2 s.*rank 1 stood at.*in hang_on_rank_1"):
        run_ranks(hang_on_rank_1, 2, timeout_s=2)
    assert time.monotonic() - start_s < 12


def test_a_rank_inside_gloo_shows_its_stack() -> None:
    with pytest.raises(
        RankError,
        match=r"(?s)rank 0, 1 of 2.*rank 0 stood at.*in wait_for_rank_1.*rank 1 stood at.*in wait_for_rank_1",
    ):
        run_ranks(wait_for_rank_1, 2, timeout_s=2)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"Rank 1 of 2 died \(signal SIGKILL\)"):
        run_ranks(die_on_rank_1, 2)


def test_work_continues_after_a_failure() -> None:
    with pytest.raises(RankError):
        run_ranks(die_on_rank_1, 2)
    assert [result.item() for result in run_ranks(sum_of_ranks, 2, 0.0)] == [1.0, 1.0]


def test_no_rank_outlives_its_request(tmp_path: object) -> None:
    with pytest.raises(RankError):
        run_ranks(hang_after_writing_the_pid, 2, str(tmp_path), timeout_s=2)
    for rank in range(2):
        with open(f"{tmp_path}/{rank}") as file, pytest.raises(ProcessLookupError):
            os.kill(int(file.read()), 0)


def test_eight_ranks_start_fast() -> None:
    run_ranks(pid, 1)
    start_s = time.monotonic()
    assert len(set(run_ranks(pid, 8))) == 8
    print(f"8 ranks up and down in {time.monotonic() - start_s:.3f} s")


def test_ranks_inherit_what_the_server_prepared(server: ModelServer) -> None:
    results = server.run(gradient_over_ranks, 3, 0.5)
    pids, losses, gradients = zip(*results)
    assert len(set(pids)) == 1 and pids[0] != os.getpid()
    assert losses == (3.0, 6.0, 9.0)  # weight 2, three inputs of 0.5, 1.0, 1.5
    assert gradients == ([3.0] * 3,) * 3  # 0.5 + 1.0 + 1.5


def test_ranks_do_not_change_the_prepared_object(server: ModelServer) -> None:
    assert server.run_local(change_weight) == 3.0
    assert server.run_local(change_weight) == 3.0


def test_run_local_has_no_process_group(server: ModelServer) -> None:
    assert server.run_local(is_grouped) is False
    assert server.run(is_grouped, 2) == [True, True]


def test_a_failure_to_prepare_is_shown() -> None:
    with pytest.raises(
        RankError, match=r"(?s)prepare\(\).*fail_to_prepare.*ValueError: no such model"
    ) as caught:
        ModelServer(fail_to_prepare)
    assert isinstance(caught.value.original, ValueError)


def test_a_closed_server_says_so() -> None:
    with ModelServer(prepare_model, 1.0) as server:
        assert server.run_local(change_weight) == 2.0
    with pytest.raises(RuntimeError, match="closed"):
        server.run_local(change_weight)
