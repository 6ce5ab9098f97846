"""Log-probabilities and entropy of a categorical distribution given by logits."""

from __future__ import annotations

import torch


def log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of `targets` [...] and entropy [...], nats, float32 (float64 for float64 logits).

    `logits` [..., V] are divided by `temperature` first; entries from `num_valid` on (padding of the vocabulary, ids that
    the tokenizer does not know) do not exist. Logits of minus infinity are legal: their probability is 0, they add
    nothing to the entropy, and all gradients stay finite.
    Errors: `ValueError` for shapes, a temperature that is not positive, or `num_valid` outside 1..V.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {list(logits.shape)} and targets {list(targets.shape)} do not match")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive; greedy decoding has no log-probs to train on")
    if not 1 <= num_valid <= logits.shape[-1]:
        raise ValueError(f"num_valid={num_valid} must lie in 1..{logits.shape[-1]} (the vocabulary)")
    exact = logits if logits.dtype == torch.float64 else logits.float()
    log_all = torch.log_softmax(exact[..., :num_valid] / temperature, dim=-1)
    inside = targets < num_valid
    log_target = log_all.gather(-1, torch.where(inside, targets, 0).unsqueeze(-1)).squeeze(-1)
    # Zeroing after the product would leave 0 * inf in the backward pass, so the factor itself is replaced.
    entropy = -(log_all.exp() * log_all.masked_fill(log_all == float("-inf"), 0.0)).sum(dim=-1)
    return log_target.masked_fill(~inside, float("-inf")), entropy
