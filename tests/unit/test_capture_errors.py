"""`explain`: each way to fail names the module, the line and what to try."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.capture.errors import CaptureError, explain, size_conditions

BATCH = torch.export.Dim("batch", min=2, max=1 << 20)


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # HERE
        return x
    return -x


def item_as_size(x: Tensor) -> Tensor:
    count = int(x.abs().sum().item())  # HERE
    return x[:count]


def tolist(x: Tensor) -> Tensor:
    total = 0.0
    for value in x.sum(0).tolist():
        total = total + value if value > 0 else total  # HERE
    return x * total


def to_numpy(x: Tensor) -> Tensor:
    return x + float(x.detach().numpy().sum())  # HERE


def fixed_batch(x: Tensor) -> Tensor:
    return x.view(4, 2, 2).sum(-1)  # HERE


def even_batch(x: Tensor) -> Tensor:
    return x.view(-1, 8) if x.shape[0] % 2 == 0 else x  # HERE


def own_assert(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()  # HERE
    return x


def equal(x: Tensor) -> Tensor:
    return x if torch.equal(x, -x) else -x  # HERE


def masks_of_one_length(x: Tensor) -> Tensor:
    y = x.detach()
    return F.mse_loss(x[y > 0], y[y > 0])  # HERE


def none_picked(x: Tensor) -> Tensor:
    picked = torch.masked_select(x, x > 0)
    return picked if picked.numel() else x  # HERE


def lengths_in_a_set(x: Tensor) -> Tensor:
    lengths = (x > 0).sum(1).tolist()
    return x if len(set(lengths)) > 1 else -x  # HERE


def no_shape(x: Tensor) -> Tensor:
    one, none = torch.ones(1), torch.zeros(1)
    return torch._fake_quantize_learnable_per_tensor_affine(x, one, none, 0, 255)  # HERE


def bug(x: Tensor) -> Tensor:
    return x + "a"  # type: ignore[operator]  # HERE


def wrong_shape(x: Tensor) -> Tensor:
    return x @ torch.ones(3, 3)  # HERE


def other_device(x: Tensor) -> Tensor:
    return x + torch.ones(4, device="meta")  # HERE


class Inner(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.linear(x))


class Net(nn.Module):
    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Inner(step)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Wrapper(nn.Module):
    """A module around the user's, as the capture makes one, that is not to be named."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def failed(model: nn.Module, x: object = None) -> tuple[CaptureError, Exception]:
    x = torch.randn(4, 4) if x is None else x
    with size_conditions(model) as sizes, pytest.raises(Exception) as caught:
        torch.export.export(Wrapper(model), (x,), dynamic_shapes=({0: BATCH},), strict=False)
    return explain(caught.value, model, sizes), caught.value


def marked_line(step: Callable[[Tensor], Tensor]) -> int:
    lines, start = inspect.getsourcelines(step)
    return start + next(index for index, line in enumerate(lines) if "# HERE" in line)


@pytest.mark.parametrize(
    ("step", "wrong", "wanted"),
    [
        (branch, "Python needs the value of a tensor", "torch.where"),
        (item_as_size, "becomes a Python integer", "keep it a tensor"),
        (tolist, "Python needs the value of a tensor", "torch.where"),
        (to_numpy, ".numpy()", "torch.library.custom_op"),
        (fixed_batch, "fixes the batch size to 4", "x.shape[0]"),
        (even_batch, "only for batch sizes with (batch % 2) == 0", "every number of samples"),
        (own_assert, "assert", "torch.compiler.is_exporting()"),
        (equal, "aten.equal", "stays a tensor"),
        (
            masks_of_one_length,
            "that of `x[mask]`",
            '(F.mse_loss(x, y, reduction="none") * mask).sum()',
        ),
        (none_picked, "that of `x[mask]`", "keep the full shape"),
        (lengths_in_a_set, "is put into a set", "instead of `set(sizes)`"),
        (no_shape, "learnable_per_tensor_affine.default` cannot be captured", "custom_op"),
        (bug, "TypeError: unsupported operand type(s)", "without Whale"),
        (wrong_shape, "same reduction dim", "without Whale"),
        (other_device, "two devices", "device=x.device"),
    ],
)
def test_names_module_line_and_what_to_try(
    step: Callable[[Tensor], Tensor], wrong: str, wanted: str
) -> None:
    explained, original = failed(Net(step))
    message = str(explained)
    where, what, advice = message.split("\n  ")[1:]
    assert where.startswith("at `blocks.1` (Inner), ")
    number = marked_line(step)
    assert (
        f"test_capture_errors.py:{number}: "
        f"`{inspect.getsource(inspect.getmodule(step)).splitlines()[number - 1].strip()}`" in where
    )
    assert wrong in what
    assert wanted in advice
    assert "draft_export" not in message
    assert explained.__cause__ is original


def test_error_inside_a_torch_module_names_that_module_and_the_users_line() -> None:
    class Mismatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).sum()

    message = str(failed(Mismatch())[0])
    assert "at `head` (Linear)" in message
    assert "`return self.head(x).sum()`" in message


def test_the_model_itself() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.missing(x)

    message = str(failed(Flat())[0])
    assert "at the model itself (Flat)" in message
    assert "AttributeError" in message


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_output_of_an_unknown_type() -> None:
    class Boxed(nn.Module):
        def forward(self, x: Tensor) -> Box:
            return Box(x)

    message = str(failed(Boxed())[0])
    assert "Box" in message and "return the loss" in message


def test_input_of_an_unknown_type() -> None:
    message = str(failed(Net(branch), Box(torch.randn(4, 4)))[0])
    assert "the batch holds a" in message and "Box" in message


def test_keyword_arguments_without_a_name() -> None:
    class Loose(nn.Module):
        def forward(self, **batch: Tensor) -> Tensor:
            return batch["x"].sum()

    model = Loose()
    with pytest.raises(Exception) as caught:
        torch.export.export(
            model, (), {"x": torch.randn(4, 4)}, dynamic_shapes={"x": {0: BATCH}}, strict=False
        )
    message = str(explain(caught.value, model))
    assert "**kwargs" in message and "name each argument" in message


def test_an_exception_chained_by_the_user_keeps_his_outer_message() -> None:
    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return x.nothing
            except AttributeError as error:
                raise KeyError("the outer one") from error

    assert "KeyError: 'the outer one'" in str(failed(Careful())[0])


def test_our_own_errors_pass_unchanged() -> None:
    own = CaptureError("already clear")
    assert explain(own, nn.Linear(1, 1)) is own


def test_shape_env_is_restored() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    before = ShapeEnv.__init__
    with pytest.raises(KeyError), size_conditions(nn.Linear(1, 1)):
        assert ShapeEnv.__init__ is not before
        raise KeyError
    assert ShapeEnv.__init__ is before
    assert type(ShapeEnv().guards) is list
