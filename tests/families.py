"""Models that others wrote: timm, vit-pytorch, diffusers, MONAI, x-transformers, dense layers of
torch_geometric. Small, in float64, without dropout, the same weights in every process.

The packages are those of tests/families.txt (`make setup-integrations`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness import Float64Mode

BATCH_SIZE = 6


class _AnyAttribute(type):
    """A class that has every attribute: `InterpolationMode.NEAREST`."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Names(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyAttribute(name, (), {"__init__": lambda self, *a, **k: None})
        setattr(self, name, made)
        return made


@contextlib.contextmanager
def offering_torchvision() -> Iterator[None]:
    """timm and vit-pytorch import torchvision for image files, which no model needs; its wheel does
    not load beside a CPU torch. While they are imported, its names are there, as empty classes.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    parts = ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".models")
    names = [f"torchvision{part}" for part in (*parts, ".models.feature_extraction", ".datasets")]
    for name in names:
        module = _Names(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    try:
        yield
    finally:
        for name in names:  # others ask whether it is there, and would take it for real
            del sys.modules[name]


class Trained(nn.Module):
    """A model with its loss: cross entropy for words and classes, else the mean square."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, dict[str, Tensor]], Any]):
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: Tensor, target: Tensor, extra: Tensor | None = None) -> Tensor:
        given = {"x": x} if extra is None else {"x": x, "extra": extra}
        output = self.call(self.inner, given)
        output = getattr(output, "sample", output)
        if isinstance(output, (tuple, list)):
            output = output[0]
        if target.is_floating_point():
            return F.mse_loss(output, target)
        return F.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Family:
    """One model with its data."""

    name: str
    package: str
    make: Callable[[], nn.Module]
    x: tuple[int, ...]
    """shape of a sample; of words: one dim"""
    target: tuple[int, ...] | None = None
    """shape of a sample's target; None: a class, or the next words"""
    words: int = 0
    """number of words where x is words"""
    extra: tuple[int, ...] | None = None
    call: Callable[[nn.Module, dict[str, Tensor]], Any] = lambda model, given: model(given["x"])
    batch_statistics: bool = False

    def build(self) -> nn.Module:
        if self.package in ("timm", "vit_pytorch"):
            with offering_torchvision():
                importlib.import_module(self.package)
                self.make()  # imports the module of this model
        with torch.random.fork_rng(devices=[]), Float64Mode():
            torch.manual_seed(0)
            return Trained(self.make(), self.call).double().train()

    def batch(self, step: int, size: int = BATCH_SIZE) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)

        def numbers(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(size, *shape, generator=generator, dtype=torch.float64)

        if self.words:
            x = torch.randint(0, self.words, (size, *self.x), generator=generator)
            found = {"x": x, "target": x.roll(-1, 1)}
        elif self.target is None:
            labels = torch.randint(0, 5, (size,), generator=generator)
            found = {"x": numbers(self.x), "target": labels}
        else:
            found = {"x": numbers(self.x), "target": numbers(self.target)}
        if self.extra is not None:
            found["extra"] = numbers(self.extra).abs()
        return found


def of(module: str, name: str, *arguments: Any, **settings: Any) -> Callable[[], nn.Module]:
    """What builds `module.name(*arguments, **settings)`; imported only then."""

    def make() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module(module), name)(*arguments, **settings)
        return made

    return make


# ---- timm

