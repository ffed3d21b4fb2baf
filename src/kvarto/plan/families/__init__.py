"""Architectures by their `model_type`: a file for those that are alike, found by a look through the folder. What none of them knows is refused.

A module offers FAMILIES: a tuple of `Family`, whose `read` turns the fields of a config into the parts of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvarto.plan.cached import Layer
from kvarto.plan.fields import Fields
from kvarto.registry import Registry


@dataclass(frozen=True)
class Family:
    """`name`: a model_type. `note` is said with every answer."""

    name: str
    read: Callable[[Fields], tuple[Layer, ...]]
    note: str = ""


NOT_SERVED = "kvarto itself refuses to serve this family: its formats are counted for comparison"

families: Registry[Family] = Registry(
    "model_type", package="kvarto.plan.families", attribute="FAMILIES", group="kvarto.plan.families"
)
"""All families by name."""
