"""A model for a benchmark, in float32 where it shall run: by kvarto's name, from a folder, or a folder's config with the weights of a GGUF file.

A machine without network gets a folder or a file by hand. A GGUF file is read with the `gguf` package alone, which takes seconds, where transformers'
own loader takes minutes; llama and qwen2 only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvarto.errors import IntegrityError, Unsupported

_PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load(folder: Path, gguf_file: Path | None, device: str) -> Any:
    """A causal language model in evaluation mode. Raises IntegrityError or Unsupported."""
    if gguf_file is None:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        return model.to(device).eval().requires_grad_(False)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in ("llama", "qwen2"):
        raise Unsupported(f"{folder}: GGUF weights of a {config.model_type} model; convert them to safetensors")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(_weights(config, gguf_file), strict=False)
    if wrong := [name for name in missing if name != "lm_head.weight"] + list(unexpected):
        raise IntegrityError(f"{gguf_file}: {wrong[0]} does not fit {folder}; give the two of one model")
    if missing:
        model.tie_weights()
    return model.eval().requires_grad_(False)


def _weights(config: Any, file: Path) -> dict[str, Tensor]:
    """By transformers' names, float32 on the CPU. llama.cpp keeps the rows of Llama's queries and keys in another order."""
    import gguf

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        numbers = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))  # a copy: the file is read-only
        weight = torch.from_numpy(numbers).float().reshape([int(size) for size in reversed(tensor.shape)])
        first, _, rest = tensor.name.partition(".")
        if first != "blk":
            if first in _WHOLE:
                found[f"{_WHOLE[first]}.{rest}"] = weight
            continue
        layer, part, kind = rest.split(".")
        if config.model_type == "llama" and part in heads:
            weight = weight.unflatten(0, (heads[part], -1, 2)).swapaxes(1, 2).flatten(0, 2)
        found[f"model.layers.{layer}.{_PARTS[part]}.{kind}"] = weight
    return found
