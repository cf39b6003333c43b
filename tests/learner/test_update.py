import itertools

import pytest
import torch
from rank_workers import CRITIC_OBS_DIM, make_batch, tiny_algorithm, tiny_policy
from torch import Tensor

from learner.update import Learner


def make_learner(seed: int = 0, **algorithm) -> Learner:
    return Learner(
        policy=tiny_policy(),
        critic_obs_dim=CRITIC_OBS_DIM,
        algorithm=tiny_algorithm(**algorithm),
        device=torch.device("cpu"),
        generator=torch.Generator().manual_seed(seed),
    )


def alone(gradient: Tensor) -> None:
    """The mean over one rank."""


def update(learner: Learner, number: int, *, update_actor: bool = True) -> dict[str, Tensor]:
    return learner.update(*make_batch(number), update_actor=update_actor, average=alone)


def parameters(learner: Learner) -> dict[str, Tensor]:
    return {
        "actor": learner.flat_actor.values.detach().clone(),
        "critic": learner.flat_critic.values.detach().clone(),
        "target": learner.flat_target.values.detach().clone(),
        "log_alpha": learner.flat_alpha.values.detach().clone(),
    }


def test_the_critic_gets_no_gradient_from_the_actor_step():
    """After an update, its gradient is the one that the critic loss left."""
    with_actor, without = make_learner(), make_learner()
    update(with_actor, 0, update_actor=True)
    update(without, 0, update_actor=False)
    assert without.flat_critic.gradient.any()
    assert torch.equal(with_actor.flat_critic.gradient, without.flat_critic.gradient)
    assert torch.equal(with_actor.flat_critic.values, without.flat_critic.values)
    assert all(parameter.requires_grad for parameter in with_actor.critic.parameters())


def test_the_actor_moves_only_when_it_is_told_to():
    learner = make_learner()
    start = parameters(learner)
    metrics = update(learner, 0, update_actor=False)
    still = parameters(learner)
    assert torch.equal(start["actor"], still["actor"])
    assert not metrics.keys() & {"actor_loss", "actor_grad_norm", "action_std"}
    assert not torch.equal(start["critic"], still["critic"])
    assert not torch.equal(start["log_alpha"], still["log_alpha"])
    metrics = update(learner, 1, update_actor=True)
    assert metrics.keys() >= {"actor_loss", "actor_grad_norm", "action_std"}
    assert not torch.equal(start["actor"], parameters(learner)["actor"])


def test_the_actor_step_reads_the_critic_and_alpha_after_their_steps():
    """With the actor's noise and batch, its loss is that of the stepped critic."""
    learner = make_learner(critic_lr=0.01, alpha_lr=0.5)
    batch, noise = make_batch(0)
    metrics = update(learner, 0)
    actor = make_learner().actor
    sample = actor.sample(batch.obs, noise.actor)
    support = torch.linspace(-5, 5, 11)
    q = (learner.critic(batch.critic_obs, sample.action).softmax(-1) @ support).mean(0)
    expected = (learner.alpha * sample.log_prob - q).mean()
    torch.testing.assert_close(metrics["actor_loss"], expected.detach())


def test_the_target_moves_only_by_polyak():
    learner = make_learner(tau=0.25)
    assert torch.equal(learner.flat_target.values, learner.flat_critic.values)
    for number in range(4):
        before = parameters(learner)["target"]
        update(learner, number)
        after = parameters(learner)
        expected = before.double() + 0.25 * (after["critic"].double() - before.double())
        torch.testing.assert_close(after["target"].double(), expected, rtol=1e-6, atol=1e-7)
        assert not learner.flat_target.gradient.any()


