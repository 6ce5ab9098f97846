"""The rollout role against vLLM alone, each in a process of its own, by turns.

Both generate from the same prompts with the same settings: cache, batch limit, graphs, seeds of requests, log-probs of
sampled tokens, temperature 1, and every response as long as allowed. The role's seconds include what it makes of the
output. A third line tells what a seed per request and log-probs cost: vLLM without them.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.measure.processes import end_with_the_parent
from flowrl.workers.environment import process_environment

PLAIN, OWN, BARE = "vllm", "flowrl", "vllm, no seeds, no log-probs"
START_SECONDS, ROUND_SECONDS = 900.0, 900.0
MOST_CACHE_BYTES = 1 << 50
"""The cache has what all requests need, however much that is."""


class EngineFailed(RuntimeError):
    """A process raised, died, or said nothing for too long."""


@dataclass(frozen=True)
class GenerationJob:
    """`requests` prompts of `prompt` tokens, each answered with `tokens` tokens. `memory_fraction` is each engine's."""

    folder: str
    shape: ModelShape
    dtype: str
    device: str
    requests: int
    prompt: int
    tokens: int
    repeat: int
    cuda_graphs: bool
    memory_fraction: float
    seed: int


def run(job: GenerationJob) -> list[dict[str, Any]]:
    """One row per engine: median tokens per second, and every round. One round goes first and does not count.

    Error: `EngineFailed` with the traceback of a process that failed.
    """
    seconds: dict[str, list[float]] = {OWN: [], PLAIN: [], BARE: []}
    with _process(job, _serve_role) as own, _process(job, _serve_plain) as plain:
        # One engine after the other looks how much memory is free; the second imports its libraries meanwhile.
        plain.ask(("settings", own.ask(("spec", 0), START_SECONDS)), START_SECONDS)
        turns = [(OWN, own, OWN), (PLAIN, plain, PLAIN), (BARE, plain, BARE)]
        for number in range(job.repeat + 1):
            # Every other round in the reverse order: whatever drifts meets both.
            for name, process, request in turns if number % 2 else turns[::-1]:
                taken = process.ask((request, number), ROUND_SECONDS)
                if number:
                    seconds[name].append(taken)
    return [_row(job, name, taken) for name, taken in seconds.items()]


def _row(job: GenerationJob, name: str, seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return {
        "engine": name,
        "requests": job.requests,
        "prompt_tokens": job.prompt,
        "response_tokens": job.tokens,
        "seconds": median,
        "tokens_per_second": job.requests * job.tokens / median,
        "rounds": seconds,
    }


def make_prompts(job: GenerationJob, number: int) -> list[list[int]]:
    """Those of a round, the same for all engines; no two rounds share any, so no cache of prompts helps."""
    import torch

    draw = torch.Generator().manual_seed(job.seed * 1_000_003 + number)
    ids: list[list[int]] = torch.randint(job.shape.vocab_size, (job.requests, job.prompt), generator=draw).tolist()
    return ids


@dataclass
class _Process:
    """A child that answers requests, one at a time."""

    pipe: Connection
    name: str
    alive: Callable[[], bool] = field(repr=False)

    def ask(self, request: tuple[str, Any], limit_seconds: float) -> Any:
        self.pipe.send(request)
        if not self.pipe.poll(limit_seconds):
            raise EngineFailed(f"{self.name} said nothing for {limit_seconds:.0f} s")
        try:
            good, value = self.pipe.recv()
        except EOFError:
            raise EngineFailed(f"the process of {self.name} died") from None
        if not good:
            raise EngineFailed(f"{self.name} failed:\n{value}")
        return value


@contextmanager
def _process(job: GenerationJob, serve: Callable[[Connection, GenerationJob], None]) -> Iterator[_Process]:
    """A fresh process that has imported nothing yet; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, serve, job), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Process(ours, serve.__name__.removeprefix("_serve_"), process.is_alive)
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()


def _main(pipe: Connection, serve: Callable[[Connection, GenerationJob], None], job: GenerationJob) -> None:
    # It looks at the pipe between generations only.
    end_with_the_parent()
    os.environ.update(process_environment(job.device, 1))
    try:
        serve(pipe, job)
    except EOFError:
        # The parent has closed its end: the work is done.
        pass
    except BaseException:  # noqa: B036 - reported by the parent, whatever it is
        pipe.send((False, traceback.format_exc()))
        raise


def _answer(pipe: Connection, answers: Callable[[str, int], Any]) -> None:
    while True:
        pipe.send((True, answers(*pipe.recv())))


def _serve_role(pipe: Connection, job: GenerationJob) -> None:
    import time

    import torch
    import torch.distributed as dist

    from flowrl.config.schema import RolloutConfig, RolloutLayout
    from flowrl.protocol import DataProto, Ragged
    from flowrl.single_controller.worker import Place, construct
    from flowrl.workers.rollout import RolloutWorker

    device = torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")
    config = RolloutConfig(
        samples_per_prompt=1,
        max_response_tokens=job.tokens,
        layout=RolloutLayout(tp=1, pp=1),
        dtype=job.dtype,  # type: ignore[arg-type]
        max_batch_requests=job.requests,
        kv_cache_bytes=MOST_CACHE_BYTES,
        cuda_graphs=job.cuda_graphs,
        gpu_memory_fraction=job.memory_fraction,
    )
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if job.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        role = construct(
            RolloutWorker,
            Place(device=device),
            job.folder,
            job.shape,
            config,
            num_tokenizer_ids=job.shape.vocab_size,
            stop_token_ids=(),
            max_prompt_tokens=job.prompt,
            seed=job.seed,
        )

        def answers(request: str, number: int) -> Any:
            if request == "spec":
                return role._engine.spec
            prompts = Ragged.from_rows([torch.tensor(ids) for ids in make_prompts(job, number)], torch.int64)
            batch = DataProto({"prompt_ids": prompts, "seeds": torch.arange(job.requests)})
            start = time.perf_counter()
            made = role.generate(batch)
            taken = time.perf_counter() - start
            _check(job, made.lengths("response_ids").tolist())
            return taken

        try:
            _answer(pipe, answers)
        finally:
            role.close()
            dist.destroy_process_group()


def _serve_plain(pipe: Connection, job: GenerationJob) -> None:
    import time

    from vllm import LLM, SamplingParams

    from flowrl.workers.generation import sampling_params
    from flowrl.workers.vllm_private import plain_arguments

    _, spec = pipe.recv()
    engine = LLM(**plain_arguments(spec))
    pipe.send((True, None))
    same = [
        sampling_params(temperature=1.0, top_p=1.0, top_k=0, max_tokens=job.tokens, stop_token_ids=(), seed=seed)
        for seed in range(job.requests)
    ]
    bare = SamplingParams(temperature=1.0, max_tokens=job.tokens, ignore_eos=True, detokenize=False)

    def answers(request: str, number: int) -> Any:
        # No round of the same prompts twice: those of the third line are its own.
        ids = make_prompts(job, number if request == PLAIN else -1 - number)
        prompts = [{"prompt_token_ids": prompt} for prompt in ids]
        start = time.perf_counter()
        outputs = engine.generate(prompts, same if request == PLAIN else bare, use_tqdm=False)
        taken = time.perf_counter() - start
        _check(job, [len(output.outputs[0].token_ids) for output in outputs])
        return taken

    _answer(pipe, answers)


def _check(job: GenerationJob, lengths: Sequence[int]) -> None:
    assert list(lengths) == [job.tokens] * job.requests, "every response is as long as allowed"
