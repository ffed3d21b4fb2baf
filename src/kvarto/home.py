"""Where kvarto keeps what it fetched and compiled: `$KVARTO_HOME`, else the XDG cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The cache folder, absolute, which may not exist yet: `$KVARTO_HOME`, `$XDG_CACHE_HOME/kvarto` or `~/.cache/kvarto`."""
    if chosen := os.environ.get("KVARTO_HOME"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).absolute() if base else Path.home() / ".cache") / "kvarto"
