"""What is closed when a `with` block ends."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import Self


class Closing:
    """A context manager that closes itself."""

    def close(self) -> object:
        """Ends its use. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
