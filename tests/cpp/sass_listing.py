"""Reads the machine code of kernels, as cuobjdump prints it, into instructions and their paths."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
# Ends a path without a predicate; the others fall through or go to a target.
ENDS = {"EXIT", "RET", "BRA", "BRX", "JMP", "KILL"}


def find_tools() -> str | None:
    """Returns a PATH with cuobjdump, and nvdisasm, which it calls; None where one is missing."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    folders = [os.environ.get("PATH", os.defpath), str(wheels), "/usr/local/cuda/bin"]
    path = os.pathsep.join(folders)
    both = all(shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm"))
    return path if both else None


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # "" where it always runs
    name: str  # with its modifiers
    operands: str

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def registers(self) -> list[int]:
        """The numbers of the general registers among the operands, in order; RZ is left out."""
        return [int(number) for number in re.findall(r"\bR(\d+)", self.operands)]


class Kernel:
    def __init__(self, name: str, listing: str) -> None:
        self.name = name
        self.code = [
            Instruction(int(m[1], 16), m[2] or "", m[3], m[4].strip())
            for m in LINE.finditer(listing)
        ]

    @cached_property
    def next_of(self) -> list[list[int]]:
        """For each instruction, the places of those that may follow it."""
        place = {one.address: i for i, one in enumerate(self.code)}
        following: list[list[int]] = []
        for i, one in enumerate(self.code):
            after = [] if one.kind in ENDS and not one.predicate else [i + 1]
            if one.kind in ("BRA", "CALL", "JMP"):
                after += [place[int(t, 16)] for t in re.findall(r"0x([0-9a-f]+)", one.operands)]
            following.append([j for j in after if j < len(self.code)])
        return following

    def reached_without(self, stop: Callable[[Instruction], bool]) -> list[Instruction]:
        """Instructions on any path from the first one that passes none for which `stop` holds."""
        seen, left = {0}, [0]
        while left:
            i = left.pop()
            if stop(self.code[i]):
                continue
            new = [j for j in self.next_of[i] if j not in seen]
            seen.update(new)
            left += new
        return [self.code[i] for i in sorted(seen) if not stop(self.code[i])]

    @cached_property
    def blocks(self) -> list[list[Instruction]]:
        """The basic blocks, in the order of their addresses."""
        begins = {0}
        for i, after in enumerate(self.next_of):
            if after != [i + 1]:
                begins.update([i + 1, *after])
        edges = sorted(begins | {len(self.code)})
        return [self.code[a:b] for a, b in pairwise(edges)]


def read_kernels(objects: list[Path], arch: str, path: str) -> Iterator[Kernel]:
    """Yields the kernels of object files for one architecture. `path`: from find_tools()."""
    command = ["cuobjdump", "-sass", "-arch", arch]
    started = [
        subprocess.Popen(
            [*command, str(file)],
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for file in objects
    ]
    for file, process in zip(objects, started, strict=True):
        text, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"cuobjdump failed for {file}")
        for part in text.split("Function : ")[1:]:
            name, _, listing = part.partition("\n")
            yield Kernel(name.strip(), listing)
