"""`python -m flowrl.resharding.plan`: bytes, memory and time of a move between two layouts, before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from flowrl.command import run_command
from flowrl.resharding.plan import report
from flowrl.resharding.plan.figures import plan_row
from flowrl.resharding.plan.options import USAGE, parse_options
from flowrl.resharding.shapes import SHAPES, planned_shape

EXIT_BAD_INPUT = 2
WIDTH = 150
"""Columns of output that goes to no terminal."""


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 with one message on stderr."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(f"{USAGE}\nNamed shapes: {', '.join(SHAPES)}\n")
        return 0
    try:
        options = parse_options(arguments)
        shape = planned_shape(options.model)
        rows = [plan_row(shape, options, rollout) for rollout in options.rollouts]
        if options.out is not None:
            report.write(options.out, report.results(options, rows))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(report.table(shape, options, rows))
    for line in report.order_lines(rows):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
