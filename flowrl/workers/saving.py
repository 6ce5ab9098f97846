"""One save of a role: a copy of its state now, files by a thread meanwhile, and an end in which all ranks take part."""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from flowrl.checkpoints.files import Files
from flowrl.checkpoints.manifest import FileDigest, digest_file
from flowrl.workers import cuda_on_cpu
from flowrl.workers.state import RoleState
from flowrl.workers.stored_files import COMMON, METADATA

logger = logging.getLogger(__name__)

COMMON_FILES = (COMMON, METADATA, "metadata.json")
PROBE_BYTES = 1 << 16


class Save:
    """Writes a state into a folder. Made, and finished, by all ranks at the same time; between the two the role may be
    used and may change."""

    def __init__(self, state: RoleState, folder: str) -> None:
        """Returns when this rank's part is copied to the host and the thread that writes it is started.

        Errors, on all ranks: `ValueError` where the state is not finite, before anything is written; `OSError` where
        the folder cannot be made or written to.
        """
        self._folder = Path(folder)
        self._files = Files()
        self._problem: OSError | None = None
        self._digests: tuple[FileDigest, ...] = ()
        self._finished = False
        state.check_finite()
        self._num_bytes = state.num_bytes()
        if dist.get_rank() == 0:
            try:
                self._probe()
            except OSError as error:
                self._problem = error
        self._agree()
        self._writing = state.plan(folder)
        self._thread = Thread(target=self._write, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _probe(self) -> None:
        """Make the folder and write a little into it, as the rank whose failure the others could not see later."""
        self._files.make_folder(self._folder)
        probe = self._folder / ".probe"
        probe.write_bytes(bytes(PROBE_BYTES))
        self._files.remove(probe)

    def _write(self) -> None:
        try:
            self._writing.write()
            self._digests = tuple(digest_file(self._folder, name) for name in self._writing.files)
        except OSError as error:
            self._problem = error
        except RuntimeError as error:
            self._problem = _os_error(error)

    def finish(self) -> tuple[FileDigest, ...]:
        """Wait until the folder is complete and on the disk. Collective; a second call answers the same.

        Answer: the files that this rank wrote, on rank 0 also the common ones; paths are relative to the folder.
        Error, on all ranks: `OSError` of the first rank that could not write, with folder, bytes needed and bytes free.
        """
        if not self._finished:
            self.wait()
            self._agree()
            with cuda_on_cpu.active():
                self._writing.conclude()
            # With it go the copies of the state.
            del self._writing
            if dist.get_rank() == 0:
                for name in COMMON_FILES:
                    self._files.sync(self._folder / name)
                self._digests += tuple(digest_file(self._folder, name) for name in COMMON_FILES)
            self._files.sync(self._folder)
            self._finished = True
        return self._digests

    def wait(self) -> None:
        """Until the thread is done."""
        self._thread.join()

    def _agree(self) -> None:
        """Raise the first rank's problem on all of them."""
        mine = None
        if self._problem is not None:
            mine = self._problem.errno or errno.EIO, self._problem.strerror or str(self._problem)
        problems: list[tuple[int, str] | None] = [None] * dist.get_world_size()
        needed: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(problems, mine)
        dist.all_gather_object(needed, self._num_bytes)
        rank = next((rank for rank, problem in enumerate(problems) if problem), None)
        if rank is not None:
            number, text = problems[rank] or (errno.EIO, "")
            raise OSError(
                number,
                f"rank {rank} cannot write its part of the checkpoint: {text}; all ranks together need "
                f"{sum(needed)} bytes, {_free(self._folder)} are free",
                str(self._folder),
            )


def _os_error(error: BaseException) -> OSError:
    """What the disk said: torch's archives raise an error of their own while they handle it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__context__
    return OSError(errno.EIO, str(error))


def _free(folder: Path) -> int:
    """Bytes that are free where the folder is or would be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free
