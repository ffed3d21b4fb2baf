"""Formats as users write them, and policies: a format for each layer.

    int4                       K and V by the codec int4
    int8/int4                  K by int8, V by int4
    int4+sink64+window256      the first 64 and the last 256 tokens stay raw
    int4+sink0                 no raw sink (formats below 8 bits keep the first page raw unless told so)
    int4+skip=0,1,-1           a policy: these layers keep the model's own dtype
    policy.json, policy.toml   a policy from a file: a format for each layer (policy_file.py)

An unknown name or a malformed part is an error that says what was expected; nothing ever means "off".
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvarto.codecs import Codec, registry
from kvarto.codecs.fp8 import Fp8
from kvarto.codecs.kvquant import Constants, KvQuant
from kvarto.errors import Unsupported, UsageError
from kvarto.layout import PAGE_TOKENS, Geometry, PageLayout, Side

if TYPE_CHECKING:
    from kvarto.policy_file import ConstantsEntry, LayerEntry

_PART = re.compile(r"(sink|window)([0-9]{1,9})")
_LAYERS = re.compile(r"-?[0-9]{1,6}(,-?[0-9]{1,6})*")
_DIGEST_DIGITS = 16
_FILES = (".json", ".toml")
_GRAMMAR = "a codec or K-codec/V-codec, then +sinkN, +windowN, +skip=LAYERS"


@dataclass(frozen=True)
class Format:
    """A codec for K and one for V; `sink_tokens` first and `window_tokens` recent tokens stay raw (both whole pages)."""

    k: Codec
    v: Codec
    sink_tokens: int = 0
    window_tokens: int = 0

    def __post_init__(self) -> None:
        for name, tokens in (("sink", self.sink_tokens), ("window", self.window_tokens)):
            if tokens < 0 or tokens % PAGE_TOKENS:
                raise UsageError(f"{name} tokens", f"a multiple of the page's {PAGE_TOKENS} tokens", tokens)

    def __str__(self) -> str:
        codecs = self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"
        sink = "" if self.sink_tokens == _default_sink(self.k, self.v) else f"+sink{self.sink_tokens}"
        return codecs + sink + (f"+window{self.window_tokens}" if self.window_tokens else "")

    def layout(self, geometry: Geometry) -> PageLayout:
        """The page of this format. Raises Unsupported if a codec cannot write the geometry."""
        for side, codec in ((Side.K, self.k), (Side.V, self.v)):
            if reason := codec.refuses(side, geometry.page_tokens, geometry.dim(side)):
                raise Unsupported(
                    f"format {self}: {side.upper()} codec {codec.name} cannot be used here: {reason}; choose another"
                )
        tokens = geometry.page_tokens
        return PageLayout(
            geometry,
            self.k.layout(Side.K, tokens, geometry.k_dim),
            self.v.layout(Side.V, tokens, geometry.v_dim),
        )


@dataclass(frozen=True)
class Policy:
    """A format for all layers but the skipped ones, which keep the model's own dtype; or, with `layers`, one for each layer.

    skip      layers, which count from 0, negative ones from the end; only those that cache keys and values count
    layers    one format for each of them; `format` is then the commonest. Made by `by_layer`
    name      what a policy with `layers` is called
    sha256    of its content: with the name it says which policy it is
    origin    the text that gives the policy again; a path for one from a file
    """

    format: Format
    skip: tuple[int, ...] = ()
    layers: tuple[Format, ...] = ()
    name: str = ""
    sha256: str = ""
    origin: str = field(default="", compare=False)

    @classmethod
    def by_layer(cls, layers: Sequence[Format], *, name: str = "layers", sha256: str = "", origin: str = "") -> Policy:
        """A format for each layer that caches keys and values. Without `sha256` it is that of the formats, parameters of their codecs included."""
        commonest = Counter(layers).most_common(1)[0][0]
        digest = sha256 or hashlib.sha256(repr(tuple(layers)).encode()).hexdigest()
        return cls(commonest, (), tuple(layers), name, digest, origin)

    def __str__(self) -> str:
        """The text form; of a policy with `layers` its name and the beginning of its digest, by which it is known where many are."""
        if self.layers:
            return f"{self.name}@{self.sha256[:_DIGEST_DIGITS]}"
        return str(self.format) + (f"+skip={','.join(map(str, self.skip))}" if self.skip else "")

    @property
    def identity(self) -> str:
        """`str`, with the whole digest: for names of what outlives the process."""
        return f"{self.name}@{self.sha256}" if self.layers else str(self)

    def for_layer(self, layer: int, layers: int, raw: Format) -> Format:
        """The format of one layer of `layers`; `raw` is what skipped layers get. Raises UsageError for a skip that is no layer, or a policy
        of another number of layers."""
        if self.layers:
            if len(self.layers) != layers:
                expected = f"a format for each of the {layers} layers that cache keys and values"
                raise UsageError(f"policy {self}", expected, len(self.layers), "calibrate one for this model")
            return self.layers[layer]
        for index in self.skip:
            if not -layers <= index < layers:
                raise UsageError("skip", f"layers between {-layers} and {layers - 1}", index)
        return raw if layer in {index % layers for index in self.skip} else self.format


def parse_format(text: str) -> Format:
    """A format without `skip`. Raises UnknownName (with a did-you-mean) or UsageError."""
    policy = spelled_policy(text)
    if policy.skip:
        raise UsageError("format", "one format for all layers", repr(text), "leave +skip= to policies")
    return policy.format


def parse_policy(text: str) -> Policy:
    """Read the text form (module docstring), or the file that it names. Raises UnknownName or UsageError. Not for what strangers send."""
    if not names_file(text):
        return spelled_policy(text)
    from kvarto.policy_file import read_policy_file  # Needs pydantic, which kernels and their tests do without.

    read = read_policy_file(text)
    formats = []
    for number, entry in enumerate(read.content.layers):
        try:
            formats.append(_entry_format(entry))
        except UsageError as error:
            name = f"policy {read.path}: layers.{number}: {error.name}"
            raise UsageError(name, error.expected, error.got, error.remedy) from None
    return Policy.by_layer(formats, name=read.name, sha256=read.sha256, origin=str(read.path))


def names_file(text: str) -> bool:
    """`text` means a policy file, not a format: no format ends so."""
    return text.strip().lower().endswith(_FILES)


def spelled_policy(text: str) -> Policy:
    """The text form alone: opens no file, whatever the text is. Raises UnknownName or UsageError."""
    codecs, *parts = text.strip().split("+")
    k_name, slash, v_name = codecs.partition("/")
    k, v = registry[k_name], registry[v_name if slash else k_name]
    chosen = Format(k, v, sink_tokens=_default_sink(k, v))
    skip: tuple[int, ...] = ()
    kinds = [re.match(r"[a-z]*", part)[0] for part in parts]  # type: ignore[index]
    for i, part in enumerate(parts):
        if kinds[i] in kinds[:i]:
            raise UsageError("format", f"{kinds[i]} once", repr(text))
        if part.startswith("skip="):
            skip = _layers(part.removeprefix("skip="), text)
        elif match := _PART.fullmatch(part):
            tokens = int(match[2])
            chosen = (
                replace(chosen, sink_tokens=tokens) if match[1] == "sink" else replace(chosen, window_tokens=tokens)
            )
        else:
            raise UsageError("format", _GRAMMAR, f"{part!r} in {text!r}")
    return Policy(chosen, skip)


def raw_format(dtype: str) -> Format:
    """The identity format of a model's own dtype: "bfloat16", "float16" or "float32"."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if dtype not in names:
        raise Unsupported(f"KV of dtype {dtype} has no raw format; load the model in bfloat16, float16 or float32")
    codec = registry[names[dtype]]
    return Format(codec, codec)


