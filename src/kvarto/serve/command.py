"""`kvarto serve` behind its options: load, say what is served, serve, and on a signal drain and leave."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from rich.console import Console

from kvarto.engine.engine import Engine, open_tiers, parse_bytes
from kvarto.engine.probe import BASELINE, Probing
from kvarto.errors import UsageError
from kvarto.formats import parse_policy, spelled_policy
from kvarto.models.load import load
from kvarto.serve.app import make_app
from kvarto.serve.connection import TimedProtocol
from kvarto.serve.rules import Config, check_formats, read_config

_FLUSH_SECONDS = 5
_log = logging.getLogger("kvarto.serve")


@dataclass(frozen=True)
class ServeOptions:
    """`kv` is the format of requests that name none, `also` are the others offered. `drain_seconds`: how long a signal lets requests finish.

    `probe_share` and `probe_threshold` are those of `engine.probe.Probing`.
    """

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
    step_ms: float
    max_running: int
    max_waiting: int
    threads: int | None
    device: str
    drain_seconds: float
    probe_share: float
    probe_threshold: float | None


def serve_command(options: ServeOptions, file: Path | None = None, given: Sequence[str] = ()) -> None:
    """As `serve`, with what a configuration file says of options that are not `given`, and its tenants and rules."""
    config = Config() if file is None else read_config(file)
    options = replace(options, **config.options_but(given))
    if file is not None:
        offered = {text: str(parse_policy(text)) for text in (options.kv, *options.also)}
        check_formats(file, config, list(offered.values()), lambda text: _named(text, offered))
    serve(options, config)


def _named(text: str, offered: Mapping[str, str]) -> str:
    """The name of a format as `Engine.policy_of` takes it; `offered` are names by the texts that were given. Raises UsageError."""
    policies = [name for name in offered.values() if "@" in name and text == name.partition("@")[0]]
    return offered.get(text) or (policies[0] if len(policies) == 1 else str(spelled_policy(text)))


def serve(options: ServeOptions, config: Config) -> None:
    """Serve until a signal comes. Raises what loading, the engine and binding the address raise, before anything is served."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # What is wrong should be said before a model is loaded.
    probing = Probing(options.probe_share, options.probe_threshold)
    probing.check([parse_policy(text) for text in (options.kv, *options.also)])
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
            step_seconds=options.step_ms / 1000,
            most_running=options.max_running,
            probe=probing,
        )
        with engine:
            http = uvicorn.Config(
                make_app(engine, config),
                http=TimedProtocol,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
            for line in [*describe(engine), *describe_rules(config)]:
                console.print(line)
            engine.warm_up()
            _settle()
            _listen(listener, http.backlog)
            address = listener.getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            console.print(f"listening on http://{host}:{address[1]}/v1")
            DrainingServer(http, engine, options.drain_seconds).run(sockets=[listener])


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
    if core.probe is not None:
        lines.append(
            f"  probe: {100 * core.probe.share:.3g} % of the requests in other formats are read again in {BASELINE}"
        )
    if core.device.type == "cuda":
        why_not = core.graphs.why_not
        lines.append("  decode steps: " + (f"no CUDA graphs, {why_not}" if why_not else "replayed as CUDA graphs"))
    return lines


def describe_rules(config: Config) -> list[str]:
    """What the configuration adds to that."""
    lines = []
    if config.rules:
        names = f", also as {', '.join(config.aliases)}" if config.aliases else ""
        lines.append(f"  rules for requests that name no format: {len(config.rules)}{names}")
    if config.tenants:
        others = "get 401" if config.needs_keys else "are served as nobody's"
        lines.append(f"  tenants: {', '.join(config.tenants)}; requests without a key of theirs {others}")
    return lines


def _settle() -> None:
    """Whatever is here now stays: Python's collector need not look at it again.

    It looks at everything once a quarter of what is old is new, and beside a million objects of torch and transformers that takes thousands of
    requests; meanwhile rings of small objects, which asyncio leaves behind with each connection, pile up. From here on it counts anew.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


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
        try:
            self._engine.close(drain=drain, timeout_seconds=self._drain_seconds)
        finally:
            self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """A socket that nobody can reach before it listens: who waits for the server should not take it for ready. Raises UsageError."""
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
        raise _not_to_be_had(f"{host}:{port}", error) from error
    return listener


def _listen(listener: socket.socket, backlog: int) -> None:
    """From now on clients get through. Raises UsageError if another process, that bound the address while nobody listened, was faster."""
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _not_to_be_had("{}:{}".format(*listener.getsockname()), error) from error


def _not_to_be_had(address: str, error: OSError) -> UsageError:
    return UsageError("port", "an address that can be listened on", f"{address} ({error.strerror})")
