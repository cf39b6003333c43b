import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from fastsac.core.networks import Actor, CriticEnsemble, support

LOW, HIGH = torch.tensor([-1.0, -0.5, 2.0]), torch.tensor([1.0, 3.0, 2.5])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_actor(seed: int = 0, *, random_heads: bool = False) -> Actor:
    actor = Actor(
        5, LOW, HIGH, hidden=32, log_std_min=-5.0, log_std_max=0.0, generator=seeded(seed)
    )
    if random_heads:
        for head in (actor.mean, actor.log_std):
            for parameter in head.parameters():
                nn.init.normal_(parameter, generator=seeded(seed + 1))
    return actor


def make_critics(seed: int = 0) -> CriticEnsemble:
    return CriticEnsemble(6, 2, num_q=3, hidden=32, num_atoms=11, generator=seeded(seed))


def log_prob_oracle(actor: Actor, sample_mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """`TransformedDistribution` in float64, evaluated where tanh is still invertible."""
    mean, std = sample_mean.double(), log_std.double().exp()
    transforms = [
        TanhTransform(cache_size=1),
        AffineTransform(actor.bias.double(), actor.scale.double(), cache_size=1),
    ]
    policy = TransformedDistribution(Normal(mean, std), transforms)
    action = mean + std * noise.double()
    for transform in transforms:
        action = transform(action)
        assert isinstance(action, Tensor)
    return policy.log_prob(action).sum(-1)


def test_first_policy_is_centred_and_of_one_spread():
    actor, obs = make_actor(), torch.randn(64, 5, generator=seeded(1))
    mean, log_std = actor(obs)
    assert torch.equal(mean, torch.zeros(64, 3))
    assert torch.equal(log_std, torch.full((64, 3), -2.5))
    torch.testing.assert_close(actor.mode(obs), ((LOW + HIGH) / 2).expand(64, 3))


def test_log_std_stays_within_its_bounds():
    actor = make_actor(random_heads=True)
    _, log_std = actor(100 * torch.randn(256, 5, generator=seeded(1)))
    with torch.no_grad():
        actor.log_std.bias.copy_(torch.tensor([-1e3, 0.0, 1e3]))
    _, extreme = actor(torch.randn(4, 5, generator=seeded(1)))
    assert log_std.min() >= -5
    assert log_std.max() <= 0
    assert torch.equal(extreme[:, 0], torch.full((4,), -5.0))
    assert torch.equal(extreme[:, 2], torch.zeros(4))


def test_log_prob_equals_torch_distributions_in_float64():
    actor = make_actor(random_heads=True)
    obs, noise = torch.randn(512, 5, generator=seeded(2)), torch.randn(512, 3, generator=seeded(3))
    sample = actor.sample(obs, noise)
    expected = log_prob_oracle(actor, sample.mean, sample.log_std, noise)
    torch.testing.assert_close(sample.log_prob.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("u", [-50.0, 50.0])
def test_log_prob_and_its_gradient_are_finite_where_tanh_saturates(u):
    actor = make_actor()
    with torch.no_grad():
        actor.mean.bias.fill_(u)
    sample = actor.sample(torch.zeros(1, 5), torch.zeros(1, 3))
    sample.log_prob.sum().backward()
    # log(1 - tanh(u)^2) = log 4 - 2 |u| to 1e-40
    log_normal = -sample.log_std - 0.5 * math.log(2 * math.pi)
    expected = log_normal - (math.log(4) - 2 * abs(u)) - actor.scale.log()
    torch.testing.assert_close(sample.log_prob, expected.sum(-1))
    assert actor.mean.bias.grad is not None
    torch.testing.assert_close(actor.mean.bias.grad, torch.full((3,), math.copysign(2, u)))


def test_actions_stay_within_asymmetric_bounds_and_reach_them():
    actor = make_actor()
    u = torch.linspace(-30, 30, 601)[:, None].expand(-1, 3)
    actions = actor.squash(u)
    assert (actions >= LOW - 1e-6).all()
    assert (actions <= HIGH + 1e-6).all()
    torch.testing.assert_close(actions[0], LOW)
    torch.testing.assert_close(actions[-1], HIGH)
    torch.testing.assert_close(actions[300], (LOW + HIGH) / 2)


def test_samples_are_squashed_and_mode_is_the_sample_without_noise():
    actor, obs = make_actor(random_heads=True), torch.randn(16, 5, generator=seeded(4))
    noise = torch.randn(16, 3, generator=seeded(5))
    mean, log_std = actor(obs)
    sample = actor.sample(obs, noise)
    torch.testing.assert_close(sample.action, actor.squash(mean + log_std.exp() * noise))
    torch.testing.assert_close(actor.mode(obs), actor.sample(obs, torch.zeros(16, 3)).action)
    assert not torch.allclose(actor.mode(obs), sample.action)


def separate_critic(critics: CriticEnsemble, i: int) -> nn.Sequential:
    """Critic `i` as modules of its own."""
    parameters = dict(critics.named_parameters())
    layers: list[nn.Module] = []
    for j in range(4):
        weight, bias = parameters[f"linears.{j}.weight"][i], parameters[f"linears.{j}.bias"][i, 0]
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        layers.append(linear)
        if j < 3:
            norm = nn.LayerNorm(weight.shape[0])
            norm.load_state_dict(
                {k: parameters[f"norms.{j}.{k}"][i, 0] for k in ("weight", "bias")}
            )
            layers += [norm, nn.SiLU()]
    return nn.Sequential(*layers)


def test_stacked_critics_equal_separate_networks():
    critics = make_critics()
    for norm in critics.norms:
        for parameter in norm.parameters():
            nn.init.normal_(parameter, generator=seeded(1))
    obs, action = torch.randn(40, 6, generator=seeded(2)), torch.randn(40, 2, generator=seeded(3))
    logits = critics(obs, action)
    assert logits.shape == (3, 40, 11)
    for i in range(3):
        expected = separate_critic(critics, i)(torch.cat([obs, action], 1))
        torch.testing.assert_close(logits[i], expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(logits[0], logits[1])


def test_a_generator_repeats_the_initial_values():
    for make in (make_actor, make_critics):
        one, again, other = (
            torch.cat([p.flatten() for p in make(seed).parameters()]) for seed in (7, 7, 8)
        )
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_initial_values_are_those_of_linear_layers():
    """Uniform within 1 / sqrt(fan_in): the ends are approached, the variance is bound^2 / 3."""
    critics = CriticEnsemble(62, 2, num_q=3, hidden=64, num_atoms=11, generator=seeded(0))
    actor = Actor(64, LOW, HIGH, hidden=64, log_std_min=-5, log_std_max=0, generator=seeded(0))
    weights = [critics.linears[0].weight, critics.linears[1].weight, actor.trunk[0].weight]
    for weight in weights:
        assert isinstance(weight, Tensor)
        bound = 1 / 8
        assert 0.98 * bound < weight.abs().max() <= bound
        assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
    for parameter in critics.norms[0].parameters():
        assert torch.equal(parameter, parameter[:, :, :1].expand_as(parameter))


def test_support_is_evenly_spaced():
    atoms = support(-20, 20, 101)[[0, 50, 51, 100]]
    torch.testing.assert_close(atoms, torch.tensor([-20, 0, 0.4, 20]), rtol=0, atol=1e-5)
