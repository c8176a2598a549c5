"""Finds a model: a local path as it is, or a snapshot of a hub repository."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

from turbomind.errors import ModelError, NotFound
from turbomind.params import wrong

# Configs, weights, tokenizer. Sub-folders and consolidated* hold copies of the same weights.
ALLOW = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
IGNORE = ["*/*", "consolidated*", "*.msgpack", "README*"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(
    model: str | os.PathLike[str], revision: str | None = None, weights: bool = True
) -> Path:
    """Returns the local path of a model, and downloads it if it is a hub name.

    huggingface_hub downloads, so HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply.

    Args:
        model: An existing path, or the name of a hub repository.
        revision: Branch, tag or commit of a hub name. None: its default.
        weights: Downloads the weights too, not only the small files.

    Raises:
        InvalidRequest: An argument has another type, or a local path comes with a revision.
        NotFound: There is neither such a path nor such a repository.
        ModelError: The download failed.
    """
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    if not isinstance(name, str) or not name:
        raise wrong("model", model, "the path of a folder or a hub name")
    path = Path(os.path.expanduser(name))  # as it is without a home directory
    if path.exists():
        if revision is not None:
            raise wrong("revision", revision, f"None for the local path {path}")
        return path
    if revision is not None and not isinstance(revision, str):
        raise wrong("revision", revision, "a string")
    if not _NAME.fullmatch(name) or ".." in name:
        raise NotFound(f"no such folder: {name}")
    return _download(name, revision, [] if weights else ["*.safetensors"])


def _download(name: str, revision: str | None, leave_out: list[str]) -> Path:
    # Imported here: it is slow to import and a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def missing(why: str) -> NotFound:
        return NotFound(f"{name} is neither a folder here nor found on the hub: {why}")

    # The library's own messages fill a screen.
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=ALLOW,
                ignore_patterns=IGNORE + leave_out,
            )
        )
    except GatedRepoError as error:
        raise missing("it needs a login; accept its terms there and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise missing("no such model; check the name, or set HF_TOKEN if it is private") from error
    except RevisionNotFoundError as error:
        raise missing(f"the model has no revision {revision!r}; check it") from error
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            why = "HF_HUB_OFFLINE is set; unset it to download, or name a folder"
        else:
            kind = type(error.__cause__ or error).__name__
            why = f"the hub does not answer ({kind}); check the network, or name a folder"
        raise missing(why) from error
    except HFValidationError as error:
        raise NotFound(
            f"{name} is neither a folder here nor a hub name, expected NAME or OWNER/NAME"
        ) from error
    except Exception as error:  # network and HTTP errors of several libraries
        why = textwrap.shorten(str(error), 160, placeholder=" ...")
        raise ModelError(f"cannot download {name}: {why}") from error
