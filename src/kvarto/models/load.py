"""A model by name, folder or hub id, loaded so that a result can say exactly what it was measured on.

Weights come from safetensors only and code from transformers only: a pickle or a repository's own Python is never run.
A checkpoint that lacks a weight is refused, since transformers would fill it with random numbers and only warn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarto.errors import BackendUnavailable, FetchError, IntegrityError, UnknownName, Unsupported, UsageError
from kvarto.models import catalog
from kvarto.models.convert import require_engine
from kvarto.models.fetch import Progress, ensure, silent
from kvarto.models.identity import identify
from kvarto.models.quiet import quiet

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?")
_LAYER = re.compile(r"(?:model\.)?layers\.([0-9]+)\.")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True)
class LoadedModel:
    """A transformers causal language model in evaluation mode with its tokenizer.

    `name` is the catalog name, the folder's name or the hub id; `identity` covers config and weights (see `identify`).
    """

    model: Any
    tokenizer: Any
    name: str
    identity: str
    folder: Path


def resolve(model: str, *, progress: Progress = silent) -> Path | str:
    """What `model` means: a folder (of a catalog model, fetched first if needed, or a local one), or a hub id as it is.

    A catalog name wins over a folder of the same name; write `./name` for the folder. Raises UnknownName or UsageError.
    """
    if model.lower() in catalog.CATALOG or model.lower() in catalog.ALIASES:
        return ensure(model, progress=progress)
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.absolute()
    if path.exists():
        raise UsageError("model", "a folder with config.json and safetensors weights", model)
    if model.startswith((".", "/", "~")):
        raise UsageError("model", "an existing folder", model)
    if _HUB_ID.fullmatch(model):
        return model
    raise UnknownName("model", model, [*catalog.CATALOG, *catalog.ALIASES, "a folder", "an owner/name of the hub"])


def load(
    model: str, *, dtype: torch.dtype | None = None, device: str = "cpu", progress: Progress = silent
) -> LoadedModel:
    """Load a model (see `resolve`) in `dtype`, float32 unless given, onto `device`.

    Raises BackendUnavailable, FetchError, IntegrityError, Unsupported or UsageError, each with what to do.
    """
    require_engine()
    _check_device(device)
    found = resolve(model, progress=progress)
    folder = found if isinstance(found, Path) else _hub_folder(found, progress)
    if not any(folder.glob("*.safetensors")):
        raise Unsupported(
            f"{model} has no safetensors weights, and pickled ones are never loaded; convert it to safetensors"
        )
    identity = identify(folder)  # before loading, because it says more plainly than the loader which file is damaged
    loaded, tokenizer = _from_folder(model, folder, dtype)
    return LoadedModel(
        model=loaded.to(device).eval().requires_grad_(False),
        tokenizer=tokenizer,
        name=_name(model, found),
        identity=identity,
        folder=folder,
    )


def _name(model: str, found: Path | str) -> str:
    if isinstance(found, str):
        return found
    known = model.lower() in catalog.CATALOG or model.lower() in catalog.ALIASES
    return catalog.find(model).name if known else found.name


def _from_folder(model: str, folder: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
            loaded, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype or torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the report names them
                **safe,
            )
    except Exception as error:  # a config may hold anything, and each model class fails at it in its own way
        reason = " ".join(str(error).split())
        remedy = "it must be a causal language model that this transformers version knows, complete with its tokenizer"
        raise Unsupported(f"{model} cannot be loaded ({type(error).__name__}: {reason[:300]}); {remedy}") from error
    _check_report(model, loaded.config.get_text_config(decoder=True).num_hidden_layers, report)
    return loaded, tokenizer


def _check_report(model: str, layers: int, report: dict[str, Any]) -> None:
    """Refuse weights that are not those of the config: transformers would make up what is missing and leave out what is too much."""
    if missing := sorted(report["missing_keys"]):
        raise IntegrityError(f"{model} lacks {len(missing)} weights ({missing[0]} ...); get a complete copy of it")
    if mismatched := sorted(report["mismatched_keys"]):
        name, got, expected = mismatched[0]
        raise IntegrityError(
            f"{model}: config.json wants {name} to be {list(expected)}, the weights hold {list(got)}; get the model again"
        )
    found = (_LAYER.match(name) for name in report["unexpected_keys"])
    beyond = sorted({int(match[1]) for match in found if match and int(match[1]) >= layers})
    if beyond:
        raise IntegrityError(
            f"{model}: config.json has {layers} layers, the weights go on with layer {beyond[0]}; get the model again"
        )


def _check_device(device: str) -> None:
    import torch

    if not (match := _DEVICE.fullmatch(device)):
        raise UsageError("device", "cpu, cuda, cuda:0 ...", repr(device))
    if device != "cpu" and not torch.cuda.is_available():
        raise BackendUnavailable("cuda", "torch sees no GPU here", "use device cpu, or install a torch with CUDA")
    if device != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise UsageError("device", f"one of the {torch.cuda.device_count()} GPUs, from cuda:0 on", repr(device))


def _hub_folder(hub_id: str, progress: Progress) -> Path:
    """The snapshot of a hub repository, downloaded unless the hub's own local cache has it."""
    from huggingface_hub import errors, snapshot_download

    # The base error of the hub's HTTP client, which is not the same package in every version of the hub library.
    http_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    progress(f"{hub_id}: looking it up on the model hub")
    try:
        with quiet():
            return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except errors.GatedRepoError as error:
        remedy = "accept its terms on the hub and log in with: hf auth login"
        raise FetchError(f"{hub_id} is gated; {remedy}") from error
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        remedy = f"give a local folder, or one of {', '.join(catalog.CATALOG)}"
        raise FetchError(f"{hub_id} is not in the local hub cache and the hub cannot be reached; {remedy}") from error
    except (http_error, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FetchError(f"{hub_id} could not be fetched from the hub: {reason}; check the name") from error
