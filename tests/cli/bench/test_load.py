"""`lmchat bench load`: the report's facts, without timings."""

import json
import shutil

import gguf_files
import pytest
from typer.testing import CliRunner

from lmchat.cli.app import app
from turbomind.errors import NotFound
from turbomind.loading.loader import describe

OPTIONS = ["--threads", "1", "--device", "cpu", "--repeat", "2"]


def test_the_report_has_bytes_seconds_and_memory(zoo, tmp_path):
    folder = zoo.folder("llama_gqa_biases_tied")
    file = gguf_files.write_gguf(folder, tmp_path / "model.gguf")
    folder = shutil.copytree(folder, tmp_path / "model")
    (folder / "consolidated.safetensors").write_bytes(b"not loaded")
    for model in (folder, file):
        done = CliRunner().invoke(app, ["bench", "load", str(model), *OPTIONS, "--json"])
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        size = file if model == file else folder / "model.safetensors"
        assert report["file_bytes"] == size.stat().st_size
        assert report["packed_bytes"] == describe(model).weight_bytes
        assert report["threads"] == 1
        assert 0 <= report["header_seconds"] < report["seconds"]
        speed = report["file_bytes"] / report["seconds"]
        assert report["bytes_per_second"] == pytest.approx(speed)
    text = CliRunner().invoke(app, ["bench", "load", str(folder), *OPTIONS]).stdout
    assert "in the page cache" in text
    assert "above the packed weights" in text


def test_what_cannot_be_loaded_is_refused(tmp_path):
    missing = CliRunner().invoke(app, ["bench", "load", str(tmp_path / "no.gguf")])
    assert isinstance(missing.exception, NotFound)
    other = CliRunner().invoke(app, ["bench", "load", str(tmp_path), "--cache-memory", "1GiB"])
    assert "--cache-memory" in other.output
    assert other.exit_code == 2
