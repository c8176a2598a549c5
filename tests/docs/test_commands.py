"""Every command and every Python block in the README and the docs works.

A command of `lmchat` is parsed by the real command line, and run with the small model that ships
where that is cheap (`RUN`). Scripts must have every option that is named. Targets of make must
exist. Python blocks are executed with the small model. Python blocks and blocks with curl of the
pages about the server are executed beside a server. A block that cannot run here stands in
`NOT_RUN` with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import typer
from assets import ROOT
from http_server import RunningServer

import lmchat
from lmchat.cli.app import app

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "README.md",
    )
)
RUN = (
    "lmchat info ./my-model",
    "lmchat sessions list",
    'git diff | lmchat chat ./my-model -p "Describe this change." --json',
)
NOT_RUN = {
    r"^(cmake|ninja|ctest|git|pre-commit|pip|nvcc|clang-format|build/)": "not ours to test",
    r"^docs/python-api\.md#": "signatures, not programs",
    r"^docs/contributing/.*python$": "fragments of a file to be written",
}
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language):
    """Returns (page, number in the page, text) of all blocks of a language."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for number, match in enumerate(BLOCK.finditer(text)):
            if match[1] == language:
                found.append((page, number, match[2]))
    return found


def commands():
    """Returns each single command line of all shell blocks, without its comment."""
    lines = []
    for page, _, text in blocks("sh"):
        if is_script(page, text):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#.*$", "", line).strip()
            lines += [part.strip() for part in line.split("&&") if part.strip()]
    return sorted({line for line in lines if not line.startswith("#")})


def is_script(page, text):
    """Returns whether a shell block calls a server, so that it runs whole."""
    return page.startswith("docs/server") and "curl " in text


def excused(text):
    """Returns the reason why a block is not run, or None."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, text)), None)


def words_of(command):
    """Returns the words of our program, in a pipe or a container, without assignments."""
    parts = [part.strip() for part in command.split("|")]
    ours = (part for part in parts if part.startswith(("lmchat", "python", "make")))
    words = shlex.split(next(ours, parts[-1]))
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words[words.index("lmchat") :] if words[0] == "docker" else words


def parsed(words):
    """Parses `lmchat WORDS` as the program would, and runs nothing."""
    command, name = typer.main.get_command(app), "lmchat"
    while hasattr(command, "commands"):  # a group
        context = command.make_context(name, list(words), resilient_parsing=False)
        name, command, words = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
    return command.make_context(name, list(words))


def check_script(words):
    """Every option of a script or a module must be in its help."""
    stop = 3 if words[1] == "-m" else 2
    done = subprocess.run(
        [sys.executable, *words[1:stop], "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in words[stop:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in done.stdout


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_is_accepted(command):
    if excused(command):
        return
    words = words_of(command)
    if words[0] in ("lmchat", ".venv/bin/lmchat"):
        parsed([word for word in words[1:] if word != "--help"])
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{re.escape(t)}:", makefile, re.MULTILINE) for t in targets)
    elif words[0] in ("python", "python3"):
        check_script(words)
    elif words[0] == "pytest":
        assert "--device" in (ROOT / "tests" / "conftest.py").read_text()
    else:
        pytest.fail(f"no rule checks {command!r}")


@pytest.mark.parametrize("command", RUN)
def test_a_cheap_command_runs(command, tmp_path):
    line = command.replace("./my-model", shlex.quote(str(lmchat.bundled_model())))
    line = line.replace("git diff", "echo +1")  # a real difference may exceed the context
    code = "import conftest; from lmchat.cli.main import main; main()"
    program = shlex.join([sys.executable, "-c", code])
    done = subprocess.run(
        ["bash", "-c", line.replace("lmchat ", program + " ", 1)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        env={**os.environ, "LMCHAT_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def address():
    """The address of a running server, in place of the default one."""
    with RunningServer() as server:
        yield f":{server.port}"


@pytest.mark.parametrize(("page", "number", "text"), blocks("python"))
def test_a_documented_python_block_runs(page, number, text, tmp_path, monkeypatch, request):
    if excused(f"{page}#") or excused(f"{page} python"):
        return
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path))
    if ":23333" in text:
        text = text.replace(":23333", request.getfixturevalue("address"))
    model = str(lmchat.bundled_model())
    code = text.replace('"./my-model"', repr(model)).replace(
        "max_new_tokens=200", "max_new_tokens=8"
    )
    exec(compile(code, f"{page} block {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(
    ("page", "number", "text"), [found for found in blocks("sh") if is_script(found[0], found[2])]
)
def test_a_documented_call_of_the_server_succeeds(page, number, text, tmp_path, address):
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nmax-time = 60\n")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text.replace(":23333", address)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "CURL_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, f"{page} block {number}: {done.stdout}{done.stderr}"


def test_a_wrong_option_is_noticed():
    with pytest.raises(Exception, match="No such option"):
        parsed(["chat", "--no-such-option"])
