"""What export drops is found and named; checkpoints run and are tagged; random branches of
probability 0 or 1 are decided.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import random as early_random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential

from whale.capture.guards import RECOMPUTE_TAG, Findings, refuse, watch
from whale.capture.python_state import decide, random_branches

BATCH = torch.export.Dim("batch", min=2, max=1 << 20)


class Round(torch.autograd.Function):
    """Straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reverse(torch.autograd.Function):
    """Gradient reversal, in the form with setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class RoundWithOptions(Round):
    """Takes a dict, which no operation of a graph can."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


early_round = Round.apply
early_round_with_options = RoundWithOptions.apply


@torch.library.custom_op("whale_test::reverse", mutates_args=())
def reverse_op(x: Tensor) -> Tensor:
    return x.clone()


@reverse_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


reverse_op.register_autograd(lambda ctx, grad: -grad)


class Net(nn.Module):
    """linear -> step -> layers -> sum."""

    def __init__(self, step: Callable[[Net, Tensor], Tensor] = lambda self, x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.step(self, self.linear(x))).sum()


def export(model: nn.Module, x: Tensor | None = None) -> ExportedProgram:
    with preserve_node_meta():
        return torch.export.export(
            model,
            (torch.randn(4, 4) if x is None else x,),
            dynamic_shapes=({0: BATCH},),
            strict=False,
        )


def watched(model: nn.Module) -> Findings:
    with watch(model) as findings:
        export(model)
    return findings


def line_of(text: str) -> int:
    """Line of this file that ends with the comment."""
    with open(__file__) as file:
        return next(
            number for number, line in enumerate(file, 1) if line.rstrip().endswith("# " + text)
        )


