"""Compares this code with recorded numbers: `python tools/check_golden.py FILE...`.

The files are described in tests/golden/README.md. Exits 1 when a quantity is off and 2 when a
file cannot be read.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fastsac.core.config import AlgorithmConfig
from fastsac.core.policy import PolicySpec
from fastsac.core.replay import (
    ReplayLayout,
    ReplaySampler,
    ReplayStorage,
    ReplayWriter,
    sample_window,
)
from fastsac.core.transition import Batch
from learner.losses import critic_targets
from learner.update import Learner, Noise

BATCH = "obs next_obs critic_obs next_critic_obs action reward terminated".split()
UPDATE = (
    "n_eff action_scale action_bias log_alpha eps_next eps_pi det_action mean log_std next_action "
    "next_log_prob target_distribution target_value logits critic_loss alpha_loss alpha_grad "
    "log_alpha_after actor_loss"
).split()
STREAM = (
    "reward done truncated sample_t sample_env n_step_reward n_eff next_t next_done next_trunc"
).split()


SAME_NAMES = (
    "actor_hidden critic_hidden num_q num_atoms v_min v_max gamma tau weight_decay max_grad_norm "
    "target_entropy_ratio log_std_min log_std_max"
).split()
FOLLOW_LOG_PROB = (
    "target_distribution target_value critic_loss critic_grad critic_grad_norm alpha_loss "
    "alpha_grad actor_loss actor_grad actor_grad_norm"
).split()


class Tolerance(NamedTuple):
    """An entry may be off by `absolute` + `relative` * |recorded|."""

    relative: float = 1e-5
    absolute: float = 1e-6


Pair = tuple[Tensor, Tensor]
"""What this code gives, and what is recorded."""


class Golden(NamedTuple):
    """A file of recorded numbers."""

    meta: dict[str, Any]
    arrays: dict[str, Tensor]


class Errors(NamedTuple):
    """Largest errors of one quantity."""

    absolute: float = 0.0
    relative: float = 0.0
    """To the quantity's largest entry."""
    used: float = 0.0
    """Of an entry's tolerance; above 1 it is off."""


def main(arguments: list[str]) -> int:
    console = Console()
    if not arguments:
        return _refuse("give the .npz files to check, for example tests/golden/update_a.npz")
    try:
        files = {path: read_golden(path) for path in arguments}
    except ValueError as error:
        return _refuse(str(error))
    results = [_report(console, path, golden) for path, golden in files.items()]
    return 0 if all(results) else 1


def read_golden(path: str) -> Golden:
    """Read a file and check that it is complete.

    Raises:
        ValueError: missing, unreadable or of another form.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays.pop("meta")))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (ValueError, EOFError, KeyError, AttributeError, TypeError, zipfile.BadZipFile):
        raise ValueError(f"{path}: not a .npz file of the golden form") from None
    expected = STREAM if "sample_t" in arrays else BATCH + UPDATE
    missing = [name for name in expected if name not in arrays]
    if missing:
        raise ValueError(f"{path}: not of the golden form, {', '.join(missing)} missing")
    return Golden(meta, {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()})


def replay_update(golden: Golden) -> dict[str, Pair]:
    """The recorded update, done by `Learner`."""
    g, learner = golden.arrays, _make_learner(golden)
    batch = Batch(
        **{name: g[name] for name in BATCH},
        discount=golden.meta["gamma"] ** g["n_eff"].float(),
    )
    support = torch.linspace(golden.meta["v_min"], golden.meta["v_max"], golden.meta["num_atoms"])
    with torch.no_grad():
        mean, log_std = learner.actor(batch.obs)
        following = learner.actor.sample(batch.next_obs, g["eps_next"])
        targets, log_prob = critic_targets(
            learner.actor, learner.target, learner.alpha, batch, g["eps_next"], support, "each"
        )
        ours = {
            "det_action": learner.actor.mode(batch.obs),
            "mean": mean,
            "log_std": log_std,
            "next_action": following.action,
            "next_log_prob": log_prob,
            "target_distribution": targets,
            "target_value": targets @ support,
            "logits": learner.critic(batch.critic_obs, batch.action),
        }
    gradients: list[Tensor] = []
    metrics = learner.update(
        batch,
        Noise(g["eps_next"], g["eps_pi"]),
        update_actor=True,
        average=lambda gradient: gradients.append(gradient.clone()),
    )
    critic_gradient, alpha_gradient, actor_gradient = gradients
    ours |= {name: value for name, value in metrics.items() if name in g}
    ours |= {"alpha_grad": alpha_gradient, "log_alpha_after": learner.log_alpha.detach()}
    for name, module, flat in [
        ("critic_grad", learner.critic, critic_gradient),
        ("actor_grad", learner.actor, actor_gradient),
        ("actor_after", learner.actor, learner.flat_actor.values.detach()),
        ("critic_after", learner.critic, learner.flat_critic.values.detach()),
        ("target_after", learner.target, learner.flat_target.values.detach()),
    ]:
        ours |= {f"{name}/{key}": view for key, view in golden_views(module, flat).items()}
    return {name: (value, g[name]) for name, value in ours.items()}


def golden_views(module: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Views of a flat tensor in the order of `module.parameters()`, by recorded name."""
    parameters = dict(module.named_parameters())
    views: dict[str, Tensor] = {}
    parts = flat.split([parameter.numel() for parameter in parameters.values()])
    for (name, parameter), part in zip(parameters.items(), parts, strict=True):
        tensor = part.view_as(parameter)
        stacked = re.fullmatch(r"(linears|norms)\.(\d+)\.(\w+)", name)
        if stacked is None:
            name = name.replace("trunk", "net").replace("log_std", "fc_logstd")
            views[re.sub(r"^mean", "fc_mu.0", name)] = tensor
            continue
        position = 3 * int(stacked[2]) + (stacked[1] == "norms")
        for i, own in enumerate(tensor):
            is_matrix = stacked[1] == "linears" and stacked[3] == "weight"
            views[f"qnets.{i}.net.{position}.{stacked[3]}"] = own if is_matrix else own[0]
    return views


