import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsac.core.networks import Actor, CriticEnsemble, support
from fastsac.core.transition import Batch
from learner.losses import (
    CriticTarget,
    actor_loss,
    alpha_loss,
    critic_loss,
    critic_targets,
    project,
)
from oracles.c51 import project_distribution

BATCH, NUM_Q, NUM_ATOMS = 12, 3, 11
SUPPORT = support(-5.0, 5.0, NUM_ATOMS)
ALPHA = torch.tensor(0.1)
CHOICES: list[CriticTarget] = ["each", "min", "mean"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_networks(critic_obs_dim: int = 4) -> tuple[Actor, CriticEnsemble]:
    low = torch.tensor([-1.0, -2.0])
    actor = Actor(4, low, -low, hidden=16, log_std_min=-5, log_std_max=0, generator=seeded(0))
    critic = CriticEnsemble(
        critic_obs_dim, 2, num_q=NUM_Q, hidden=16, num_atoms=NUM_ATOMS, generator=seeded(1)
    )
    with torch.no_grad():
        for tensor in [*actor.mean.parameters(), *actor.log_std.parameters()]:
            tensor.normal_(generator=seeded(2))
        critic.linears[-1].bias.normal_(generator=seeded(3))  # pyright: ignore[reportCallIssue]
    return actor, critic


def make_batch(critic_obs_dim: int | None = None) -> Batch:
    """A third of the rows is terminated."""
    generator = seeded(4)
    obs, next_obs = torch.randn(2, BATCH, 4, generator=generator)
    critic_obs, next_critic_obs = obs, next_obs
    if critic_obs_dim is not None:
        critic_obs, next_critic_obs = torch.randn(2, BATCH, critic_obs_dim, generator=generator)
    return Batch(
        obs=obs,
        critic_obs=critic_obs,
        action=torch.randn(BATCH, 2, generator=generator),
        reward=torch.randn(BATCH, generator=generator),
        next_obs=next_obs,
        next_critic_obs=next_critic_obs,
        terminated=torch.arange(BATCH) % 3 == 0,
        discount=0.9 ** torch.randint(1, 4, (BATCH,), generator=generator).float(),
    )


def noise(seed: int = 5) -> Tensor:
    return torch.randn(BATCH, 2, generator=seeded(seed))


def distributions(num_atoms: int) -> st.SearchStrategy[list[float]]:
    weights = st.lists(st.integers(0, 1000), min_size=num_atoms, max_size=num_atoms)
    return weights.filter(any).map(lambda w: [x / sum(w) for x in w])


@st.composite
def projections(draw: st.DrawFn) -> tuple[float, float, list[float], list[float]]:
    """v_min, v_max, masses and shifted atoms, some of them far outside."""
    num_atoms = draw(st.integers(2, 30))
    v_min = draw(st.integers(-20, 10))
    v_max = v_min + draw(st.integers(1, 30))
    masses = draw(distributions(num_atoms))
    reach = st.floats(v_min - 40, v_max + 40, allow_nan=False, width=32)
    return v_min, v_max, masses, draw(st.lists(reach, min_size=num_atoms, max_size=num_atoms))


@settings(max_examples=200, deadline=None)
@given(projections())
def test_projection_equals_the_naive_loop_and_keeps_mass(case):
    v_min, v_max, masses, shifted = case
    probabilities = torch.tensor(masses).expand(2, 1, -1)
    ours = project(probabilities, torch.tensor([shifted]), support(v_min, v_max, len(masses)))
    expected = torch.tensor(project_distribution(masses, shifted, v_min, v_max))
    torch.testing.assert_close(ours[0, 0], expected, rtol=0, atol=2e-5)
    assert abs(ours.double().sum(-1) - 1).max() < 1e-6
    assert ours.min() >= 0


@pytest.mark.parametrize("shift", range(-12, 13))
def test_atoms_on_the_support_keep_their_mass(shift):
    """Shifted by whole atoms, the distribution moves as it is; what leaves gathers at the ends."""
    masses = torch.rand(1, 1, NUM_ATOMS, generator=seeded(0)).softmax(-1)
    spacing = SUPPORT[1] - SUPPORT[0]
    ours = project(masses, (SUPPORT + shift * spacing)[None], SUPPORT)[0, 0]
    expected = torch.zeros(NUM_ATOMS)
    for atom, mass in enumerate(masses[0, 0]):
        expected[min(max(atom + shift, 0), NUM_ATOMS - 1)] += mass
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


def test_values_beyond_the_support_go_to_its_ends():
    masses = torch.full((1, 2, NUM_ATOMS), 1 / NUM_ATOMS)
    atoms = torch.tensor([[1e6], [-1e6]]).expand(2, NUM_ATOMS)
    ours = project(masses, atoms, SUPPORT)[0]
    torch.testing.assert_close(ours[0], torch.eye(NUM_ATOMS)[-1])
    torch.testing.assert_close(ours[1], torch.eye(NUM_ATOMS)[0])


def naive_targets(
    actor: Actor, target: CriticEnsemble, batch: Batch, eps: Tensor, choice: CriticTarget
) -> Tensor:
    """Row by row in float64, from the projection's naive loop."""
    sample = actor.sample(batch.next_obs, eps)
    probabilities = target(batch.next_critic_obs, sample.action).double().softmax(-1)
    rows = []
    for i in range(BATCH):
        each = []
        for q in range(NUM_Q):
            shifted = []
            for z in SUPPORT.double().tolist():
                bootstrap = z - float(ALPHA) * float(sample.log_prob[i])
                bootstrap *= 0.0 if batch.terminated[i] else float(batch.discount[i])
                shifted.append(float(batch.reward[i]) + bootstrap)
            each.append(project_distribution(probabilities[q, i].tolist(), shifted, -5.0, 5.0))
        if choice == "mean":
            each = [[sum(m) / NUM_Q for m in zip(*each, strict=True)]] * NUM_Q
        if choice == "min":
            values = [sum(m * z for m, z in zip(e, SUPPORT.tolist(), strict=True)) for e in each]
            each = [each[values.index(min(values))]] * NUM_Q
        rows.append(each)
    return torch.tensor(rows, dtype=torch.float64).transpose(0, 1)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("critic_obs_dim", [None, 7])
def test_targets_equal_the_naive_computation(choice, critic_obs_dim):
    actor, target = make_networks(critic_obs_dim or 4)
    batch = make_batch(critic_obs_dim)
    ours, log_prob = critic_targets(actor, target, ALPHA, batch, noise(), SUPPORT, choice)
    with torch.no_grad():
        expected = naive_targets(actor, target, batch, noise(), choice)
        torch.testing.assert_close(log_prob, actor.sample(batch.next_obs, noise()).log_prob)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    if choice != "each":
        assert torch.equal(ours[0], ours[1])


def gradients(critic: CriticEnsemble, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(critic.parameters()))])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("critic_obs_dim", [None, 7])
def test_next_obs_of_terminated_rows_does_not_matter(poison, critic_obs_dim):
    actor, critic = make_networks(critic_obs_dim or 4)
    _, target = make_networks(critic_obs_dim or 4)
    batch = make_batch(critic_obs_dim)
    results = []
    for value in (0.0, poison):
        ended = batch.terminated[:, None]
        next_obs = torch.where(ended, value, batch.next_obs)
        next_critic_obs = next_obs
        if critic_obs_dim is not None:
            next_critic_obs = torch.where(ended, value, batch.next_critic_obs)
        poisoned = replace(batch, next_obs=next_obs, next_critic_obs=next_critic_obs)
        targets, log_prob = critic_targets(actor, target, ALPHA, poisoned, noise(), SUPPORT, "each")
        loss, _ = critic_loss(critic, targets, poisoned, SUPPORT)
        log_alpha = ALPHA.log().requires_grad_()
        temperature_loss = alpha_loss(log_alpha, log_prob, -1.0)
        [alpha_gradient] = torch.autograd.grad(temperature_loss, log_alpha)
        results.append([loss, gradients(critic, loss), temperature_loss, alpha_gradient])
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)


