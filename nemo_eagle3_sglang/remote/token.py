"""The secret by which a trainer may use a target server that others can reach as well."""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path

from nemo_eagle3_sglang.errors import ConfigError

VARIABLE = "NEMO_EAGLE3_SGLANG_TOKEN"
SHORTEST = 16


def find(path: str | None, where: str) -> str | None:
    """Return the token of a file, or of the environment where no file is named; ``None`` where there is none.

    Args:
        path: A file that holds it and nothing else.
        where: What names the file, for errors.

    Raises:
        ConfigError: The file cannot be read, or the token can be guessed.
    """
    if path is not None:
        try:
            token, source = Path(path).read_text(encoding="utf-8").strip(), f"{where}: {path}"
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    else:
        token, source = os.environ.get(VARIABLE, "").strip(), VARIABLE
        if not token:
            return None
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{source} holds no token of at least {SHORTEST} letters and digits; "
            "make one with: python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return token


def check_address(host: str, token: str | None) -> None:
    """Refuse to listen where others can reach without a token.

    Raises:
        ConfigError: See above, or ``host`` is no address.
    """
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"--host {host}: write an IP address, e.g. 127.0.0.1 or 0.0.0.0") from error
    if not loopback and token is None:
        raise ConfigError(
            f"--host {host} can be reached from other hosts, and that needs a token: give --token-file FILE or set "
            f"{VARIABLE}, the same for the trainer (recipe_args.remote_token_file)"
        )


def fits(header: str | None, token: str) -> bool:
    """Return whether an ``Authorization`` header carries the token; takes as long whatever is wrong."""
    given = (header or "").encode("utf-8", "replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())
