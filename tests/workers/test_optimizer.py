from __future__ import annotations

import pytest
import torch
from processes import run

from flowrl.config.schema import OptimConfig
from flowrl.workers import megatron_private
from flowrl.workers.optimizer import learning_rate


def rates(config: OptimConfig, total: int) -> list[float]:
    return [learning_rate(step, config, total) for step in range(1, total + 1)]


def test_constant_rate_is_the_peak_from_the_first_step() -> None:
    assert rates(OptimConfig(lr=0.5), 3) == [0.5, 0.5, 0.5]


def test_warm_up_is_linear_and_no_step_is_a_no_op() -> None:
    assert rates(OptimConfig(lr=1.0, warmup_steps=4), 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_schedule_falls_from_the_peak_towards_the_minimum() -> None:
    config = OptimConfig(lr=1.0, schedule="linear", min_lr=0.2)
    assert rates(config, 4) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert learning_rate(5, config, 4) == pytest.approx(0.2)
    assert learning_rate(50, config, 4) == pytest.approx(0.2)


def test_cosine_schedule_is_half_way_in_the_middle() -> None:
    config = OptimConfig(lr=1.0, schedule="cosine", warmup_steps=2)
    assert rates(config, 6)[2:] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_norms_and_clipping_of_all_gradients_together_are_those_of_one_after_another() -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(size, generator=generator) for size in ((3, 5), (7,), (1, 1), (64, 33))]
    norm, _ = megatron_private._norm_of_all(0, None, [gradients], False)
    assert norm.shape == (1,) and torch.equal(norm[0], torch.norm(torch.tensor([torch.norm(g) for g in gradients])))
    scaled = [gradient * 0.3 for gradient in gradients]
    megatron_private._scale_all(0, None, [gradients, gradients], 0.3)
    assert all(torch.equal(one, other) for one, other in zip(gradients, scaled, strict=True))
    assert run(1, cured) == [[megatron_private._norm_of_all.__name__, megatron_private._scale_all.__name__]]


def cured() -> list[str]:
    from megatron.core.optimizer import clip_grads

    megatron_private.cure()
    return [clip_grads.l2_norm_impl.__name__, clip_grads.multi_tensor_scale_impl.__name__]
