"""The command that a user can type, or type again, for a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from flowrl.config.redact import HIDDEN, is_secret, redact_text

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")


def override(key: str, text: str) -> str:
    """`key=text` so that Hydra reads this very text, whatever is in it."""
    if _PLAIN.fullmatch(text):
        return f"{key}={text}"
    quoted = text.replace("'", "\\'")
    return f"{key}='{quoted}'"


def resume_command(words: Sequence[str], run_dir: Path) -> str:
    """The command of these words, going on in `run_dir`, for a shell. Secrets are hidden: they are to be given again."""
    kept = [_without_secrets(word) for word in words if not word.startswith(("trainer.resume=", "run.dir="))]
    return shlex.join([*kept, override("run.dir", str(run_dir))])


def _without_secrets(word: str) -> str:
    key, equals, _ = word.partition("=")
    return f"{key}={HIDDEN}" if equals and is_secret(key.rpartition(".")[2]) else redact_text(word)
