"""Archives: a session as a file that another machine can import.

An archive is a zip with `session.json` (`session.schema.json` describes it), on request `pages/`
with its KV, and `manifest.json` with the SHA-256 of every entry. Equal sessions are equal bytes:
nothing is compressed and every date is the same.

Not here: commands and dialogues about archives (`cli/sessions`).
"""

from lmchat.archive.archive import Archive, read_archive, write_archive
from lmchat.archive.pages import ArchivePage
from lmchat.archive.transfer import export_session, import_session
from lmchat.store.records import Exported

__all__ = [
    "Archive",
    "ArchivePage",
    "Exported",
    "export_session",
    "import_session",
    "read_archive",
    "write_archive",
]
