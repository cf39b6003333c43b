"""Parameters of a network as one tensor, and their gradients as another.

One all-reduce, one optimiser call, one Polyak step, one copy to publish.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FlatParameters:
    """Turns a module's parameters, and their gradients, into views of two flat tensors."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.values = nn.Parameter(flat)
        """(num_parameters,) float32, in the order of `module.parameters()`."""
        self.gradient = torch.zeros_like(flat)
        """(num_parameters,); autograd accumulates into it."""
        self.values.grad = self.gradient
        sizes = [parameter.numel() for parameter in parameters]
        values, gradients = flat.split(sizes), self.gradient.split(sizes)
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.data = value.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)

    def move_towards(self, other: FlatParameters, share: float) -> None:
        """Polyak: move `share` of the way to `other`'s values."""
        with torch.no_grad():
            self.values.lerp_(other.values, share)

    def clip_gradient(self, max_norm: float) -> Tensor:
        """Scale the gradient to norm `max_norm` at most (0: any); returns the norm before."""
        norm = torch.linalg.vector_norm(self.gradient)
        if max_norm > 0:
            self.gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm
