"""The configuration file: what it says counts, what is wrong in it is one line, and keys are never shown."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from kvarto.errors import UsageError
from kvarto.serve.rules import Caller, Config, Options, UnknownKey, check_formats, read_config

KEY = "sk-secret-1"
DIGEST = hashlib.sha256(b"sk-secret-2").hexdigest()
FILE = f"""
[serve]
kv = "int4"
also = ["bf16", "fp8"]
memory = "2GiB"
host_memory = 1073741824
disk = "pages"
port = 0

[tenants.acme-corp]
keys = ["{KEY}", "sha256:{DIGEST.upper()}"]
priority = -1

[tenants.beta]
keys = ["sk-beta"]
cache_salt = ""

[[rules]]
tenant = "acme-corp"
kv = "bf16"

[[rules]]
model = ["x-fp8", "y-fp8"]
route = "/v1/completions"
kv = "fp8"

[[rules]]
header = {{ X-Team = "research", X-Stage = "eval" }}
kv = "bf16"
"""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def read(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvarto.toml"
    path.write_text(text)
    return read_config(path)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return read(tmp_path, FILE)


def test_the_first_rule_counts_that_holds(config: Config) -> None:
    def chosen(model: str = "m", route: str = CHAT, tenant: str | None = None, **headers: str) -> str | None:
        return config.format_for(Caller(route, {k.replace("_", "-"): v for k, v in headers.items()}, tenant), model)

    assert chosen() is None
    assert chosen(tenant="beta") is None
    assert chosen(tenant="acme-corp") == "bf16"
    assert chosen("x-fp8", COMPLETIONS, "acme-corp") == "bf16"
    assert chosen("y-fp8", COMPLETIONS) == "fp8"
    assert chosen("y-fp8", CHAT) is None
    assert chosen(X_Team="research") is None
    assert chosen(X_Team="research", X_Stage="eval") == "bf16"
    assert config.aliases == ["x-fp8", "y-fp8"]


def test_tenants_are_known_by_their_keys(config: Config) -> None:
    assert config.tenant_of(f"Bearer {KEY}") == "acme-corp"
    assert config.tenant_of("bearer  sk-secret-2 ") == "acme-corp"
    assert config.tenant_of("Bearer sk-beta") == "beta"
    for wrong in (None, "", "Bearer ", f"Basic {KEY}", KEY, "Bearer sk-beta2", f"Bearer {DIGEST}", "Bearer é"):
        with pytest.raises(UnknownKey) as caught:
            config.tenant_of(wrong)
        assert "sk-" not in str(caught.value)
    open_to_all = config.model_copy(update={"unknown_keys": "allow"})
    assert open_to_all.tenant_of("Bearer none") is None
    assert open_to_all.tenant_of(f"Bearer {KEY}") == "acme-corp"
    assert Config().tenant_of(None) is None


def test_keys_are_not_kept(config: Config) -> None:
    assert KEY not in repr(config)
    assert config.tenants["acme-corp"].keys == [hashlib.sha256(KEY.encode()).hexdigest(), DIGEST]


def test_prefixes_are_a_tenant_s_own(config: Config) -> None:
    """Unless its salt is empty; and no salt of a client's leads to what is somebody else's."""
    assert config.identity(None, None) is None
    assert config.identity("beta", None) is None
    assert config.identity("beta", "s") == config.identity(None, "s") == "s"
    own = [config.identity("acme-corp", salt) for salt in (None, "s", "t")]
    others = [config.identity(None, salt) for salt in ("acme-corp", "('acme-corp', None)")]
    assert len({repr(identity) for identity in own + others}) == 5
    assert (config.priority("acme-corp"), config.priority("beta"), config.priority(None)) == (-1, 0, 0)


def test_options_that_are_given_win(config: Config) -> None:
    assert config.options_but(["memory", "port"]) == {
        "kv": "int4", "also": ["bf16", "fp8"], "host_memory": "1073741824", "disk": Path("pages"),
    }  # fmt: skip


def test_every_option_of_the_command_can_stand_in_the_file() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("llguidance")
    from kvarto.serve.command import ServeOptions

    assert set(Options.model_fields) == {field.name for field in dataclasses.fields(ServeOptions)}


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("[serve]\nprot = 1", "serve.prot", "expected only fields that this server supports, got 1; leave it out"),
        ("[serve]\nport = '80'", "serve.port", "expected a valid integer, got '80'"),
        ("[serve]\nport = 70000", "serve.port", "expected less than or equal to 65535, got 70000"),
        ("[serve]\nthreads = 0", "serve.threads", "expected greater than or equal to 1, got 0"),
        ("[serve]\nmemory = 1.5", "serve.memory", "expected a valid string, got 1.5"),
        ("[[rules]]\nmodel = 'a'", "rules[0].kv", "expected a value, got nothing"),
        ("[[rules]]\nkv = 'int4'\nroute = '/v1/chat'", "rules[0].route[0]", "'/v1/completions' or '/v1/chat/completions'"),
        ("[[rules]]\nkv = 'int4'\ntenant = 'acm'\n[tenants.acme]\nkeys = ['k']", "rules[0].tenant", "one of acme, got 'acm'; did you mean acme?"),
        ("[[rules]]\nkv = 'int4'\nheader = {a = 1}", "rules[0].header.a", "expected a valid string, got 1"),
        ("unknown_keys = 'drop'", "unknown_keys", "expected 'refuse' or 'allow', got 'drop'"),
        ("[tenants.a]\nkeys = ['sk-1']\n[tenants.b]\nkeys = ['sk-1']", "tenants", "a key that stands there twice"),
        ("[tenants.a]\nkeys = []", "tenants.a.keys", "got a value of type list"),
        ("[tenants.a]\nkeys = 'sk-1'", "tenants.a.keys", "got a value of type str"),
        ("[tenants.a]\nkeys = ['']", "tenants.a.keys[0]", "expected a key, or sha256:"),
        ("[tenants.a]\nkeys = ['sha256:sk-1']", "tenants.a.keys[0]", "expected a key, or sha256:"),
        ("[tenants.a]\nkey = 'sk-1'\nkeys = ['sk-2']", "tenants.a.key", "got a value of type str; leave it out"),
        ("tenants = 'sk-1'", "tenants", "got a value of type str"),
        (f"[tenants.a]\nkeys = ['sha256:{hashlib.sha256(b'').hexdigest()}']", "tenants.a.keys[0]", "that of an empty key is none"),
        ("[tenant.a]\nkeys = ['sk-1']", "tenant", "got a value of type dict; leave it out"),
        ("keys = ['sk-1']", "keys", "got a value of type list; leave it out"),
        ("[serve]\ndrain_seconds = inf", "serve.drain_seconds", "expected a finite number"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_no_key_is_shown(tmp_path: Path, text: str, name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'kvarto.toml'}: {name}: expected ")
    assert said in message
    assert "\n" not in message
    assert "sk-1" not in message


def test_what_is_no_file_of_this_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config: expected a file that can be read, got .*no\.toml \(No such file"):
        read_config(tmp_path / "no.toml")
    with pytest.raises(UsageError, match=r"kvarto\.toml: expected TOML, got .*line 1"):
        read(tmp_path, "serve\n")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"bytes\.toml: expected TOML, got "):
        read_config(tmp_path / "bytes.toml")


def test_formats_of_rules_are_offered(config: Config) -> None:
    def canonical(text: str) -> str:
        if text == "fp8":
            raise UsageError("codec", "one of int4", "'fp8'", "did you mean int4?")
        return text

    check_formats(Path("f"), config, ["int4", "bf16", "fp8"], str)
    for offered, how, said in ((["int4"], str, r"f: rules\[0\]\.kv: expected a format of kv or also: int4, got 'bf16'; add it to also"),
                               (["bf16"], canonical, r"f: rules\[1\]\.kv: expected one of int4, got 'fp8'; did you mean int4\?")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            check_formats(Path("f"), config, offered, how)


def test_the_guide_s_example(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    config = read(tmp_path, re.sub(r"sha256:\w+\.\.\.", f"sha256:{DIGEST}", block))
    check_formats(Path("f"), config, [config.serve.kv or "", *(config.serve.also or [])], str)
    assert config.tenant_of("Bearer sk-secret-2") == "acme"
    assert config.aliases == ["smollm2-int8"]


def asked(**values: Any) -> Config:
    return Config.model_validate(values)


def test_a_rule_without_conditions_is_for_everybody() -> None:
    assert asked(rules=[{"kv": "int8"}, {"kv": "int4"}]).format_for(Caller(CHAT, {}), "m") == "int8"
