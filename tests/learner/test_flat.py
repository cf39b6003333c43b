import copy

import pytest
import torch
from torch import nn

from learner.flat import FlatParameters


def network(seed: int = 0) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return module


def loss(module: nn.Module) -> torch.Tensor:
    return module(torch.arange(15.0).view(5, 3)).square().sum()


def test_parameters_are_views_of_the_flat_values():
    module = network()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    flat = FlatParameters(module)
    assert torch.equal(flat.values, torch.cat([p.flatten() for p in before]))
    with torch.no_grad():
        flat.values.mul_(2)
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, 2 * old)


def test_autograd_accumulates_into_the_flat_gradient():
    module, reference = network(), network()
    flat = FlatParameters(module)
    loss(reference).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    for times in (1, 2):
        loss(module).backward()
        torch.testing.assert_close(flat.gradient, times * expected)
    assert flat.values.grad is flat.gradient


def test_an_optimiser_on_the_flat_values_moves_the_module():
    module, reference = network(), network()
    flat = FlatParameters(module)
    for parameters, net in ([flat.values], module), (reference.parameters(), reference):
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            loss(net).backward()
            optimizer.step()
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_polyak_moves_a_share_of_the_way():
    target, source = FlatParameters(network(0)), FlatParameters(network(1))
    start, goal = target.values.detach().clone(), source.values.detach().clone()
    target.move_towards(source, 0.125)
    torch.testing.assert_close(target.values.detach(), 0.875 * start + 0.125 * goal)
    assert torch.equal(source.values, goal)
    target.move_towards(source, 1.0)
    assert torch.equal(target.values, goal)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clipping_equals_clip_grad_norm(max_norm):
    module, reference = network(), network()
    flat = FlatParameters(module)
    for net in (module, reference):
        loss(net).backward()
    unlimited = max_norm or float("inf")
    expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), unlimited)
    norm = flat.clip_gradient(max_norm)
    torch.testing.assert_close(norm, expected_norm)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("flatten_first", [True, False])
def test_a_copied_network_is_independent(flatten_first):
    critic = network()
    flat_critic = FlatParameters(critic) if flatten_first else None
    target = copy.deepcopy(critic)
    flat_critic = flat_critic or FlatParameters(critic)
    flat_target = FlatParameters(target)
    start = flat_target.values.detach().clone()
    loss(critic).backward()
    with torch.no_grad():
        flat_critic.values.add_(1)
    assert torch.equal(flat_target.values, start)
    assert not flat_target.gradient.any()
    assert flat_critic.gradient.any()
    for parameter, value in zip(target.parameters(), network().parameters(), strict=True):
        assert torch.equal(parameter, value)
