"""The way into a driver: overrides in, exit code out. Errors of configuration are one message and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from flowrl.config.compose import Recipe, compose_all
from flowrl.config.plan import make_plan, render
from flowrl.config.redact import redact_text
from flowrl.config.reference import help_text
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError

EXIT_CONFIGURATION = 2


def run_main(
    main: Callable[[Config], int | None],
    argv: Sequence[str] | None = None,
    *,
    recipe: Recipe | None = None,
    outlook: Callable[[Config], str] | None = None,
) -> NoReturn:
    """Composes the configuration and ends the process with the exit code of `main` (None: 0).

    `--help` and `dry_run=true` print and exit 0; `outlook` is what the latter says beside the plan. A `ConfigError`, from here or from `main` (data, tokenizer, reward
    function), is printed on stderr without traceback, exit 2. Other exceptions and signals are `main`'s business.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("--help", "-h") for word in argv):
        sys.stdout.write(help_text(recipe))
        sys.exit(0)
    try:
        composed = compose_all(argv, recipe=recipe)
        if composed.config.dry_run:
            plan = render(make_plan(composed.config, composed.shapes, composed.machine))
            sys.stdout.write(plan + (f"\n{outlook(composed.config)}\n" if outlook else ""))
            sys.exit(0)
        code = main(composed.config)
    except ConfigError as error:
        sys.stderr.write(message(error))
        sys.exit(EXIT_CONFIGURATION)
    sys.exit(0 if code is None else code)


def message(error: ConfigError) -> str:
    """What the user sees of a configuration error."""
    if len(error.problems) == 1:
        return redact_text(f"configuration error: {error}\n")
    lines = [f"  {number}. {problem}" for number, problem in enumerate(error.problems, 1)]
    return redact_text("\n".join([f"{len(lines)} configuration errors:", *lines]) + "\n")
