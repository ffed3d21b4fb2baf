"""How an engine is really set up: read from its page and its other addresses, not from the command that started it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvarto.diagnose.signals import Always, Answer, Label, Place, Setting
from kvarto.diagnose.window import Window
from kvarto.errors import Unreachable

SWITCHES = (Setting.PREFIX_CACHING, Setting.CHUNKED_PREFILL, Setting.CONTINUOUS_BATCHING, Setting.PAGED_KV)
_ON, _OFF = ("true", "on", "1", "yes", "enabled"), ("false", "off", "0", "no", "disabled", "none", "")
Ask = Callable[[str], Any]
"""The JSON of a path of the engine. Raises Unreachable."""


@dataclass(frozen=True)
class Told:
    """A setting's value, "on" or "off" of a switch, and where it stands."""

    value: str
    source: str

    @property
    def on(self) -> bool | None:
        """Of a switch."""
        return {"on": True, "off": False}.get(self.value)


def settings_of(window: Window, ask: Ask | None = None) -> dict[Setting, Told]:
    """Those that the engine tells. Without `ask` (pages from files) only what stands on the page. An address that does not answer tells nothing."""
    asked: dict[str, Any] = {}
    found = {}
    for setting, places in window.engine.settings.items():
        for place in places:
            told = _told(window, place, setting in SWITCHES, ask, asked)
            if told is not None:
                found[setting] = told
                break
    return found


def _told(window: Window, place: Place, switch: bool, ask: Ask | None, asked: dict[str, Any]) -> Told | None:
    if isinstance(place, Always):
        return Told(place.value, f"always: {place.reason}")
    if isinstance(place, Label):
        value = window.label(place.name, place.label)
        if value is None:
            return None
        shown = _switch(value) if switch else value
        return None if shown is None else Told(shown, f"{place.label} of {place.name} in its metrics")
    if ask is None:
        return None
    if place.path not in asked:
        try:
            asked[place.path] = ask(place.path)
        except Unreachable:
            asked[place.path] = None
    return _answered(place, _follow(asked[place.path], place.keys), switch)


def _answered(place: Answer, value: Any, switch: bool) -> Told | None:
    if value is None and not place.above_zero:
        return None
    if place.above_zero and isinstance(value, int | float):
        value = value > 0
    shown = _switch(str(value)) if switch else str(value)
    if shown is None:
        return None
    if place.inverted:
        shown = {"on": "off", "off": "on"}[shown]
    return Told(shown, f"{'.'.join(place.keys)} of {place.path.split('?')[0]}")


def _follow(answer: Any, keys: tuple[str, ...]) -> Any:
    """The value at the end of a path of keys, a number into a list; None if it is not there."""
    for key in keys:
        if isinstance(answer, Mapping):
            answer = answer.get(key)
        elif isinstance(answer, list) and key.isdecimal() and int(key) < len(answer):
            answer = answer[int(key)]
        else:
            return None
    return None if isinstance(answer, Mapping | list) else answer


def _switch(text: str) -> str | None:
    """What a switch says; None if that is neither on nor off."""
    text = text.strip().lower()
    return "on" if text in _ON else "off" if text in _OFF else None
