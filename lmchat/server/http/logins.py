"""Logins of browsers by API keys: a cookie that nothing is stored for, and a bound of attempts.

The cookie is a name, a time of expiry and an HMAC of both by the user's key. So it outlives
restarts and ends with the key.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Mapping

from lmchat.server.errors import HttpError
from lmchat.server.http.guard import Keys

FAILURES = 10
"""Failed attempts of one address in a minute."""
LASTS = 30 * 86400
"""Seconds for which a login lasts."""
_MOST_ADDRESSES = 10_000


def cookie(name: str, key: str, expires: int) -> str:
    """Returns the value of the cookie of a user.

    Args:
        name: the owner that the key names.
        key: the key.
        expires: end of the login, in seconds of the epoch.
    """
    text = f"{name}|{expires}"
    sign = hmac.new(key.encode(), f"lmchat web login|{text}".encode(), hashlib.sha256)
    return f"{text}|{sign.hexdigest()}"


class Logins:
    """The users of a server, by the keys that name them. Falsy without keys.

    Args:
        keys: keys and the owners that they name.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = keys
        self._owners = Keys(keys)
        self._failed: OrderedDict[str, list[float]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def owner(self, value: str) -> str | None:
        """Returns the owner that a cookie names, or None for a wrong or expired one."""
        name, _, rest = value.partition("|")
        expires = rest.partition("|")[0]
        if not (expires.isascii() and expires.isdigit() and len(expires) < 12):
            return None
        ours = [cookie(name, key, int(expires)) for key, of in self._keys.items() if of == name]
        is_valid = [hmac.compare_digest(one.encode(), value.encode()) for one in ours]
        return name if any(is_valid) and int(expires) > time.time() else None

    def log_in(self, name: str, key: str, address: str) -> str:
        """Returns the cookie of a user.

        Args:
            name: the owner that the key names.
            key: the key.
            address: the client's address, whose failed attempts are counted.

        Raises:
            HttpError: 401: the name or the key is wrong; 429: too many attempts have failed.
        """
        failed = self._recent(address)
        if len(failed) >= FAILURES:
            raise HttpError(429, "Too many attempts failed. Try again in a minute.")
        if not name or self._owners.owner(key.encode("latin-1", "replace")) != name:
            failed.append(time.monotonic())
            raise HttpError(401, "The name or the key is wrong.")
        return cookie(name, key, int(time.time()) + LASTS)

    def _recent(self, address: str) -> list[float]:
        """Returns the times of an address's failed attempts of the last minute."""
        times = self._failed.setdefault(address, [])
        times[:] = [at for at in times if at > time.monotonic() - 60]
        self._failed.move_to_end(address)
        while len(self._failed) > _MOST_ADDRESSES:
            self._failed.popitem(last=False)
        return times
