"""Every place that asks "does torch differentiate this?" says yes to complex numbers, and whoever
reads memory sees the values that a lazy conjugate or negative view stands for.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import whale as wh
from whale import api
from whale.capture.batch import digest, read_batch
from whale.capture.check_runs import GraphReader
from whale.capture.prepare import CapturedModel
from whale.checkpoint.errors import CheckpointError
from whale.checkpoint.pretrained import export_safetensors
from whale.checkpoint.tensor_files import TensorFile, write_tensors
from whale.costs.backward_workspace import live_between
from whale.distributed.message import Message, MessagePiece
from whale.dtypes import as_bytes, in_memory, is_differentiable
from whale.lowering.weights import digest_weights, initialise_weights
from whale.planning.stages import carries_gradient
from whale.runtime.split import Deferred, replacements, run_products
from whale.sharding.local import empty_transform

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
WHOLE = (torch.bool, torch.uint8, torch.int32, torch.int64)


def prepare(model: nn.Module, x: Tensor) -> CapturedModel:
    layout, tensors = read_batch(x)
    return api._prepare(model, layout, tensors, None, wh.Config(), "cpu", check=False)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
def test_torch_differentiates(dtype: torch.dtype) -> None:
    """Torch itself says so: such a tensor may require a gradient."""
    tensor = torch.zeros(2, dtype=dtype).requires_grad_()
    assert is_differentiable(dtype) and is_differentiable(tensor)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_torch_does_not_differentiate(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(2, dtype=dtype).requires_grad_()
    assert not is_differentiable(dtype)


class Scaled(nn.Module):
    """A product and a square, without anything that some type lacks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))
        self.shift = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = x * self.scale
        counts = (product.detach().abs() > 1).sum(-1)
        value = product * (self.shift * 2)
        square = torch.view_as_real(value) if value.is_complex() else value
        return (square.float().square().flatten(1).sum(-1) * counts).sum()


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64, torch.complex128], ids=str)
def test_values_that_carry_a_gradient_are_marked(dtype: torch.dtype) -> None:
    """The same ones that autograd differentiates when the captured graph runs."""
    model = Scaled(dtype)
    x = torch.ones(4, 3).to(dtype)
    captured = prepare(model, x).captured
    differentiated = set()

    class Watching(GraphReader):
        def run_node(self, n: Node) -> object:
            result = super().run_node(n)
            if isinstance(result, Tensor) and result.requires_grad:
                differentiated.add(n)
            return result

    Watching(captured, dict(model.named_parameters()), False).run(x)
    assert carries_gradient(captured) == differentiated
    assert len(differentiated) > 4


# ---- memory


LAZY = [torch.conj, lambda z: torch.conj(z).imag]


def complex_numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128)


@pytest.mark.parametrize("lazy", LAZY, ids=["conjugate", "negative"])
def test_memory_holds_the_values(lazy) -> None:  # type: ignore[no-untyped-def]
    view = lazy(complex_numbers(4))
    assert view.is_conj() or view.is_neg()
    held = in_memory(view)
    assert not held.is_conj() and not held.is_neg() and torch.equal(held, view)
    assert in_memory(held) is held


@pytest.mark.parametrize("lazy", LAZY, ids=["conjugate", "negative"])
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_a_message_holds_what_a_lazy_view_stands_for(lazy, num_pieces: int) -> None:  # type: ignore[no-untyped-def]
    tensors = [lazy(complex_numbers(2, 3)) for _ in range(num_pieces)]
    pieces = tuple(MessagePiece(i, None, (2, 3), tensors[i].dtype) for i in range(num_pieces))
    message = Message(1, 0, pieces)
    packed = message.pack(tensors)
    assert not packed.is_conj() and not packed.is_neg()
    for tensor, got in zip(tensors, message.unpack(packed), strict=True):
        assert torch.equal(got, tensor)


STRIDED = [
    lambda: torch.randn(4, 6)[:, 0],  # `reshape(-1)` gives a view that is not contiguous
    lambda: torch.randn(4, 6)[1:2, 0],  # one number: contiguous, with a stride of 6
    lambda: torch.randn(7, 5).t()[:, :1],  # contiguous, with a last stride of 5
    lambda: torch.randn(()),
    lambda: torch.randn(0, 3),
]


@pytest.mark.parametrize("make", STRIDED)
def test_values_of_any_strides_as_bytes(make) -> None:  # type: ignore[no-untyped-def]
    """Found by tests/fuzz: `view(torch.uint8)` asks for a last stride of 1."""
    tensor = make()
    plain = torch.frombuffer(bytearray(tensor.numpy().tobytes() or b"0"), dtype=torch.uint8)
    assert torch.equal(as_bytes(tensor), plain[: tensor.nbytes])
    assert digest([tensor]) == digest([tensor.clone(memory_format=torch.contiguous_format)])
    message = Message(
        1, 0, tuple(MessagePiece(i, None, tuple(tensor.shape), tensor.dtype) for i in (0, 1))
    )
    assert all(torch.equal(each, tensor) for each in message.unpack(message.pack([tensor, tensor])))


