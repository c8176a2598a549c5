"""`lmchat web`: its options, and what it says without its packages."""

import importlib.util

import pytest
from typer.testing import CliRunner

from lmchat.cli.app import app
from lmchat.errors import InvalidRequest


def test_its_options_are_those_of_serve():
    def options(command):
        text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        return text[text.index("Options:") :]

    assert options("web") == options("serve")


def test_without_gradio_it_names_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gradio" else find(name)
    )
    done = CliRunner().invoke(app, ["web"])
    assert isinstance(done.exception, InvalidRequest)
    assert str(done.exception) == (
        "the page needs gradio: install it with pip install 'lmchat[web]'"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--limit", "bodi=1"],
        ["--host", "0.0.0.0", "--insecure"],
    ],
)
def test_wrong_options_are_refused(arguments):
    pytest.importorskip("gradio")
    done = CliRunner().invoke(app, ["web", *arguments])
    assert isinstance(done.exception, InvalidRequest)
