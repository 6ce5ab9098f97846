"""The written reference of all knobs: `python -m flowrl.config.reference` writes `docs/configuration.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from flowrl.config.compose import GROUP_DEFAULTS, Recipe
from flowrl.config.schema import VARIANTS, Config
from flowrl.config.tree import Knob, knobs, sections, show

DOCUMENT = Path("docs/configuration.md")
HEAD = """# Configuration

Written by `python -m flowrl.config.reference` from `flowrl/config/schema.py`; a test keeps it current.

A driver takes overrides in Hydra's grammar: `KEY=VALUE`, lists as `KEY=[a,b]`, a config group by its name as in
`algorithm=grpo`. Every key exists once. Unknown keys, values of another type (`8.0` or `'8'` for an integer), knobs that the
rest of the configuration leaves without effect, and numbers that do not fit together end the run before it starts, with one
message and exit code 2. `auto` becomes a value before anything starts; `dry_run=true` shows it, with placement, batch
arithmetic and memory.

Units: `prompts` are rows of the data, `rows` are prompts times `rollout.samples_per_prompt`; sizes of batches count prompts of
the whole run, not of one device. A mini-batch is one optimizer step. A micro-batch is what one device runs at once; it is
measured in tokens and never changes a result.

On resume: a key that is `free` changes no result and may differ from the checkpoint's; any other change is refused unless
`trainer.resume_allow` names the key (`docs/checkpoints.md`).
"""


def document() -> str:
    """`docs/configuration.md` as text."""
    return HEAD + "".join(_tables())


def _tables() -> Iterator[str]:
    every = knobs(Config)
    yield _table("Top level", "", [knob for key, knob in every.items() if "." not in key])
    parts = sections(Config)
    for name, (_, doc) in parts.items():
        own = [knob for key, knob in every.items() if key.rpartition(".")[0] == name]
        if own:
            yield _table(f"`{name}`", doc, own)
    for group, types in VARIANTS.items():
        for name, cls in types.items():
            default = " (default)" if GROUP_DEFAULTS[group] == name else ""
            yield _table(f"`{group}={name}`{default}", inspect.getdoc(cls) or "", knobs(cls, f"{group}.").values())


def _table(title: str, doc: str, rows: Iterable[Knob]) -> str:
    lines = [f"\n## {title}\n"]
    if doc:
        lines.append(doc[0].upper() + doc[1:].rstrip(".") + ".\n")
    body = [
        f"| `{k.key}` | `{show(k.default)}` | {_cell(k.legal)} | {_cell(k.doc)} | {'free' if k.free else ''} |"
        for k in rows
    ]
    if body:
        lines += ["| key | default | legal | meaning | on resume |", "|---|---|---|---|---|", *body, ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def help_text(recipe: Recipe | None = None) -> str:
    """The keys, briefly, for `--help`."""
    groups = (recipe or Recipe()).variants()
    lines = ["usage: KEY=VALUE ...      (Hydra overrides; docs/configuration.md explains each key)", ""]
    lines += [f"{group}={'|'.join(types)}" for group, types in groups.items()]
    rows = list(knobs(Config).values())
    for group, types in groups.items():
        rows += [knob for cls in types.values() for knob in knobs(cls, f"{group}.").values()]
    lines += list(dict.fromkeys(f"{k.key}={show(k.default)}   {k.doc}" for k in rows))
    if recipe is not None and recipe.defaults:
        lines += ["", "defaults of this recipe: " + " ".join(recipe.defaults)]
    return "\n".join(lines) + "\n"


def number_of_keys() -> int:
    """Every key of every variant, and the groups themselves."""
    return len(knobs(Config)) + sum(
        1 + len({key for cls in types.values() for key in knobs(cls)}) for types in VARIANTS.values()
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCUMENT
    target.write_text(document())
