"""Configs of real models, cut to what their caches and weights follow from (read from aiconfigurator-core 0.12.0, which ships copies of them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvarto.plan.cached import CachedModel
from kvarto.plan.config import Config, cached_model, make_config
from kvarto.plan.engines import engine_formats
from kvarto.plan.gpu import find_gpu
from kvarto.plan.ours import own_formats
from kvarto.plan.speed import Machine
from kvarto.plan.weights import weights_of
from kvarto.plan.written import KvFormat

HERE = Path(__file__).parent
CONFIGS: dict[str, dict[str, Any]] = json.loads((HERE / "configs.json").read_text())
VECTORS: list[dict[str, Any]] = json.loads((HERE / "kv_bytes_vectors.json").read_text())
FORMATS: dict[str, KvFormat] = {kv.name: kv for kv in [*own_formats(), *engine_formats()]}
LLAMA, QWEN3_4B = "meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen3-4B"


def config(name: str) -> Config:
    return make_config(name, CONFIGS[name])


def model(name: str) -> CachedModel:
    return cached_model(config(name))


def machine(name: str, gpu: str, tp: int = 1) -> Machine:
    return Machine(model(name), weights_of(config(name), None), find_gpu(gpu), tp)


def make(model_type: str, **fields: Any) -> CachedModel:
    return cached_model(make_config("made", {"model_type": model_type, **fields}))
