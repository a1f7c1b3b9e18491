"""Optional bearer keys. Without a key file every client is let in."""

import hmac
from collections.abc import Sequence
from pathlib import Path

from router.openai import errors


class BadKeyFile(ValueError):
    """The API key file holds no key, or cannot be read."""


def read_api_keys(path: Path) -> list[bytes]:
    """One key a line; empty lines do not count. Raises BadKeyFile."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadKeyFile(f"cannot read the API keys: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise BadKeyFile(f"{path} holds no key: write one a line")
    return keys


class ApiKeys:
    """`keys` empty: open to all."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    def check(self, authorization: str | None) -> None:
        """Raises ApiError 401. Takes the same time for every wrong key."""
        if not self._keys:
            return
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise errors.no_key()
        presented = given.strip().encode("latin-1", errors="replace")
        matches = [hmac.compare_digest(presented, key) for key in self._keys]
        if not any(matches):
            raise errors.wrong_key()
