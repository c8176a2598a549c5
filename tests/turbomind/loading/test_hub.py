"""Hub names, against a loopback server with the needed part of the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tiny
from command import lmchat

ROOT = Path(__file__).resolve().parents[3]
SHA = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny"
GATED = "someone/gated"
EXTRA = ("pytorch_model.bin", "original/consolidated.safetensors", "modeling_evil.py", "README.md")

SCRIPT = """
import json, sys, turbomind
try:
    options = {"revision": sys.argv[2] or None, "load_format": sys.argv[3]}
    with turbomind.Engine(sys.argv[1], threads=1, cache_memory="8MiB", **options) as engine:
        result = engine.generate([3, 4, 5], temperature=0, max_new_tokens=4, ignore_eos=True)
        print(json.dumps([result.token_ids, str(engine.info.path)]))
except turbomind.Error as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


class Hub(ThreadingHTTPServer):
    """Serves one repository from a folder and records the requested paths."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.asked: list[str] = []

    def files(self) -> list[str]:
        return sorted(
            str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()
        )


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        for revision in ("main", "v1", SHA):
            if path == f"/api/models/{REPO}/revision/{revision}" or path == f"/api/models/{REPO}":
                return self.send(self.info(), {}, body)
            if path.startswith(f"/api/models/{REPO}/tree/{revision}"):
                return self.send(self.tree(), {}, body)
            prefix = f"/{REPO}/resolve/{revision}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in self.server.files():
                data = (self.server.folder / path.removeprefix(prefix)).read_bytes()
                etag = f'"{hashlib.sha256(data).hexdigest()}"'
                return self.send(data, {"ETag": etag, "X-Repo-Commit": SHA}, body)
        kind = "RevisionNotFound" if f"/{REPO}/" in path else "RepoNotFound"
        if GATED in path:
            kind = "GatedRepo"
        self.send_response(403 if GATED in path else 404)
        self.send_header("X-Error-Code", kind)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def info(self) -> bytes:
        siblings = [{"rfilename": name} for name in self.server.files()]
        return json.dumps({"id": REPO, "sha": SHA, "siblings": siblings}).encode()

    def tree(self) -> bytes:
        return json.dumps(
            [
                {
                    "type": "file",
                    "path": name,
                    "size": (self.server.folder / name).stat().st_size,
                    "oid": SHA,
                }
                for name in self.server.files()
            ]
        ).encode()

    def send(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_tiny(tmp_path / "repository")
    (folder / "tokenizer.json").write_text("{}")
    for name in EXTRA:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never to be fetched")
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def environment(endpoint: str, hub_cache: Path) -> dict[str, str]:
    """Returns variables that restrict the library to `endpoint`."""
    return {
        **{k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k[:3] != "HF_"},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(hub_cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }


def run(
    name: str,
    endpoint: str,
    hub_cache: Path,
    revision: str = "",
    load_format: str = "auto",
    **more: str,
) -> list[Any]:
    """Runs Engine(name) in its own process, for the library reads its environment once."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, revision, load_format],
        cwd=ROOT, env={**environment(endpoint, hub_cache), **more}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_hub_names_are_downloaded_as_needed(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    hub_cache = tmp_path / "hub"
    local, _ = run(str(hub.folder), "http://127.0.0.1:9", hub_cache)
    dummy, _ = run(REPO, endpoint, hub_cache, load_format="dummy")
    assert dummy != local
    # `lmchat info` fetches no weights either.
    result = lmchat("info", REPO, env={**environment(endpoint, hub_cache), "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    assert "LlamaForCausalLM" in result.stdout
    assert not [path for path in hub.asked if path.endswith(".safetensors")]
    for revision in ("", "v1", SHA):
        tokens, path = run(REPO, endpoint, hub_cache, revision)
        assert tokens == local
        assert Path(path).is_relative_to(hub_cache)
    assert {p.name for p in Path(path).iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert not [path for path in hub.asked if path.endswith(EXTRA)]
    # After the download the server is not needed.
    offline = run(REPO, "http://127.0.0.1:9", hub_cache, HF_HUB_OFFLINE="1")
    assert offline == [local, path]


def test_hub_errors_report_their_reason(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    hub_cache = tmp_path / "hub"
    missing = "is neither a folder here nor found on the hub:"
    kind, message = run("someone/else", endpoint, hub_cache)
    assert kind == "NotFound"
    assert message == (
        f"someone/else {missing} no such model; check the name, or set HF_TOKEN if it is private"
    )
    kind, message = run(GATED, endpoint, hub_cache)
    assert kind == "NotFound"
    assert message == f"{GATED} {missing} it needs a login; accept its terms there and set HF_TOKEN"
    kind, message = run(REPO, endpoint, hub_cache, "no-such-branch")
    assert kind == "NotFound"
    assert message == f"{REPO} {missing} the model has no revision 'no-such-branch'; check it"
    kind, message = run(REPO, endpoint, hub_cache, HF_HUB_OFFLINE="1")
    assert kind == "NotFound"
    assert message == (
        f"{REPO} {missing} HF_HUB_OFFLINE is set; unset it to download, or name a folder"
    )
    kind, message = run(REPO, "http://127.0.0.1:9", hub_cache)
    assert kind == "NotFound"
    assert f"{REPO} {missing} the hub does not answer (" in message
    assert len(message) < 3 * 80
    kind, message = run(str(hub.folder), endpoint, hub_cache, "v1")
    assert kind == "InvalidRequest"
    assert "revision is 'v1'" in message
