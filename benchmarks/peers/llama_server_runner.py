"""llama.cpp's llama-server with `cache_prompt`: bf16 GGUF, f16 KV, flash attention.

A turn sends the whole conversation as token ids, as its clients do, and the server reuses the
common prefix in its slot. Slot 0 holds the conversation, slot 1 serves recomputed prompts.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from runner_protocol import MAX_CONTEXT, ChatRunner, serve

TOOL = Path(os.environ["LLAMA_CPP_BIN"]) / "llama-server"
START_SECONDS = 120
PR_SET_PDEATHSIG = 1


class LlamaServerRunner(ChatRunner):
    def load(self, model: Path, threads: int, max_batch: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [
            TOOL, "-m", model / "model-bf16.gguf", "-t", threads, "-tb", threads, "-b", 2048,
            "-ub", 512, "-c", 2 * MAX_CONTEXT, "-np", 2, "-fa", "on", "--no-ui",
            "--host", "127.0.0.1", "--port", self.port,
        ]  # fmt: skip
        libc = ctypes.CDLL(None)
        self.process = subprocess.Popen(
            [str(part) for part in command],
            # The server must not outlive this process.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        end = time.monotonic() + START_SECONDS
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"llama-server did not start: exit {self.process.poll()}")
            time.sleep(0.2)

    def versions(self) -> dict[str, str]:
        (source,) = TOOL.parents[2].glob("llama_cpp_python-*")
        return {"llama-server of llama-cpp-python": source.name.split("-")[1]}

    def healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def complete(
        self, prompt: list[int], tokens: int, slot: int
    ) -> tuple[list[int], float, dict[str, Any]]:
        """Returns the reply, the seconds to its first token, and the server's own timings."""
        request = {
            "prompt": prompt,
            "n_predict": tokens,
            "id_slot": slot,
            "cache_prompt": slot == 0,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            "stream": True,
        }
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(
            "POST", "/completion", json.dumps(request), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"llama-server answers {response.status}: {response.read()[:500]!r}")
        reply: list[int] = []
        seconds = 0.0
        timings: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[len(b"data: ") :])
            if part.get("tokens") and not reply:
                seconds = time.perf_counter() - start
            reply += part.get("tokens", [])
            timings = part.get("timings", timings)
        connection.close()
        return reply, seconds, timings

    def chat_start(self) -> None:
        """Does nothing: a conversation with another prefix reuses nothing in the slot."""

    def chat_turn(self, past: list[int], new: list[int], reply: int) -> tuple[list[int], float]:
        tokens, seconds, timings = self.complete(past + new, reply, slot=0)
        # The last token of the previous reply has no KV yet.
        if past and timings["prompt_n"] > len(new) + 1:
            raise RuntimeError(f"{timings['prompt_n']} tokens computed for {len(new)} new ones")
        return tokens, seconds

    def chat_again(self, prompt: list[int]) -> float:
        _, seconds, timings = self.complete(prompt, 1, slot=1)
        if timings["prompt_n"] != len(prompt):
            raise RuntimeError(f"{timings['prompt_n']} of {len(prompt)} tokens computed again")
        return seconds


if __name__ == "__main__":
    serve(LlamaServerRunner())
