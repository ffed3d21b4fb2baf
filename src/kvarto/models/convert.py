"""From one GGUF file to a plain Hugging Face folder: float32 safetensors, config.json and tokenizer files.

Loading a GGUF dequantizes it every time, which takes minutes; from safetensors it takes seconds. So it is done once.
The weights are kept in float32 because that is what a dequantized value is: any narrower type would round it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvarto.errors import BackendUnavailable
from kvarto.models.quiet import quiet

NEEDED = ("torch", "transformers", "accelerate", "gguf", "safetensors")


def require_engine(needed: tuple[str, ...] = NEEDED) -> None:
    """Raise BackendUnavailable unless the packages that convert and load a model are installed."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            "the model loader", f"{', '.join(missing)} not installed", "run: pip install 'kvarto[engine]'"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize the file `gguf` and write a loadable model with its tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        # Loaded from GGUF the model counts as quantized and refuses to be saved, though its weights are plain floats.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder, max_shard_size="2GB")
        tokenizer.save_pretrained(folder)


def versions() -> dict[str, str]:
    """The versions of the packages that decide what a conversion writes, for its record."""
    from importlib.metadata import version

    return {name: version(name) for name in NEEDED}