IMAGE = (3, 16, 16)
TIMM = {"num_classes": 5}
TIMM_VIT = {**TIMM, "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}


def timm_beit() -> nn.Module:
    return of("timm.models.beit", "Beit", **TIMM_VIT)()


FAMILIES = [
    Family(
        "timm vit",
        "timm",
        of("timm.models.vision_transformer", "VisionTransformer", **TIMM_VIT),
        IMAGE,
    ),
    Family("timm cait", "timm", of("timm.models.cait", "Cait", **TIMM_VIT), IMAGE),
    Family("timm beit", "timm", timm_beit, IMAGE),
    Family(
        "timm mixer",
        "timm",
        of(
            "timm.models.mlp_mixer",
            "MlpMixer",
            **TIMM,
            img_size=16,
            patch_size=4,
            num_blocks=3,
            embed_dim=16,
        ),
        IMAGE,
    ),
    Family(
        "timm convnext",
        "timm",
        of("timm.models.convnext", "ConvNeXt", **TIMM, depths=(1, 1, 1, 1), dims=(4, 8, 8, 16)),
        (3, 32, 32),
    ),
    Family(
        "timm swin",
        "timm",
        of(
            "timm.models.swin_transformer",
            "SwinTransformer",
            **TIMM,
            img_size=16,
            patch_size=2,
            window_size=4,
            embed_dim=8,
            depths=(2, 1),
            num_heads=(2, 2),
            drop_path_rate=0.0,
        ),
        IMAGE,
    ),
]

# ---- vit-pytorch

VIT = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "heads": 2, "mlp_dim": 24}
FAMILIES += [
    Family("vit", "vit_pytorch", of("vit_pytorch.vit", "ViT", **VIT, depth=3, dim_head=8), IMAGE),
    Family(
        "simple vit",
        "vit_pytorch",
        of("vit_pytorch.simple_vit", "SimpleViT", **VIT, depth=3, dim_head=8),
        IMAGE,
    ),
    Family(
        "deep vit",
        "vit_pytorch",
        of("vit_pytorch.deepvit", "DeepViT", **VIT, depth=3, dim_head=8),
        IMAGE,
    ),
    Family(
        "cait",
        "vit_pytorch",
        of("vit_pytorch.cait", "CaiT", **VIT, depth=2, cls_depth=1, dim_head=8),
        IMAGE,
    ),
    Family(
        "parallel vit",
        "vit_pytorch",
        of("vit_pytorch.parallel_vit", "ViT", **VIT, depth=2, dim_head=8),
        IMAGE,
    ),
    Family(
        "vit for small data",
        "vit_pytorch",
        of("vit_pytorch.vit_for_small_dataset", "ViT", **VIT, depth=2, dim_head=8),
        IMAGE,
    ),
]

# ---- diffusers: a sample, a time, and what the noise was

