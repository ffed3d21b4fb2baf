"""What is to go live, and what it is compared with: the engines, as they are, and what the user says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from kvarto.diagnose.scrape import Live, get, get_json, is_url, read_pages
from kvarto.diagnose.settings import Told, settings_of
from kvarto.diagnose.signals import Engine, Setting
from kvarto.diagnose.window import Window, make_window
from kvarto.errors import KvartoError, UsageError


@dataclass(frozen=True)
class Arm:
    """One engine: an address, or saved pages of it. What cannot be read is a reason in words (`problem`), not an exception: checks report it."""

    role: str
    source: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_seconds: float = 5.0
    model: str | None = None

    @property
    def is_live(self) -> bool:
        """It can be asked things."""
        return is_url(self.source)

    @cached_property
    def base(self) -> str:
        """Its address without a path."""
        return Live(self.source).base

    @cached_property
    def _read(self) -> Window | str:
        try:
            return self.scrape()
        except KvartoError as error:
            return str(error)

    @property
    def problem(self) -> str:
        """Why its metrics cannot be read, or ""."""
        return self._read if isinstance(self._read, str) else ""

    @property
    def window(self) -> Window | None:
        """Its page, None if there is a problem."""
        return None if isinstance(self._read, str) else self._read

    @property
    def engine(self) -> Engine | None:
        """What it is, None if there is a problem."""
        return None if self.window is None else self.window.engine

    @cached_property
    def settings(self) -> dict[Setting, Told]:
        """Its effective configuration; empty if there is a problem."""
        if self.window is None:
            return {}
        return settings_of(self.window, self.ask if self.is_live else None)

    def scrape(self) -> Window:
        """Its page as it is now. Raises UsageError or Unreachable."""
        if self.is_live:
            return make_window([Live(self.source, self.headers, self.timeout_seconds).page()], self.model)
        return make_window(read_pages([Path(self.source)])[-1:], self.model)

    def ask(self, path: str) -> Any:
        """The JSON of a path. Raises Unreachable."""
        return get_json(self.base + path, headers=self.headers, seconds=self.timeout_seconds)

    def complete(
        self, *, seconds: float, headers: Mapping[str, str] | None = None, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Have it generate one token; `fields` go into the body. Raises Unreachable if it does not."""
        name = self.settings.get(Setting.MODEL) if self.model is None else None
        model = self.model or self._served_name() or (name.value if name else "")
        body = {"model": model, "prompt": "One, two,", "max_tokens": 1, "temperature": 0, **(fields or {})}
        url = f"{self.base}/v1/completions"
        get(url, headers={**self.headers, **(headers or {})}, body=body, seconds=seconds)

    def _served_name(self) -> str | None:
        try:
            return str(self.ask("/v1/models")["data"][0]["id"])
        except (KvartoError, LookupError, TypeError):
            return None


@dataclass(frozen=True)
class Rollout:
    """All that checks look at.

    wanted      the KV format that should serve, None if the user did not say
    before      the candidate before the format was switched on: saved pages, or an address; the baseline stands in for it
    checkpoint  the folder of the model
    results     files of studies
    route       a gateway's address and the header that switches the format off for a request, (address, name, value)
    may_send    whether requests of one token may be sent to engines
    """

    candidate: Arm
    baseline: Arm | None = None
    control: Arm | None = None
    before: Arm | None = None
    wanted: str | None = None
    checkpoint: Path | None = None
    gpu: str | None = None
    backend: str | None = None
    results: Sequence[Path] = ()
    prometheus: str | None = None
    gateway: str | None = None
    off_header: tuple[str, str] | None = None
    may_send: bool = True
    answer_seconds: float = 60.0
    today: date = field(default_factory=date.today)

    @property
    def reference(self) -> Arm | None:
        """What the candidate's configuration is compared with."""
        return self.before or self.baseline

    @property
    def format(self) -> str | None:
        """The KV format: as wanted, else as the candidate tells."""
        told = self.candidate.settings.get(Setting.KV_DTYPE)
        return self.wanted or (None if told is None else told.value)

    @property
    def arms(self) -> list[Arm]:
        """Those that are named."""
        return [arm for arm in (self.candidate, self.baseline, self.control) if arm is not None]

    def through(self, url: str) -> Arm:
        """The candidate's model behind another address."""
        if not is_url(url):
            raise UsageError("--gateway", "an address", repr(url))
        return replace(self.candidate, role="gateway", source=url)
