"""Configuration, spec and curriculum of mjlab's registered tasks."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from pathlib import Path

import mjlab.tasks  # noqa: F401 (registers the tasks)
import numpy as np
import torch
from mjlab.envs import ManagerBasedRlEnv, ManagerBasedRlEnvCfg
from mjlab.envs.mdp.actions import JointPositionAction
from mjlab.tasks.registry import load_env_cfg
from mjlab.tasks.tracking.mdp import MotionCommand, MotionCommandCfg
from torch import Tensor

from collectors.adapters._random_stream import RandomStream
from collectors.adapters.rsl_rl_env import observation_of
from collectors.env import EnvSpec
from fastsac.core.shard_state import MergeRule

VECTOR_STEPS = "vector_steps"
"""Shard state: mjlab's `common_step_counter`, which its stage schedules read."""
TERRAIN_LEVEL = "terrain_level"
"""Shard state: mean terrain level at which episodes ended."""
TERRAIN_WINDOW = 1024
"""Episodes of the whole fleet that the mean level remembers."""
MOTION_ARRAYS = ("joint_pos joint_vel body_pos_w body_quat_w body_lin_vel_w body_ang_vel_w").split()


class FailureEma:
    """One shard's share of the failure-bin EMA of a motion: D = sum_t a (1 - a)^(T - t) c[t]."""

    def __init__(self, command: MotionCommand) -> None:
        self.command = command
        self.delta = torch.zeros(
            command.bin_count, dtype=torch.float64, device=command.time_steps.device
        )

    def count(self, frames: Tensor, terminated: Tensor) -> None:
        """Add a vector step: `frames` (num_envs,) int64 shown, `terminated` (num_envs,) bool."""
        bins = self.command.bin_count
        shown = (frames * bins // max(self.command.motion.time_step_total, 1)).clamp(0, bins - 1)
        rate = self.command.cfg.adaptive_alpha
        self.delta.mul_(1 - rate).index_add_(0, shown, terminated.double(), alpha=rate)


def load_cfg(
    task_id: str, evaluation: bool, episode_length: int | None, motion_file: str | None
) -> ManagerBasedRlEnvCfg:
    """The task's configuration without automatic resets, with the arguments filled in."""
    training = load_env_cfg(task_id)
    cfg = load_env_cfg(task_id, play=True) if evaluation else training
    cfg.auto_reset = False
    cfg.episode_length_s = training.episode_length_s
    if episode_length is not None:
        # mjlab rounds up to whole env steps.
        cfg.episode_length_s = (episode_length - 0.5) * cfg.sim.mujoco.timestep * cfg.decimation
    if evaluation:
        for group in cfg.observations.values():
            group.enable_corruption = False
    motions = [c for c in cfg.commands.values() if isinstance(c, MotionCommandCfg)]
    if motions and motion_file is None:
        raise ValueError(f"mjlab task {task_id!r} tracks a motion: set env.args.motion_file (npz)")
    if motion_file is not None:
        if not motions:
            raise ValueError(f"mjlab task {task_id!r} tracks no motion: drop motion_file")
        _check_motion_file(motion_file)
        for motion in motions:
            motion.motion_file = motion_file
    return cfg


def _check_motion_file(path: str) -> None:
    if not Path(path).is_file():
        raise ValueError(f"motion_file {path!r} does not exist: give the path of an npz file")
    with np.load(path) as arrays:
        missing = [name for name in MOTION_ARRAYS if name not in arrays]
    if missing:
        raise ValueError(f"motion_file {path!r} lacks {missing}: it needs {MOTION_ARRAYS}")


def build(cfg: ManagerBasedRlEnvCfg, device: torch.device) -> ManagerBasedRlEnv:
    """mjlab's environment; its tables are not shown, its warnings are."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        env = ManagerBasedRlEnv(cfg, device=str(device))
    for line in told.getvalue().splitlines():
        if "warning" in line.lower():
            warnings.warn(f"mjlab: {line}", stacklevel=2)
    return env


@functools.cache
def probe(
    task_id: str,
    episode_length: int | None,
    action_limit: float | None,
    motion_file: str | None,
    num_envs: int,
) -> EnvSpec:
    """The spec, read from a one-env copy of the training task."""
    cfg = load_cfg(task_id, False, episode_length, motion_file)
    rules = stage_rules(cfg)
    cfg.scene.num_envs = 1
    cfg.events, cfg.rewards, cfg.terminations, cfg.curriculum, cfg.metrics = {}, {}, {}, {}, {}
    stream = RandomStream(torch.device("cpu"))
    with stream.active():
        env = build(cfg, torch.device("cpu"))
    for command in map(env.command_manager.get_term, env.command_manager.active_terms):
        if isinstance(command, MotionCommand):
            given, needed = command.motion.joint_pos.shape[1], command.robot.num_joints
            if given != needed:
                raise ValueError(
                    f"motion_file {motion_file!r} has {given} joints where the robot of "
                    f"{task_id!r} has {needed}: give a motion retargeted to it"
                )
    shown = observation_of(env.observation_manager.compute())
    high = _action_bounds(env, task_id, action_limit)
    for name, ema in failure_emas(env).items():
        rate = ema.command.cfg.adaptive_alpha
        rules[name] = MergeRule(kind="linear_ema", size=ema.command.bin_count, rate=rate)
    spec = EnvSpec(
        num_envs=num_envs,
        actor_obs_dim=shown.actor_obs.shape[1],
        critic_obs_dim=None if shown.critic_obs is None else shown.critic_obs.shape[1],
        action_low=-high,
        action_high=high,
        control_period_s=env.step_dt,
        episode_length=env.max_episode_length,
        shard_states=rules,
    )
    env.close()
    return spec


def stage_rules(cfg: ManagerBasedRlEnvCfg) -> dict[str, MergeRule]:
    """Rules of the states that a curriculum has, whatever its robot."""
    rules = {}
    if cfg.curriculum:
        rules[VECTOR_STEPS] = MergeRule(kind="max", size=1)
        if cfg.scene.terrain is not None and cfg.scene.terrain.terrain_generator is not None:
            rules[TERRAIN_LEVEL] = MergeRule(kind="weighted_mean", size=1, window=TERRAIN_WINDOW)
    return rules


def failure_emas(env: ManagerBasedRlEnv) -> dict[str, FailureEma]:
    terms = {name: env.command_manager.get_term(name) for name in env.command_manager.active_terms}
    return {
        f"{name}_failures": FailureEma(term)
        for name, term in terms.items()
        if isinstance(term, MotionCommand) and term.cfg.sampling_mode == "adaptive"
    }


def _action_bounds(env: ManagerBasedRlEnv, task_id: str, limit: float | None) -> Tensor:
    """(action_dim,) symmetric bounds: `limit`, or those that reach the farther joint limit."""
    if limit is not None:
        return torch.full((env.action_manager.total_action_dim,), float(limit))
    parts = []
    for name in env.action_manager.active_terms:
        term = env.action_manager.get_term(name)
        if not isinstance(term, JointPositionAction):
            raise ValueError(
                f"action {name!r} of {task_id!r} is a {type(term).__name__}, not a joint "
                "position, and has no known bounds: set env.args.action_limit to a positive number"
            )
        limits = env.scene[term.cfg.entity_name].data.joint_pos_limits[:, term.target_ids]
        default = torch.as_tensor(term.offset)[..., None]
        parts.append(((limits - default).abs().amax(-1) / term.scale)[0])
    bounds = torch.cat(parts).float().cpu()
    if not bool((bounds.isfinite() & (bounds > 0)).all()):
        raise ValueError(
            f"joints of {task_id!r} have no limits to bound its actions by: set "
            "env.args.action_limit to a positive number"
        )
    return bounds
