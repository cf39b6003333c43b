"""A contract test for environments: what collectors and learners rely on, rule by rule.

A test of one's own environment is `check_env_shard(MyEnv, my_arg=3)`. In the spirit of dm_env's
`test_utils` (Muldal et al. 2019).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from collectors.env import EnvFactory, EnvShard, EnvSpec, Observation, Step, check_spec
from collectors.guard import check_observation, check_step, check_tensor
from fastsac.core.shard_state import LocalState

SEED = 1


def check_env_shard(
    factory: EnvFactory,
    *,
    num_envs: int = 4,
    device: str = "cpu",
    num_steps: int = 64,
    **args: Any,
) -> list[str]:
    """Hold an environment to `EnvShard`'s contract with random actions.

    Streams are compared bit for bit, which engines promise on the CPU only.

    Args:
        factory: the environment's class, or a function that builds it.
        num_steps: vector steps per rule; the time limit is checked over two whole episodes.
        args: further arguments of the factory, as under `env.args`.
    Returns:
        Notes on what the environment legitimately leaves out.
    Raises:
        AssertionError: says which rule is broken and where.
    """
    maker = _Maker(factory, num_envs, torch.device(device), args)
    for evaluation in (False, True):
        _check_spec(maker, evaluation)
        _check_steps(maker, evaluation)
    _check_seeds(maker, num_steps)
    _check_reset_envs(maker, num_steps)
    _check_shard_states(maker, num_steps)
    return _check_saving(maker, num_steps)


@dataclass(frozen=True)
class _Maker:
    """Builds the environment under test, and actions for it."""

    factory: EnvFactory
    num_envs: int
    device: torch.device
    args: Mapping[str, Any]

    def make(self, *, evaluation: bool = False) -> EnvShard:
        return self.factory(
            num_envs=self.num_envs, device=self.device, evaluation=evaluation, **self.args
        )

    def actions(self, spec: EnvSpec, num_steps: int, seed: int = SEED) -> list[Tensor]:
        """`num_steps` of (num_envs, action_dim), uniform within the bounds."""
        generator = torch.Generator().manual_seed(seed)
        unit = torch.rand((num_steps, self.num_envs, spec.action_dim), generator=generator)
        actions = spec.action_low + unit * (spec.action_high - spec.action_low)
        return list(actions.to(self.device).unbind(0))


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise AssertionError(f"environment contract: {rule}")


def _check_spec(maker: _Maker, evaluation: bool) -> None:
    env, training = maker.make(evaluation=evaluation), maker.make()
    with _contract():
        check_spec(env.spec, num_envs=maker.num_envs)
    for field in ("actor_obs_dim", "critic_obs_dim", "control_period_s"):
        agree = getattr(env.spec, field) == getattr(training.spec, field)
        _require(agree, f"spec.{field} must be the same in training and evaluation")
    env.close()
    training.close()


def _check_steps(maker: _Maker, evaluation: bool) -> None:
    """Shapes, dones, final observations and the time limit over two episodes."""
    env = maker.make(evaluation=evaluation)
    spec = env.spec
    _check_observation(env.reset(SEED), spec, maker.device, "reset")
    lengths = torch.zeros(maker.num_envs, dtype=torch.int64, device=maker.device)
    nobody = torch.zeros(maker.num_envs, dtype=torch.bool, device=maker.device)
    finals_differ = False
    for action in maker.actions(spec, 2 * spec.episode_length):
        given = action.clone()
        step = env.step(action)
        _require(torch.equal(action, given), "step must not write into its action")
        _check_step(step, spec, maker.device)
        done = step.terminated | step.truncated
        lengths += 1
        late = ~done & (lengths >= spec.episode_length)
        _require(
            not bool(late.any()),
            f"an episode ends at the latest after spec.episode_length = {spec.episode_length} env "
            f"steps; those of envs {late.nonzero().flatten().tolist()} go on",
        )
        lengths.masked_fill_(done, 0)
        if bool(done.any()):
            finals_differ |= not torch.equal(step.final_actor_obs[done], step.actor_obs[done])
            shown = step.actor_obs.clone()
            _require(
                torch.equal(env.reset_envs(nobody).actor_obs, shown),
                "actor_obs after a done is the observation of the next episode's start, and "
                "reset_envs of no env shows it again",
            )
    _require(
        finals_differ,
        "final_actor_obs holds the last observation of the episode that ended, actor_obs the first "
        "of the next",
    )
    env.close()


@contextmanager
def _contract() -> Iterator[None]:
    """The run's own checks, as broken rules of the contract."""
    try:
        yield
    except ValueError as error:
        raise AssertionError(f"environment contract: {error}") from error


def _check_observation(
    observation: Observation, spec: EnvSpec, device: torch.device, source: str
) -> None:
    with _contract():
        check_observation(observation, spec, device, source)
    _check_finite(observation.actor_obs, f"actor_obs of {source}")
    _check_finite(observation.critic_obs, f"critic_obs of {source}")


