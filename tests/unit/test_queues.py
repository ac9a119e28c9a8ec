"""How many receives may be posted ahead with one hardware queue, against cases worked by hand."""

from __future__ import annotations

from whale.scheduling.queues import QueuedTransfer, finishes, launches, safe_window


def _transfers(text: str, peer: int) -> list[QueuedTransfer]:
    """`S R`: a send, then a receive."""
    return [QueuedTransfer(letter == "S", (peer,)) for letter in text.split()]


def test_a_second_posted_receive_blocks_the_sends_that_it_waits_for() -> None:
    """1F1B on two stages: the second gradient needs the second activation, which is launched behind
    the second posted receive.
    """
    pipeline = {0: _transfers("S S R S R S R R", 1), 1: _transfers("R S R S R S R S", 0)}
    assert safe_window(pipeline, 8) == 1
    assert not finishes({rank: launches(own, 2) for rank, own in pipeline.items()})


def test_without_posting_two_sends_each_way_block_each_other() -> None:
    crossing = {0: _transfers("S S R R", 1), 1: _transfers("S S R R", 0)}
    assert not finishes({rank: launches(own, 0) for rank, own in crossing.items()})
    assert safe_window(crossing, 1) == 1


def test_no_window_helps_where_ranks_wait_for_each_other() -> None:
    assert safe_window({0: _transfers("R S", 1), 1: _transfers("R S", 0)}, 8) is None


def test_receives_from_several_ranks_have_channels_of_their_own() -> None:
    one_to_three = {0: [QueuedTransfer(True, (1, 2, 3)), QueuedTransfer(False, (1, 2, 3))] * 2}
    for rank in (1, 2, 3):
        one_to_three[rank] = [QueuedTransfer(False, (0,)), QueuedTransfer(True, (0,))] * 2
    # the second receive of a channel would block the second send
    assert safe_window(one_to_three, 8) == 1


def _with_loads(text: str, peer: int) -> list[QueuedTransfer]:
    """`S LR`: a send, then kernels that are called for the first time, then a receive."""
    return [
        QueuedTransfer(each.endswith("S"), (peer,), each.startswith("L")) for each in text.split()
    ]


def test_kernels_are_loaded_only_where_no_message_waits_for_this_rank() -> None:
    """1F1B on two stages. The second takes its first activation, loads the kernels of its forward
    and backward and sends the gradient back, whose receive the first has posted meanwhile.
    """
    pipeline = {
        0: _with_loads("LS S R LS R S R R", 1),
        1: _with_loads("R LS R S R S R S", 0),
    }
    assert safe_window(pipeline, 8) == 1
    assert safe_window(pipeline, 8, is_first=True) == 0


def test_no_window_helps_where_both_load_in_front_of_their_receives() -> None:
    crossing = {0: _with_loads("S S LR R", 1), 1: _with_loads("S S LR R", 0)}
    assert safe_window(crossing, 8) == 1
    assert safe_window(crossing, 8, is_first=True) is None
