"""The meaning on a CPU of the CUDA calls that Megatron-core makes without asking. The one place for them.

Nothing here has an effect where CUDA exists. Read against Megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_installed = False


class _Stream:
    """A stream or an event of a device that does everything in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _Generators(Sequence[torch.Generator]):
    """The generators of all CUDA devices: the CPU's, whatever the index."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


class _OnCpu(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU; CPU tensors answer to CUDA type names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device") or ""):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        # Optimizer and clipping compare `tensor.type()` with names such as torch.cuda.FloatTensor.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def install() -> None:
    """Give the process-wide CUDA functions a CPU meaning, once. Call it before Megatron-core is imported."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    cpu = torch.device("cpu")
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "set_device": lambda _device: None,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda _stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Stream,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "default_generators": _Generators(),
        "get_device_capability": lambda *_: (0, 0),
        "_lazy_call": lambda call, **__: call(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, replacements[name])


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Within this context, in this thread, tensor calls for CUDA land on the CPU.

    Megatron-core needs it whenever it runs; scoped, so that another library in the process never sees it.
    """
    if torch.cuda.is_available():
        yield
    else:
        with _OnCpu():
            yield
