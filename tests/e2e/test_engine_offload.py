"""What left the engine's memory comes back as it was, after a restart too, or is computed again. Never does a wrong page give an answer."""

from __future__ import annotations

import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_engine import FORMATS, GREEDY, ROOMY, SMALL, alone, assert_same, core, drive, forget, prompt

from kvarto.cache.tiers import DiskTier, HostTier, Tiers
from kvarto.engine.core import EngineCore
from kvarto.engine.request import Request, Sampling
from kvarto.page import HEADER_BYTES

TOKENS = tuple(prompt(300))


def serve(
    engine: EngineCore, text: str, family: str, tokens: tuple[int, ...] = TOKENS, tenant: str | None = None
) -> int:
    """Serve a request, compare it with one that is alone, and return how many of its tokens were found."""
    request = Request("a", list(tokens), GREEDY, identity=tenant)
    assert_same(text, drive(engine, [request])[request], alone(family, text, tokens))
    return request.cached_tokens


def on_disk(
    folder: Path, text: str = "int4", family: str = "gemma3_text", identity: str = "model", **options: Any
) -> EngineCore:
    return core(family, text, tiers=Tiers(None, DiskTier(folder, 1 << 28)), identity=identity, **options)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "gemma3_text"])
def test_what_was_dropped_comes_back_from_host_memory_and_after_a_restart(
    family: str, text: str, tmp_path: Path
) -> None:
    tiers = Tiers(HostTier(1 << 26), DiskTier(tmp_path, 1 << 28))
    engine = core(family, text, tiers=tiers, identity="model")
    assert serve(engine, text, family) == 0
    forget(engine)
    assert serve(engine, text, family) == 256
    assert tiers.hits["host"] > 0
    engine.close()
    engine = on_disk(tmp_path, text, family)
    assert serve(engine, text, family) == 256
    assert engine.offload is not None
    assert engine.offload.tiers.hits["disk"] > 0
    assert serve(engine, text, family) == 256
    engine.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:32] + data[32:].replace(b"int4", b"int3"),
        lambda data: data[:36] + b"\x63" + data[37:],
        lambda data: data[:-HEADER_BYTES],
    ],
    ids=["half", "empty", "a bit", "another prefix", "another codec", "another version", "less"],
)
def test_a_file_that_is_not_sound_is_computed_again(
    change: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = on_disk(tmp_path)
    serve(engine, "int4", "gemma3_text")
    engine.close()
    files = sorted(tmp_path.glob("??/*sealed.kvb"))
    for path in files:
        path.write_bytes(change(path.read_bytes()))
    engine = on_disk(tmp_path)
    assert serve(engine, "int4", "gemma3_text") < 256
    assert "is computed again" in caplog.text
    assert engine.offload is not None
    assert engine.offload.tiers.refused > 0
    engine.close()


def test_files_of_other_models_formats_and_tenants_are_not_found(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    serve(engine, "int4", "gemma3_text", tenant="a")
    engine.close()
    for identity, text, tenant, found in (
        ("model", "int4", "a", 256), ("other", "int4", "a", 0), ("model", "int3", "a", 0),
        ("model", "int4+sink0", "a", 0), ("model", "int4", "b", 0), ("model", "int4", None, 0),
    ):  # fmt: skip
        engine = on_disk(tmp_path, text, identity=identity)
        assert serve(engine, text, "gemma3_text", tenant=tenant) == found
        engine.close()


def test_two_files_that_were_swapped_are_found_out(tmp_path: Path) -> None:
    engine = on_disk(tmp_path, family="qwen2")
    serve(engine, "int4", "qwen2")
    engine.close()
    one, other, *_ = sorted(tmp_path.glob("??/*sealed.kvb"))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    engine = on_disk(tmp_path, family="qwen2")
    assert serve(engine, "int4", "qwen2") < 256
    engine.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_random_traffic_with_little_memory_and_tiers_that_forget(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    tiers = Tiers(HostTier(1 << 18), DiskTier(tmp_path, 1 << 20))
    engine = core("gemma3_text", "int4", memory=SMALL, tiers=tiers, identity="model")
    stems = [prompt(length, seed=length) for length in (130, 200)]
    for i in range(25):
        tokens = tuple(
            rng.choice(stems)[: rng.randrange(64, 200)] + prompt(rng.randrange(1, 60), seed=rng.randrange(3))
        )
        most = Sampling(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
        requests = [Request(f"{i}{j}", list(tokens), most) for j in range(rng.randrange(1, 4))]
        got = drive(engine, requests)
        for request in requests:
            assert_same("int4", got[request], alone("gemma3_text", "int4", tokens, 6))
        if rng.random() < 0.2:
            forget(engine)
    assert tiers.hits["host"] > 0
    engine.close()


def test_without_room_nothing_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    engine = on_disk(tmp_path, memory=ROOMY)
    serve(engine, "int4", "gemma3_text")
    engine.close()
    small = on_disk(tmp_path, memory=SMALL)
    hog = Request("hog", prompt(200, seed=9), Sampling(max_tokens=60, temperature=0, ignore_eos=True))
    small.add(hog)
    for _ in range(5):
        small.step()
    serve(small, "int4", "gemma3_text")
    small.close()


@contextmanager
def a_full_disk(folder: Path) -> Iterator[Path]:
    """A folder with room for a few files: a file system of its own where one may be mounted, else no file may have more than some bytes."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_every_answer_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with a_full_disk(tmp_path / "small") as folder:
        for _ in range(2):
            engine = on_disk(folder, memory=SMALL)
            for seed in range(2):
                tokens = tuple(prompt(300, seed=seed))
                serve(engine, "int4", "gemma3_text", tokens)
                forget(engine)
                serve(engine, "int4", "gemma3_text", tokens)
            engine.close()
        assert "blocks are not kept" in caplog.text
        assert engine.offload is not None
        assert engine.offload.tiers.refused == 0
        assert not list(folder.glob("??/*.part"))


def test_a_clock_that_jumps_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, clock = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + rng.choice([-1, 0, 1]) * 86_400)
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    for expected in (0, 256):
        engine = on_disk(tmp_path)
        assert serve(engine, "int4", "gemma3_text") == expected
        forget(engine)
        assert serve(engine, "int4", "gemma3_text") == 256
        engine.close()
