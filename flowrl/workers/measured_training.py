"""A trained role's speed on one device, and that of its parts: what the benchmark's process does.

FLOPs of an update: 6 per parameter and token (2 forward, 4 backward), the output head included, and causal attention:
6 * n^2 * heads * d per layer and row of n tokens. Recomputed work (chunks of logits, activations) is not counted.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import ActorConfig, NoKL, OptimConfig, TrainLayout
from flowrl.protocol import DataProto, Ragged
from flowrl.resharding.measure.device import median_seconds, product_tflops
from flowrl.single_controller.worker import Place, construct
from flowrl.workers import vocabulary
from flowrl.workers.actor import ActorWorker
from flowrl.workers.attention import attention
from flowrl.workers.model import DTYPES
from flowrl.workers.packed import PackedRows

WARM_UPS = 2
SHORTEST = 8
"""Rows of many lengths have from an eighth of the longest up."""
UNCHUNKED = 1 << 62


@dataclass(frozen=True)
class TrainingJob:
    """What to measure: mini-batches of `microbatches` times `rows` rows of `tokens` tokens."""

    folder: str
    shape: ModelShape
    dtype: str
    device: str
    tokens: int
    rows: int
    microbatches: int
    repeat: int
    recompute: bool
    seed: int


@dataclass(frozen=True)
class Case:
    """`mixed`: rows of many lengths, as many tokens in all. `chunk_elements`: logits that exist at once."""

    name: str
    mixed: bool
    chunk_elements: int


CASES = (
    Case("one length", mixed=False, chunk_elements=vocabulary.MAX_CHUNK_ELEMENTS),
    Case("many lengths", mixed=True, chunk_elements=vocabulary.MAX_CHUNK_ELEMENTS),
    Case("one length, all logits at once", mixed=False, chunk_elements=UNCHUNKED),
)


def active_parameters(shape: ModelShape) -> int:
    """Those that a token meets in matrix products: without an embedding that is no head, and without idle experts."""
    unused = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    if shape.num_experts:
        idle = shape.num_experts - shape.experts_per_token
        unused += shape.num_layers * shape.expert_parameters * idle // shape.num_experts
    return shape.num_parameters - unused


def forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Of one forward pass over rows of these lengths; an update takes three times as many."""
    attention_flops = 2 * shape.num_layers * shape.heads * shape.head_dim * sum(n * n for n in lengths)
    return 2 * active_parameters(shape) * sum(lengths) + attention_flops


