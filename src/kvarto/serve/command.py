"""`kvarto serve` behind its options: load, say what is served, serve, and on a signal drain and leave."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from rich.console import Console

from kvarto.engine.engine import Ask, Engine, open_tiers, parse_bytes
from kvarto.engine.request import Sampling
from kvarto.errors import Unsupported, UsageError
from kvarto.formats import parse_policy
from kvarto.layout import PAGE_TOKENS
from kvarto.models.load import load
from kvarto.serve.app import make_app

_FLUSH_SECONDS = 5
_BACKLOG = 2048  # uvicorn's, which listens once more
_log = logging.getLogger("kvarto.serve")


@dataclass(frozen=True)
class ServeOptions:
    """`kv` is the format of requests that name none, `also` are the others offered. `drain_seconds`: how long a signal lets requests finish."""

    model: str
    kv: str
    also: Sequence[str]
    memory: str
    host_memory: str | None
    disk: Path | None
    disk_memory: str
    host: str
    port: int
    step_tokens: int
    max_running: int
    max_waiting: int
    threads: int | None
    device: str
    drain_seconds: float


def serve_command(options: ServeOptions) -> None:
    """Serve until a signal comes. Raises what loading, the engine and binding the address raise, before anything is served."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for text in (options.kv, *options.also):  # what is wrong should be said before a model is loaded
        parse_policy(text)
    parse_bytes(options.memory)
    if options.host_memory is not None:
        parse_bytes(options.host_memory, "host_memory")
    parse_bytes(options.disk_memory, "disk_memory")
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with _bind(options.host, options.port) as listener:
        loaded = load(options.model, device=options.device, progress=console.print)
        engine = Engine(
            loaded,
            kv=options.kv,
            also=options.also,
            memory=options.memory,
            tiers=open_tiers(options.host_memory, options.disk, options.disk_memory),
            most_waiting=options.max_waiting,
            step_tokens=options.step_tokens,
            most_running=options.max_running,
        )
        with engine:
            config = uvicorn.Config(
                make_app(engine), log_config=None, access_log=False, timeout_graceful_shutdown=_FLUSH_SECONDS
            )
            for line in describe(engine):
                console.print(line)
            warm_up(engine)
            listener.listen(_BACKLOG)  # before it is said, so that who reads the line can connect
            address = listener.getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            console.print(f"listening on http://{host}:{address[1]}/v1")
            DrainingServer(config, engine, options.drain_seconds).run(sockets=[listener])


def describe(engine: Engine) -> list[str]:
    """What is served, a line each."""
    core = engine.core
    lines = [
        f"{engine.loaded.name} on {core.device}, {core.context_tokens:,} tokens of context, "
        f"{core.memory.arena.nbytes / 2**20:,.0f} MiB for keys and values"
    ]
    for number, offer in enumerate(engine.offers):
        room = "any number of" if offer.capacity_tokens is None else f"{offer.capacity_tokens:,}"
        lines.append(
            f"  {offer.name}: {offer.bits_per_number:.2f} bits per number, {room} tokens fit, kernel {offer.kernel_names}"
            + ("" if number else " (the default)")
        )
    return lines


def warm_up(engine: Engine) -> None:
    """Let kernels be compiled before the first client waits for them: each format fills a page and reads it. Raises Unsupported if one cannot."""
    tokens = [0] * (PAGE_TOKENS + 1)
    for done in engine.generate([Ask(tokens, Sampling(max_tokens=2), kv, identity=_log.name) for kv in engine.formats]):
        if done.error:
            raise Unsupported(f"format {done.kv} does not run on this machine: {done.error}; serve another one")


class DrainingServer(uvicorn.Server):
    """A signal closes the engine to new requests (503, and so is /health) and lets the others finish.

    A second one ends these as well, and they are told; a third one ends everything.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine, self._drain_seconds, self._signals = engine, drain_seconds, 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn calls this for SIGINT and SIGTERM."""
        self._signals += 1
        if self._signals > 2:
            self.should_exit = self.force_exit = True
        else:
            threading.Thread(target=self._close, args=(self._signals == 1,), name="kvarto close", daemon=True).start()

    def _close(self, drain: bool) -> None:
        left = self._engine.running + self._engine.waiting
        _log.info("%s; requests left: %d", "closing" if drain else "closing at once", left)
        self._engine.close(drain=drain, timeout_seconds=self._drain_seconds)
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError("host", "an address of this machine", f"{host} ({error.strerror})") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError("port", "an address that can be listened on", f"{host}:{port} ({error.strerror})") from error
    return listener
