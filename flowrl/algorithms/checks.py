"""Argument checks that every formula makes before it computes anything."""

from __future__ import annotations

import torch


def check_same_shape(**tensors: torch.Tensor) -> None:
    """Refuse tensors of different shapes: broadcasting would hide a wrong one. Errors: `ValueError` with all shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"tensors must have one shape, got {listed}")


def check_dims(dims: int, **tensors: torch.Tensor) -> None:
    """Refuse tensors that do not have `dims` dimensions. Errors: `ValueError` naming tensor, shape and `dims`."""
    for name, tensor in tensors.items():
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {list(tensor.shape)}")


def check_mask(mask: torch.Tensor) -> None:
    """Refuse a mask that is not boolean: a float mask multiplies NaN instead of hiding it."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be torch.bool, got {mask.dtype}; make it with `positions < lengths`")
