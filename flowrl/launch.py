"""From a command line to an exit code: what happens around a driver."""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flowrl.checkpoints.start import FOLDER, StartPoint, find_start
from flowrl.checkpoints.store import CheckpointStore
from flowrl.config.cli import run_main
from flowrl.config.command import resume_command
from flowrl.config.compose import Recipe
from flowrl.config.paths import run_lock, user_path
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError
from flowrl.signals import Stopped, stop_signals

if TYPE_CHECKING:
    from flowrl.recovery import Attempts
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
                run_main(partial(_train, train), argv, recipe=recipe, outlook=_outlook)
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


def _outlook(config: Config) -> str:
    """What `dry_run` says of checkpoints. Error: `ConfigError` where the run would be refused for them."""
    return _outlook_of(find_start(config), config)


def _outlook_of(start: StartPoint, config: Config) -> str:
    return "\n".join([*(f"warning: {warning}" for warning in start.warnings), start.words(config.trainer.total_steps)])


def _train(train: Callable[[Run], None], config: Config) -> int:
    # The folder itself is locked and set aside, and not a link to it.
    folder = user_path(config.run.dir).resolve()
    with ExitStack() as stack:
        stack.enter_context(_gone_if_refused(folder))
        try:
            stack.enter_context(_alone(folder))
            start = find_start(config)
            if start.step == config.trainer.total_steps:
                sys.stdout.write(_outlook_of(start, config) + "\n")
                return 0
            earlier = None if start.in_place else _set_aside(folder)
            stack.enter_context(driver_log(folder / "logs"))
        except OSError as error:
            raise ConfigError(
                f"run.dir={folder} cannot be used: {error.strerror}; give a folder that can be written"
            ) from None
        # Late, so that a configuration error does not pay for these imports, and their warnings go to the log.
        gc.disable()  # It would cost a quarter of the time and find nothing.
        from flowrl.recovery import Attempts

        gc.enable()
        attempts = Attempts(config, start)
        if earlier is not None:
            attempts.run.console.message(f"run.dir={folder} held an earlier run, which lies in {earlier} now")
        return _guarded(train, attempts)


def _guarded(train: Callable[[Run], None], attempts: Attempts) -> int:
    try:
        with stop_signals(attempts.stop), attempts:
            attempts.carry_out(train)
    except Stopped as stopped:
        _say(_how_to_go_on(attempts.run, stopped))
        return stopped.exit_code
    except Exception as error:
        if isinstance(error, ValueError) and not attempts.restarted and not attempts.run.opened:
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
        _failed(attempts.run, error)
        return EXIT_FAILURE
    return 0


def _how_to_go_on(run: Run, stopped: Stopped) -> str:
    """Where the run stopped, and the command that goes on from its newest checkpoint."""
    trainer = run.config.trainer
    where = f"{stopped}; stopped at step {run.step} of {trainer.total_steps}"
    if stopped.late:
        where += f", which did not end within trainer.grace_seconds={trainer.grace_seconds:g}"
    steps = CheckpointStore(run.folder / FOLDER, trainer.keep_checkpoints).steps()
    if not steps:
        return f"{where}; there is no checkpoint to go on from (trainer.save_every={trainer.save_every}); run: {run.folder}"
    return f"{where}; resumable from step {steps[-1]}: {resume_command(sys.orig_argv, run.folder)}"


@contextmanager
def _gone_if_refused(folder: Path) -> Iterator[None]:
    """Removes a folder that was made inside for a run whose configuration is then refused, and parents left empty."""
    try:
        existed = folder.exists()
        new = [parent for parent in folder.parents if not parent.exists()]
    except OSError:
        existed, new = True, []
    try:
        yield
    except ConfigError:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                for parent in new:
                    parent.rmdir()
        raise


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other runs out of the folder. The lock lies beside it, so that it stays when the folder is moved."""
    path = run_lock(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(path.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"run.dir={folder} belongs to a run that is still going; give this one another run.dir"
                ) from None
            # Its holder may have removed it between the two; then this lock keeps nobody out.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _set_aside(folder: Path) -> Path | None:
    """Moves an earlier run out of the way, to the first free `folder.N`; None where there is none."""
    if not any((folder / name).exists() for name in ("metrics.jsonl", FOLDER)):
        return None
    number = next(n for n in count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def _failed(run: Run, error: Exception) -> None:
    """One message that ends with the cause; the driver's own traceback goes to its log."""
    from flowrl.checkpoints.store import SaveError
    from flowrl.report import TrainingFailed
    from flowrl.rewards.runner import RewardError
    from flowrl.single_controller import ClusterError, WorkerError

    log = run.folder / "logs" / "driver.log"
    known = isinstance(error, TrainingFailed | RewardError | SaveError | WorkerError | ClusterError)
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