def replay_stream(golden: Golden) -> dict[str, Pair]:
    """The recorded samples gathered from a replay shard that took the recorded stream."""
    g, meta = golden.arrays, golden.meta
    num_envs, capacity, num_steps = meta["num_envs"], meta["capacity"], g["reward"].shape[0]
    layout = ReplayLayout(
        capacity=capacity,
        num_envs=num_envs,
        actor_obs_dim=2,
        critic_obs_dim=None,
        action_dim=1,
        final_slots=num_envs * capacity,
    )
    with tempfile.TemporaryDirectory() as directory:
        storage = ReplayStorage.allocate(layout, torch.device("cpu"), directory, "golden")
    writer, env = ReplayWriter(storage), torch.arange(num_envs, dtype=torch.float32)
    writer.start(torch.stack([torch.zeros(num_envs), env], 1), None)
    for t in range(num_steps):
        writer.append(
            action=torch.zeros(num_envs, 1),
            reward=g["reward"][t],
            terminated=g["done"][t] & ~g["truncated"][t],
            truncated=g["truncated"][t],
            valid=torch.ones(num_envs, dtype=torch.bool),
            final_actor_obs=torch.stack([torch.full_like(env, t + 0.5), env], 1),
            final_critic_obs=None,
            actor_obs=torch.stack([torch.full_like(env, t + 1), env], 1),
            critic_obs=None,
            oldest_readable=max(0, t - capacity),
        )
    sampler = ReplaySampler([storage], meta["n"], meta["gamma"])
    sampler.draw([sample_window(num_steps, capacity, 0)], 1, 1, torch.Generator())
    batch = sampler.gather(g["sample_t"] % layout.ring * num_envs + g["sample_env"])
    # a window that is cut at the newest row is recorded as truncated too
    terminated = g["next_done"].bool() & ~g["next_trunc"].bool()
    truncated = g["truncated"][g["next_t"].long(), g["sample_env"]]
    # where no episode was truncated, the next row's observation (t + 1, e) is the true next one
    next_t = torch.where(truncated, g["next_t"], g["next_t"] + 0.5)
    # that window went on summing in the oldest rows of the ring; this code stops at the newest
    ahead = torch.arange(meta["n"])
    row = g["sample_t"][:, None] + ahead
    beyond = (row >= num_steps) & (ahead < g["n_eff"][:, None])
    oldest = g["reward"][row.clamp(min=capacity) - capacity, g["sample_env"][:, None]]
    surplus = (beyond * oldest * meta["gamma"] ** ahead).sum(1)
    n_eff = batch.discount.double().log() / math.log(meta["gamma"])
    return {
        "obs": (batch.obs, torch.stack([g["sample_t"], g["sample_env"]], 1)),
        "n_step_reward": (batch.reward, g["n_step_reward"] - surplus),
        "n_eff": (n_eff, g["n_eff"] - beyond.sum(1)),
        "next_obs": (batch.next_obs, torch.stack([next_t, g["sample_env"]], 1)),
        "terminated": (batch.terminated, terminated),
    }


