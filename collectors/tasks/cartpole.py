# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Cartpole swing-up: push a cart so that its pole swings up and stays there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import mujoco
import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation
from collectors.physics.engine import Engine, Physics
from collectors.tasks.mujoco_env import MujocoEnv, Outcome, Simulation, Task
from fastsac.core.shard_state import LocalState, MergeRule

SUCCESS = "swingup_success"
"""Shard state: mean reward per env step, in [0, 1], of whole episodes from a hanging start."""
SUCCESS_WINDOW = 64
"""Episodes of the whole fleet that the mean remembers."""
START_NOISE = 0.01
"""Half width of the uniform noise on a start, in m, rad, m/s and rad/s."""


def cartpole_swingup(
    *,
    num_envs: int,
    device: torch.device,
    evaluation: bool,
    decimation: int = 2,
    episode_length: int = 500,
    easy_start_share: float = 0.5,
    physics: Engine = "auto",
    max_contacts: int | None = None,
    max_constraints: int | None = None,
) -> MujocoEnv:
    """Push a cart so that its pole swings up and stays there.

    Evaluation has no easy starts.

    Args:
        decimation: physics steps, of 0.01 s each, per env step.
        episode_length: env steps until truncation.
        easy_start_share: share of easy starts while the fleet's success is 0, in [0, 1].
        physics: engine, see `MujocoEnv`, as are the numbers that follow.
    Raises:
        ValueError: a number is outside its range.
    """
    task = CartpoleSwingup(
        num_envs=num_envs,
        decimation=decimation,
        episode_length=episode_length,
        easy_start_share=easy_start_share,
        easy_starts=not evaluation,
    )
    return MujocoEnv(
        task,
        device=device,
        evaluation=evaluation,
        physics=physics,
        max_contacts=max_contacts,
        max_constraints=max_constraints,
    )


class CartpoleSwingup(Task):
    """Cartpoles under one force on the cart.

    Observation (5): cart position m, cos and sin of the pole's angle (0 is upright), cart velocity
    m/s, pole angular velocity rad/s. Action (1): the motor's command. Episodes never terminate.
    Past 1.8 m the rail pushes the cart back softly: a fast cart goes up to 0.3 m further.

    Training starts some episodes easy, with the pole at any angle, the fewer the better the fleet
    swings up (`apply`); the others start hanging.
    """

    def __init__(
        self,
        *,
        num_envs: int,
        decimation: int,
        episode_length: int,
        easy_start_share: float,
        easy_starts: bool,
    ) -> None:
        """See `cartpole_swingup`; without `easy_starts` every episode starts hanging."""
        if not 0 <= easy_start_share <= 1:
            raise ValueError(f"easy_start_share is {easy_start_share:g}: give a share in [0, 1]")
        model = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("cartpole.xml")))
        low, high = torch.tensor(model.actuator_ctrlrange, dtype=torch.float32).unbind(1)
        self.simulation = Simulation(
            model=model,
            decimation=decimation,
            max_contacts=0,
            max_constraints=1,  # the cart presses one end of the rail at a time
        )
        self.spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=5,
            action_low=low,
            action_high=high,
            control_period_s=decimation * model.opt.timestep,
            episode_length=episode_length,
            shard_states={
                SUCCESS: MergeRule(kind="weighted_mean", size=1, window=SUCCESS_WINDOW, initial=0.0)
            },
        )
        self._easy_start_share = easy_start_share if easy_starts else 0.0
        self._easy_start_probability = self._easy_start_share

    def allocate(self, physics: Physics, generator: torch.Generator) -> None:
        self._physics = physics
        self._generator = generator
        n, device = self.spec.num_envs, physics.qpos.device
        self.memory = {
            "easy": torch.zeros(n, dtype=torch.bool, device=device),
            # Env steps and rewards since the start, which the spread age of a first episode
            # precedes.
            "steps": torch.zeros(n, dtype=torch.int64, device=device),
            "returns": torch.zeros(n, dtype=torch.float64, device=device),
            # Sum of mean rewards and number of counted episodes since the last report.
            "pending": torch.zeros(2, dtype=torch.float64, device=device),
        }

    def start(self, mask: Tensor) -> None:
        noise = torch.rand((6, len(mask)), generator=self._generator, device=mask.device)
        easy = noise[5] < self._easy_start_probability
        position, swing, angle, *velocities = (2 * noise[:5] - 1).unbind(0)
        angle = torch.where(easy, math.pi * angle, math.pi + START_NOISE * swing)
        self._physics.set_state(
            mask,
            torch.stack([START_NOISE * position, angle], 1),
            START_NOISE * torch.stack(velocities, 1),
        )
        self.memory["easy"].copy_(torch.where(mask, easy, self.memory["easy"]))
        self.memory["steps"].masked_fill_(mask, 0)
        self.memory["returns"].masked_fill_(mask, 0)

    def act(self, action: Tensor) -> None:
        self._physics.ctrl.copy_(action)

    def outcome(self, action: Tensor) -> Outcome:
        obs = self.observe().actor_obs
        reward = swingup_reward(obs, action)
        self.memory["steps"] += 1
        self.memory["returns"] += reward
        return Outcome(
            reward=reward,
            terminated=torch.zeros_like(reward, dtype=torch.bool),
            info={"upright": (obs[:, 1] + 1) / 2},
        )

    def observe(self) -> Observation:
        position, angle = self._physics.qpos.float().unbind(1)
        velocity, angular_velocity = self._physics.qvel.float().unbind(1)
        return Observation(
            torch.stack([position, angle.cos(), angle.sin(), velocity, angular_velocity], 1)
        )

    def finish(self, done: Tensor, truncated: Tensor) -> None:
        del done  # nothing terminates
        returns, whole = self.memory["returns"], self.memory["steps"] == self.spec.episode_length
        # A non-finite return is of a broken episode, which the collector drops.
        counted = truncated & whole & ~self.memory["easy"] & returns.isfinite()
        mean_rewards = torch.where(counted, returns, 0) / self.spec.episode_length
        self.memory["pending"] += torch.stack([mean_rewards.sum(), counted.sum()])

    def report(self) -> dict[str, LocalState]:
        """Summed mean rewards and number of the whole hanging-start episodes that ended."""
        total, episodes = self.memory["pending"].tolist()
        self.memory["pending"].zero_()
        value = torch.tensor([total], dtype=torch.float64)
        return {SUCCESS: LocalState(value=value, weight=episodes)}

    def apply(self, state: Mapping[str, Tensor]) -> None:
        """Start fewer episodes easy, the better the fleet swings up: share * (1 - success)."""
        success = float(state[SUCCESS])
        self._easy_start_probability = self._easy_start_share * (1 - success)


def swingup_reward(obs: Tensor, action: Tensor) -> Tensor:
    """Smooth swing-up reward of the DeepMind Control Suite (Tassa et al. 2018), in [0, 1].

    Args:
        obs: (num_envs, 5) after the step.
        action: (num_envs, 1) in [-1, 1], held during the step.
    Returns:
        (num_envs,)
    """
    position, cos_angle, _, _, angular_velocity = obs.unbind(1)
    upright = (1 + cos_angle) / 2
    centered = (1 + closeness(position, margin=2)) / 2
    slow = (1 + closeness(angular_velocity, margin=5)) / 2
    gentle = (5 - action[:, 0].square()) / 5
    return upright * centered * slow * gentle


def closeness(value: Tensor, margin: float) -> Tensor:
    """A Gaussian: 1 at 0 and 0.1 at `margin`."""
    return (math.log(0.1) * (value / margin).square()).exp()
