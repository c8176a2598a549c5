"""The architectures of GGUF files, from the families that have them."""

from __future__ import annotations

from collections.abc import Mapping

from turbomind.models import FAMILIES
from turbomind.models.gguf import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    name: facts for family in FAMILIES for name, facts in vars(family).get("gguf", {}).items()
}
"""By `general.architecture`. A family has those of its own alone, none of its base's."""
