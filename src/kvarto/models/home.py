"""Where fetched models are kept: one folder that the user can move with an environment variable, and delete at any time."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The cache folder: `$KVARTO_HOME`, else `$XDG_CACHE_HOME/kvarto`, else `~/.cache/kvarto`. It need not exist yet."""
    if own := os.environ.get("KVARTO_HOME"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "kvarto"
    return Path.home() / ".cache" / "kvarto"


def models_folder() -> Path:
    """The folder that holds one folder per fetched model."""
    return home() / "models"
