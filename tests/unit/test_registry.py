from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kvarto
from kvarto.codecs import registry
from kvarto.errors import UnknownName

SOURCE = Path(kvarto.__file__).parent


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PYTHONPATH": str(path),
        "PATH": "/usr/bin:/bin",
        "HOME": str(path),
        "KVARTO_HOME": str(path / "home"),
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture
def copy_of_package(tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(SOURCE, tmp_path / "kvarto", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_codec_copied_into_one_file_is_everywhere(copy_of_package: Path) -> None:
    codecs = copy_of_package / "kvarto" / "codecs"
    text = (codecs / "bf16.py").read_text()
    start = text.index("CODECS = (")
    (codecs / "mine.py").write_text(text[:start] + 'CODECS = (Raw("mine", 16, "my own paper", dtype="bfloat16"),)\n')
    result = run_python(
        """
        from kvarto.codecs import registry
        from kvarto.study.options import StudyOptions, candidates
        from kvarto.testing import check_codec
        from kvarto.cli import app
        from typer.testing import CliRunner
        import json
        check_codec(registry["mine"])
        listed = json.loads(CliRunner().invoke(app, ["codecs", "--json"]).output)
        assert "mine" in [row["name"] for row in listed], listed
        assert "mine" in [str(policy) for policy in candidates(StudyOptions())]
        print("found", kv := registry["mine"].source)
        """,
        copy_of_package,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "found my own paper"


def test_two_codecs_of_one_name_are_refused(copy_of_package: Path) -> None:
    codecs = copy_of_package / "kvarto" / "codecs"
    (codecs / "other.py").write_text((codecs / "int8.py").read_text())
    result = run_python("from kvarto.codecs import registry; len(registry)", copy_of_package)
    assert result.returncode == 1
    assert "codec 'int8': expected a name of its own" in result.stderr


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="expected one of .*bf16.*, got 'nope'"):
        registry["nope"]
    assert "nope" not in registry
    assert list(registry) == sorted(registry)


@pytest.mark.parametrize(
    "module",
    [
        "errors",
        "home",
        "layout",
        "registry",
        "stats",
        "page",
        "cache.pool",
        "formats",
        "codecs",
        "cli",
        "attention",
        "study.verdict",
        "study.result",
    ],
)
def test_imports_without_torch(module: str, tmp_path: Path) -> None:
    code = f"""
        import sys
        import kvarto.{module}
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """
    result = run_python(code, SOURCE.parent)
    assert result.returncode == 0, result.stderr
