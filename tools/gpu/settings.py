"""Options of a run. Phases are processes of their own and read them from a file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMULATED = "cuda_emulated"


@dataclass(frozen=True)
class Settings:
    """Options of a run. Folders are absolute paths.

    `work`: where phases leave their results and logs. `build`: CMake's folder. `package`: what the
    phases import `turbomind` from; `drivers`: where the C++ programs are. `seeds`: of the inputs of
    the ops' drivers. `seconds`: of the phase that reads this. `emulated` and `quick` runs take tiny
    shapes.
    """

    device: str
    quick: bool
    work: str
    build: str
    package: str
    drivers: str
    commit: str
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    seconds: float = 60.0

    @property
    def emulated(self) -> bool:
        """True if the kernels run on the host."""
        return self.device == EMULATED

    @property
    def tiny(self) -> bool:
        """True if shapes are those of a test."""
        return self.quick or self.emulated

    def result_path(self, phase: str) -> Path:
        """Returns the path of the result of a phase."""
        return Path(self.work) / (phase.replace(":", "-") + ".json")

    def result_of(self, phase: str) -> dict[str, object]:
        """Returns the result of an earlier phase; empty if there is none."""
        try:
            found = json.loads(self.result_path(phase).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def save(self) -> None:
        """Writes the options for the processes of the phases."""
        write_json(Path(self.work) / "settings.json", asdict(self))


def load_settings(work: Path) -> Settings:
    """Reads the options that `Settings.save` has written."""
    return Settings(**json.loads((work / "settings.json").read_text()))


def write_json(path: Path, value: object) -> None:
    """Writes a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=1, sort_keys=False) + "\n")
    os.replace(beside, path)
