"""Options of `lmchat serve` are checked before the model is loaded."""

import os
import socket
import stat
from pathlib import Path

import pytest
from command import lmchat
from typer.testing import CliRunner

from lmchat.cli.app import app
from lmchat.cli.serve.options import config_of, example, limits_of
from lmchat.errors import Error, InvalidRequest
from lmchat.server.http import keys as keys_module
from lmchat.server.http.keys import VARIABLE, collect, parse_key
from lmchat.server.http.sockets import is_loopback, tcp_sockets, unix_socket, url_of

DEFAULTS = {
    "host": "127.0.0.1", "api_key": (), "api_keys": None, "insecure": False, "model_name": None,
    "import_pages": False, "drain_seconds": 30.0, "limit": (), "allow_origin": (),
    "root_path": "",
}  # fmt: skip


def config(**given):
    return config_of(**{**DEFAULTS, **given})


def test_a_wrong_option_is_one_line():
    done = lmchat("serve", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "--host is '0.0.0.0', which other machines can reach" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "bodi=1"], "limit is 'bodi', expected one of archives, bodies, body"),
        (["--api-key", "short"], "--api-key: the key has 5 characters"),
        (["--log-level", "loud"], "--log-level is 'loud', expected one of debug"),
        (["--port", "70000"], "--port is 70000, expected 0 to 65535"),
        (["--drain-seconds", "-1"], "--drain-seconds is -1.0, expected 0 or more"),
        (["--allow-origin", "https://a.example/"], "--allow-origin is 'https://a.example/'"),
        (["--allow-origin", "*"], "--allow-origin is '*', which lets in pages of any site"),
        (["--root-path", "chat"], "--root-path is 'chat', expected a path such as /chat"),
        (["--root-path", "/v1"], "--root-path is '/v1', which is a path of the server"),
        (["--model-name", ""], "--model-name is '', expected 1 to 256"),
        (["/no/such/folder"], "/no/such/folder"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(done.exception, Error)
    assert message in str(done.exception)


def test_a_port_in_use_is_refused_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"port {port} of 127.0.0.1 is in use"):
            tcp_sockets("127.0.0.1", port)


@pytest.mark.parametrize("host", ["nobody.invalid", "192.0.2.1", "\x00"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(InvalidRequest):
        tcp_sockets(host, 0)


def test_addresses():
    assert [is_loopback(h) for h in ("localhost", "127.0.0.5", "::1", "0.0.0.0", "::", "a.b")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    with tcp_sockets("127.0.0.1", 0)[0] as bound:
        assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
    with tcp_sockets("0.0.0.0", 0)[0] as bound:
        assert url_of(bound).startswith("http://127.0.0.1:")


def test_other_machines_need_a_key_or_the_word_insecure():
    with pytest.raises(InvalidRequest, match="--insecure"):
        config(host="::")
    assert config(host="0.0.0.0", insecure=True).any_host
    assert not config(host="0.0.0.0", api_key=["12345678"]).any_host
    assert not config(host=None).keys


def test_limits():
    limits = limits_of(["body=1MiB", "receive_seconds=0.5", "choices=2"])
    assert (limits.body, limits.receive_seconds, limits.choices) == (1 << 20, 0.5, 2)


@pytest.mark.parametrize(
    "given",
    [["body"], ["body=0"], ["body=-1"], ["body=x"], ["choices=1.5"], ["choices=1", "choices=2"],
     ["receive_seconds=nan"], ["receive_seconds=inf"], ["choices=True"]],
)  # fmt: skip
def test_wrong_limits_are_refused(given):
    with pytest.raises(InvalidRequest):
        limits_of(given)


def test_the_example_is_three_lines_and_names_a_needed_key():
    shown = example("http://127.0.0.1:1", None, "a'b", True)
    assert len(shown.splitlines()) == 3
    assert "Bearer KEY" in shown
    assert "Bearer" not in example("http://127.0.0.1:1", None, "memo", False)


# --- keys ---------------------------------------------------------------------------------------


def test_keys_of_all_sources(tmp_path):
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("# friends\n\nann:key-of-ann\n  key-of-local  \n")
    found = collect(["bob:key-of:bob"], file, {VARIABLE: "eve:key-of-eve"})
    assert found == {
        "key-of:bob": "bob", "key-of-eve": "eve", "key-of-ann": "ann", "key-of-local": "local",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "short", "with space", "naïve-key", ":12345678", "a/b:12345678", "x" * 257]
)
def test_malformed_keys_are_refused_without_showing_them(text):
    with pytest.raises(InvalidRequest) as caught:
        parse_key(text, "--api-key")
    assert not text or text not in str(caught.value).partition("name before")[0]


def test_an_empty_variable_is_refused():
    with pytest.raises(InvalidRequest, match=VARIABLE):
        collect([], None, {VARIABLE: ""})


def test_one_key_has_one_owner():
    with pytest.raises(InvalidRequest, match="the same API key"):
        collect(["a:12345678", "b:12345678"], None, {})


@pytest.mark.parametrize("mode", [0o660, 0o604, 0o644, 0o666])
def test_a_file_of_keys_that_others_can_read_is_refused(tmp_path, mode):
    file = tmp_path / "keys"
    file.write_text("12345678\n")
    file.chmod(mode)
    with pytest.raises(InvalidRequest, match="expected 0600"):
        collect([], file, {})


@pytest.mark.parametrize(
    ("mode", "owner", "group", "words"),
    [
        (0o440, 0, 7, None),  # a mounted secret, with the pod's fsGroup
        (0o640, 0, 9, None),
        (0o400, 0, 5, None),
        (0o600, 1000, 5, None),
        (0o440, 0, 5, "a pod's fsGroup with defaultMode 0440"),
        (0o444, 0, 7, "a pod's fsGroup with defaultMode 0440"),
        (0o460, 0, 7, "a pod's fsGroup with defaultMode 0440"),
        (0o440, 1000, 7, "run chmod 600 keys"),
        (0o600, 1001, 7, "belongs to user 1001, expected 1000"),
    ],
)
def test_mounted_secrets_are_taken(monkeypatch, mode, owner, group, words):
    """As PostgreSQL takes the files of its keys."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 9)
    monkeypatch.setattr(os, "getgroups", lambda: [7, 9])
    facts = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 9, 0, 0, 0))
    if words is None:
        return keys_module._check(Path("keys"), facts)
    with pytest.raises(InvalidRequest, match=words):
        keys_module._check(Path("keys"), facts)
    return None


def test_a_file_without_keys_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.touch(0o600)
    with pytest.raises(InvalidRequest, match="has no key"):
        collect([], file, {})
    with pytest.raises(InvalidRequest, match="cannot read"):
        collect([], tmp_path / "missing", {})
    with pytest.raises(InvalidRequest):
        collect([], tmp_path, {})


# --- Unix sockets -------------------------------------------------------------------------------


def test_a_unix_socket_is_private_and_replaces_a_dead_one(tmp_path):
    path = tmp_path / "s"
    unix_socket(path).close()  # no process listens there
    with unix_socket(path) as bound:
        assert os.stat(path).st_mode & 0o777 == 0o600
        bound.listen()
        with pytest.raises(InvalidRequest, match="a server listens"):
            unix_socket(path)


def test_a_file_is_not_replaced_by_a_socket(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(InvalidRequest, match="is not a socket"):
        unix_socket(path)
    assert path.read_text() == "x"
