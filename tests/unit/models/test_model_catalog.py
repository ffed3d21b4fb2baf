"""The catalog: entries are complete, names resolve, nothing needs torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kvarto.errors import UnknownName
from kvarto.models import catalog
from kvarto.models.catalog import CATALOG, DEFAULT_MODEL


@pytest.mark.parametrize("entry", CATALOG.values(), ids=CATALOG.keys())
def test_every_entry_pins_what_it_fetches(entry: catalog.ModelEntry) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", entry.name)
    assert re.fullmatch(r"[0-9a-f]{64}", entry.gguf_sha256)
    assert entry.packages
    assert all(re.fullmatch(r"[0-9.]+", package.version) for package in entry.packages)
    assert len({package.name for package in entry.packages}) == len(entry.packages)
    assert ("part" in re.compile(entry.member).groupindex) == (len(entry.packages) > 1)
    assert 0 < entry.gguf_bytes < entry.model_bytes
    assert entry.licence
    assert entry.note


def test_one_default_that_asks_for_nothing() -> None:
    assert [entry.name for entry in CATALOG.values() if entry.default] == [DEFAULT_MODEL]
    assert not CATALOG[DEFAULT_MODEL].needs_terms
    assert catalog.find("default") is CATALOG[DEFAULT_MODEL]


def test_only_gemma_needs_the_users_word() -> None:
    assert [entry.name for entry in CATALOG.values() if entry.needs_terms] == ["gemma3-270m"]


def test_names_ignore_case_and_unknown_ones_get_a_hint() -> None:
    assert catalog.find("SmolLM2-135M-Instruct").name == "smollm2-135m-instruct"
    with pytest.raises(UnknownName, match=r"did you mean gemma3-270m"):
        catalog.find("gemma-270m")


def test_catalog_fetch_and_texts_import_without_the_engine() -> None:
    code = "import sys, kvarto.models.catalog, kvarto.models.fetch, kvarto.models.texts, kvarto.models.load\n"
    code += "assert not {'torch', 'transformers', 'numba'} & set(sys.modules), 'engine package imported'"
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": paths})
