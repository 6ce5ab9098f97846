"""What the processes of the GPU tests do."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rollout_scenarios import Setup, generate, pair, prompts, rollout, wrong_regions
from scenarios import Cell, actor, call, figures, local_state, place, whole_gradients, whole_weights
from state_scenarios import Trip, round_trips

from flowrl.algorithms.distributions import log_probs_and_entropy
from flowrl.protocol import DataProto, Ragged
from flowrl.workers import vllm_private, vllm_private_tame
from flowrl.workers.attention import CausalAttention
from flowrl.workers.packed import PackedRows

TEMPERATURE = 0.7
LENGTHS = (40, 5, 33, 1)


def hugging_face(folder: Path, batch: DataProto, dtype: str) -> torch.Tensor:
    """Log-probs of all response tokens by transformers on the GPU, each row alone and unpadded."""
    from transformers import AutoModelForCausalLM

    device = place().device
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    parts = []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None].to(device)).logits[0, len(prompt) - 1 : -1].float()
        parts.append(log_probs_and_entropy(logits, response.to(device), TEMPERATURE, logits.shape[-1])[0])
    return torch.cat(parts)


def three_log_probs(folder: Path, num_ids: int, dtype: str, graphs: bool) -> dict[str, torch.Tensor]:
    """Log-probs of sampled tokens by the engine that sampled them, the trainer, and transformers in the same and in full
    precision."""
    setup = Setup(num_ids=num_ids, dtype=dtype, temperature=TEMPERATURE, cuda_graphs=graphs)
    role = rollout(folder, setup)
    asked = prompts(LENGTHS, num_ids=num_ids)
    rows = generate(role, asked)
    role.close()
    answers = [rows[row] for row in asked.row_ids]
    responses = Ragged.from_rows([torch.tensor(answer[0]) for answer in answers], torch.int64)
    batch = DataProto({"prompt_ids": asked["prompt_ids"], "response_ids": responses}, row_ids=asked.row_ids)
    trainer = actor(folder, Cell(dtype=dtype), temperature=TEMPERATURE, num_ids=num_ids)
    return {
        "engine": torch.tensor([value for answer in answers for value in answer[1]]),
        "trainer": call(trainer, trainer.log_probs, batch)["old_log_probs"].values,
        "transformers": hugging_face(folder, batch, dtype),
        "exact": hugging_face(folder, batch, "float32"),
    }


def packed_attention(lengths: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Attention of packed rows and its gradients, in bfloat16 by the kernel for packed rows, and in float32 by padded rows."""
    device = place().device
    draw = torch.Generator(device=device).manual_seed(0)
    inputs = [torch.randn(sum(lengths), 1, heads, 64, device=device, generator=draw) for heads in (6, 2, 2)]
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2, device=device) / 64)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        rows = PackedRows(lengths, device)
        rows.turn(frequencies, dtype)
        # The same values on both sides: those that bfloat16 has.
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        out = CausalAttention()(*leaves, packed_seq_params=rows)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append({"out": out.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))})
    return results


def updates(folder: Path, cells: Sequence[Cell], batch: DataProto, count: int = 1) -> list[dict[str, Any]]:
    """Per cell: metrics of the last of some updates with one set of old log-probs, gradients and weights after it."""
    results = []
    for cell in cells:
        role = actor(folder, cell)
        ready = batch.union(call(role, role.log_probs, batch))
        for _ in range(count):
            metrics = figures(call(role, role.update, ready))
        gradients = {} if cell.distributed_optimizer else whole_gradients(role._engine)
        results.append({"metrics": metrics, "gradients": gradients, "weights": whole_weights(role._engine)})
    return results


def _free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def take_turns(folder: Path, cell: Cell, setup: Setup, batch: DataProto, out: Path) -> dict[str, Any]:
    """Two steps in which trainer and engine have the GPU's memory by turns, beside a trainer that stays."""
    source, role = pair(folder, folder, cell, setup)
    other = actor(folder, cell)
    asked, found = (
        prompts(LENGTHS, num_ids=setup.num_ids),
        {"free": {}, "back": [], "rows": [], "wrong": [], "same": []},
    )
    free = found["free"]
    for number in range(2):
        free[number, "awake"] = _free()
        role.sleep()
        free[number, "engine asleep"] = _free()
        before = torch.cuda.memory_allocated()
        source.reload()
        found["back"].append(torch.cuda.memory_allocated() - before)
        for one in (source, other):
            call(one, one.update, batch.union(call(one, one.log_probs, batch)))
        free[number, "trained"] = _free()
        role.wake(what="weights")
        for parameter in role._parameters.values():
            parameter.data.fill_(float("nan"))
        moved = role.receive_weights(source)
        assert moved.metrics["reshard/fingerprint_ok"].value == 1.0
        twins = zip(local_state(source._engine), local_state(other._engine), strict=True)
        found["same"].append(all(torch.equal(left, right) for left, right in twins))
        source.offload()
        free[number, "trainer away"] = _free()
        role.wake(what="kv_cache")
        found["rows"].append(generate(role, asked))
    try:
        source.log_probs(batch)
    except ValueError as error:
        found["error"] = str(error)
    source.reload()
    source.export(str(out / "turns"))
    found["wrong"] = wrong_regions(role, out / "turns")
    role.close()
    return found


