"""Steps of GRPO on a model with random weights, as a part: one run of `main_ppo`, in seconds by phase.

    python -m recipes.multi_gpu.steps out=FOLDER scratch=FOLDER model=llama-7b layers=18 device=cuda limit=100 [key=value ...]

`scratch` keeps the model's folder for the next part. What is no word of `recipes.gpu_steps` goes to `main_ppo` as it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.command import run_command
from flowrl.resharding.measure.processes import RankFailed, run_ranks
from flowrl.resharding.measure.report import origin
from flowrl.resharding.shapes import SHAPES
from flowrl.resharding.words import parse_words, whole_number
from recipes import gpu_steps

OWN = ("out", "scratch", "model", "layers", "device", "limit")
WORKLOAD = ("prompts", "samples", "prompt", "tokens", "steps", "seed")
DEFAULTS = {"prompts": "64", "samples": "4", "prompt": "128", "tokens": "256", "steps": "5"}
SETTINGS = {"cuda": ("rollout.cuda_graphs=false", "actor.offload=false"), "cpu": ()}
"""An engine without graphs starts half a minute sooner, and the trained state is small enough to stay."""


def model_folder(given: Mapping[str, str]) -> str:
    """What `model.path` is: the name or folder as given, or for a named shape a folder with random weights, written if
    it is not there. Errors: `RankFailed`, `ValueError`."""
    name = given["model"]
    if name not in SHAPES:
        return name
    shape = replace(SHAPES[name], num_layers=whole_number(given, "layers", SHAPES[name].num_layers))
    folder = Path(given["scratch"]).absolute() / f"{name}-{shape.num_layers}"
    if not folder.is_dir():
        settings = {
            "dtype": "bfloat16" if given["device"] == "cuda" else "float32",
            "device": given["device"],
            "seed": 1,
        }
        run_ranks(1, "gloo", (), "flowrl.workers.benchmark:write_folder", str(folder), shape, settings)
    return str(folder)


def words(given: Mapping[str, str], model: str, extra: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what every run has in common, what this one adds) for `main_ppo`; `extra` wins over settings of the part."""
    common = gpu_steps.overrides(
        DEFAULTS | {key: given[key] for key in WORKLOAD if key in given}, Path(given["scratch"])
    )
    common[0] = f"model.path={model}"
    keys = {word.partition("=")[0] for word in extra}
    own = [
        word
        for word in (*SETTINGS[given["device"]], f"cluster.device={given['device']}")
        if word.partition("=")[0] not in keys
    ]
    return common, [*own, *extra]


def measure(given: Mapping[str, str], extra: Sequence[str]) -> dict[str, Any]:
    """The content of results.json. Errors: `ValueError`, `RankFailed`, `RuntimeError`."""
    out, scratch = Path(given["out"]).absolute(), Path(given["scratch"])
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    # Megatron-core warns in every process of optional packages that flowrl does without.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    limit, start = whole_number(given, "limit"), time.monotonic()
    common, added = words(given, model_folder(given), extra)
    # The run gets what writing the folder has left.
    row, peaks = gpu_steps.run("grpo", common, added, out, max(1, limit - int(time.monotonic() - start)))
    told = dict(word.split("=", 1) for word in extra)
    layers = f" of {given['layers']} layers" if "layers" in given else ""
    return {
        **origin(given["device"]),
        "model": f"{given['model']}{layers}",
        "settings": told,
        "rows": [row],
        "memory": peaks,
    }


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 1 where the run failed; 2 for bad input."""
    known = (*OWN, *WORKLOAD)
    mine = [word for word in arguments if word.partition("=")[0] in known]
    extra = [word for word in arguments if word not in mine]
    try:
        content = measure(parse_words(mine, known, ("out", "scratch", "model", "device", "limit")), extra)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n{__doc__}\n")
        return 2
    except (RankFailed, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    out = Path(dict(word.split("=", 1) for word in mine)["out"])
    (out / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    row = content["rows"][0]
    sys.stdout.write(f"{row['step_seconds']:.2f} s a step: {row['phases']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