def test_gradients_are_averaged_in_one_order_and_clipped_afterwards():
    learner, sizes = make_learner(max_grad_norm=0.01), []

    def double(gradient: Tensor) -> None:
        sizes.append(gradient.numel())
        gradient.mul_(2)

    clipped = learner.update(*make_batch(0), update_actor=True, average=double)
    flats = learner.flat_critic, learner.flat_alpha, learner.flat_actor
    assert sizes == [flat.gradient.numel() for flat in flats]
    free = update(make_learner(), 0)
    torch.testing.assert_close(clipped["critic_grad_norm"], 2 * free["critic_grad_norm"])
    for flat in (learner.flat_critic, learner.flat_actor):
        assert float(flat.gradient.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_saved_learner_continues_bit_for_bit():
    learner = make_learner()
    for number in range(5):
        update(learner, number)
    state = learner.state_dict()
    frozen = [tensor.clone() for tensor in _tensors(state)]
    resumed = make_learner(seed=9)
    for number in range(5, 8):
        update(learner, number)
    assert all(map(torch.equal, _tensors(state), frozen)), "a saved state does not move on"
    resumed.load_state_dict(state)
    for number in range(5, 8):
        update(resumed, number)
    assert all(map(torch.equal, learner.tensors(), resumed.tensors()))
    for one, other in zip(learner.actor.parameters(), resumed.actor.parameters(), strict=True):
        assert torch.equal(one, other)


def _tensors(tree) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return list(itertools.chain.from_iterable(_tensors(value) for value in tree.values()))


@pytest.mark.parametrize("sizes", [{"actor_hidden": 32}, {"num_q": 3}, {"critic_hidden": 32}])
def test_networks_of_other_sizes_are_refused_in_one_line(sizes):
    algorithm = tiny_algorithm(**sizes)
    policy = tiny_policy()
    other = Learner(
        policy=type(policy)(**{**vars(policy), "hidden": algorithm.actor_hidden}),
        critic_obs_dim=CRITIC_OBS_DIM,
        algorithm=algorithm,
        device=torch.device("cpu"),
        generator=torch.Generator(),
    )
    with pytest.raises(ValueError, match=r"parameters where this configuration gives") as error:
        make_learner().load_state_dict(other.state_dict())
    assert "\n" not in str(error.value)


def test_actor_parameters_are_a_copy():
    learner = make_learner()
    published = learner.actor_parameters()
    start = published.clone()
    update(learner, 0)
    assert torch.equal(published, start)
    assert not torch.equal(learner.actor_parameters(), start)


def test_each_network_has_its_own_learning_rate_and_log_alpha_no_weight_decay():
    """AdamW's first step: p (1 - lr * decay) - lr * g / (|g| + eps)."""
    rates = {"actor": 1e-3, "critic": 2e-3, "log_alpha": 3e-3}
    learner = make_learner(
        actor_lr=rates["actor"],
        critic_lr=rates["critic"],
        alpha_lr=rates["log_alpha"],
        weight_decay=0.5,
    )
    start = parameters(learner)
    update(learner, 0)
    flats = {
        "actor": learner.flat_actor,
        "critic": learner.flat_critic,
        "log_alpha": learner.flat_alpha,
    }
    for name, flat in flats.items():
        decay = 0.0 if name == "log_alpha" else 0.5
        direction = flat.gradient / (flat.gradient.abs() + 1e-8)
        expected = start[name] * (1 - rates[name] * decay) - rates[name] * direction
        torch.testing.assert_close(flat.values.detach(), expected, rtol=1e-5, atol=1e-6)


def test_metrics_are_of_the_critic_before_its_step_and_of_alpha_after_its_own():
    learner, before = make_learner(), make_learner()
    batch, noise = make_batch(0)
    metrics = update(learner, 0)
    support = torch.linspace(-5, 5, 11)
    with torch.no_grad():
        q = before.critic(batch.critic_obs, batch.action).softmax(-1) @ support
        log_prob = before.actor.sample(batch.next_obs, noise.next).log_prob
        log_std = before.actor(batch.obs)[1]
    expected = {
        "q_mean": q.mean(),
        "q_min": q.min(),
        "q_max": q.max(),
        "entropy": -log_prob.mean(),
        "alpha": learner.flat_alpha.values.detach().exp().squeeze(),
        "action_std": log_std.exp().mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, msg=lambda text, n=name: f"{n}: {text}")
