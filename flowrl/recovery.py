"""What happens after a worker died: the run is begun again from its newest checkpoint, on what still stands."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import TracebackType

from flowrl.checkpoints.start import StartPoint, find_restart
from flowrl.config.schema import Config
from flowrl.restarts import Failure, Restarts
from flowrl.run import Run
from flowrl.session import Session
from flowrl.single_controller import WorkerError

logger = logging.getLogger("flowrl")


class Attempts:
    """A run, begun again by the same driver as often as `trainer.max_restarts` allows when a worker dies or raises.

    A context manager around all attempts; `run` is the one of now. An error of the driver, of the reward function or of
    Ray itself, and a signal, end the run as ever.
    """

    def __init__(self, config: Config, start: StartPoint) -> None:
        self._config, self._first = config, start
        self._restarts = Restarts(config.trainer.max_restarts)
        self._session = Session()
        self.stop = self._session.stop
        self.run = Run(config, start, self._session)

    @property
    def restarted(self) -> bool:
        """Whether this is not the first attempt."""
        return self._restarts.number > 0

    def carry_out(self, train: Callable[[Run], None]) -> None:
        """Runs the driver to the end of the run. Errors: those of the last attempt."""
        while True:
            try:
                with self.run:
                    train(self.run)
                    self.run.finish()
                return
            except WorkerError as error:
                # A signal that was to let this step end: now it cannot.
                self.stop.stop()
                reason = self._restarts.refusal(Failure.of(error, self.run.step))
                if reason is not None:
                    if self.restarted and self._config.trainer.max_restarts:
                        logger.warning("not begun again: %s", reason)
                    raise
                logger.error("a worker died at step %d", self.run.step, exc_info=error)
                died = f"worker died ({error.role} rank {error.rank}, step {self.run.step}: {error.cause})"
            self._begin_again(died)

    def _begin_again(self, died: str) -> None:
        # What hangs on the driver of before, its phases of the cluster for one, ends now and not during the next.
        gc.collect()
        start = find_restart(self._config, self._first)
        where = f"from {start.checkpoint.folder.name}" if start.checkpoint else "from the beginning"
        kept = self._session.recover()
        self.run = Run(self._config, start, self._session)
        most = self._config.trainer.max_restarts
        standing = f"; processes of pool {', '.join(kept)} go on" if kept else ""
        self.run.console.warn(f"{died}: restart {self._restarts.number} of {most} {where}{standing}")

    def __enter__(self) -> Attempts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)
