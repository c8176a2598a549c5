"""Digests of whole weight files equal hashlib's, and the cache file is used only if valid."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_safetensors, write_tiny

import turbomind
from turbomind import ModelError
from turbomind.files.checkpoint import Checkpoint
from turbomind.loading import digests, loader
from turbomind.loading.digests import DigestMemory, full_digest

OLD = 1_600_000_000_000_000_000  # mtime, ns


class Files:
    """Weight files in a folder, their cache file, and the list of files hashed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.path = folder / "a.safetensors"
        self.memory = folder / "memory" / "digests.json"
        self.hashed: list[str] = []
        hash_file = digests._hash_file

        def counted(path: Path, opened: os.stat_result) -> str:
            self.hashed.append(path.name)
            return hash_file(path, opened)

        monkeypatch.setattr(digests, "_hash_file", counted)
        self.write(b"weights")

    def write(self, content: bytes, path: Path | None = None, mtime: int = OLD) -> None:
        path = path or self.path
        path.write_bytes(content)
        os.utime(path, ns=(mtime, mtime))

    def digest(self, path: Path | None = None) -> str:
        path = path or self.path
        found = DigestMemory(self.memory).digest(path, path.stat())
        assert found == hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def times(self) -> int:
        """Returns the number of files hashed since the last call."""
        count = len(self.hashed)
        self.hashed.clear()
        return count


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(tmp_path, monkeypatch)


def test_an_unchanged_file_is_hashed_once(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BUFFER", 1000)
    files.write(bytes(range(256)) * 100)
    assert files.digest() == files.digest()
    assert files.times() == 1
    other = files.folder / "b.safetensors"
    files.write(files.path.read_bytes(), other)
    assert files.digest(other) == files.digest()
    assert files.times() == 1, "a copy is a file of its own"
    files.write(b"", other)
    assert files.digest(other) == hashlib.sha256().hexdigest()
    assert files.memory.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in files.memory.parent.iterdir()] == ["digests.json"]
    monkeypatch.chdir(files.folder)
    files.times()
    files.digest(Path(files.path.name))
    assert files.times() == 0, "a relative path is known by its absolute one"


def test_any_change_of_a_file_is_hashed_again(files: Files) -> None:
    first = files.digest()
    files.times()
    files.write(b"Weights", mtime=OLD + 1)
    assert files.digest() != first, "a changed byte"
    os.utime(files.path, ns=(OLD + 2, OLD + 2))
    files.digest()
    assert files.times() == 2, "another mtime alone"
    new = files.folder / "new"
    files.write(b"weightS", new, mtime=OLD + 2)
    os.replace(new, files.path)
    assert files.digest() != first, "another inode alone"
    files.write(b"weightS and more", mtime=OLD + 2)
    files.digest()
    assert files.times() == 2, "another size alone"
    files.digest()
    assert files.times() == 0


def test_a_file_written_just_before_is_not_cached(files: Files) -> None:
    files.path.write_bytes(b"weights")
    files.digest()
    assert not files.memory.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"\xff" + text,
        lambda text: b"[" * 100_000,
        lambda text: b"[]",
        lambda text: b"null",
        lambda text: text.replace(b'"version": 1', b'"version": 2'),
        lambda text: text.replace(b'"files"', b'"flies"'),
        lambda text: json.dumps({"version": 1, "files": ["a"]}).encode(),
        lambda text: text.replace(b'"inode"', b'"node"'),
        lambda text: text.replace(b'"size": 7', b'"size": true'),
        lambda text: text.replace(b'"size": 7', b'"size": "7"'),
        lambda text: text.replace(b'"sha256": "', b'"sha256": "0'),
        lambda text: text.replace(b'"sha256": "', b'"sha256": 1, "was": "'),
    ],
)
def test_a_damaged_cache_file_is_ignored(damage: Callable[[bytes], bytes], files: Files) -> None:
    files.digest()
    text = files.memory.read_bytes()
    assert damage(text) != text
    files.memory.write_bytes(damage(text))
    files.times()
    files.digest()
    files.digest()
    assert files.times() == 1, "hashed again, and remembered again"
    assert files.memory.read_bytes() == text


def test_good_entries_survive_a_bad_one(files: Files) -> None:
    other = files.folder / "b.safetensors"
    files.write(b"others", other)
    files.digest()
    files.digest(other)
    text = files.memory.read_text().replace('"size": 7', '"size": -0.5')
    files.memory.write_text(text)
    files.times()
    files.digest(other)
    files.digest()
    assert files.times() == 1