def _check_step(step: Step, spec: EnvSpec, device: torch.device) -> None:
    with _contract():
        check_step(step, spec, device)
    done = (step.terminated | step.truncated)[:, None]
    _check_finite(step.actor_obs, "actor_obs of step")
    _check_finite(step.critic_obs, "critic_obs of step")
    _check_finite(step.reward, "reward of step")
    # Rows of envs that go on are not read, whatever they hold.
    for name in ("final_actor_obs", "final_critic_obs"):
        final: Tensor | None = getattr(step, name)
        _check_finite(None if final is None else final.masked_fill(~done, 0), f"{name} of step")


def _check_finite(tensor: Tensor | None, name: str) -> None:
    _require(tensor is None or bool(tensor.isfinite().all()), f"{name} is not finite")


def _record(env: EnvShard, actions: list[Tensor]) -> list[Tensor]:
    """Everything that the steps show, cloned; final observations of done envs only."""
    shown = []
    for action in actions:
        step = env.step(action)
        done = step.terminated | step.truncated
        for field in fields(step):
            value = getattr(step, field.name)
            if isinstance(value, Tensor):
                final = field.name.startswith("final_")
                shown.append(value[done].clone() if final else value.clone())
    return shown


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _check_seeds(maker: _Maker, num_steps: int) -> None:
    env, twin = maker.make(), maker.make()
    actions = maker.actions(env.spec, num_steps)
    streams = []
    for shard, seed in ((env, SEED), (twin, SEED), (env, SEED), (twin, SEED + 1)):
        start = shard.reset(seed).actor_obs.clone()
        streams.append([start, *_record(shard, actions)])
    _require(_same(streams[0], streams[1]), "reset with one seed gives one stream in two shards")
    _require(_same(streams[0], streams[2]), "reset with the same seed starts the stream again")
    _require(not _same(streams[0], streams[3]), "reset with another seed gives another stream")
    env.close()
    twin.close()


def _check_reset_envs(maker: _Maker, num_steps: int) -> None:
    env = maker.make()
    env.reset(SEED)
    *before, last = maker.actions(env.spec, num_steps)
    _record(env, before)
    step = env.step(last)
    shown = step.actor_obs.clone()
    mask = torch.arange(maker.num_envs, device=maker.device) % 2 == 0
    observation = env.reset_envs(mask)
    _check_observation(observation, env.spec, maker.device, "reset_envs")
    obs = observation.actor_obs
    kept, begun = torch.equal(obs[~mask], shown[~mask]), not torch.equal(obs[mask], shown[mask])
    _require(kept, "reset_envs leaves envs outside its mask alone")
    _require(begun, "reset_envs starts new episodes where its mask is true")
    env.close()


def _check_shard_states(maker: _Maker, num_steps: int) -> None:
    env = maker.make()
    rules = env.spec.shard_states
    env.reset(SEED)
    _record(env, maker.actions(env.spec, num_steps))
    report = env.report_shard_state()
    unknown = sorted(set(report) - set(rules))
    _require(not unknown, f"report_shard_state gives {unknown}, which spec.shard_states lacks")
    for name, local in report.items():
        _check_local_state(name, local, rules[name].size)
    for name, local in env.report_shard_state().items():
        kind = rules[name].kind
        empty = local.weight == 0 if kind == "weighted_mean" else not bool(local.value.any())
        _require(
            kind not in ("weighted_mean", "linear_ema", "sum") or empty,
            f"a report tells what was seen since the last one: {name!r} right after a report is "
            "not empty",
        )
    fleet = {
        name: torch.full((rule.size,), rule.initial, dtype=torch.float64)
        for name, rule in rules.items()
        if rule.kind != "none"
    }
    given = {name: value.clone() for name, value in fleet.items()}
    env.apply_shard_state(fleet)
    _record(env, maker.actions(env.spec, num_steps))
    kept = all(torch.equal(fleet[name], given[name]) for name in fleet)
    _require(kept, "apply_shard_state must not write into the fleet's view")
    env.close()


def _check_local_state(name: str, local: LocalState, size: int) -> None:
    cpu = torch.device("cpu")
    with _contract():
        check_tensor(local.value, (size,), torch.float64, cpu, f"the report of {name!r}")
    _require(local.weight >= 0, f"the report of {name!r} has weight {local.weight:g}, below 0")


def _check_saving(maker: _Maker, num_steps: int) -> list[str]:
    env, other = maker.make(), maker.make()
    env.reset(SEED)
    _record(env, maker.actions(env.spec, num_steps))
    try:
        state = env.state_dict()
    except NotImplementedError:
        env.close()
        return ["state_dict is not implemented: a resumed run starts fresh episodes"]
    actions = maker.actions(env.spec, num_steps, seed=SEED + 1)
    stream = _record(env, actions)
    file = io.BytesIO()
    # Saved after the steps: a state that shares memory with the env has changed by now.
    torch.save(state, file)
    file.seek(0)
    other.reset(SEED + 1)
    other.load_state_dict(torch.load(file, weights_only=False))
    _require(
        _same(stream, _record(other, actions)),
        "a shard that loads a saved state_dict continues as the saved one does",
    )
    reports = env.report_shard_state(), other.report_shard_state()
    _require(
        {name: (local.value.tolist(), local.weight) for name, local in reports[0].items()}
        == {name: (local.value.tolist(), local.weight) for name, local in reports[1].items()},
        "a shard that loads a saved state_dict reports as the saved one does",
    )
    env.close()
    other.close()
    return []
