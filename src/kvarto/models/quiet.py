"""Silence around transformers, which draws progress bars and warns on the terminal while it loads a model.

Whatever goes wrong still raises; only the noise is dropped, and every setting is put back afterwards.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Load or convert a model inside this block without a word on standard error."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.ERROR)
    logging.disable_progress_bar()
    try:
        # The GGUF loader draws with tqdm itself, not with transformers' wrapper, so only the stream can silence it.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
