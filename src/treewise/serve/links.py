"""Links that fetch a file of a checkpoint, for an hour, without a key: signed with a secret of the server's folder."""

import hashlib
import hmac
import secrets
import time
from pathlib import Path

from treewise.base.durable import moved_into_place
from treewise.errors import ConfigError

LIFE_SECONDS = 3600
_SIZE = 32  # bytes of the secret


class Links:
    """secret: a file that only its owner may read; made where it is missing, which ends the links made before.

    Raises:
        ConfigError: it cannot be read, or is not a secret that was written here.
    """

    def __init__(self, secret: Path) -> None:
        try:
            if not secret.exists():
                with moved_into_place(secret, permissions=0o600) as part:
                    part.write_bytes(secrets.token_bytes(_SIZE))
            if secret.stat().st_mode & 0o077:
                secret.chmod(0o600)
            self._secret = secret.read_bytes()
        except OSError as error:
            raise ConfigError(f"{secret} cannot be read or written ({error.strerror}).") from None
        if len(self._secret) != _SIZE:
            raise ConfigError(
                f"{secret} has {len(self._secret)} bytes of {_SIZE}; remove it, which ends links made before."
            )

    def made(self, file: str, now: float) -> str:
        """The query of a link to a file. file: what names it, and its content."""
        expires = int(now) + LIFE_SECONDS
        return f"expires={expires}&signature={self._signature(file, str(expires))}"

    def is_valid(self, file: str, expires: str, signature: str) -> bool:
        """Whether a link's query is one that was made for this file and is not over."""
        is_made = hmac.compare_digest(self._signature(file, expires).encode(), signature.encode())
        return is_made and int(expires) > time.time()

    def _signature(self, file: str, expires: str) -> str:
        return hmac.new(self._secret, f"{expires} {file}".encode(), hashlib.sha256).hexdigest()
