"""The model that an engine serves, as far as the user says: by its config, as the planner reads it, or as a head of D numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.diagnose.formats import token_bytes
from kvarto.diagnose.measure import Model
from kvarto.diagnose.signals import Gauge
from kvarto.diagnose.window import Window
from kvarto.errors import Unsupported
from kvarto.plan.answer import model_signals
from kvarto.plan.cached import CachedModel, KeyValue
from kvarto.plan.config import Config, cached_model, read_config
from kvarto.plan.weights import weights_of
from kvarto.plan.written import KvFormat


@dataclass(frozen=True)
class Served:
    """What bytes are counted on. `head_dim`: D of the head that stands for a model without a config."""

    model: CachedModel
    config: Config | None = None
    head_dim: int | None = None

    @property
    def name(self) -> str | None:
        """Of the config's model."""
        return None if self.config is None else self.model.name

    def signals(self, context_tokens: float | None) -> dict[str, float]:
        """What advice goes by; nothing without a config, and nothing of windows without a context."""
        if self.config is None:
            return {}
        found = model_signals(self.model, max(1, round(context_tokens or 1)))
        return found if context_tokens else {name: value for name, value in found.items() if name != "constant_share"}

    def complete(self, said: Model, window: Window, kv: KvFormat | None) -> Model:
        """What was said, and what the config adds to it. `kv`: the format that serves."""
        if self.config is None:
            return said
        token = token_bytes(window, kv, self.model) if kv is not None and said.kv_token_bytes is None else None
        return Model(said.weights_bytes or _weights_bytes(self.config, window), said.kv_token_bytes or token)


def by_config(name: str) -> Served:
    """As `kvarto plan` takes a model. Raises what reading it raises."""
    config = read_config(name)
    return Served(cached_model(config), config)


def by_head_dim(dim: int) -> Served:
    """K and V of one head: in all formats but those that keep some layers raw that is what a whole model costs."""
    return Served(CachedModel("a head", "head", ((KeyValue(1, dim, dim),),)), head_dim=dim)


def _weights_bytes(config: Config, window: Window) -> float | None:
    """Those that a step of as many sequences as run reads; None for an architecture whose weights nobody knows."""
    running = window.gauge(Gauge.RUNNING)
    try:
        return weights_of(config, None).read_nbytes(1 if running is None else max(1, round(running.mean)))
    except Unsupported:
        return None
