"""Whole steps of GRPO and PPO on a model shape with random weights, in seconds by phase.

    python -m recipes.gpu_steps out=FOLDER [model=qwen2.5-1.5b] [runs=grpo,ppo] [key=value ...]

Weights, tokenizer and prompts are made on the spot; then `flowrl.main_ppo` runs, and its metrics are read. `FOLDER` gets
`results.json` and both runs. A key with a dot goes to `main_ppo` as it is (`actor.tokens_per_microbatch=32768`).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import string
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowrl.command import run_command
from flowrl.config.compose import compose_all
from flowrl.config.machine import find_machine
from flowrl.config.memory import memory
from flowrl.config.model_shape import ModelShape
from flowrl.resharding.measure.folder import write_config
from flowrl.resharding.measure.gpu_tables import cells, headings
from flowrl.resharding.measure.processes import RankFailed, run_ranks
from flowrl.resharding.measure.report import origin
from flowrl.resharding.shapes import SHAPES, planned_shape
from flowrl.resharding.words import make_folder, output_path, parse_words, whole_number
from recipes.limited import run_measured

KEYS = {
    "out": "folder for results.json and the runs",
    "model": "a named shape, for which random weights are written, or a model's folder (qwen2.5-1.5b)",
    "runs": "grpo, ppo or both (grpo,ppo)",
    "prompts": "of a step (256)",
    "samples": "of a prompt (4)",
    "prompt": "tokens of a prompt (128)",
    "tokens": "of a response (512)",
    "steps": "of a run; the first warms up and does not count (4)",
    "seed": "of weights, prompts and sampling (1)",
    "limit": "seconds of a run, after which it is told to stop; what it has measured counts (900)",
}
RUNS = {"grpo": ("algorithm=grpo", "kl=none"), "ppo": ("algorithm=gae", "kl=reward")}
GENERATION = ("generate",)
TRAINING = ("log_probs", "reference", "values", "update_critic", "update_actor")
"""Phases in which a model of the trainer works: passes forward and backward."""
MICROBATCH, TOKENS_PER_MICROBATCH = "actor.tokens_per_microbatch", 16384
MOST = 1 << 16
"""Of prompts and tokens: they are written before a run looks at them."""
WIDTH = 190


def score(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """A reward that differs between the samples of a prompt and costs nothing: whether a response has an even length."""
    return float(len(response) % 2 == 0)


def summary(run: str, rows: Sequence[Mapping[str, float]], samples: int) -> dict[str, Any]:
    """The table's row: medians over the steps of a run after the first, which warms up.

    Phases of several roles may overlap; `other_share` is what of a step is neither generation nor training.
    """
    steps = [row for row in rows if row["step"] > 1]
    names = sorted({key for row in steps for key in row if key.startswith("seconds/")} - {"seconds/total"})
    seconds = {name.removeprefix("seconds/"): statistics.median(row.get(name, 0.0) for row in steps) for name in names}
    total = statistics.median(row["seconds/total"] for row in steps)
    generation, training = (sum(seconds.get(name, 0.0) for name in group) for group in (GENERATION, TRAINING))
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    measured = sorted({key for row in steps for key in row if key.startswith("memory/")})
    return {
        "run": run,
        "steps": len(steps),
        "rows": samples,
        "response_tokens": statistics.median(row["response_tokens/mean"] for row in steps),
        "step_seconds": total,
        "generation_seconds": generation,
        "training_seconds": training,
        "other_share": max(0.0, 1.0 - (generation + training) / total),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps),
        "seconds": seconds,
        "phases": ", ".join(f"{name} {value:.2f}" for name, value in ordered if value >= 0.005),
        "memory": {key: max(row.get(key, 0.0) for row in steps) for key in measured},
    }


def peaks(run: str, rows: Sequence[Mapping[str, float]], words: Sequence[str]) -> list[dict[str, Any]]:
    """Peaks of memory by phase: the largest of the steps after the first, and what `dry_run` predicts. None on a CPU."""
    composed = compose_all(words)
    predicted: dict[str, int] = {}
    for entry in memory(composed.config, composed.shapes):
        predicted[entry.phase] = max(entry.total, predicted.get(entry.phase, 0))
    found = []
    for phase, size in predicted.items():
        measured = [row[key] for row in rows if row["step"] > 1 and (key := f"memory/{phase}/peak_bytes_max") in row]
        if measured:
            sizes = {"measured_bytes": max(measured), "predicted_bytes": size, "ratio": size / max(measured)}
            found.append({"run": run, "phase": phase, **sizes})
    return found


def write_prompts(path: Path, *, count: int, tokens: int, seed: int) -> None:
    """Prompts of so many letters, each a token of the random model's tokenizer."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"prompt": "".join(draw.choices(string.ascii_lowercase, k=tokens))}) + "\n")


