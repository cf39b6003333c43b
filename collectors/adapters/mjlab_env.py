"""mjlab's tasks as env shards (mjlab 1.6: velocity tracking, motion tracking, manipulation)."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import list_tasks
from mjlab.terrains import TerrainEntity
from torch import Tensor

from collectors.adapters._mjlab_task import (
    TERRAIN_LEVEL,
    VECTOR_STEPS,
    FailureEma,
    build,
    failure_emas,
    load_cfg,
    probe,
    stage_rules,
)
from collectors.adapters._random_stream import RandomStream
from collectors.adapters.rsl_rl_env import merge_rows, observation_of
from collectors.env import EnvSpec, Observation, Step
from fastsac.core.shard_state import LocalState


class MjlabShard:
    """An env shard of one of mjlab's registered tasks.

    Observations are the groups `actor` and `critic`. The model is compiled and the simulator
    allocated by `reset`; `spec` is read from a copy of the task with one env on the CPU, without
    its events and rewards, built once per process and never stepped.

    Final observations are exact. With mjlab's `auto_reset=False`, `step` returns what an env that
    goes on would show: same kinematics, same noise, histories advanced once. `reset(env_ids)` then
    restarts the done envs and gives only their histories the new episode's first frame, so other
    envs keep the observation of `step`. The price is a second forward pass in steps with a done.

    Actions: a joint-position target is `default + scale * action`, unbounded in mjlab. Bounds are
    symmetric and reach the farther joint limit: max(|lower - default|, |upper - default|) / scale.

    Randomness: mjlab draws from the global generators; they hold this shard's own stream while it
    runs. `reset(seed)` also redraws what mjlab draws once (`startup` events, terrain levels), but
    the shape of a generated terrain stays that of the first seed. In training the ages of the
    first episodes are spread, as mjlab's runner does, so that resets do not come all at once.

    Evaluation uses the registry's play configuration, with training's time limit and without
    observation noise. mjlab cannot save its state, so neither can this.

    Shard states, as the task has them:

    - `<command>_failures` (linear_ema): failures per bin of motion frames, counted here at the
      frame at which an env terminated. The fleet's EMA replaces mjlab's `bin_failed_count`, which
      mjlab goes on updating with its own failures until the next one arrives.
    - `vector_steps` (max): the step counter behind stage schedules. Shards step together, so the
      largest is the fleet's tick; a resumed run continues its stages.
    - `terrain_level` (weighted_mean by episodes): reported only, levels belong to single envs.
    """

    def __init__(
        self,
        task_id: str,
        *,
        num_envs: int,
        device: torch.device,
        evaluation: bool,
        episode_length: int | None = None,
        action_limit: float | None = None,
        motion_file: str | None = None,
    ) -> None:
        """Check the arguments.

        Args:
            task_id: as registered with mjlab, for example Mjlab-Velocity-Flat-Unitree-Go1.
            episode_length: env steps until truncation; the task's own if absent.
            action_limit: bound of every action, -limit to limit, instead of the joints' limits.
            motion_file: npz of the reference motion, for tracking tasks.
        Raises:
            ValueError: an unknown task, a number out of range, or no usable motion file.
        """
        if task_id not in list_tasks():
            near = difflib.get_close_matches(task_id, list_tasks(), n=3, cutoff=0.0)
            raise ValueError(f"mjlab has no task {task_id!r}: nearest are {', '.join(near)}")
        if episode_length is not None and episode_length < 1:
            raise ValueError(f"episode_length is {episode_length}: give at least 1 env step")
        if action_limit is not None and not 0 < action_limit < math.inf:
            raise ValueError(f"action_limit is {action_limit}: give a positive number")
        self._cfg = load_cfg(task_id, evaluation, episode_length, motion_file)
        self._cfg.scene.num_envs = num_envs
        self._probe = functools.partial(
            probe, task_id, episode_length, action_limit, motion_file, num_envs
        )
        self._device = device
        self._evaluation = evaluation
        self._stream = RandomStream(device)
        self._fleet: dict[str, Tensor] = {}
        self._env: ManagerBasedRlEnv | None = None
        self._failures: dict[str, FailureEma] = {}
        self._levels = torch.zeros(2, dtype=torch.float64, device=device)
        self._stages = stage_rules(self._cfg)

    @property
    def spec(self) -> EnvSpec:
        """Raises ValueError where action bounds are unknown or the motion fits another robot."""
        return self._probe()

    def reset(self, seed: int) -> Observation:
        """Start every env afresh; what the fleet's view has set stays."""
        if self._env is None:
            self._stream.seed(seed)
            with self._stream.active():
                self._env = build(self._cfg, self._device)
            self._failures = failure_emas(self._env)
        env = self._env
        for ema in self._failures.values():
            ema.delta.zero_()
            ema.command.bin_failed_count.zero_()
        self._levels.zero_()
        self._use_fleet_state(env)
        self._stream.seed(seed)
        with self._stream.active():
            if "startup" in env.event_manager.available_modes:
                env.event_manager.apply(mode="startup")
            groups = self._start_all(env)
            if not self._evaluation:
                env.episode_length_buf.random_(0, env.max_episode_length)
        self._shown = observation_of(groups)
        return self._shown

    def reset_envs(self, mask: Tensor) -> Observation:
        """Start new episodes where `mask` (num_envs,) is true; returns all observations."""
        env_ids = mask.nonzero().flatten()
        if len(env_ids):
            with self._stream.active():
                groups, _ = self._running().reset(env_ids=env_ids)
            self._shown = merge_rows(mask, observation_of(groups), self._shown)
        return self._shown

    def step(self, action: Tensor) -> Step:
        """Advance one control period. `action`: (num_envs, action_dim) within the bounds."""
        env = self._running()
        # The command moves on to the next frame at the end of mjlab's step.
        frames = {name: ema.command.time_steps.clone() for name, ema in self._failures.items()}
        with self._stream.active():
            groups, reward, terminated, time_outs, _ = env.step(action)
        # A finite horizon is part of the MDP; copies, for mjlab writes the next ones in place.
        terminated = terminated | time_outs if env.cfg.is_finite_horizon else terminated.clone()
        truncated = time_outs & ~terminated
        reward = reward.clone()
        info = _reward_terms(env)
        for name, ema in self._failures.items():
            ema.count(frames[name], terminated)
        if TERRAIN_LEVEL in self._stages:
            ended = torch.stack([_terrain(env).terrain_levels, torch.ones_like(terminated)])
            self._levels += (ended * (terminated | truncated)).sum(1)
        final = self._shown = observation_of(groups)
        shown = self.reset_envs(terminated | truncated)
        return Step(
            actor_obs=shown.actor_obs,
            critic_obs=shown.critic_obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_actor_obs=final.actor_obs,
            final_critic_obs=final.critic_obs,
            info=info,
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        """Failures and terrain levels since the last report, and the step counter."""
        report = {}
        for name, ema in self._failures.items():
            report[name] = LocalState(value=ema.delta.cpu().clone())
            ema.delta.zero_()
        if VECTOR_STEPS in self._stages:
            counter = float(self._running().common_step_counter)
            report[VECTOR_STEPS] = LocalState(value=torch.tensor([counter], dtype=torch.float64))
        if TERRAIN_LEVEL in self._stages:
            total, episodes = self._levels.tolist()
            self._levels.zero_()
            value = torch.tensor([total], dtype=torch.float64)
            report[TERRAIN_LEVEL] = LocalState(value=value, weight=episodes)
        return report

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        """Sample frames and advance stages by the fleet's view, from the next resets on."""
        self._fleet = {name: value.clone() for name, value in state.items()}
        if self._env is not None:
            self._use_fleet_state(self._env)

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("mjlab's simulator and managers cannot be saved")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("mjlab's simulator and managers cannot be loaded")

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _running(self) -> ManagerBasedRlEnv:
        assert self._env is not None, "call reset first"
        return self._env

    def _start_all(self, env: ManagerBasedRlEnv) -> Mapping[str, Any]:
        """New episodes in every env; returns mjlab's observation groups."""
        counter = env.common_step_counter
        terrain = env.scene.terrain
        if terrain is not None and terrain.terrain_origins is not None:
            top = terrain.cfg.max_init_terrain_level
            rows = len(terrain.terrain_origins)
            terrain.terrain_levels.random_(0, rows if top is None else min(top + 1, rows))
            origins = terrain.terrain_origins[terrain.terrain_levels, terrain.terrain_types]
            env.scene.env_origins.copy_(origins)
            # mjlab moves levels by the distance walked, except before its first step.
            env.common_step_counter = 0
        groups, _ = env.reset()
        env.common_step_counter = counter
        for ema in self._failures.values():
            # Failures of the episodes that were cut off belong to no report.
            ema.command._current_bin_failed.zero_()
        return groups

    def _use_fleet_state(self, env: ManagerBasedRlEnv) -> None:
        if VECTOR_STEPS in self._fleet:
            known = int(self._fleet[VECTOR_STEPS])
            env.common_step_counter = max(env.common_step_counter, known)
        for name, ema in self._failures.items():
            if name in self._fleet:
                ema.command.bin_failed_count.copy_(self._fleet[name])


def _terrain(env: ManagerBasedRlEnv) -> TerrainEntity:
    assert env.scene.terrain is not None
    return env.scene.terrain


def _reward_terms(env: ManagerBasedRlEnv) -> dict[str, Tensor]:
    """(num_envs,) weighted reward terms per second, as mjlab logs them."""
    manager = env.reward_manager
    columns = manager._step_reward.clone().unbind(1)
    return {f"reward_{n}": c for n, c in zip(manager.active_terms, columns, strict=True)}
