from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarto.calibrate.record import Provenance, Record
from kvarto.calibrate.tensors import pack, unpack
from kvarto.errors import IntegrityError, UsageError


def record(**changed: Any) -> Record:
    said: dict[str, Any] = {
        "model": "tiny", "identity": "a" * 64, "source": "builtin", "text_sha256": "b" * 64, "documents": 3, "tokens": 4000,
        "sink_tokens": 192, "window_tokens": 2048, "threshold_tokens": 4000, "fisher_tokens": 0, "pre_rope": "",
        "dtype": "float32", "versions": {"kvarto": "0"}, "date": "2026-01-01",
    }  # fmt: skip
    rng = np.random.default_rng(0)
    layers = tuple(
        {name: rng.random((2, *shape), np.float32) for name, shape in (("k_amax", ()), ("k_sink_amax", ()), ("k_mean", (8,)))}
        for _ in range(12)
    )  # fmt: skip
    return Record(Provenance(**said | changed), layers)


def test_a_record_round_trips(tmp_path: Path) -> None:
    record().save(tmp_path / "r")
    read = Record.load(tmp_path / "r", model="a" * 64)
    assert read.provenance == record().provenance
    assert read.sha256 == record().sha256
    for one, other in zip(read.layers, record().layers, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_safetensors_reads_it_too(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    record().save(tmp_path / "r")
    with safetensors.safe_open(tmp_path / "r", framework="np") as file:
        assert np.array_equal(file.get_tensor("layers.11.k_mean"), record().layers[11]["k_mean"])


def test_the_date_alone_does_not_make_another_record() -> None:
    assert record(date="2030-01-01").sha256 == record().sha256
    assert record(tokens=4001).sha256 != record().sha256


def test_a_record_of_another_model_is_refused(tmp_path: Path) -> None:
    record().save(tmp_path / "r")
    with pytest.raises(
        UsageError, match=r"expected one of the model \(cccc.*\), got one of tiny \(aaaa.*\); calibrate this model"
    ):
        Record.load(tmp_path / "r", model="c" * 64)
    with pytest.raises(UsageError, match="model: expected a LoadedModel, or an identity"):
        Record.load(tmp_path / "r", model="default")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99, 0.9999])
def test_a_file_that_is_cut_off_is_refused(share: float, tmp_path: Path) -> None:
    record().save(tmp_path / "r")
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(data[: int(share * len(data))])
    with pytest.raises(IntegrityError, match="is cut off, or no record .*; calibrate again"):
        Record.load(tmp_path / "r")


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    record().save(tmp_path / "r")
    data = bytearray((tmp_path / "r").read_bytes())
    data[-3] ^= 1
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged: its checksum is another"):
        Record.load(tmp_path / "r")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"PK\x03\x04" + bytes(100), bytes(8) + b"{}", (2).to_bytes(8, "little") + b"[]", b"\xff" * 64,
        (100_000).to_bytes(8, "little") + b"[" * 100_000, pack({"a": np.zeros(3, np.float32)}, {}),
        pack({}, {"kvarto_record": "["}), pack({}, {"kvarto_record": "[]"}), pack({}, {"kvarto_record": '{"version": 9}'}),
        pack({}, {"kvarto_record": '{"version": 1, "layers": 1}'}),
        pack({"layers.5.k": np.zeros(3, np.float32)}, {"kvarto_record": '{"version": 1, "layers": 1, "sha256": ""}'}),
    ],
)  # fmt: skip
def test_foreign_files_are_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(IntegrityError, match="calibrate again") as failure:
        Record.load(tmp_path / "r")
    assert "\n" not in str(failure.value)


def test_a_missing_file_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="record: expected an existing file"):
        Record.load(tmp_path / "none")


def test_metadata_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    record().save(tmp_path / "r")
    metadata, arrays = unpack((tmp_path / "r").read_bytes())
    head = json.loads(metadata["kvarto_record"]) | {"tokens": "many"}
    (tmp_path / "r").write_bytes(pack(arrays, {"kvarto_record": json.dumps(head)}))
    with pytest.raises(IntegrityError, match=r"no sound record \(tokens: input should be a valid integer\)"):
        Record.load(tmp_path / "r")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}}, {"a": 3}, {"__metadata__": {"x": 1}},
    ],
)  # fmt: skip
def test_headers_that_promise_what_is_not_there_are_refused(header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match="is not|has no|are no"):
        unpack(len(text).to_bytes(8, "little") + text + bytes(8))


def test_records_and_policies_are_read_without_torch(tmp_path: Path) -> None:
    record().save(tmp_path / "r")
    code = (
        "import sys; from kvarto.calibrate import Record; from kvarto.calibrate import spend, windows; import kvarto.policy_file;"
        f"Record.load({str(tmp_path / 'r')!r}); print(sorted({{'torch', 'numba', 'transformers'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
