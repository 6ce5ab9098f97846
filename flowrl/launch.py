"""From a command line to an exit code: what happens around a driver."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flowrl.config.cli import run_main
from flowrl.config.compose import Recipe
from flowrl.config.paths import user_path
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError
from flowrl.signals import Stopped, stop_signals

if TYPE_CHECKING:
    from flowrl.run import Run

EXIT_FAILURE = 1


def launch(train: Callable[[Run], None], recipe: Recipe | None = None, argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a driver on the configuration of the command line and ends the process.

    Exit codes: 0 when all announced steps are done, 2 for a configuration that cannot run (data, tokenizer and reward
    function included), 1 for a failure, 130 or 143 when stopped by SIGINT or SIGTERM.
    """
    with _quick_end():
        try:
            with stop_signals():
                run_main(partial(_train, train), argv, recipe=recipe)
        except Stopped as stopped:
            _say(f"{stopped} before the run began")
            sys.exit(stopped.exit_code)


@contextmanager
def _quick_end() -> Iterator[None]:
    """After the exit handlers, which run as ever, the process ends at once.

    The interpreter would collect the half a million objects of the imported libraries one by one: 3 s of a CPU.
    """
    codes: list[int] = []

    def leave() -> None:
        if codes:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])

    # Handlers run last registered first, so the libraries', which are imported later, run before this one.
    atexit.register(leave)
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            codes.append(end.code)
        raise


def _train(train: Callable[[Run], None], config: Config) -> int:
    folder = user_path(config.run.dir)
    with ExitStack() as stack:
        stack.enter_context(_gone_if_refused(folder))
        try:
            stack.enter_context(_alone(folder))
            earlier = _set_aside(folder)
            stack.enter_context(driver_log(folder / "logs"))
        except OSError as error:
            raise ConfigError(
                f"run.dir={folder} cannot be used: {error.strerror}; give a folder that can be written"
            ) from None
        # Late, so that a configuration error does not pay for these imports, and their warnings go to the log.
        from flowrl.run import Run

        run = Run(config)
        if earlier is not None:
            run.console.message(f"run.dir={folder} held an earlier run, which lies in {earlier} now")
        return _guarded(train, run)


def _guarded(train: Callable[[Run], None], run: Run) -> int:
    try:
        with stop_signals(), run:
            train(run)
            run.finish()
    except Stopped as stopped:
        _say(f"{stopped}; stopped at step {run.step} of {run.config.trainer.total_steps}; run: {run.folder}")
        return stopped.exit_code
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and not run.opened:
            raise ConfigError(str(error)) from error
        _failed(run, error)
        return EXIT_FAILURE
    return 0


@contextmanager
def _gone_if_refused(folder: Path) -> Iterator[None]:
    """Removes a folder that was made inside for a run whose configuration is then refused."""
    try:
        existed = folder.exists()
    except OSError:
        existed = True
    try:
        yield
    except ConfigError:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other runs out of the folder. The lock lies beside it, so that it stays when the folder is moved."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.dir={folder} belongs to a run that is still going; give this one another run.dir"
            ) from None
        yield
        path.unlink(missing_ok=True)


def _set_aside(folder: Path) -> Path | None:
    """Moves an earlier run out of the way, to the first free `folder.N`; None where there is none."""
    if not (folder / "metrics.jsonl").exists():
        return None
    number = next(n for n in count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def _failed(run: Run, error: Exception) -> None:
    """One message that ends with the cause; the driver's own traceback goes to its log."""
    from flowrl.report import TrainingFailed
    from flowrl.rewards.runner import RewardError
    from flowrl.single_controller import WorkerError

    log = run.folder / "logs" / "driver.log"
    known = isinstance(error, TrainingFailed | RewardError | WorkerError)
    logging.getLogger("flowrl").error("the run failed at step %d", run.step, exc_info=error)
    cause = str(error) if known else f"{type(error).__name__}: {error}; traceback in {log}"
    _say(f"failed at step {run.step}: {cause}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


@contextmanager
def driver_log(folder: Path) -> Iterator[None]:
    """Inside, log records and warnings of this process go to `driver.log` in the folder; flowrl's warnings to stderr too."""
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder / "driver.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    warnings.addFilter(lambda record: record.levelno == logging.WARNING)
    warnings.setFormatter(logging.Formatter("warning: %(message)s"))
    root, own = logging.getLogger(), logging.getLogger("flowrl")
    before = own.level
    own.setLevel(logging.INFO)
    root.addHandler(file)
    own.addHandler(warnings)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        own.removeHandler(warnings)
        own.setLevel(before)
        root.removeHandler(file)
        file.close()
