"""Runs flowrl's commands as a user does, and sees what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MARK = "FLOWRL_TEST_MARK"


@dataclass(frozen=True)
class Finished:
    """A command that ended: exit code, both outputs, its run folder, processes that outlived it."""

    code: int
    out: str
    err: str
    folder: Path
    seconds: float
    left_behind: tuple[str, ...]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def processes_marked(mark: str) -> list[str]:
    """Command lines of live processes whose environment carries the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:
                    found.append(f"{folder.name} {command[:120]}")
        except OSError:
            continue
    return found


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class Command:
    """Starts `python -m MODULE overrides... run.dir=...` from the repository's root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, mark: str) -> dict[str, str]:
        return {**os.environ, MARK: mark}

    def __call__(
        self, *overrides: str, module: str = "flowrl.main_ppo", name: str = "run", timeout: float = 300
    ) -> Finished:
        mark, folder = uuid.uuid4().hex, self.folder / name
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", module, f"run.dir={folder}", *overrides],
            capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=self.environment(mark),
        )  # fmt: skip
        seconds = time.monotonic() - started
        # A run writes nothing of its environment, where keys and tokens are.
        assert [file for file in files_of(folder) if mark.encode() in file.read_bytes()] == []
        deadline = time.monotonic() + 60
        while processes_marked(mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        return Finished(done.returncode, done.stdout, done.stderr, folder, seconds, tuple(processes_marked(mark)))


@pytest.fixture
def flowrl(tmp_path: Path) -> Command:
    return Command(tmp_path)


def random_model(folder: Path, family: str, **sizes: Any) -> Path:
    """A tiny model of four layers and random weights, with the tokenizer of the built-in model."""
    import torch
    import transformers

    from flowrl.builtin.model import resolve_model

    tiny = resolve_model("builtin:tiny", "~/.cache/flowrl")
    ids = json.loads((tiny / "config.json").read_text())
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=128, initializer_range=0.1, tie_word_embeddings=False,
        **{key: ids[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    for file in tiny.iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            shutil.copyfile(file, folder / file.name)
    return folder
