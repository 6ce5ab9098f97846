"""Secrets stay out of whatever is written: configuration dumps, trackers, messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
SECRET_ENDINGS = ("key", "token", "password", "secret", "authorization")
"""A key whose name ends like this holds a secret; counts such as `max_prompt_tokens` do not."""
# A password with a slash that is not escaped is no valid URL, but a secret. A port is no password.
_USER_INFO = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^/\s]+|[^/\s:@]+:(?!\d+/)[^\s@]+)@")
_IN_QUERY = re.compile(rf"([?&][\w.-]*(?:{'|'.join(SECRET_ENDINGS)})=)[^&#\s'\"]+", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a value of this name, the last part of a key or of an HTTP header, is not to be shown."""
    return name.lower().endswith(SECRET_ENDINGS)


def redact_text(text: str) -> str:
    """The text with the user part of every URL (`https://user:password@host`), and what its query says of secret names,
    hidden."""
    return _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _USER_INFO.sub(rf"\g<1>{HIDDEN}@", text))


def redact(value: Any, name: str = "") -> Any:
    """`value`, nested mappings and lists included, with the values of secret names and the users of URLs hidden.

    null and empty text stay as they are, for they tell that no secret was given.
    """
    if value is None or value == "":
        return value
    if isinstance(value, Mapping):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if is_secret(name):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [redact(inner, name) for inner in value]
    return redact_text(value) if isinstance(value, str) else value
