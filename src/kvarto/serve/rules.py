"""The file of `kvarto serve --config`: options of the command line, tenants by their keys, and rules for requests that name no format. No torch.

    [serve]
    kv = "int4"
    also = ["bf16"]

    [tenants.acme]
    keys = ["sha256:2bb80d53..."]

    [[rules]]
    tenant = "acme"
    kv = "bf16"

The first rule counts whose conditions all hold. Of a key only its digest is kept, and no message shows what stands in a tenant's table.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvarto.errors import KvartoError, UnknownName, UsageError
from kvarto.serve.protocol import Texts, expectation

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_BEARER = "bearer "
Count = Annotated[int, Field(ge=1)]
Size = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Route = Literal["/v1/completions", "/v1/chat/completions"]


class UnknownKey(KvartoError):
    """A request without the key of any tenant."""


class Table(BaseModel):
    """Strict types, unknown keys refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Options(Table):
    """[serve]: options of the command line, with underscores; those that are given there win."""

    model: str | None = None
    kv: str | None = None
    also: list[str] | None = None
    memory: Size | None = None
    host_memory: Size | None = None
    disk: Annotated[Path | None, Field(strict=False)] = None
    disk_memory: Size | None = None
    host: str | None = None
    port: int | None = Field(default=None, ge=0, le=65535)
    step_tokens: Count | None = None
    step_ms: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_running: Count | None = None
    max_waiting: Count | None = None
    threads: Count | None = None
    device: str | None = None
    drain_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    probe_share: float | None = None
    probe_threshold: float | None = None


# The digest of an empty key, which `sha256sum` gives where a variable was not set.
_NO_KEY = hashlib.sha256(b"").hexdigest()
_SHOWN = ("serve", "rules", "unknown_keys")


def _digest(key: str) -> str:
    """Of a key as it is, or the digest that stands for one."""
    if (match := _DIGEST.fullmatch(key)) and match[1].lower() != _NO_KEY:
        return match[1].lower()
    if not key or key.startswith("sha256:"):
        raise ValueError("a key, or sha256: and the 64 hexadecimal digits of its digest (that of an empty key is none)")
    return hashlib.sha256(key.encode()).hexdigest()


class Tenant(Table):
    """[tenants.NAME].

    keys         as clients send them behind `Authorization: Bearer`, or their digests
    cache_salt   who has the same one shares prefixes; by default the tenant's name, so nobody; "": everybody who has none
    priority     of its requests: lower goes first
    """

    keys: Annotated[list[Annotated[str, AfterValidator(_digest)]], Field(min_length=1)]
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class Caller:
    """Who asks, and how: a route, headers by their names in any case, and the tenant whose key came along."""

    route: str
    headers: Mapping[str, str]
    tenant: str | None = None


class Rule(Table):
    """[[rules]]: `kv` is the format where all that is given holds, of each condition any of its values.

    `model` makes new names under which the model is served. `header`: names and the values that they must have.
    """

    kv: str
    tenant: Texts = []
    route: Annotated[list[Route], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = []
    model: Texts = []
    header: dict[str, str] = {}

    def matches(self, caller: Caller, model: str) -> bool:
        """It is for such a request."""
        return (
            (not self.tenant or caller.tenant in self.tenant)
            and (not self.route or caller.route in self.route)
            and (not self.model or model in self.model)
            and all(caller.headers.get(name) == value for name, value in self.header.items())
        )


class Config(Table):
    """The whole file.

    unknown_keys   where there are tenants: "refuse" requests that bring none of their keys, or "allow" them as nobody's
    """

    serve: Options = Options()
    tenants: dict[str, Tenant] = {}
    unknown_keys: Literal["refuse", "allow"] = "refuse"
    rules: list[Rule] = []

    @property
    def aliases(self) -> list[str]:
        """Names of the model that rules know, in their order."""
        return list(dict.fromkeys(name for rule in self.rules for name in rule.model))

    @property
    def needs_keys(self) -> bool:
        """Who brings no key is refused."""
        return bool(self.tenants) and self.unknown_keys == "refuse"

    def options_but(self, given: Sequence[str]) -> dict[str, Any]:
        """What [serve] says of options that are not `given` on the command line."""
        return {name: value for name, value in self.serve if value is not None and name not in given}

    def format_for(self, caller: Caller, model: str) -> str | None:
        """What the rules say, or None."""
        return next((rule.kv for rule in self.rules if rule.matches(caller, model)), None)

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant whose key stands in the header, None if nobody's. Raises UnknownKey if that is refused."""
        sent = authorization or ""
        key = sent[len(_BEARER) :].strip() if sent.lower().startswith(_BEARER) else ""
        digest = hashlib.sha256(key.encode("latin-1", "replace")).hexdigest()  # headers come as latin-1
        tenant = next((name for name, tenant in self.tenants.items() if key and digest in tenant.keys), None)
        if tenant is None and self.needs_keys:
            raise UnknownKey(
                f"authorization: expected Bearer and a key of this server, got {'another key' if key else 'none'}"
            )
        return tenant

    def identity(self, tenant: str | None, cache_salt: str | None) -> Hashable:
        """Whose prefixes a request may share. A client's own salt divides further, and never leads into another tenant's."""
        own = None if tenant is None else self.tenants[tenant].cache_salt
        if tenant is None or own == "":
            return cache_salt
        return (tenant if own is None else own, cache_salt)

    def priority(self, tenant: str | None) -> int:
        """Of a tenant's requests."""
        return 0 if tenant is None else self.tenants[tenant].priority


def read_config(path: Path) -> Config:
    """Raises UsageError that names file and key."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError("config", "a file that can be read", f"{path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(str(path), "TOML", str(error)) from error
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise _explain(path, error) from None  # its text shows what it was given, keys too
    for number, rule in enumerate(config.rules):
        for name in rule.tenant:
            if name not in config.tenants:
                raise UnknownName(f"{path}: rules[{number}].tenant", name, config.tenants)
    keys = [key for tenant in config.tenants.values() for key in tenant.keys]
    if len(set(keys)) < len(keys):
        raise UsageError(
            f"{path}: tenants", "keys of which each belongs to one tenant", "a key that stands there twice"
        )
    return config


def check_formats(path: Path, config: Config, offered: Sequence[str], canonical: Callable[[str], str]) -> None:
    """Raises UsageError if a rule's format is not `offered`; these and what `canonical` gives are the names of formats."""
    for number, rule in enumerate(config.rules):
        name = f"{path}: rules[{number}].kv"
        try:
            chosen = canonical(rule.kv)
        except UsageError as error:
            raise UsageError(name, error.expected, error.got, error.remedy) from error
        if chosen not in offered:
            raise UsageError(name, f"a format of kv or also: {', '.join(offered)}", repr(rule.kv), "add it to also")


def _explain(path: Path, error: ValidationError) -> UsageError:
    """The first thing that is wrong. Values are shown only of what can hold no key, and a tenant's table may stand under another name."""
    first = error.errors(include_url=False)[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    expected, got, remedy = expectation(first)
    if first["loc"][0] not in _SHOWN and first["type"] != "missing":
        got = f"a value of type {type(first['input']).__name__}"
    return UsageError(f"{path}: {key}", expected, got, remedy)
