"""The Python of the README and of the guides runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


@pytest.mark.model
def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.model
def test_the_calibration_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python in order, as one program, where its files may lie; its policy by hand is one."""
    from kvarto.formats import parse_policy

    guide = (ROOT / "docs/calibration.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", guide, re.S):
        exec(compile(block, "docs/calibration.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"policy: 3\.\d\d bits, KL 0\.\d+\n", said)
    assert "2048 ['k_amax'" in said
    assert "Paris" in str(names["text"])
    (tmp_path / "by-hand.toml").write_text(re.findall(r"```toml\n(.*?)```", guide, re.S)[0])
    assert [str(each) for each in parse_policy("by-hand.toml").layers][:2] == ["int8/int4", "int4"]


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}, which is not there"