def test_a_transform_of_nothing_has_a_history() -> None:
    """Found by tests/fuzz: MKL refuses a transform without rows, which a device of a grid may have
    where samples are few. Its backward takes part in exchanges all the same.
    """
    x = torch.zeros(0, 4, 6, dtype=torch.float64, requires_grad=True)
    z = empty_transform(x, [0, 4, 4], torch.complex128)
    assert z.shape == (0, 4, 4) and z.dtype == torch.complex128
    back = empty_transform(z, [0, 4, 6], torch.float64)
    assert back.shape == x.shape and back.dtype == x.dtype
    back.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_sums_of_live_values_are_never_negative() -> None:
    """Found by tests/fuzz: a crossing time of -7e-23 s was refused. Sizes are added and taken away
    again.
    """
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(3):
        nodes.append(graph.call_function(torch.sin, (nodes[-1],)))
    sizes = dict(zip(nodes, [0.1, 0.7, 1e-17, 0.3]))
    assert min(live_between(nodes, sizes.__getitem__)) >= 0


def test_hashes_see_the_difference_between_a_value_and_its_conjugate() -> None:
    z = complex_numbers(3)
    assert digest([z.conj()]) == digest([z.conj().resolve_conj()]) != digest([z])
    model = nn.Module()
    model.register_buffer("value", z.conj())
    other = nn.Module()
    other.register_buffer("value", z.conj().resolve_conj())
    assert digest_weights(model) == digest_weights(other)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
def test_a_file_gives_back_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(3, 4, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    tensors = {"a": values.to(dtype), "b": torch.arange(3)}
    write_tensors(tmp_path / "file", tensors, {"note": "text"})
    with closing(TensorFile(tmp_path / "file")) as file:
        assert file.metadata["note"] == "text"
        assert file.tensors["a"].shape == (3, 4)
        for key, tensor in tensors.items():
            got = file.read(key)
            assert got.dtype == tensor.dtype
            assert torch.equal(got.to(torch.complex128), tensor.to(torch.complex128))
        box = file.read("a", ((1, 3), (0, 2))).to(torch.complex128)
        assert torch.equal(box, tensors["a"][1:3, 0:2].to(torch.complex128))


def test_an_export_refuses_what_others_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex64"):
        export_safetensors(tmp_path / "x.safetensors", {"a": complex_numbers(2)})


# ---- initialisation


class Filter(nn.Module):
    def __init__(self, dtype: torch.dtype, sets: bool = True) -> None:
        super().__init__()
        self.sets = sets
        self.weight = nn.Parameter(torch.empty(3, dtype=dtype))

    def reset_parameters(self) -> None:
        if self.sets:
            nn.init.constant_(self.weight, 2.0)


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64, torch.complex128], ids=str)
def test_parameters_of_every_type_are_initialised(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = Filter(dtype)
        forgets = Filter(dtype, sets=False)
    names = {"weight": "weight"}
    made = initialise_weights(model, names, names, None, 0, "cpu")
    assert torch.equal(made["weight"], torch.full((3,), 2.0, dtype=dtype))
    with pytest.raises(ValueError, match="left without a value"):
        initialise_weights(forgets, names, names, None, 0, "cpu")


# ---- backward in two parts


@pytest.mark.parametrize("operation", ["linear", "addmm", "matmul"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_the_weight_gradient_that_is_put_off_is_that_of_autograd(
    operation: str, dtype: torch.dtype
) -> None:
    deferred = Deferred()
    targets = {str(each).split(".")[1]: f for each, f in replacements(deferred).items()}
    x = torch.randn(4, 3, dtype=dtype)
    weight = nn.Parameter(torch.randn(3, 3, dtype=dtype))
    bias = nn.Parameter(torch.randn(3, dtype=dtype))
    arguments = {"linear": (x, weight, bias), "addmm": (bias, x, weight), "matmul": (x, weight)}

    def gradients(function) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
        x.grad = weight.grad = bias.grad = None
        x.requires_grad_()
        products = deferred.begin()
        result = function(*arguments[operation])
        (result * result).abs().sum().backward()
        run_products(products)
        return [x.grad, weight.grad, bias.grad]

    plain = {"linear": nn.functional.linear, "addmm": torch.addmm, "matmul": torch.matmul}
    for expected, got in zip(gradients(plain[operation]), gradients(targets[operation])):
        assert (expected is None) == (got is None)
        assert expected is None or torch.allclose(expected, got, rtol=1e-12)