SMALL_UNET = {
    "sample_size": 8,
    "in_channels": 2,
    "out_channels": 2,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


def without_label_dropout() -> nn.Module:
    """A diffusion transformer that never leaves out a class label."""
    model = of(
        "diffusers",
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        out_channels=2,
        num_layers=2,
        norm_num_groups=2,
        sample_size=8,
        num_embeds_ada_norm=5,
    )()
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return model


def at_time(model: nn.Module, given: dict[str, Tensor]) -> Any:
    return model(given["x"], 10 * given["extra"])


def conditioned(model: nn.Module, given: dict[str, Tensor]) -> Any:
    return model(given["x"], torch.tensor(3), given["extra"])


FAMILIES += [
    Family(
        "diffusers unet",
        "diffusers",
        of(
            "diffusers",
            "UNet2DModel",
            **SMALL_UNET,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        ),
        (2, 8, 8),
        (2, 8, 8),
        extra=(),
        call=at_time,
    ),
    Family(
        "diffusers conditioned unet",
        "diffusers",
        of(
            "diffusers",
            "UNet2DConditionModel",
            **SMALL_UNET,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=12,
            attention_head_dim=4,
        ),
        (2, 8, 8),
        (2, 8, 8),
        extra=(5, 12),
        call=conditioned,
    ),
    Family(
        "diffusers autoencoder",
        "diffusers",
        of(
            "diffusers",
            "AutoencoderKL",
            in_channels=2,
            out_channels=2,
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=2,
            norm_num_groups=4,
            sample_size=8,
        ),
        (2, 8, 8),
        (2, 8, 8),
    ),
    Family(
        "diffusers dit",
        "diffusers",
        without_label_dropout,
        (2, 8, 8),
        (2, 8, 8),
        extra=(),
        call=lambda model, given: model(
            given["x"],
            timestep=(10 * given["extra"]).long(),
            class_labels=(given["extra"] > 0.5).long(),
        ),
    ),
]

# ---- MONAI

VOLUME = (1, 8, 8, 8)
FAMILIES += [
    Family(
        "monai unet",
        "monai",
        of(
            "monai.networks.nets",
            "UNet",
            3,
            1,
            2,
            channels=(4, 8, 8),
            strides=(2, 2),
            num_res_units=1,
        ),
        VOLUME,
        (2, 8, 8, 8),
    ),
    Family(
        "monai segresnet",
        "monai",
        of(
            "monai.networks.nets",
            "SegResNet",
            3,
            init_filters=8,
            blocks_down=(1, 1),
            blocks_up=(1,),
        ),
        VOLUME,
        (2, 8, 8, 8),
    ),
    Family(
        "monai attention unet",
        "monai",
        of("monai.networks.nets", "AttentionUnet", 3, 1, 2, channels=(4, 8), strides=(2,)),
        VOLUME,
        (2, 8, 8, 8),
        batch_statistics=True,
    ),
    Family(
        "monai vit",
        "monai",
        of(
            "monai.networks.nets",
            "ViT",
            1,
            (8, 8, 8),
            (4, 4, 4),
            hidden_size=16,
            mlp_dim=16,
            num_layers=2,
            num_heads=2,
        ),
        VOLUME,
        (8, 16),
    ),
    Family(
        "monai unetr",
        "monai",
        of(
            "monai.networks.nets",
            "UNETR",
            1,
            2,
            (16, 16),
            feature_size=4,
            hidden_size=16,
            mlp_dim=16,
            num_heads=2,
            spatial_dims=2,
        ),
        (1, 16, 16),
        (2, 16, 16),
    ),
    Family(
        "monai dynunet",
        "monai",
        of(
            "monai.networks.nets",
            "DynUNet",
            3,
            1,
            2,
            (3, 3, 3),
            (1, 2, 2),
            (2, 2),
            filters=(4, 8, 8),
        ),
        VOLUME,
        (2, 8, 8, 8),
    ),
]

# ---- x-transformers


def decoder(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        x = importlib.import_module("x_transformers")
        layers = x.Decoder(dim=16, depth=3, heads=2, attn_dim_head=8, **settings)
        made: nn.Module = x.TransformerWrapper(num_tokens=20, max_seq_len=12, attn_layers=layers)
        return made

    return make


def continuous() -> nn.Module:
    x = importlib.import_module("x_transformers")
    layers = x.Encoder(dim=16, depth=2, heads=2, attn_dim_head=8, rel_pos_bias=True)
    made: nn.Module = x.ContinuousTransformerWrapper(
        dim_in=6, dim_out=4, max_seq_len=10, attn_layers=layers
    )
    return made


FAMILIES += [
    Family("x-transformers plain", "x_transformers", decoder(), (10,), words=20),
    Family(
        "x-transformers rotary", "x_transformers", decoder(rotary_pos_emb=True), (10,), words=20
    ),
    Family(
        "x-transformers alibi",
        "x_transformers",
        decoder(alibi_pos_bias=True, alibi_num_heads=1),
        (10,),
        words=20,
    ),
    Family(
        "x-transformers gated",
        "x_transformers",
        decoder(ff_glu=True, use_rmsnorm=True, attn_qk_norm=True),
        (10,),
        words=20,
    ),
    Family("x-transformers continuous", "x_transformers", continuous, (10, 6), (10, 4)),
]

# ---- torch_geometric: dense graphs, a matrix of edges for each sample


class DenseGraphs(nn.Module):
    """Two dense layers and a mean over the nodes."""

    def __init__(self, layer: str, **settings: Any) -> None:
        super().__init__()
        dense = importlib.import_module("torch_geometric.nn.dense")
        kind = getattr(dense, layer)
        if layer == "DenseGINConv":
            self.first = kind(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)))
            self.second = kind(nn.Linear(8, 8))
        else:
            self.first = kind(4, 8, **settings)
            self.second = kind(8, 8, **settings)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x, edges))
        return self.head(self.second(hidden, edges).mean(1))


def on_graph(model: nn.Module, given: dict[str, Tensor]) -> Any:
    return model(given["x"], (given["extra"] > 0.5).to(given["x"].dtype))


FAMILIES += [
    Family(
        f"geometric {layer}",
        "torch_geometric",
        lambda layer=layer: DenseGraphs(layer),  # type: ignore[misc]
        (6, 4),
        extra=(6, 6),
        call=on_graph,
    )
    for layer in ("DenseGCNConv", "DenseSAGEConv", "DenseGINConv", "DenseGraphConv", "DenseGATConv")
]

BY_NAME = {family.name: family for family in FAMILIES}
