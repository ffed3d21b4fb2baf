from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvarto.errors import UnknownName, UsageError
from kvarto.formats import Policy, parse_format, parse_policy, raw_format, spelled_policy
from kvarto.policy_file import LayerEntry, PolicyFile, RecordEntry, read_policy_file, write_policy_file

LAYERS = (
    *(LayerEntry(format=text) for text in ("int4", "int8/int3+sink64", "bf16")),
    LayerEntry(format="fp8-head", k_scale=(0.5, 0.25), v_scale=(2.0,)),
)


def written(folder: Path, name: str = "policy.json", **changed: Any) -> str:
    path = folder / name
    write_policy_file(path, PolicyFile(**{"layers": LAYERS} | changed))
    return str(path)


def test_a_file_round_trips(tmp_path: Path) -> None:
    content = PolicyFile(
        name="mine", layers=LAYERS, record=RecordEntry(path="x.record", sha256="a" * 64), provenance={"bits": 3.25}
    )
    write_policy_file(tmp_path / "policy.json", content)
    read = read_policy_file(str(tmp_path / "policy.json"))
    assert read.content == content
    assert read.sha256 == hashlib.sha256((tmp_path / "policy.json").read_bytes()).hexdigest()
    assert not list(tmp_path.glob(".*"))


def test_toml_says_the_same_as_json(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(
        'kvarto_policy = 1\nlayers = ["int4", "int8/int3+sink64", "bf16",\n'
        '  {format = "fp8-head", k_scale = [0.5, 0.25], v_scale = [2.0]}]\n'
    )
    assert parse_policy(str(tmp_path / "p.toml")).layers == parse_policy(written(tmp_path)).layers


def test_every_layer_has_its_own_format(tmp_path: Path) -> None:
    policy, raw = parse_policy(written(tmp_path)), raw_format("float32")
    formats = [policy.for_layer(i, 4, raw) for i in range(4)]
    assert [str(each) for each in formats] == ["int4", "int8/int3", "bf16", "fp8-head/fp8-head"]
    assert formats[0] == parse_format("int4")
    assert (formats[3].k.scales, formats[3].v.scales) == ((0.5, 0.25), (2.0,))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"a format for each of the 3 layers .*, got 4; calibrate one for this model"):
        policy.for_layer(0, 3, raw)


def test_a_policy_is_known_by_its_content(tmp_path: Path) -> None:
    one = parse_policy(written(tmp_path, "a.json"))
    assert str(one).startswith("a@")
    assert one == parse_policy(one.origin)
    scaled = (*LAYERS[:3], LayerEntry(format="fp8-head", k_scale=(0.5, 0.125), v_scale=(2.0,)))
    (tmp_path / "other").mkdir()
    other = parse_policy(written(tmp_path / "other", "a.json", layers=scaled))
    assert other.name == one.name
    assert len({str(one), str(other)}) == len({one.identity, other.identity}) == 2
    assert one.identity == f"a@{hashlib.sha256((tmp_path / 'a.json').read_bytes()).hexdigest()}"


def test_policies_made_in_python_differ_by_their_scales_too() -> None:
    formats = [parse_format("fp8"), parse_format("int4")]
    assert str(Policy.by_layer(formats)) == str(Policy.by_layer(formats))
    assert Policy.by_layer(formats).identity != Policy.by_layer(formats[::-1]).identity


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", r"policy .*: expected JSON text, got"),
        ("{", r"policy .*: expected JSON text, got"),
        ("[" * 100_000, r"policy .*: expected JSON text, got"),
        ("[]", r"a policy file, which says .*got none; kvarto calibrate"),
        ('{"layers": ["int4"]}', r"a policy file, which says"),
        ('{"kvarto_policy": 2, "layers": ["int4"]}', r"kvarto_policy: expected input should be 1, got 2"),
        ('{"kvarto_policy": 1}', r"layers: expected field required"),
        ('{"kvarto_policy": 1, "layers": []}', r"layers: expected .*at least 1 item"),
        ('{"kvarto_policy": 1, "layers": ["int4"], "sink": 3}', r"sink: expected extra inputs are not permitted"),
        ('{"kvarto_policy": 1, "layers": ["int4"], "name": "a b"}', r"name: expected string should match"),
        ('{"kvarto_policy": 1, "layers": ["int4"], "name": "a@b"}', r"name: expected string should match"),
        ('{"kvarto_policy": 1, "layers": ["int4", "imt4"]}', r"layers\.1: codec: expected .*did you mean int4"),
        ('{"kvarto_policy": 1, "layers": ["int4+skip=0"]}', r"layers\.0: format: expected one format for all layers"),
        ('{"kvarto_policy": 1, "layers": ["other.json"]}', r"layers\.0: codec: expected"),
        ('{"kvarto_policy": 1, "layers": [{"format": "int4", "k_scale": [1.0]}]}', r"layers\.0: k_scale: expected .*, got int4"),
        ('{"kvarto_policy": 1, "layers": [{"format": "fp8", "k_scale": [1.0, 2.0]}]}', r"layers\.0: scales of fp8: expected one"),
        ('{"kvarto_policy": 1, "layers": [{"format": "fp8", "k_scale": [-1.0]}]}', r"layers.*k_scale.*greater than 0"),
        ('{"kvarto_policy": 1, "layers": [{"format": "fp8", "k_scale": [NaN]}]}', r"layers.*k_scale"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_in_one_line(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UsageError, match=line) as failure:
        parse_policy(str(tmp_path / "p.json"))
    assert "\n" not in str(failure.value)


def test_a_file_that_is_not_there_is_no_format(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an existing .json or .toml file"):
        parse_policy(str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="an existing .json or .toml file"):
        parse_policy(str(tmp_path) + "/.json")


def test_what_strangers_send_opens_no_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(UnknownName, match="codec"):
        spelled_policy(path)
    with pytest.raises(UnknownName, match="codec"):
        parse_format(path)


def test_only_json_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ends in .json"):
        write_policy_file(tmp_path / "p.toml", PolicyFile(layers=LAYERS[:1]))
    with pytest.raises(UsageError, match="a file that can be written"):
        write_policy_file(tmp_path / "none" / "p.json", PolicyFile(layers=LAYERS[:1]))


def test_a_file_is_text_that_one_can_read(tmp_path: Path) -> None:
    text = Path(written(tmp_path, name="p.json", layers=(LAYERS[0], LayerEntry(format="int8/int3")))).read_text()
    assert text == '{\n  "kvarto_policy": 1,\n  "layers": [\n    "int4",\n    "int8/int3"\n  ]\n}\n'
    assert json.loads(text)["layers"] == ["int4", "int8/int3"]
