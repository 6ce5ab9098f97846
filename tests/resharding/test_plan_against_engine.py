"""What planning believes an engine keeps, against what vLLM's own loaders keep."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.model_shape import read_model_shape
from flowrl.resharding.needs import rank_needs, stage_layers
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.regions import disjoint

COMMON: dict[str, Any] = dict(
    num_hidden_layers=5, hidden_size=64, intermediate_size=192, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
    vocab_size=131, max_position_embeddings=128, rms_norm_eps=1e-5, torch_dtype="float32", hidden_act="silu",
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[], decoder_sparse_step=1)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(architectures=["LlamaForCausalLM"], model_type="llama"),
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
    "tied": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True),
    "qwen3-moe": dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **MOE),
    "mixtral": dict(
        architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=6, num_experts_per_tok=2, sliding_window=None
    ),
}  # fmt: skip
LAYOUTS = [ParallelSizes(tp=tp, pp=pp) for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 3))]
EXPERT_LAYOUTS = [ParallelSizes(tp=2, ep=2), ParallelSizes(tp=4, ep=4)]


def make_folder(root: Path, name: str) -> Path:
    """A folder with a configuration and no weights."""
    folder = root / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
    return folder


def test_stages_of_an_engine_have_the_layers_that_vllm_gives_them() -> None:
    """PAR-07."""
    pytest.importorskip("vllm")
    from vllm.distributed.utils import get_pp_indices

    for layers, pp in product(range(1, 62), range(1, 9)):
        if pp <= layers:
            stages = [range(*get_pp_indices(layers, stage, pp)) for stage in range(pp)]
            assert stages == stage_layers(layers, pp), (layers, pp)


@pytest.mark.parametrize(
    "names", [("llama", "qwen3-moe"), pytest.param(("qwen2", "qwen3", "tied", "mixtral"), marks=pytest.mark.slow)]
)
def test_planned_needs_are_what_loaders_keep_on_every_rank(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Families over sizes up to 4 ranks: shared key/value heads, a prime vocabulary, uneven stages, spread experts."""
    pytest.importorskip("vllm")
    requests, expected = [], []
    for folder in (make_folder(tmp_path, name) for name in names):
        shape = read_model_shape(folder)
        for sizes in LAYOUTS + (EXPERT_LAYOUTS if shape.num_experts else []):
            for tp_rank, stage in product(range(sizes.tp), range(sizes.pp)):
                place = dict(tp=sizes.tp, pp=sizes.pp, tp_rank=tp_rank, stage=stage)
                requests.append(dict(folder=str(folder), expert_parallel=sizes.ep > 1, **place))
                expected.append(rank_needs(shape, sizes, tp_rank, stage))
    program = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_needs.py"))],
        input="\n".join(map(json.dumps, requests)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = [line.partition("RESULT ")[2] for line in program.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(requests), program.stderr[-3000:]
    for request, line, boxes in zip(requests, lines, expected, strict=True):
        kept = {name: [tuple(map(tuple, box)) for box in there] for name, there in json.loads(line).items()}
        once = {name: sorted(disjoint(there)) for name, there in kept.items()}
        assert once == {name: sorted(there) for name, there in boxes.items()}, request
