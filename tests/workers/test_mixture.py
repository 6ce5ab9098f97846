from __future__ import annotations

import torch

from flowrl.workers.mixture import mixture


def test_a_mixture_is_the_weighted_sum_of_its_chosen_experts_wherever_they_live() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, width, inner, experts, chosen = 7, 4, 6, 5, 2
    hidden = torch.randn(tokens, width, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator)
    down = torch.randn(experts, width, inner, generator=generator)
    # No token visits expert 3.
    ids = torch.tensor([[0, 1], [1, 0], [4, 2], [2, 4], [0, 4], [1, 2], [4, 0]], dtype=torch.int32)
    weights = torch.rand(tokens, chosen, generator=generator)
    expected = torch.zeros(tokens, width)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(mixture(hidden, gate_up, down, weights, ids), expected, atol=1e-5)
    parts = torch.zeros(tokens, width)
    for here in ([0, 1], [2, 3, 4]):
        numbers = torch.full((experts,), -1, dtype=torch.int32)
        numbers[here] = torch.arange(len(here), dtype=torch.int32)
        parts += mixture(hidden, gate_up[here], down[here], weights, ids, numbers)
    assert torch.allclose(parts, expected, atol=1e-5)