def overrides(given: Mapping[str, str], folder: Path) -> list[str]:
    """What every run has in common. Errors: `ValueError` for what is no whole number."""
    prompts, tokens = whole_number(given, "prompts", 256, most=MOST), whole_number(given, "tokens", 512, most=MOST)
    length, seed = whole_number(given, "prompt", 128, most=MOST), whole_number(given, "seed", 1)
    data = folder / "prompts.jsonl"
    write_prompts(data, count=2 * prompts, tokens=length, seed=seed)
    return [
        f"model.path={folder / 'model'}",
        f"data.train_files=[{data}]",
        "data.eval_files=[]",
        f"data.prompts_per_step={prompts}",
        f"data.max_prompt_tokens={length}",
        f"rollout.samples_per_prompt={whole_number(given, 'samples', 4)}",
        f"rollout.max_response_tokens={tokens}",
        f"actor.minibatch_prompts={max(1, prompts // 2)}",
        "reward.function=recipes.gpu_steps:score",
        f"trainer.total_steps={whole_number(given, 'steps', 4)}",
        f"trainer.seed={seed}",
        "trainer.eval_every=0",
        "trainer.loggers=[]",
    ]


def own_words(name: str, extra: Sequence[str], out: Path) -> list[str]:
    """What one run adds to what they have in common, before `extra`."""
    own = [*RUNS[name], f"run.dir={out / name}"]
    if not any(word.startswith(f"{MICROBATCH}=") for word in extra):
        own.append(f"{MICROBATCH}={TOKENS_PER_MICROBATCH}")
    return own


def check(names: Sequence[str], common: Sequence[str], extra: Sequence[str], out: Path) -> None:
    """Refuse what `main_ppo` would refuse, before anything is written or started. Error: `ValueError`."""
    for name in names:
        compose_all([*common, *own_words(name, extra, out), *extra])


def run(
    name: str, common: Sequence[str], extra: Sequence[str], out: Path, limit_seconds: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run of `main_ppo`: its summary and its peaks. Error: `RuntimeError` with the end of its output where it failed or
    took too long."""
    own = own_words(name, extra, out)
    command = [sys.executable, "-m", "flowrl.main_ppo", *common, *own, *extra]
    log = out / f"{name}.log"
    try:
        with log.open("wb") as written:
            rows = run_measured(command, limit_seconds, out / name, written)
        if sum(row["step"] > 1 for row in rows) == 0:
            raise RuntimeError("it ended before its second step")
    except RuntimeError as error:
        raise RuntimeError(f"no result of {name}: {error}:\n{log.read_text()[-3000:]}") from None
    settings = dict(word.split("=", 1) for word in common)
    samples = int(settings["data.prompts_per_step"]) * int(settings["rollout.samples_per_prompt"])
    return summary(name, rows, samples), peaks(name, rows, [*common, *own, *extra])


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 1 where a run failed; 2 for bad input."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(f"{__doc__}\n" + "".join(f"{key:<10}{text}\n" for key, text in KEYS.items()))
        return 0
    extra = [argument for argument in arguments if "." in argument.partition("=")[0]]
    try:
        given = parse_words([argument for argument in arguments if argument not in extra], KEYS, ("out",))
        shape = planned_shape(given.get("model", "qwen2.5-1.5b"))
        names = given.get("runs", ",".join(RUNS)).split(",")
        unknown = [name for name in names if name not in RUNS]
        if unknown:
            raise ValueError(f"runs={given['runs']}: {unknown[0]!r} is not one of {', '.join(RUNS)}")
        out = output_path(given)
        assert out is not None
        make_folder(out)
        content = measure(given, shape, names, extra, out.absolute())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n{__doc__}\n")
        return 2
    except (RankFailed, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    (out / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for kind in ("steps", "memory"):
        table = Table(*headings(kind), title=f"{content['model']}: {kind}")
        for line in cells(kind, content):
            table.add_row(*line)
        if table.row_count:
            console.print(table)
    return 0


def measure(
    given: Mapping[str, str], shape: ModelShape, names: Sequence[str], extra: Sequence[str], out: Path
) -> dict[str, Any]:
    """The content of results.json. Errors: `ValueError`, `RankFailed`, `RuntimeError`."""
    device = "cuda" if find_machine().gpus else "cpu"
    model, limit = given.get("model", "qwen2.5-1.5b"), whole_number(given, "limit", 900)
    # Megatron-core warns in every process of optional packages that flowrl does without.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = {"dtype": "bfloat16" if device == "cuda" else "float32", "device": device}
        common = overrides(given, folder)
        if model in SHAPES:
            seed = whole_number(given, "seed", 1)
            target = str(folder / "model")
            alone = write_config(folder, shape, settings["dtype"])
            check(names, [f"model.path={alone}", *common[1:]], extra, out)
            run_ranks(1, "gloo", (), "flowrl.workers.benchmark:write_folder", target, shape, settings | {"seed": seed})
        else:
            common[0] = f"model.path={model}"
            check(names, common, extra, out)
        done = [run(name, common, extra, out, limit) for name in names]
        told = {word.split("=", 1)[0]: word.split("=", 1)[1] for word in [*common, *extra] if str(folder) not in word}
    return {**origin(device), "model": Path(model).name, "settings": settings | told,
            "rows": [row for row, _ in done], "memory": [peak for _, own in done for peak in own]}  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(main))