def test_a_cache_file_that_cannot_be_written_is_no_error(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.memory.parent.write_bytes(b"a file where its folder should be")
    files.digest()
    files.memory.parent.unlink()
    files.memory.mkdir(parents=True)
    files.digest()
    assert list(files.memory.parent.iterdir()) == [files.memory], "no other file is left"
    files.memory.rmdir()
    if os.geteuid() == 0:  # root ignores file modes
        monkeypatch.setattr(digests.tempfile, "mkstemp", _refused)
    files.memory.parent.chmod(0o500)
    try:
        files.digest()
        assert files.times() == 3
        assert not files.memory.exists()
    finally:
        files.memory.parent.chmod(0o700)


def _refused(**_: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_the_cache_file_is_bounded(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MAX_ENTRIES", 3)
    paths = [files.folder / f"{i}.safetensors" for i in range(5)]
    for path in paths:
        files.write(path.name.encode(), path)
        files.digest(path)
    assert len(json.loads(files.memory.read_text())["files"]) == 3
    files.times()
    files.digest(paths[-1])
    assert files.times() == 0


def test_a_file_that_changes_while_it_is_hashed_is_refused(files: Files) -> None:
    opened = files.path.stat()
    files.write(b"weights", mtime=OLD + 1)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        DigestMemory(files.memory).digest(files.path, opened)
    files.path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        DigestMemory(files.memory).digest(files.path, opened)
    assert not files.memory.exists()


PROCESS = """
import sys
from pathlib import Path
from turbomind.loading.digests import DigestMemory
for name in sys.argv[2:]:
    print(DigestMemory(Path(sys.argv[1])).digest(Path(name), Path(name).stat()))
"""


def test_many_processes_share_a_cache_file(files: Files) -> None:
    paths = [files.folder / f"{i}.safetensors" for i in range(40)]
    for path in paths:
        files.write(path.name.encode(), path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(files.memory), *map(str, paths[i:] + paths[:i])],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in (0, 20)
    ]
    for i, process in zip((0, 20), processes, strict=True):
        out = process.communicate()[0].split()
        assert process.returncode == 0
        want = [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths[i:] + paths[:i]]
        assert out == want
    assert len(json.loads(files.memory.read_text())["files"]) > 0
    for path in paths:
        files.digest(path)


def test_large_files_do_not_fill_the_page_cache(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append(length)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    files.digest()
    assert not dropped, "loading reads it next"
    monkeypatch.setattr(digests, "physical_memory", lambda: 4)
    monkeypatch.setattr(digests, "BUFFER", 3)
    files.memory.unlink()
    files.digest()
    assert dropped == [3, 6, 7]


def test_the_full_digest_is_hashlibs(tmp_path: Path) -> None:
    """A full digest covers unsampled bytes, ignores the folder, and differs from sampled ones."""
    tensor = np.zeros(100_000, np.float32)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", {"x": tensor})

    def both(folder: Path) -> tuple[str, str]:
        checkpoint = Checkpoint(folder)
        files = [(file.path, file.stat) for file in checkpoint.files]
        return checkpoint.digest(), full_digest(files, tmp_path / "digests.json")

    assert both(folders[0]) == both(folders[1])
    sampled, full = both(folders[0])
    assert full.startswith("sha256 ")
    assert not sampled.startswith("sha256 ")
    tensor[30_000] = 1
    write_safetensors(folders[0] / "model.safetensors", {"x": tensor})
    assert both(folders[0])[0] == sampled
    assert both(folders[0])[1] != full


def test_an_engines_fingerprint_covers_every_byte(
    open_engine: Callable[..., turbomind.Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    make = loader.fingerprint
    monkeypatch.setattr(loader, "fingerprint", lambda i, w: seen.append(make(i, w)) or seen[-1])
    folder = write_tiny(tmp_path / "model")
    memory = tmp_path / "data" / "digests.json"
    open_engine(folder)
    for path in (memory, str(memory)):
        open_engine(folder, weights_digests=path)
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    open_engine(moved, weights_digests=memory)
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(0.25).tobytes())
    open_engine(moved, weights_digests=memory)
    assert seen[1] == seen[2] == seen[3]
    assert len(set(seen)) == 3
