"""A real `kvarto serve` process over a tiny random model whose tokens are bytes, and what its metrics say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bytes_tokenizer import EOS, PLAIN, tokenizer
from kvarto.models.load import LoadedModel

CONTEXT_TOKENS = 1024
_COMMAND = "from kvarto.cli import main; main()"
_START_SECONDS = 240.0


def tiny_model() -> Any:
    """Its weights are large, so that logits are not flat."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=EOS + 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT_TOKENS, initializer_range=0.3,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=EOS, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=EOS)
    return model


def tiny_loaded() -> LoadedModel:
    """For an engine in this process."""
    return LoadedModel(tiny_model(), tokenizer(PLAIN), "tiny", "tiny", Path())


def save_tiny(folder: Path) -> Path:
    """For an engine in another one. Returns the folder."""
    tiny_model().save_pretrained(folder)
    tokenizer(PLAIN).save_pretrained(folder)
    return folder


class Server:
    """The command with these words, on a free port; what it says is in `log`. Leaving ends it, by force if it must be."""

    def __init__(self, log: Path, *words: str) -> None:
        self._log = log
        # OpenMP teams of several processes that compete for cores collapse.
        own = {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, "serve", *words, "--port", "0", "--threads", "1"],
                stderr=file, stdout=file, env=os.environ | own,
            )  # fmt: skip
        end = time.monotonic() + _START_SECONDS
        while not (found := re.search(r"listening on (http://\S+)/v1", self.said)):
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the server did not start:\n{self.said}")
            time.sleep(0.05)
        self.url = found[1]

    @property
    def said(self) -> str:
        """All that it wrote."""
        return self._log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Each name's sum over its labels, without the prefix."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=60).text):
            for sample in family.samples:
                name = sample.name.removeprefix("kvarto_")
                sums[name] = sums.get(name, 0) + sample.value
        return sums

    def terminate(self, seconds: float = 60) -> int:
        """A polite signal, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """At once, with no time to do anything."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def soon(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """It becomes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
