"""Packages, their mapping, the wheel, and the imports of a chat."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
from assets import ROOT
from driver_builds import EXTENSION_BUILD, locked

from lmchat import bundled

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUP = PROJECT["tool"]["setuptools"]


def folder_of(package: str):
    for name, folder in SETUP["package-dir"].items():
        if package == name or package.startswith(name + "."):
            return ROOT / folder / package.removeprefix(name).strip(".").replace(".", "/")
    return ROOT / package.replace(".", "/")


def python(code: str, cwd) -> str:
    """Returns stdout of an interpreter with the installed packages, or this checkout's."""
    command = f"import sys; sys.path.append({str(ROOT)!r}); import conftest\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_python_folder_is_a_listed_package():
    tops = ("turbomind", "lmchat", "cli", "webui")
    found = {p.parent for top in tops for p in (ROOT / top).rglob("*.py")}
    assert found == {folder_of(package) for package in SETUP["packages"]}


def test_the_build_requirements_are_listed_once_alike():
    lines = (ROOT / "requirements" / "build.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed == PROJECT["build-system"]["requires"]


def test_the_version_is_the_same_everywhere(tmp_path):
    versions = python(
        "import lmchat, turbomind; print(lmchat.__version__, turbomind.__version__)", tmp_path
    )
    assert versions.split() == [PROJECT["project"]["version"]] * 2
    assert f"## {PROJECT['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_cli_folder_is_lmchat_cli(tmp_path):
    code = "import lmchat.cli.main as m; print(m.__name__, m.__file__)"
    name, file = python(code, tmp_path).split()
    assert name == "lmchat.cli.main"
    assert os.path.basename(file) == "main.py"


def test_chatting_imports_neither_torch_nor_transformers(tmp_path):
    code = (
        "import lmchat.cli.app, lmchat.engine, lmchat.cli.support_table, sys, json\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    modules = json.loads(python(code, tmp_path))
    assert {"turbomind", "lmchat", "tokenizers"} <= set(modules)
    assert not {"torch", "transformers", "huggingface_hub"} & set(modules)
    assert not {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"} & set(modules)


def test_importing_lmchat_is_quick(tmp_path):
    code = "import lmchat, sys\nprint(*sorted(sys.modules))"
    heavy = {"numpy", "tokenizers", "jinja2", "turbomind", "typer", "rich"}
    assert not heavy & set(python(code, tmp_path).split())


def test_no_module_names_the_command_or_the_page():
    for path in [*(ROOT / "turbomind").rglob("*.py"), *(ROOT / "lmchat").rglob("*.py")]:
        assert not re.search(r"\blmchat\.(cli|webui)\b", path.read_text()), path


def test_the_page_imports_lmchat_alone_and_only_its_command_imports_the_page(tmp_path):
    for path in (ROOT / "webui").rglob("*.py"):
        assert not re.search(r"\blmchat\.cli\b|\bturbomind\b", path.read_text()), path
    assert not re.search(r"^from lmchat", (ROOT / "cli" / "app.py").read_text(), re.M)
    code = (
        "import sys\n"
        "import lmchat.cli.app, lmchat.cli.serve.command\n"
        "print(*(n for n in sys.modules if n.startswith(('gradio', 'lmchat.webui'))), sep=',')"
    )
    assert python(code, tmp_path).strip() == ""


def test_the_extra_of_the_page_is_that_of_make_web():
    lines = (ROOT / "requirements" / "web.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed == PROJECT["project"]["optional-dependencies"]["web"]


@pytest.mark.timeout(1800)
def test_a_wheel_holds_the_packages_and_runs(tmp_path):
    if not (EXTENSION_BUILD / "build.ninja").exists():
        pytest.skip("the extension was not built in this checkout, a wheel would take minutes")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    with locked(EXTENSION_BUILD):
        done = subprocess.run(
            [*command, "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    for left in [*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")]:
        shutil.rmtree(left)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for package in SETUP["packages"]:
        for path in folder_of(package).glob("*.py"):
            assert f"{package.replace('.', '/')}/{path.name}" in names
    assert {"turbomind/_C.pyi", "turbomind/py.typed", "lmchat/py.typed"} <= names
    memo = {f"lmchat/memo/{path.name}" for path in bundled.FOLDER.iterdir()}
    assert {f"lmchat/memo/{name}" for name in (*bundled.FILES, "README.md")} <= memo
    assert memo == {name for name in names if name.startswith("lmchat/memo/")}
    page = {f"lmchat/webui/static/{path.name}" for path in (ROOT / "webui" / "static").iterdir()}
    assert {"lmchat/webui/static/page.js", "lmchat/webui/static/page.css"} <= page <= names
    assert any(re.fullmatch(r"turbomind/_C\..*so", name) for name in names)
    assert not any(
        name.startswith(("cpp/", "tests/", "cli/", "webui/", "training/")) for name in names
    )
    site = tmp_path / "site"
    shown = installed(site, "--version")
    assert shown.stdout == f"lmchat {PROJECT['project']['version']}\n", shown.stderr
    answer = installed(site, "chat", "-p", "Hello!", "--max-new-tokens", "8", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["model"] == "memo"


def installed(site, *arguments):
    """Runs `lmchat` from the packages in the folder `site` and returns it finished."""
    return subprocess.run(
        [sys.executable, "-m", "lmchat.cli", *arguments],
        cwd=site,
        env=os.environ | {"PYTHONPATH": str(site)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("target", ["chat", "serve", "web"])
@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ([], []),
        (["ARGS=--seed 1"], ["--seed", "1"]),
        (["MODEL=a folder"], ["a folder"]),
        (["MODEL=Qwen/Qwen3-0.6B", "ARGS=--plain"], ["Qwen/Qwen3-0.6B", "--plain"]),
    ],
)
def test_make_chat_serve_and_web_need_no_model(target, given, arguments):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        ["make", "-n", target, *given], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    words = shlex.split(last)
    assert words[words.index("-m") :] == ["-m", "lmchat.cli", target, *arguments]
