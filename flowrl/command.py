"""What commands have in common at their top: signals end them in order, with one line and the usual exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from flowrl.signals import Stopped, stop_signals


def run_command(main: Callable[[Sequence[str]], int]) -> int:
    """The exit code of `main` of this process's arguments; 128 + signal, after one line on stderr, where SIGINT or SIGTERM
    ended it. It leaves its `with` and `finally` blocks first."""
    try:
        with stop_signals():
            return main(sys.argv[1:])
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.exit_code
