"""The models of the Whale paper, captured once without weights and planned onto as many clusters as
a benchmark likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from models.m6 import M6, M6Config
from models.resnet import ResNet, ResNetConfig
from whale.api import _prepare
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.lowering.weights import build_on_meta
from whale.planning.planner import make_plan
from whale.planning.pricing import price
from whale.planning.problem import Problem
from whale.plans.plan import Plan
from whale.plans.revise import with_devices
from whale.search.choose import choose_plan

SAMPLES = 4
"""of the batch that a model is captured with; the graph has a symbol in its place"""
LENGTH = 128
"""words of a text"""


def bert_large() -> nn.Module:
    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    return BertForMaskedLM(
        BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def t5_large() -> nn.Module:
    sizes = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "d_kv": 64}
    return T5ForConditionalGeneration(
        T5Config(
            **sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0
        )
    )


def words(batch_size: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch_size, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def pictures(batch_size: int) -> dict[str, torch.Tensor]:
    return {
        "images": torch.zeros(batch_size, 3, 224, 224),
        "labels": torch.zeros(batch_size, dtype=torch.long),
    }


def m6_batch(batch_size: int) -> dict[str, torch.Tensor]:
    config = M6Config.m6_10b()
    ids = torch.ones(batch_size, config.caption_length, dtype=torch.long)
    pixels = torch.zeros(batch_size, 3, config.image_size, config.image_size)
    return {"pixels": pixels, "prompt_ids": ids, "caption_ids": ids, "labels": ids}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "BERT-Large": (bert_large, words),
    "T5-Large": (t5_large, words),
    "ResNet50": (lambda: ResNet(ResNetConfig.resnet50()), pictures),
    "M6-10B": (lambda: M6(M6Config.m6_10b()), m6_batch),
}


@dataclass
class Captured:
    """One model, ready to be planned."""

    name: str
    prepared: dict[bool, CapturedModel]
    """by whether the mini-batch is cut"""

    def plan(
        self, cluster: Cluster, batch_size: int, optimizer_ratio: float = 2.0, **config: Any
    ) -> Plan:
        """As `wh.plan` would make it."""
        return self._plan(
            cluster, batch_size, optimizer_ratio, Config({"check_capture": False, **config})
        )[0]

    def even_plan(
        self, cluster: Cluster, batch_size: int, optimizer_ratio: float = 2.0, **config: Any
    ) -> Plan:
        """The plan for as many devices of one kind, on this cluster: even samples, even cuts,
        devices in their order.
        """
        like = replace(
            cluster,
            devices=tuple(
                replace(device, kind=cluster.devices[0].kind) for device in cluster.devices
            ),
        )
        checked = Config({"check_capture": False, **config})
        plan, assignment = self._plan(like, batch_size, optimizer_ratio, checked)
        kinds = tuple(device.kind.name for device in cluster.devices)
        priced = price(
            plan, self._of(checked).captured, assignment, cluster, optimizer_ratio, checked.dtype
        )
        return with_devices(priced, {"kind": kinds})

    def searched_plan(
        self, cluster: Cluster, batch_size: int, optimizer_ratio: float = 2.0, **config: Any
    ) -> Plan:
        """What the search finds."""
        settings = Config({"check_capture": False, "strategy": "auto", **config})
        # captured as for several micro-batches: the search may want them
        cut = settings.replace(num_micro_batch=2)
        return choose_plan(
            self.problem(cluster, batch_size, optimizer_ratio, settings, self._of(cut))
        )[0]

    def problem(
        self,
        cluster: Cluster,
        batch_size: int,
        optimizer_ratio: float,
        config: Config,
        prepared: CapturedModel,
    ) -> Problem:
        """What is to be planned."""
        return Problem(
            captured=prepared.captured,
            kinds=prepared.kinds,
            marks={},
            default_strategy=None,
            term_texts=prepared.term_texts(),
            not_additive=prepared.not_additive,
            cluster=cluster,
            config=config,
            batch_size=batch_size,
            optimizer_ratio=optimizer_ratio,
        )

    def _plan(
        self, cluster: Cluster, batch_size: int, optimizer_ratio: float, config: Config
    ) -> Any:
        return make_plan(
            self.problem(cluster, batch_size, optimizer_ratio, config, self._of(config))
        )

    def _of(self, config: Config) -> CapturedModel:
        is_cut = config.num_micro_batch > 1
        if is_cut not in self.prepared:
            self.prepared[is_cut] = _capture(self.name, config)
        return self.prepared[is_cut]


def capture(name: str) -> Captured:
    """Takes some seconds for each of the large models, when it is first planned."""
    return Captured(name, {})


def _capture(name: str, config: Config) -> CapturedModel:
    build, batch = MODELS[name]
    layout, tensors = read_batch(batch(SAMPLES))
    return _prepare(build_on_meta(build), layout, tensors, None, config, "cpu")
