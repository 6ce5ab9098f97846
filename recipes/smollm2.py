"""GRPO on a real pretrained model: SmolLM2-135M-Instruct learns to add, asked in its chat format.

    python -m recipes.smollm2 out=FOLDER [model=FOLDER] [steps=80] [minutes=8] [key=value ...]

Makes the model's folder where `model` does not hold one (see `flowrl/builtin/smollm2.py`), writes the task's problems, runs
`flowrl.main_ppo`, and reads the reward on held-out problems before and after from its metrics. `FOLDER` gets `results.json` and
the run. A key with a dot goes to `main_ppo` as it is (`actor.optim.lr=1e-6`).
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowrl.builtin.smollm2 import write_smollm2
from flowrl.command import run_command
from flowrl.config.machine import find_machine
from flowrl.resharding.measure.gpu_tables import cells, headings
from flowrl.resharding.measure.report import origin
from flowrl.resharding.words import make_folder, output_path, parse_words, whole_number
from recipes.limited import run_measured

KEYS = {
    "out": "folder for results.json and the run",
    "model": "folder of the model, made where there is none (in out)",
    "steps": "of training (80)",
    "minutes": "after which the run is told to stop; what it has measured counts (8)",
    "seed": "of sampling and order (1)",
}
NUM_EVAL = 256
MOST, MOST_DIGITS = 40, 6
SETTINGS = {
    "algorithm": "grpo",
    "kl": "none",
    "data.max_prompt_tokens": "96",
    "data.prompts_per_step": "64",
    "data.eval_prompts": str(NUM_EVAL),
    "rollout.samples_per_prompt": "8",
    "rollout.max_response_tokens": "16",
    "actor.minibatch_prompts": "64",
    "actor.tokens_per_microbatch": "32768",
    "actor.optim.lr": "1e-5",
    "trainer.eval_every": "10",
    "reward.function": "recipes.smollm2:score",
}
"""Of the run, unless the command line says otherwise."""
FIRST_AND_LAST = 5
"""Steps whose training reward is averaged at each end."""


def problems() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(to learn from, held out): sums of two numbers from 1 to 40, cut by a hash, so the same on every machine."""
    rows = [_problem(left, right) for left in range(1, MOST + 1) for right in range(1, MOST + 1)]
    rows.sort(key=lambda row: hashlib.sha256(row["id"].encode()).digest())
    return rows[NUM_EVAL:], rows[:NUM_EVAL]


def _problem(left: int, right: int) -> dict[str, Any]:
    """A chat with one example: without it the model rarely answers with a number, and learns from what it does."""
    question = "What is {} + {}? Answer with the number only."
    turns = [("user", question.format(12, 7)), ("assistant", "19"), ("user", question.format(left, right))]
    prompt = [{"role": role, "content": content} for role, content in turns]
    return {"id": f"{left}+{right}", "prompt": prompt, "answer": str(left + right)}


def score(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """1 where the last number of the response is the answer; where it is less than 10 off, up to 0.4 for being near."""
    numbers = re.findall(r"\d+", response)
    if not numbers or len(numbers[-1]) > MOST_DIGITS:
        return 0.0
    difference = abs(int(numbers[-1]) - int(row["answer"]))
    return 1.0 if difference == 0 else max(0.0, 0.4 * (1 - difference / 10))


def command(given: Mapping[str, str], model: Path, out: Path, extra: Sequence[str]) -> list[str]:
    """The call of `main_ppo`; problems are written beside the run. Errors: `ValueError` for what is no whole number."""
    names = ("train.jsonl", "eval.jsonl")
    for name, rows in zip(names, problems(), strict=True):
        (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {word.partition("=")[0] for word in extra}
    own = SETTINGS | {
        "model.path": str(model),
        "data.train_files": f"[{out / names[0]}]",
        "data.eval_files": f"[{out / names[1]}]",
        "trainer.total_steps": str(whole_number(given, "steps", 80)),
        "trainer.seed": str(whole_number(given, "seed", 1)),
        "run.dir": str(out / "run"),
    }
    kept = [f"{key}={value}" for key, value in own.items() if key not in said]
    return [sys.executable, "-m", "flowrl.main_ppo", *kept, *extra]


def summary(rows: Sequence[Mapping[str, float]], minutes: float) -> dict[str, Any]:
    """The table's row. Error: `ValueError` where the run made no step, or no evaluation after the first one."""
    steps = [row for row in rows if row["step"] > 0]
    evaluations = [(int(row["step"]), row["eval/reward/mean"]) for row in rows if "eval/reward/mean" in row]
    if not steps or len(evaluations) < 2:
        raise ValueError(f"the run has {len(steps)} steps and {len(evaluations)} evaluations; it needs 1 and 2")
    rewards = [row["reward/mean"] for row in steps]
    return {
        "model": "SmolLM2-135M-Instruct",
        "steps": len(steps),
        "minutes": minutes,
        "reward_before": evaluations[0][1],
        "reward_after": evaluations[-1][1],
        "first_steps_reward": statistics.fmean(rewards[:FIRST_AND_LAST]),
        "last_steps_reward": statistics.fmean(rewards[-FIRST_AND_LAST:]),
        "evaluations": evaluations,
        "rewards": rewards,
        "step_seconds": [row["seconds/total"] for row in steps],
    }


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 1 where the run failed; 2 for bad input."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(f"{__doc__}\n" + "".join(f"{key:<10}{text}\n" for key, text in KEYS.items()))
        return 0
    extra = [argument for argument in arguments if "." in argument.partition("=")[0]]
    try:
        given = parse_words([argument for argument in arguments if argument not in extra], KEYS, ("out",))
        out = output_path(given)
        assert out is not None
        out = out.absolute()
        limit = 60 * whole_number(given, "minutes", 8)
        make_folder(out)
        model = Path(given.get("model", str(out / "SmolLM2-135M-Instruct"))).expanduser().absolute()
        words = command(given, model, out, extra)
        write_smollm2(model)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n{__doc__}\n")
        return 2
    start = time.monotonic()
    # A run that takes too long is asked to stop; what it has measured until then counts.
    try:
        rows = run_measured(words, limit, out / "run")
        row = summary(rows, (time.monotonic() - start) / 60)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"error: no result of main_ppo: {error}\n")
        return 1
    settings = {key: value for key, value in (w.split("=", 1) for w in words[3:]) if str(out) not in value}
    settings.pop("model.path", None)
    device = "cuda" if find_machine().gpus else "cpu"
    content = {**origin(device), "model": row["model"], "settings": settings, "rows": [row]}
    (out / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    table = Table(*headings("learning"), title="reward on held-out sums")
    for line in cells("learning", content):
        table.add_row(*line)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