def compare(ours: Tensor, recorded: Tensor, tolerance: Tolerance) -> Errors:
    """Largest errors; NaN is infinitely far off."""
    recorded, ours = recorded.double(), ours.double().reshape(recorded.shape)
    error, size = (ours - recorded).abs().nan_to_num(torch.inf), recorded.abs()
    used = error / (tolerance.absolute + tolerance.relative * size)
    relative = error.max() / size.max().clamp(min=1e-30)
    return Errors(float(error.max()), float(relative), float(used.max()))


def tolerance_of(quantity: str, meta: Mapping[str, Any]) -> Tolerance:
    """How far a quantity may be from what is recorded."""
    # The recorder's log(1 - tanh^2 + 1e-6) is off by 1e-6 / (1 - tanh^2), some 1e-5 here, where
    # this code is exact. Losses, gradients and targets see it times alpha. Its weight decay of
    # log alpha, 3e-6 |log alpha| per update, is none of ours.
    if quantity == "next_log_prob":
        return Tolerance(absolute=1e-4)
    if quantity in FOLLOW_LOG_PROB:
        return Tolerance(absolute=1e-6 + 1e-4 * meta["alpha"])
    # AdamW's first step is lr * sign(gradient), however tiny the gradient
    if quantity in ("actor_after", "critic_after"):
        return Tolerance(absolute=2e-4)
    if quantity == "target_after":
        return Tolerance(absolute=2e-4 * meta["tau"])
    return Tolerance()


def _make_learner(golden: Golden) -> Learner:
    """A learner with the recorded sizes, hyperparameters and weights."""
    g, meta = golden.arrays, golden.meta
    algorithm = AlgorithmConfig(
        **{name: meta[name] for name in SAME_NAMES},
        actor_lr=meta["lr"],
        critic_lr=meta["lr"],
        alpha_lr=meta["lr"],
        batch_size=meta["batch"],
        betas=(meta["beta1"], meta["beta2"]),
    )
    policy = PolicySpec(
        obs_dim=meta["actor_obs_dim"],
        action_low=g["action_bias"] - g["action_scale"],
        action_high=g["action_bias"] + g["action_scale"],
        hidden=meta["actor_hidden"],
        log_std_min=meta["log_std_min"],
        log_std_max=meta["log_std_max"],
    )
    learner = Learner(
        policy=policy,
        critic_obs_dim=meta["critic_obs_dim"],
        algorithm=algorithm,
        device=torch.device("cpu"),
        generator=torch.Generator(),
    )
    with torch.no_grad():
        for prefix, module, flat in (
            ("actor", learner.actor, learner.flat_actor),
            ("critic", learner.critic, learner.flat_critic),
            ("target", learner.target, learner.flat_target),
        ):
            for name, view in golden_views(module, flat.values).items():
                view.copy_(g[f"{prefix}/{name}"])
        learner.flat_alpha.values.copy_(g["log_alpha"])
    return learner


def _report(console: Console, path: str, golden: Golden) -> bool:
    """Print the errors of a file; true when all are within their tolerances."""
    is_stream = "sample_t" in golden.arrays
    table = Table("quantity", "absolute", "relative", "tolerance", "used", title=path)
    worst: defaultdict[str, Errors] = defaultdict(Errors)
    pairs = replay_stream(golden) if is_stream else replay_update(golden)
    for name, (ours, recorded) in pairs.items():
        quantity = name.split("/")[0]
        errors = compare(ours, recorded, tolerance_of(quantity, golden.meta))
        worst[quantity] = Errors(*map(max, errors, worst[quantity]))
    for quantity, errors in worst.items():
        relative, absolute = tolerance_of(quantity, golden.meta)
        table.add_row(
            quantity,
            f"{errors.absolute:.1e}",
            f"{errors.relative:.1e}",
            f"{relative:.0e} |x| + {absolute:.0e}",
            f"{errors.used:.0%}",
            style="red" if errors.used > 1 else None,
        )
    console.print(table)
    return all(errors.used <= 1 for errors in worst.values())


def _refuse(reason: str) -> int:
    print(f"check_golden: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
