"""What roles around an engine have in common, and what those that train add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.checkpoints.manifest import FileDigest
from flowrl.single_controller.dispatch import Broadcast, MeshPosition, broadcast
from flowrl.single_controller.worker import Worker, register
from flowrl.workers.export import export_folder

if TYPE_CHECKING:
    from flowrl.workers.engine import Engine
    from flowrl.workers.saving import Save

BUCKET_BYTES = 256 << 20


class EngineWorker(Worker):
    """A role around one engine. Mesh "train": one slice per replica of the model."""

    libraries = ("flowrl.workers.engine", "flowrl.workers.saving")  # and Megatron-core with them
    _engine: Engine

    def meshes(self) -> dict[str, MeshPosition]:
        return {**super().meshes(), "train": self._engine.position}

    @register(dispatch=broadcast)
    def offload(self) -> None:
        """Give this role's memory on a GPU to others until `reload`; without `offload` in its section nothing moves."""
        self._engine.offload()

    @register(dispatch=broadcast)
    def reload(self) -> None:
        """Take the memory back before the role is used again."""
        self._engine.reload()


class TrainedWorker(EngineWorker):
    """A role that learns: its state can be written, read and exported. All methods are collective."""

    _save: Save | None = None

    @register(dispatch=broadcast)
    def export(self, folder: str) -> None:
        """Write a Hugging Face folder, complete or absent; a critic's value head goes into a file of its own."""
        export_folder(self._engine, folder, BUCKET_BYTES)

    @register(dispatch=broadcast)
    def save_state(self, folder: str) -> None:
        """Copy weights, moments, schedule and generators as they are now, and write them into `folder` while the role
        goes on. An earlier save that nobody finished is waited for and given up.

        Errors: `ValueError` naming the first tensor that is not finite, before anything is written, and where the role
        is offloaded; `OSError` where the folder cannot be written to.
        """
        from flowrl.workers.saving import Save

        if self._save is not None:
            self._save.wait()
            self._save = None
        self._save = Save(self._engine.state(), folder)

    @register(dispatch=Broadcast("all"))
    def finish_save(self) -> tuple[FileDigest, ...]:
        """Wait until the files of `save_state` are on the disk: those of this rank, relative to its folder. Every file
        is named by one rank. None where nothing was saved; the same again where it was finished.

        Error: `OSError` with folder, bytes needed and bytes free.
        """
        return () if self._save is None else self._save.finish()

    @register(dispatch=broadcast)
    def load_state(self, folder: str) -> str:
        """Take over what `save_state` wrote, in whatever layout. A line says what was restored.

        Errors: `ValueError` naming what is missing, unexpected or of another shape or type, or what is no file of
        flowrl's; the role is then as it was. Where a file turns out to be damaged while it is read, it is not.
        """
        return self._engine.state().load(folder)

    def close(self) -> None:
        if self._save is not None:
            self._save.wait()
        super().close()
