"""An environment of your own: a point mass that is pushed to the origin, simulated in PyTorch.

    python docs/examples/point_mass.py            # train it from Python
    fastsac train docs/examples/point_mass.yaml   # or from the command line

The five duties of an `EnvShard`: say its sizes (`spec`), reset, step with auto-reset, save and
load itself, and speak with the fleet about shared state (this one has nothing to share).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation, Step
from fastsac.core.shard_state import LocalState

CONTROL_PERIOD_S = 0.1
EPISODE_LENGTH = 50


class PointMass:
    """Reward 1 - |position| per env step; leaving [-2, 2] m ends the episode."""

    def __init__(
        self, *, num_envs: int, device: torch.device, evaluation: bool, max_force_n: float = 1.0
    ) -> None:
        del evaluation  # trains and evaluates on the same start states
        self._device = device
        self.spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=2,
            action_low=torch.tensor([-max_force_n]),
            action_high=torch.tensor([max_force_n]),
            control_period_s=CONTROL_PERIOD_S,
            episode_length=EPISODE_LENGTH,
        )

    def reset(self, seed: int) -> Observation:
        num_envs = self.spec.num_envs
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._state = torch.zeros(num_envs, 2, device=self._device)  # position m, velocity m/s
        self._age = torch.zeros(num_envs, dtype=torch.int64, device=self._device)
        return self.reset_envs(torch.ones(num_envs, dtype=torch.bool, device=self._device))

    def reset_envs(self, mask: Tensor) -> Observation:
        shape, generator = self._state.shape, self._generator
        start = 2 * torch.rand(shape, generator=generator, device=self._device) - 1
        self._state = torch.where(mask[:, None], start, self._state)
        self._age = torch.where(mask, 0, self._age)
        return Observation(self._state)

    def step(self, action: Tensor) -> Step:
        position, velocity = self._state.unbind(1)
        velocity = velocity + CONTROL_PERIOD_S * action[:, 0]
        position = position + CONTROL_PERIOD_S * velocity
        self._state = final = torch.stack([position, velocity], 1)
        self._age = self._age + 1
        terminated = position.abs() > 2
        truncated = ~terminated & (self._age >= EPISODE_LENGTH)
        return Step(
            actor_obs=self.reset_envs(terminated | truncated).actor_obs,
            critic_obs=None,
            reward=1 - position.abs(),
            terminated=terminated,
            truncated=truncated,
            final_actor_obs=final,
            final_critic_obs=None,
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        return {}

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._state, "age": self._age, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._age = state["state"], state["age"]
        self._generator.set_state(state["generator"])

    def close(self) -> None:
        pass


if __name__ == "__main__":
    from fastsac.config_files import load_config
    from fastsac.trainer import train

    config = load_config(str(Path(__file__).with_suffix(".yaml")))
    result = train(config, env=PointMass)
    print(result.summary["metrics"]["eval/return"], result.run_dir)
