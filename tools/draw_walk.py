# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Draw how a trained robot follows a course of commands: pictures, velocities, feet.

    python tools/draw_walk.py runs/RUN docs/walk.png

Pictures need an OpenGL that renders without a screen, for example Debian's libosmesa6 and
MUJOCO_GL=osmesa; without one they are left out, and that is said.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import mujoco
import numpy as np
import torch

from collectors.env import resolve_task
from collectors.tasks.mujoco_env import MujocoEnv
from fastsac.core.policy import Policy
from fastsac.evaluation import saved_policy
from fastsac.run import open_run

mpl.use("Agg")
from matplotlib import pyplot as plt

COURSE = [(0.8, 0.0, 0.0), (0.5, 0.0, 0.7), (0.0, 0.35, 0.0), (-0.5, 0.0, 0.0), (0.9, 0.0, -0.4)]
"""Commands, vx m/s, vy m/s, yaw rate rad/s, each for SECONDS."""
SECONDS = 3.0
PICTURES = 6


@dataclass(frozen=True)
class Walk:
    """One env step per row."""

    period_s: float
    qpos: np.ndarray
    velocity: np.ndarray
    """(steps, 3) vx, vy, yaw rate in the frame of the base"""
    command: np.ndarray
    contact: np.ndarray
    """(steps, feet) bool"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config, state = open_run(args.run)
    env = resolve_task(config.env.task)(
        num_envs=1, device=torch.device("cpu"), evaluation=True, **config.env.args
    )
    assert isinstance(env, MujocoEnv)
    walk = record(env, saved_policy(state, env.spec, config.algorithm))
    _draw(walk, _render(env._task.simulation.model, walk), args.picture)
    error = np.linalg.norm(walk.velocity[:, :2] - walk.command[:, :2], axis=1).mean()
    print(f"{args.picture}: mean planar velocity error {error:.3f} m/s over the course")


def record(env: MujocoEnv, policy: Policy) -> Walk:
    """The deterministic policy over the course."""
    task, period_s = env._task, env.spec.control_period_s
    observation = env.reset(1)
    physics = env._physics
    assert physics is not None
    rows: list[tuple[np.ndarray, ...]] = []
    for command in COURSE:
        for _ in range(round(SECONDS / period_s)):
            task.memory["command"][:] = torch.tensor(command)
            observation = task.observe()
            env.step(policy.mode(observation.actor_obs))
            seen = task.observe().actor_obs[0].numpy()
            feet = physics.sensordata.shape[1] // 7
            velocity = np.array([seen[0], seen[1], seen[5]])
            contact = physics.sensordata[0, 6 * feet :].numpy() > 0
            rows.append((physics.qpos[0].numpy().copy(), velocity, np.array(command), contact))
    return Walk(period_s, *(np.stack(column) for column in zip(*rows, strict=True)))


def _render(model: mujoco.MjModel, walk: Walk) -> list[np.ndarray]:
    try:
        renderer = mujoco.Renderer(model, 300, 400)
    except Exception as error:  # whatever a missing OpenGL raises
        print(f"no pictures: OpenGL without a screen is not there ({error})")
        return []
    camera = mujoco.MjvCamera()
    camera.distance, camera.elevation, camera.azimuth = 1.5, -18, 125
    data = mujoco.MjData(model)
    pictures = []
    for row in np.linspace(0, len(walk.qpos) - 1, PICTURES + 1).astype(int)[1:]:
        data.qpos[:] = walk.qpos[row]
        mujoco.mj_forward(model, data)
        camera.lookat[:] = walk.qpos[row, :3]
        renderer.update_scene(data, camera)
        pictures.append(renderer.render())
    renderer.close()
    return pictures


def _draw(walk: Walk, pictures: list[np.ndarray], path: Path) -> None:
    rows = 3 if pictures else 2
    figure = plt.figure(figsize=(11, 2.4 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 1, height_ratios=[1.0, 1.5, 0.8][-rows:])
    time_s = np.arange(len(walk.qpos)) * walk.period_s
    if pictures:
        strip = grid[0].subgridspec(1, len(pictures), wspace=0.02)
        for i, picture in enumerate(pictures):
            axes = figure.add_subplot(strip[i])
            axes.imshow(picture)
            axes.axis("off")
    axes = figure.add_subplot(grid[rows - 2])
    names = ("forward, m/s", "leftward, m/s", "yaw rate, rad/s")
    for i, (name, colour) in enumerate(zip(names, ("C0", "C1", "C2"), strict=True)):
        axes.plot(time_s, walk.command[:, i], color=colour, linestyle="--", linewidth=1)
        axes.plot(time_s, walk.velocity[:, i], color=colour, linewidth=1.2, label=name)
    axes.set_ylabel("commanded (dashed), done")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    axes.grid(alpha=0.3)
    feet = figure.add_subplot(grid[rows - 1], sharex=axes)
    feet.imshow(
        walk.contact.T, aspect="auto", cmap="Greys", interpolation="nearest",
        extent=(0.0, float(time_s[-1]), walk.contact.shape[1] - 0.5, -0.5),
    )  # fmt: skip
    feet.set_xlabel("time, s")
    feet.set_ylabel("foot on the ground")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
