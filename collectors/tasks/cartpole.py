# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Cartpole swing-up: push a cart so that its pole swings up and stays there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco
import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation, Step
from fastsac.core.shard_state import LocalState, MergeRule

if TYPE_CHECKING:
    from collectors.physics.warp_physics import WarpPhysics

SUCCESS = "swingup_success"
"""Shard state: mean reward per env step, in [0, 1], of whole episodes from a hanging start."""
SUCCESS_WINDOW = 64
"""Episodes of the whole fleet that the mean remembers."""
START_NOISE = 0.01
"""Half width of the uniform noise on a start, in m, rad, m/s and rad/s."""


class CartpoleSwingup:
    """An env shard of cartpoles under one force on the cart.

    Observation (5): cart position m, cos and sin of the pole's angle (0 is upright), cart velocity
    m/s, pole angular velocity rad/s. Action (1): the motor's command. Episodes never terminate.
    Past 1.8 m the rail pushes the cart back softly: a fast cart goes up to 0.3 m further.

    Training starts some episodes easy, with the pole at any angle, the fewer the better the fleet
    swings up (`apply_shard_state`), and spreads the ages of the first episodes, so that resets do
    not come all at once. Evaluation always starts whole episodes from the hanging pole.
    """

    def __init__(
        self,
        *,
        num_envs: int,
        device: torch.device,
        evaluation: bool,
        decimation: int = 2,
        episode_length: int = 500,
        easy_start_share: float = 0.5,
    ) -> None:
        """Read the model; the worlds are allocated by `reset`.

        Args:
            decimation: physics steps, of 0.01 s each, per env step.
            episode_length: env steps until truncation.
            easy_start_share: share of easy starts while the fleet's success is 0, in [0, 1].
        Raises:
            ValueError: a number is outside its range.
        """
        if decimation < 1:
            raise ValueError(f"decimation is {decimation}: give at least 1 physics step")
        if not 0 <= easy_start_share <= 1:
            raise ValueError(f"easy_start_share is {easy_start_share:g}: give a share in [0, 1]")
        self._model = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("cartpole.xml")))
        low, high = torch.tensor(self._model.actuator_ctrlrange, dtype=torch.float32).unbind(1)
        self._spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=5,
            action_low=low,
            action_high=high,
            control_period_s=decimation * self._model.opt.timestep,
            episode_length=episode_length,
            shard_states={
                SUCCESS: MergeRule(kind="weighted_mean", size=1, window=SUCCESS_WINDOW, initial=0.0)
            },
        )
        self._device = device
        self._evaluation = evaluation
        self._decimation = decimation
        self._easy_start_share = 0.0 if evaluation else easy_start_share
        self._easy_start_probability = self._easy_start_share
        self._physics: WarpPhysics | None = None

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self, seed: int) -> Observation:
        """Start every env afresh; what the fleet's view has set stays."""
        self._allocate()
        self._generator.manual_seed(seed)
        self._pending.zero_()
        everything = torch.ones(self._spec.num_envs, dtype=torch.bool, device=self._device)
        self._start_episodes(everything)
        if not self._evaluation:
            self._ages.random_(0, self._spec.episode_length, generator=self._generator)
            self._counts &= self._ages == 0
        return Observation(self._observe())

    def reset_envs(self, mask: Tensor) -> Observation:
        """Start new episodes where `mask` (num_envs,) is true; returns all observations."""
        self._start_episodes(mask)
        return Observation(self._observe())

    def step(self, action: Tensor) -> Step:
        """Advance one control period. `action`: (num_envs, 1) in [-1, 1]."""
        assert self._physics is not None, "step before reset"
        self._physics.ctrl.copy_(action)
        self._physics.step()
        final_obs = self._observe()
        reward = swingup_reward(final_obs, action)
        self._ages += 1
        self._returns += reward
        truncated = self._ages >= self._spec.episode_length
        actor_obs = final_obs
        # On the CPU a look costs less than starting no episode; on a GPU it would be a wait.
        if self._device.type != "cpu" or bool(truncated.any()):
            self._count_finished(truncated)
            self._start_episodes(truncated)
            actor_obs = self._observe()
        return Step(
            actor_obs=actor_obs,
            critic_obs=None,
            reward=reward,
            terminated=torch.zeros_like(truncated),
            truncated=truncated,
            final_actor_obs=final_obs,
            final_critic_obs=None,
            info={"upright": (final_obs[:, 1] + 1) / 2},
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        """Summed mean rewards and number of the whole hanging-start episodes that ended."""
        total, episodes = self._pending.tolist()
        self._pending.zero_()
        value = torch.tensor([total], dtype=torch.float64)
        return {SUCCESS: LocalState(value=value, weight=episodes)}

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        """Start fewer episodes easy, the better the fleet swings up: share * (1 - success)."""
        success = float(state[SUCCESS])
        self._easy_start_probability = self._easy_start_share * (1 - success)

    def state_dict(self) -> dict[str, Any]:
        assert self._physics is not None, "state_dict before reset"
        return {
            "physics": self._physics.state_dict(),
            "generator": self._generator.get_state(),
            "ages": self._ages.clone(),
            "returns": self._returns.clone(),
            "counts": self._counts.clone(),
            "pending": self._pending.clone(),
            "easy_start_probability": self._easy_start_probability,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._allocate()
        assert self._physics is not None
        self._physics.load_state_dict(state["physics"])
        self._generator.set_state(state["generator"])
        self._ages.copy_(state["ages"])
        self._returns.copy_(state["returns"])
        self._counts.copy_(state["counts"])
        self._pending.copy_(state["pending"])
        self._easy_start_probability = state["easy_start_probability"]

    def close(self) -> None:
        self._physics = None

    def _allocate(self) -> None:
        if self._physics is not None:
            return
        # Importing MuJoCo-Warp takes seconds, which reading `spec` shall not cost.
        from collectors.physics.warp_physics import WarpPhysics

        n, device = self._spec.num_envs, self._device
        self._physics = WarpPhysics(
            self._model,
            num_envs=n,
            decimation=self._decimation,
            max_contacts=0,
            max_constraints=1,  # the cart presses one end of the rail at a time
            device=device,
        )
        self._generator = torch.Generator(device)
        self._ages = torch.zeros(n, dtype=torch.int64, device=device)
        self._returns = torch.zeros(n, dtype=torch.float64, device=device)
        # Whether the episode began hanging and at age 0, so that its return tells of success.
        self._counts = torch.zeros(n, dtype=torch.bool, device=device)
        # Sum of mean rewards and number of counted episodes since the last report.
        self._pending = torch.zeros(2, dtype=torch.float64, device=device)

    def _observe(self) -> Tensor:
        assert self._physics is not None
        position, angle = self._physics.qpos.unbind(1)
        velocity, angular_velocity = self._physics.qvel.unbind(1)
        return torch.stack([position, angle.cos(), angle.sin(), velocity, angular_velocity], 1)

    def _start_episodes(self, mask: Tensor) -> None:
        """New episodes where `mask`; draws the same numbers whatever the mask."""
        assert self._physics is not None
        noise = torch.rand((6, len(mask)), generator=self._generator, device=self._device)
        easy = noise[5] < self._easy_start_probability
        position, swing, angle, *velocities = (2 * noise[:5] - 1).unbind(0)
        angle = torch.where(easy, math.pi * angle, math.pi + START_NOISE * swing)
        self._physics.set_state(
            mask,
            torch.stack([START_NOISE * position, angle], 1),
            START_NOISE * torch.stack(velocities, 1),
        )
        self._ages.masked_fill_(mask, 0)
        self._returns.masked_fill_(mask, 0)
        self._counts.copy_(torch.where(mask, ~easy, self._counts))

    def _count_finished(self, ended: Tensor) -> None:
        # A non-finite return is of a broken episode, which the collector drops.
        counted = ended & self._counts & self._returns.isfinite()
        mean_rewards = torch.where(counted, self._returns, 0) / self._spec.episode_length
        self._pending += torch.stack([mean_rewards.sum(), counted.sum()])


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
    centered = (1 + _closeness(position, margin=2)) / 2
    slow = (1 + _closeness(angular_velocity, margin=5)) / 2
    gentle = (5 - action[:, 0].square()) / 5
    return upright * centered * slow * gentle


def _closeness(value: Tensor, margin: float) -> Tensor:
    """A Gaussian: 1 at 0 and 0.1 at `margin`."""
    return (math.log(0.1) * (value / margin).square()).exp()
