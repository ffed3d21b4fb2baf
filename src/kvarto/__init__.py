"""kvarto: the quantized KV cache for long-context LLM inference that people can trust."""

__version__ = "0.1.0"
