"""The process of one runtime's runner, which is stopped except while it answers a request."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS = "lmchat"
TIMEOUT_SECONDS = 900
WEIGHTS_VARIABLE = "BENCHMARK_WEIGHTS"  # format of quantized weights, for the runner
PR_SET_PDEATHSIG = 1


class PeerError(Exception):
    """Raised when a runner is not installed, ends, times out or answers with an error."""


def llama_cpp_environment(root: Path, cpus: list[int]) -> dict[str, str]:
    return {"LLAMA_CPP_BIN": str(root / "llama_cpp" / "build" / "bin")}


def vllm_environment(root: Path, cpus: list[int]) -> dict[str, str]:
    """Returns the environment variables of vLLM, with a compile cache of its own.

    The engine runs in the runner's process, so that stopping the runner stops it. The OpenMP
    settings that vLLM would give to worker processes are therefore set here.
    """
    folder = root / "vllm"
    binary = folder / "venv" / "bin"
    environment = {
        "PATH": f"{binary}{os.pathsep}{os.environ['PATH']}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
    }
    preload = preloads(folder / "venv")
    if preload:
        environment["LD_PRELOAD"] = ":".join(preload)
    if any("libiomp5" in path for path in preload):
        cpu_list = environment["VLLM_CPU_OMP_THREADS_BIND"]
        environment["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{cpu_list}]"
        environment["KMP_BLOCKTIME"] = "5"
        environment["KMP_TPAUSE"] = "0"
    return environment


def preloads(venv: Path) -> list[str]:
    """Returns the paths of tcmalloc and Intel OpenMP, which vLLM recommends, where they exist."""
    places = [venv.parent / "tcmalloc", venv / "lib", Path("/usr/lib")]
    found = []
    for pattern in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        matches = (path for place in places for path in sorted(place.rglob(pattern)))
        found += [str(path) for path in [next(matches, None)] if path]
    return found


@dataclass(frozen=True)
class Peer:
    """How a runtime is started.

    `stays_warm` is set where one process serves all measurements. `installed_with` names the peer
    whose environment it uses, where that is not its own. `weights` is the format of quantized
    weights; a peer of 16-bit weights has none.
    """

    name: str
    label: str
    environment: Callable[[Path, list[int]], dict[str, str]] = lambda root, cpus: {}
    stays_warm: bool = True
    installed_with: str = ""
    weights: str = ""

    @property
    def runtime(self) -> str:
        """The peer of 16-bit weights, whose environment and runner are used."""
        return self.name.removesuffix(f"-{self.weights}")

    def command(self, root: Path) -> list[str]:
        python = sys.executable
        if self.runtime != OURS:
            folder = root / (self.installed_with or self.runtime)
            if not (folder / "installed").exists():
                raise PeerError(f"not installed in {root}: run benchmarks/install_peers.py")
            python = str(folder / "venv" / "bin" / "python")
        return [python, str(HERE / "peers" / f"{self.runtime}_runner.py")]


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "lmchat (ours), bf16"),
        Peer("vllm", "vLLM CPU, bf16", vllm_environment),
        Peer("openvino", "OpenVINO GenAI, fp16 weights"),
        Peer("transformers", "transformers, bf16"),
        Peer("llama_cpp", "llama.cpp, bf16", llama_cpp_environment, stays_warm=False),
        *(
            Peer(f"{OURS}-{weights}", f"lmchat (ours), {weights}", weights=weights)
            for weights in ("int8", "int4")
        ),
        *(
            Peer(
                f"llama_cpp-{weights}",
                f"llama.cpp, {weights.upper()}",
                llama_cpp_environment,
                stays_warm=False,
                weights=weights,
            )
            for weights in ("q8_0", "q4_0")
        ),
    )
}
SIXTEEN_BIT = [name for name, peer in PEERS.items() if not peer.weights]


class PeerProcess:
    """A runner in its own process group, stopped except while it answers."""

    def __init__(self, peer: Peer, root: Path, cpus: list[int], model: str) -> None:
        logs = root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{model}-{peer.name}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(len(cpus)),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            WEIGHTS_VARIABLE: peer.weights,
            **peer.environment(root, cpus),
        }
        libc = ctypes.CDLL(None)

        def prepare() -> None:
            os.sched_setaffinity(0, cpus)
            # Otherwise a stopped runner would outlive a comparison that was killed.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                peer.command(root),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=root,
                start_new_session=True,
                preexec_fn=prepare,
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends one request and returns the answer. Raises PeerError when that is an error."""
        assert self.process.stdin
        assert self.process.stdout
        timer = threading.Timer(TIMEOUT_SECONDS, self.send_signal, (signal.SIGKILL,))
        timer.start()
        self.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
            self.send_signal(signal.SIGSTOP)
        if not line:
            raise PeerError(
                f"it ended while asked for {request['op']}: {self.last_words()}; log: {self.log}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{request['op']}: {answer['error']}; log: {self.log}")
        return answer

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing logged")

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kills the whole process group: a runner has nothing to save."""
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()