def _entry_format(entry: LayerEntry) -> Format:
    chosen = parse_format(entry.format)
    k, v = _scaled(chosen.k, entry.k_scale, "k_scale"), _scaled(chosen.v, entry.v_scale, "v_scale")
    k, v = _calibrated(k, entry.k_constants, "k_constants"), _calibrated(v, entry.v_constants, "v_constants")
    return replace(chosen, k=k, v=v)


def _calibrated(codec: Codec, constants: ConstantsEntry | None, name: str) -> Codec:
    """The codec with constants of the layer. Raises UsageError if it has none, or not such ones."""
    if constants is None:
        return codec
    if not isinstance(codec, KvQuant):
        raise UsageError(name, "none, or a codec with calibrated levels such as kvquant4", codec.name)
    return replace(codec, calibrated=Constants(**constants.model_dump()))


def _scaled(codec: Codec, scales: tuple[float, ...] | None, name: str) -> Codec:
    """The codec with calibrated scales, of the layer or of its KV heads. Raises UsageError if it has no such scales."""
    if scales is None:
        return codec
    if not isinstance(codec, Fp8) or codec.scale_per == "token":
        raise UsageError(name, "none, or a codec with static scales such as fp8 or fp8-head", codec.name)
    return replace(codec, scales=scales)


def _default_sink(k: Codec, v: Codec) -> int:
    return PAGE_TOKENS if min(k.bits, v.bits) < 8 else 0


def _layers(text: str, whole: str) -> tuple[int, ...]:
    if not _LAYERS.fullmatch(text):
        raise UsageError("skip", "layer numbers such as skip=0,1,-1", f"{text!r} in {whole!r}")
    return tuple(int(number) for number in text.split(","))
