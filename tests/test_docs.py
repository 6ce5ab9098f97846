"""Code and commands in the documents are true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def test_the_code_of_authoring_runs(tmp_path: Path) -> None:
    blocks = code_blocks(ROOT / "docs" / "authoring.md")
    assert len(blocks) == 3
    main = blocks.pop(1)
    script = tmp_path / "mine.py"
    script.write_text("\n".join([*blocks, main]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_file_that_a_document_names_exists() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`((?:flowrl|recipes|docs|tests|requirements)/[\w/.-]+\.\w+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