def move_metrics(folder: Path, target: Path, dtype: str, num_ids: int) -> tuple[list[str], dict[str, float]]:
    """Wrong regions and metrics of a move into an engine that was asleep."""
    setup = Setup(num_ids=num_ids, dtype=dtype)
    source, role = pair(target, folder, Cell(dtype=dtype), setup)
    role.sleep()
    role.wake(what="weights")
    moved = role.receive_weights(source)
    role.wake(what="kv_cache")
    generate(role, prompts(LENGTHS, num_ids=num_ids))
    wrong = wrong_regions(role, target)
    role.close()
    return wrong, {name: metric.value for name, metric in moved.metrics.items()}


def two_engines(folder: Path) -> list[Any]:
    """Responses of an engine and of a second one in the same process after it."""
    answers = []
    for setup in (Setup(), replace(Setup(), top_k=5)):
        role = rollout(folder, setup)
        answers.append(generate(role, prompts(LENGTHS)))
        role.close()
    return answers


TAKES = """
import sys, torch
while line := sys.stdin.readline():
    held = torch.empty(int(line), dtype=torch.uint8, device="cuda")
    print("taken", flush=True)
    sys.stdin.readline()
    del held
    torch.cuda.empty_cache()
    print("left", flush=True)
"""


def sleeps_beside_another(folder: Path) -> tuple[list[Any], int]:
    """Responses before and after a sleep in which another process takes more memory of the GPU than the engine gives back,
    and how often vLLM took that for its own."""
    source, role = pair(folder, folder, Cell(), Setup())
    asked, noted = prompts(LENGTHS), Noted()
    logger = logging.getLogger(vllm_private_tame.__name__)
    logger.setLevel(logging.INFO)
    logger.addHandler(noted)
    role.receive_weights(source)
    answers = [generate(role, asked)]
    allocator: Any = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    more = sum(vllm_private._pool_bytes().values()) + (1 << 30)
    sleep = allocator.sleep
    with subprocess.Popen(
        [sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:

        def told(line: str) -> str:
            assert other.stdin is not None and other.stdout is not None
            other.stdin.write(line + "\n")
            other.stdin.flush()
            return other.stdout.readline().strip()

        def sleeps(*args: Any, **kwargs: Any) -> None:
            sleep(*args, **kwargs)
            assert told(str(more)) == "taken"

        allocator.sleep = sleeps
        role.sleep()
        allocator.sleep = sleep
        assert told("leave it") == "left"
    role.wake(what="weights")
    role.receive_weights(source)
    role.wake(what="kv_cache")
    answers.append(generate(role, asked))
    role.close()
    return [{row: answer[:3] for row, answer in rows.items()} for rows in answers], len(noted.records)


class Noted(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def states_through_files(
    folder: Path, trips: Sequence[Trip], batch: DataProto, target: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As `round_trips`, with old log-probs of the model as it is."""
    role = actor(folder, Cell())
    return round_trips(folder, trips, batch.union(call(role, role.log_probs, batch)), target)


def saved_between_turns(folder: Path, cells: Sequence[Cell], batch: DataProto, target: Path) -> list[bool]:
    """Per cell: whether a role that was away and came back is saved as it was, though it goes away again while its files
    are written, and whether one that reads them has that state, also after it was away itself."""
    found = []
    for number, cell in enumerate(cells):
        first, second = actor(folder, cell), actor(folder, cell)
        call(first, first.update, batch.union(call(first, first.log_probs, batch)))
        expected = local_state(first._engine)
        first.offload()
        first.reload()
        first.save_state(str(target / str(number)))
        first.offload()
        first.finish_save()
        first.reload()
        second.load_state(str(target / str(number)))
        second.offload()
        second.reload()
        for role in (first, second):
            pairs = zip(local_state(role._engine), expected, strict=True)
            found.append(all(torch.equal(one, other) for one, other in pairs))
    return found


def by_runner(folder: Path, batch: DataProto, second: bool) -> tuple[list[Any], bool]:
    """Responses by vLLM's second runner, which is that of dense models, or by its first: as asked, in another order, each
    alone; and whether `sampling_gpu` drew them. In a process of its own: vLLM reads its variables once."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(second))
    from flowrl.workers import sampling_gpu

    drawn: list[int] = []
    plain = sampling_gpu.draw
    vars(sampling_gpu)["draw"] = lambda *args: (drawn.append(1), plain(*args))[1]
    role = rollout(folder, Setup())
    alone: dict[Any, Any] = {}
    for number in range(len(batch)):
        alone |= generate(role, batch.rows([number]))
    answers = [generate(role, batch), generate(role, batch.reorder(list(reversed(range(len(batch)))))), alone]
    role.close()
    return answers, bool(drawn)
