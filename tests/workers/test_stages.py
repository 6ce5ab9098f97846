"""Which layers a rank holds: our own arithmetic against Megatron-core's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from megatron.core.transformer.transformer_block import get_num_layers_to_build  # type: ignore[import-untyped]
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # type: ignore[import-untyped]

from flowrl.config.layout import pipeline_problem, stage_chunks
from flowrl.config.model_shape import shape_of
from flowrl.config.schema import EngineConfig, TrainLayout
from flowrl.workers.model import transformer_config


def test_stages_and_chunks_have_the_layers_that_megatron_core_builds() -> None:
    """PAR-07: equal, uneven at either end, interleaved, over all sizes up to 12 layers on 6 stages."""
    checked = {"equal": 0, "last": 0, "first": 0, "interleaved": 0}
    for layers, pp, vpp, first in product(range(1, 13), range(1, 7), range(1, 5), [None, *range(1, 12)]):
        if pipeline_problem(layers, pp, vpp, first) is not None:
            continue
        layout = TrainLayout(tp=1, pp=pp, vpp=vpp, first_stage_layers=first, cp=1, ep=1, etp=1)
        config = EngineConfig(layout=layout, dtype="float32", tokens_per_microbatch=1)
        settings = transformer_config(replace(shape_of("builtin:tiny"), num_layers=layers), config)
        for stage, chunks in enumerate(stage_chunks(layers, pp, vpp, first)):
            for number, chunk in enumerate(chunks):
                vp_stage = number if vpp > 1 else None
                assert get_num_layers_to_build(settings, vp_stage, stage) == len(chunk)
                assert get_transformer_layer_offset(settings, vp_stage, stage) == chunk.start
        checked["interleaved" if vpp > 1 else "first" if first else "last" if layers % pp else "equal"] += 1
    assert min(checked.values()) >= 10, checked