def row_lengths(job: TrainingJob, case: Case) -> list[int]:
    """Tokens of each row of a mini-batch, in all `microbatches * rows * tokens`."""
    if not case.mixed:
        return [job.tokens] * (job.rows * job.microbatches)
    draw = random.Random(job.seed)
    left, lengths = job.tokens * job.rows * job.microbatches, []
    while left:
        lengths.append(min(left, max(2, draw.randint(job.tokens // SHORTEST, job.tokens))))
        left -= lengths[-1]
    if lengths[-1] < 2:
        # A row is a prompt and a response.
        lengths[-2:] = [sum(lengths[-2:])]
    return lengths


def make_rows(lengths: Sequence[int], num_ids: int, seed: int) -> DataProto:
    """Rows of one prompt token and random responses, with random advantages."""
    draw = torch.Generator().manual_seed(seed)
    responses = [torch.randint(num_ids, (n - 1,), generator=draw) for n in lengths]
    return DataProto(
        {
            "prompt_ids": Ragged.from_rows([torch.randint(num_ids, (1,), generator=draw) for _ in lengths]),
            "response_ids": Ragged.from_rows(responses),
            "advantages": Ragged.from_rows([torch.randn(n - 1, generator=draw) for n in lengths]),
        }
    )


def run(job: TrainingJob) -> dict[str, Any]:
    """Rows of the table, one per case; parts of an update, each alone; the rate of a matrix product."""
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
    role = _actor(job, device)
    rate = product_tflops(device, DTYPES[job.dtype])
    rows = [_measure(job, case, role, device, rate) for case in CASES]
    return {"product_tflops": rate, "rows": rows, "parts": list(_parts(job, device))}


def _actor(job: TrainingJob, device: torch.device) -> ActorWorker:
    config = ActorConfig(
        layout=TrainLayout(tp=1, pp=1, vpp=1, first_stage_layers=None, cp=1, ep=1, etp=1),
        dtype=job.dtype,  # type: ignore[arg-type]
        tokens_per_microbatch=job.tokens * job.rows,
        recompute=job.recompute,
        # The weights stay near where they are, so that every repetition does the same.
        optim=OptimConfig(lr=1e-9),
    )
    return construct(
        ActorWorker,
        Place(device=device),
        job.folder,
        job.shape,
        config,
        kl=NoKL(),
        temperature=1.0,
        num_tokenizer_ids=job.shape.vocab_size,
        total_optimizer_steps=1,
        seed=job.seed,
    )


@contextmanager
def _logits_at_once(elements: int) -> Iterator[None]:
    kept = vocabulary.MAX_CHUNK_ELEMENTS
    vars(vocabulary)["MAX_CHUNK_ELEMENTS"] = elements
    try:
        yield
    finally:
        vars(vocabulary)["MAX_CHUNK_ELEMENTS"] = kept


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _TimedSteps:
    """Seconds of the optimizer's part of each update of a role, while it is entered."""

    def __init__(self, role: ActorWorker, device: torch.device) -> None:
        optimizer = role._engine._optimizer
        assert optimizer is not None
        self._optimizer, self._step, self._device = optimizer, optimizer.step, device
        self.seconds: list[float] = []

    def __enter__(self) -> _TimedSteps:
        def step() -> Any:
            start = _clock(self._device)
            result = self._step()
            self.seconds.append(_clock(self._device) - start)
            return result

        vars(self._optimizer)["step"] = step
        return self

    def __exit__(self, *_: Any) -> None:
        del vars(self._optimizer)["step"]


def _repeated(work: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    seconds = []
    for number in range(WARM_UPS + count):
        start = _clock(device)
        work()
        if number >= WARM_UPS:
            seconds.append(_clock(device) - start)
    return seconds


def _measure(job: TrainingJob, case: Case, role: ActorWorker, device: torch.device, rate: float) -> dict[str, Any]:
    lengths = row_lengths(job, case)
    batch = make_rows(lengths, job.shape.vocab_size, job.seed)
    batch = batch.union(role.log_probs(batch))
    with _logits_at_once(case.chunk_elements), _TimedSteps(role, device) as steps:
        scoring = _repeated(lambda: role.log_probs(batch), job.repeat, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        updates = _repeated(lambda: role.update(batch), job.repeat, device)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    total, optimizer = statistics.median(updates), statistics.median(steps.seconds[WARM_UPS:])
    passes = statistics.median(a - b for a, b in zip(updates, steps.seconds[WARM_UPS:], strict=True))
    tokens, flops = sum(lengths), forward_flops(job.shape, lengths)
    forward = statistics.median(scoring)
    return {
        "case": case.name,
        "rows": len(lengths),
        "tokens": tokens,
        "longest": max(lengths),
        "update_seconds": total,
        "optimizer_seconds": optimizer,
        "forward_backward_seconds": passes,
        "forward_backward_tokens_per_second": tokens / passes,
        "forward_backward_tflops": 3 * flops / passes / 1e12,
        "forward_backward_mfu": 3 * flops / passes / 1e12 / rate,
        "update_tokens_per_second": tokens / total,
        "update_mfu": 3 * flops / total / 1e12 / rate,
        "log_probs_seconds": forward,
        "log_probs_tokens_per_second": tokens / forward,
        "log_probs_mfu": flops / forward / 1e12 / rate,
        "idle_bytes": before,
        "peak_bytes": peak,
        "rounds": {"update_seconds": updates, "optimizer_seconds": steps.seconds[WARM_UPS:], "log_probs": scoring},
    }


def _parts(job: TrainingJob, device: torch.device) -> Iterator[dict[str, Any]]:
    """Seconds, forward and backward, of one micro-batch: attention of all layers in every form that this device has, and
    the output head. The optimizer's are with the cases."""
    shape, dtype = job.shape, DTYPES[job.dtype]
    total = job.rows * job.tokens
    inputs = [torch.randn(total, shape.heads, shape.head_dim, device=device, dtype=dtype) for _ in range(3)]
    rows = PackedRows([job.tokens] * job.rows, device)

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, rows)

    def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(job.rows, job.tokens, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    flops = 3 * 2 * shape.num_layers * shape.heads * shape.head_dim * job.rows * job.tokens**2
    yield _part("attention, as trained", own, inputs, shape.num_layers, flops, device)
    gpu_only = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for backend in gpu_only if device.type == "cuda" else ():
        name = f"attention, padded, {backend.name.lower()}"
        try:
            with sdpa_kernel(backend):
                yield _part(name, padded, inputs, shape.num_layers, flops, device)
        except RuntimeError as error:
            yield {"part": name, "refused": str(error).splitlines()[0]}
    targets = torch.randint(shape.vocab_size, (total,), device=device)

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        valid = shape.vocab_size
        return vocabulary.token_outputs(hidden, weight, targets, first_id=0, num_valid=valid, temperature=1.0)[0]

    sizes = ((total, shape.hidden_size), (shape.vocab_size, shape.hidden_size))
    inputs = [torch.randn(size, device=device, dtype=dtype) * 0.02 for size in sizes]
    yield _part("output head", head, inputs, 1, 6 * total * shape.vocab_size * shape.hidden_size, device)


def _part(
    name: str,
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    times: int,
    flops: float,
    device: torch.device,
) -> dict[str, Any]:
    """`times` runs of a function, forward and backward; `flops` are those of all of them."""
    leaves = [x.requires_grad_() for x in inputs]
    weight = torch.ones_like(function(*leaves))
    seconds = times * median_seconds(lambda: torch.autograd.grad(function(*leaves), leaves, weight), device)
    return {"part": name, "microbatch_seconds": seconds, "tflops": flops / seconds / 1e12}
