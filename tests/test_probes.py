"""Learning proven where the answer is known. gamma is 0.9 throughout."""

import pytest
import torch
from helpers import saved_state, small_config
from probes import ConstantReward, DelayedReward, MatchObservation, Probe, TerminatedOrTruncated

from fastsac.core.networks import CriticEnsemble, support
from fastsac.core.normalizer import FleetNormalizer
from fastsac.core.policy import Policy, PublishedPolicy
from fastsac.evaluation import policy_spec
from fastsac.trainer import train

GAMMA = 0.9
ALGORITHM = {
    "batch_size": 128,
    "weight_publish_interval": 8,
    "updates_per_vector_step": 4,
    "actor_hidden": 32,
    "critic_hidden": 64,
    "num_atoms": 51,
    "v_min": -2.0,
    "v_max": 12.0,
    "gamma": GAMMA,
    "tau": 0.1,
    "actor_lr": 3e-3,
    "critic_lr": 3e-3,
    "alpha_lr": 1e-6,
    "alpha_init": 1e-6,
    "policy_frequency": 2,
}
EVERY_OBS = torch.tensor([[-0.5, 0.0], [-0.5, 1.0], [0.5, 0.0], [0.5, 1.0]])


def learn(tmp_path, env: type[Probe], **algorithm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Train; returns Q of every observation under the learnt actions, and those actions."""
    config = small_config(
        tmp_path,
        total_env_steps=4800,
        algorithm=ALGORITHM | algorithm,
        replay={"steps_per_env": 400},
    )
    state = saved_state(train(config, env=env, runtime="inline").run_dir)
    learner = state["learners"]["learner"]
    normalizer = FleetNormalizer(2, None, enabled=True)
    normalizer.load_state_dict(state["normalizer"])
    spec = env(num_envs=1, device=torch.device("cpu"), evaluation=True).spec
    policy = Policy(policy_spec(spec, config.algorithm), torch.device("cpu"))
    policy.load(
        PublishedPolicy(version=0, parameters=learner["actor"], normalizers=normalizer.published())
    )
    critic = CriticEnsemble(2, 1, num_q=2, hidden=64, num_atoms=51)
    torch.nn.utils.vector_to_parameters(learner["critic"], critic.parameters())
    action = policy.mode(EVERY_OBS)
    with torch.no_grad():
        logits = critic(normalizer.published().actor(EVERY_OBS), action)
    q = (logits.softmax(-1) * support(-2.0, 12.0, 51)).sum(-1).mean(0)
    return q, action[:, 0]


def test_constant_reward_is_worth_its_geometric_series(tmp_path):
    q, _ = learn(tmp_path, ConstantReward)
    torch.testing.assert_close(q, torch.full((4,), 1 / (1 - GAMMA)), atol=0.3, rtol=0)


def test_reward_after_one_step_is_discounted_once(tmp_path):
    q, _ = learn(tmp_path, DelayedReward)
    torch.testing.assert_close(q, torch.tensor([GAMMA, 1.0, GAMMA, 1.0]), atol=0.1, rtol=0)


def test_truncation_bootstraps_and_termination_does_not(tmp_path):
    q, _ = learn(tmp_path, TerminatedOrTruncated)
    forever = 1 / (1 - GAMMA)
    expected = torch.tensor([forever, forever, 1 + GAMMA, 1.0])
    torch.testing.assert_close(q, expected, atol=0.3, rtol=0)


def test_the_best_action_depends_on_the_observation(tmp_path):
    q, action = learn(tmp_path, MatchObservation, alpha_init=0.05, alpha_lr=1e-4)
    torch.testing.assert_close(action[[0, 2]], torch.tensor([-0.5, 0.5]), atol=0.1, rtol=0)
    assert q[[0, 2]] == pytest.approx([0.0, 0.0], abs=0.1)