def gradient(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    weight = model.linear.weight
    return torch.autograd.grad(run(x), weight)[0]


def scaled_by_hook(model: Net, x: Tensor) -> Tensor:
    x.register_hook(double)  # hook
    return x


def double(grad: Tensor) -> Tensor:  # double
    return grad * 2


@pytest.mark.parametrize(
    ("step", "kind", "name", "line"),
    [
        (
            lambda model, x: RoundWithOptions.apply(x, {}),  # round
            "function",
            "RoundWithOptions",
            "round",
        ),
        (
            lambda model, x: early_round_with_options(x, {}),  # early
            "function",
            "RoundWithOptions",
            "early",
        ),
        (scaled_by_hook, "tensor hook", "double", "hook"),
    ],
)
def test_found_in_the_forward_and_refused_by_name(
    step: Any, kind: str, name: str, line: str
) -> None:
    torch.manual_seed(0)
    model = Net(step)
    x = torch.randn(4, 4)
    with watch(model) as findings:
        program = export(model, x)
    # the reason for all this: the captured gradient is another one
    captured = torch.func.functional_call(program.module(), dict(model.named_parameters()), (x,))
    wrong = torch.autograd.grad(captured, model.linear.weight)[0]
    assert not torch.allclose(wrong, gradient(model, model, x))
    (change,) = findings.gradient_changes()
    assert (change.kind, change.name.split(".")[-1]) == (kind, name)
    assert change.place == f"test_guards.py:{line_of(line)}"
    with pytest.raises(
        ValueError, match=f"(?s){kind}.*{name}.*test_guards.py:{line_of(line)}.*register_autograd"
    ):
        refuse(findings)


@pytest.mark.parametrize("function", [Round.apply, early_round, Reverse.apply])
def test_a_function_becomes_an_operation_with_its_own_backward(function: Any) -> None:
    torch.manual_seed(0)
    model = Net(lambda model, x: function(x))
    x = torch.randn(4, 4)
    with watch(model) as findings:
        program = export(model, x)
    captured = torch.func.functional_call(program.module(), dict(model.named_parameters()), (x,))
    got = torch.autograd.grad(captured, model.linear.weight)[0]
    assert torch.allclose(got, gradient(model, model, x))
    assert not findings.gradient_changes()


def test_backward_hooks_of_modules_of_all_kinds() -> None:
    model = Net()
    model.layers[1].register_full_backward_hook(
        lambda module, grad_in, grad_out: (grad_in[0] * 2,)  # full
    )
    model.layers[2].register_full_backward_pre_hook(
        lambda module, grad_out: (grad_out[0] * 2,)  # pre
    )
    findings = watched(model)
    assert [
        (entry.kind, entry.name.split(":")[0], entry.place) for entry in findings.gradient_changes()
    ] == [
        ("module hook", "layers.1", f"test_guards.py:{line_of('full')}"),
        ("module hook", "layers.2", f"test_guards.py:{line_of('pre')}"),
    ]
    with pytest.raises(ValueError, match=r"layers\.1"):
        refuse(findings)


def test_backward_hook_for_all_modules() -> None:
    handle = torch.nn.modules.module.register_module_full_backward_hook(
        lambda module, grad_in, grad_out: None
    )
    try:
        findings = watched(Net())
    finally:
        handle.remove()
    (change,) = findings.gradient_changes()
    assert change.name.startswith("all modules")


def test_backward_hook_that_comes_and_goes_in_the_forward() -> None:
    def step(model: Net, x: Tensor) -> Tensor:
        handle = model.linear.register_full_backward_hook(
            lambda module, grad_in, grad_out: (grad_in[0] * 2,)
        )
        x = model.linear(x)
        handle.remove()
        return x

    (change,) = watched(Net(step)).gradient_changes()
    assert (change.kind, change.name) == ("module hook", "linear")


def test_hooks_on_parameters() -> None:
    model = Net()
    model.linear.weight.register_hook(double)
    model.linear.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    changes = watched(model).gradient_changes()
    assert sorted(change.name.split(":")[0] for change in changes) == [
        "linear.bias",
        "linear.weight",
    ]
    assert f"test_guards.py:{line_of('double')}" in [change.place for change in changes]


def test_hooks_over_several_gradients() -> None:
    def step(model: Net, x: Tensor) -> Tensor:
        torch.autograd.graph.register_multi_grad_hook((x,), lambda grads: None)  # multi
        return x

    (change,) = watched(Net(step)).gradient_changes()
    assert (change.kind, change.place) == ("tensor hook", f"test_guards.py:{line_of('multi')}")


def test_saved_tensor_hooks() -> None:
    def step(model: Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: saved.half(), lambda packed: packed.float()
        ):
            return x * x

    assert [change.kind for change in watched(Net(step)).gradient_changes()] == [
        "saved tensor hook"
    ]


def test_custom_op_and_plain_models_are_not_accused() -> None:
    for step in (lambda model, x: reverse_op(x), lambda model, x: x.relu()):
        findings = watched(Net(step))
        assert findings.entries == []
        refuse(findings)


def test_function_without_gradients_is_not_accused() -> None:
    def step(model: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = Round.apply(x)
        return x + noise

    assert watched(Net(step)).entries == []


def checkpointed(model: Net, x: Tensor) -> Tensor:
    x = checkpoint(model.linear, x, use_reentrant=False)
    x = checkpoint(model.linear, x, use_reentrant=True)
    x = checkpoint(lambda y: model.layers[0](y).relu(), x, use_reentrant=True)
    return CheckpointFunction.apply(model.layers[1].forward, True, x)


def test_checkpoints_run_and_are_recorded_and_tagged() -> None:
    model = Net(checkpointed)
    x = torch.randn(4, 4)
    with watch(model) as findings:
        program = export(model, x)
    assert findings.gradient_changes() == []
    assert [entry.name for entry in findings.checkpoints()] == [
        "linear",
        "linear",
        "layers.0",
        "layers.1",
    ]
    tags = [
        (node.meta.get("custom") or {}).get(RECOMPUTE_TAG)
        for node in program.graph.nodes
        if node.op == "call_function"
    ]
    # linear | linear | linear | linear, relu | linear | four layers and the sum
    assert tags == [None, 0, 1, 2, 2, 3, None, None, None, None, None]
    assert torch.equal(program.module()(x), model(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_sequential(reentrant: bool) -> None:
    model = Net(lambda model, x: checkpoint_sequential(model.layers, 2, x, use_reentrant=reentrant))
    assert [entry.name for entry in watched(model).checkpoints()] == ["layers.0, layers.1"]


def test_selective_checkpoint_and_keyword_arguments() -> None:
    def contexts() -> Any:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(
            [torch.ops.aten.mm.default]
        )

    def step(model: Net, x: Tensor) -> Tensor:
        return checkpoint(
            lambda y, scale: model.linear(y) * scale,
            x,
            use_reentrant=False,
            context_fn=contexts,
            scale=3.0,
        )

    model = Net(step)
    x = torch.randn(4, 4)
    with watch(model) as findings:
        program = export(model, x)
    assert [entry.name for entry in findings.checkpoints()] == ["linear"]
    assert torch.equal(program.module()(x), model(x))


def test_forward_context_of_a_checkpoint_is_kept() -> None:
    @contextmanager
    def bfloat16() -> Iterator[None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield

    def step(model: Net, x: Tensor) -> Tensor:
        y = checkpoint(
            model.linear, x, use_reentrant=False, context_fn=lambda: (bfloat16(), bfloat16())
        )
        assert y.dtype == torch.bfloat16
        return y.float()

    assert len(watched(Net(step)).checkpoints()) == 1


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"use_reentrant": False}])
def test_hugging_face_gradient_checkpointing(options: dict[str, bool]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    gpt2 = transformers.GPT2LMHeadModel(config).train()
    gpt2.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    with watch(gpt2) as findings:
        export(LossOf(gpt2), torch.randint(0, 50, (4, 8)))
    assert [entry.name for entry in findings.checkpoints()] == [
        "transformer.h.0",
        "transformer.h.1",
    ]
    assert findings.gradient_changes() == []


class LossOf(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids.clone()).loss


def test_bloom_gelu_is_found_once() -> None:
    transformers = pytest.importorskip("transformers")
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=50)
    ).train()
    with watch(bloom) as findings:
        export(LossOf(bloom), torch.randint(0, 50, (4, 8)))
    (change,) = findings.gradient_changes()
    assert change.name.endswith("modeling_bloom.GeLUFunction")
    assert change.place.startswith("modeling_bloom.py:")


def test_nothing_stays_patched_after_an_exception() -> None:
    patched = [
        torch.autograd.Function.apply.__func__,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.autograd.graph.saved_tensors_hooks.__enter__,
        torch.utils.checkpoint.checkpoint.__wrapped__,
    ]
    before = [(function.__code__, function.__kwdefaults__) for function in patched]
    draws = random.uniform, np.random.rand
    with pytest.raises(KeyError), watch(Net()), random_branches():
        assert all(
            function.__code__ is not code
            for function, (code, _) in zip(patched, before, strict=True)
        )
        raise KeyError
    assert [(function.__code__, function.__kwdefaults__) for function in patched] == before
    assert (random.uniform, np.random.rand) == draws
    x = torch.randn(3, requires_grad=True)
    Reverse.apply(checkpoint(torch.sin, x, use_reentrant=True)).sum().backward()
    assert torch.equal(x.grad, -x.detach().cos())


# --- random branches
# -----------------------------------------------------------------------------------------------------------


def test_decide_agrees_with_draws() -> None:
    """Against the largest and smallest numbers that a draw from [0, 1) can be."""
    comparisons = {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}
    extremes = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    for name, compare in comparisons.items():
        for p in (-1.0, 0.0, 0.3, 1.0, 2.0):
            outcomes = set(compare(extremes, p).tolist())
            assert decide(name, p) == (outcomes.pop() if len(outcomes) == 1 else None), (name, p)


def drop_after(
    draw: Callable[[], Any], p: float, keep: bool = False
) -> Callable[[Net, Tensor], Tensor]:
    def step(model: Net, x: Tensor) -> Tensor:
        r = draw()
        skip = model.training and (r >= p if keep else r < p)
        return x if skip else model.linear(x)  # branch

    return step


DRAWS = {
    "rand([])": lambda: torch.rand([]),
    "rand(())": lambda: torch.rand(()),
    "rand(1)": lambda: torch.rand(1),
    "rand(1)[0]": lambda: torch.rand(1)[0],
    "uniform_": lambda: torch.empty(()).uniform_(0, 1),
    "uniform_ default": lambda: torch.empty(1).uniform_(),
    "item": lambda: torch.rand([]).item(),
    "item of 1": lambda: torch.rand(1).item(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_branches_without_chance_are_decided(draw: Callable[[], Any]) -> None:
    def linears(p: float, keep: bool) -> int:
        with random_branches() as findings:
            program = export(Net(drop_after(draw, p, keep)))
        assert findings.entries == []
        return sum(node.target is torch.ops.aten.linear.default for node in program.graph.nodes)

    # linear and four layers; the branch that is not skipped adds one
    assert [linears(0.0, False), linears(1.0, False), linears(0.0, True), linears(1.0, True)] == [
        6,
        5,
        5,
        6,
    ]


def test_branches_with_chance_are_refused_with_the_line() -> None:
    model = Net(drop_after(DRAWS["rand([])"], 0.1))
    with pytest.raises(ValueError, match=r"0\.1") as caught, random_branches(model):
        export(model)
    message = str(caught.value)
    assert (
        f"test_guards.py:{line_of('branch')}" in message
        and "the model itself (Net)" in message
        and "layerdrop = 0.0" in message
    )


def test_draws_that_are_not_branches_stay_operations() -> None:
    def step(model: Net, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape) < 0.5
        gate = torch.rand(1) < 0.5
        scale = torch.rand([]).item()
        return torch.where(gate, x * mask, -x) * scale + (torch.rand(()) < 0.0).float()

    with random_branches() as findings:
        program = export(Net(step))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("aten.rand.default") == 4
    assert sum(target.startswith("aten.lt") for target in targets) == 3
    assert findings.entries == []


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: random.random(), "random.random"),
        (lambda: random.uniform(0, 1), "random.uniform"),
        (lambda: np.random.uniform(0, 1), "numpy.random.uniform"),
        (lambda: np.random.rand(), "numpy.random.rand"),
        (lambda: early_random(), "random"),
    ],
)
def test_random_numbers_of_python_are_noted(draw: Callable[[], float], name: str) -> None:
    with random_branches() as findings:
        export(Net(drop_after(draw, 0.5)))
    (entry,) = findings.entries
    assert (entry.kind, entry.name) == ("python random", name)
    assert entry.place.startswith("test_guards.py:") or name == "random"


def test_python_draws_without_chance_are_not_noted() -> None:
    with random_branches() as findings:
        export(Net(drop_after(lambda: random.uniform(0, 1), 0.0)))
        export(Net(drop_after(lambda: np.random.random(), 0.0)))
    assert findings.entries == []


def test_layerdrop_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 32,
    }
    config = transformers.OPTConfig(
        vocab_size=50, max_position_embeddings=16, layerdrop=0.0, **sizes
    )
    with random_branches():
        program = export(
            LossOf(transformers.OPTForCausalLM(config).train()), torch.randint(0, 50, (4, 8))
        )
    # q, k, v, out, fc1, fc2 in both layers, and the head: no layer was dropped
    assert sum(node.target is torch.ops.aten.linear.default for node in program.graph.nodes) == 13
    config.layerdrop = 0.5
    model = transformers.OPTForCausalLM(config).train()
    with (
        pytest.raises(ValueError, match=r"model\.decoder.*modeling_opt\.py"),
        random_branches(model),
    ):
        export(LossOf(model), torch.randint(0, 50, (4, 8)))