def test_terminated_rows_stop_at_the_reward_and_others_bootstrap():
    """A truncated transition is one that is not terminated."""
    actor, target = make_networks()
    batch = make_batch()
    moved = replace(batch, next_obs=batch.next_obs + 1, next_critic_obs=batch.next_obs + 1)
    values = []
    for b in (batch, moved):
        targets, _ = critic_targets(actor, target, ALPHA, b, noise(), SUPPORT, "each")
        values.append(targets @ SUPPORT)
    ended = batch.terminated
    torch.testing.assert_close(values[0][:, ended], batch.reward[ended].expand(NUM_Q, -1))
    torch.testing.assert_close(values[1][:, ended], values[0][:, ended])
    assert ((values[0] - values[1])[:, ~ended].abs() > 1e-4).all()


def test_critic_loss_is_the_cross_entropy_summed_over_critics():
    _, critic = make_networks()
    batch = make_batch()
    targets = torch.rand(NUM_Q, BATCH, NUM_ATOMS, generator=seeded(6)).softmax(-1)
    loss, q = critic_loss(critic, targets, batch, SUPPORT)
    logits = critic(batch.critic_obs, batch.action).double()
    expected = sum(F.cross_entropy(x, t) for x, t in zip(logits, targets.double(), strict=True))
    torch.testing.assert_close(loss.double(), expected)
    expected_q = logits.softmax(-1) @ SUPPORT.double()
    torch.testing.assert_close(q.double(), expected_q, rtol=1e-5, atol=1e-6)
    assert not q.requires_grad


def test_actor_loss_is_entropy_against_the_mean_of_the_critics():
    actor, critic = make_networks()
    batch = make_batch()
    with torch.no_grad():
        loss, sample = actor_loss(actor, critic, ALPHA, batch, noise(), SUPPORT)
        q = (critic(batch.critic_obs, sample.action).softmax(-1) * SUPPORT).sum(-1)
    expected = [
        float(ALPHA) * float(sample.log_prob[i]) - float(q[:, i].sum()) / NUM_Q
        for i in range(BATCH)
    ]
    assert float(loss) == pytest.approx(sum(expected) / BATCH, rel=1e-5)


@pytest.mark.parametrize(("log_prob", "rises"), [(3.0, True), (1.0, False)])
def test_alpha_rises_while_the_entropy_is_too_low(log_prob, rises):
    """Entropy -log_prob against the target -2; the gradient is -alpha (log_prob - 2)."""
    log_alpha = torch.tensor(0.5).log().requires_grad_()
    alpha_loss(log_alpha, torch.full((8,), log_prob), -2.0).backward()
    assert log_alpha.grad is not None
    assert float(log_alpha.grad) == pytest.approx(-0.5 * (log_prob - 2.0))
    assert (log_alpha.grad < 0) == rises
