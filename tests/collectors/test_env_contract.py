"""`check_env_shard` accepts environments that keep the contract and names the rule that others
break: one broken environment per rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from collectors.env import EnvShard, EnvSpec, Observation, Step
from collectors.tasks.cartpole import cartpole_swingup
from collectors.testing import check_env_shard
from fastsac.core.shard_state import LocalState, MergeRule

LIMIT = 1.0
"""Distance at which a walk terminates."""


class Walk:
    """A point pushed along a line from a random start; keeps the contract."""

    def __init__(self, *, num_envs: int, device: torch.device, evaluation: bool) -> None:
        del device, evaluation
        bound = torch.ones(1)
        self.spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=1,
            critic_obs_dim=2,
            action_low=-bound,
            action_high=bound,
            control_period_s=0.1,
            episode_length=5,
            shard_states={"visits": MergeRule(kind="sum", size=1)},
        )

    def reset(self, seed: int) -> Observation:
        self.generator = torch.Generator().manual_seed(seed)
        self.position, self.age = torch.zeros(2, self.spec.num_envs)
        self.visits = 0.0
        return self.restart(torch.ones(self.spec.num_envs, dtype=torch.bool))

    def reset_envs(self, mask: Tensor) -> Observation:
        return self.restart(mask)

    def restart(self, mask: Tensor) -> Observation:
        start = LIMIT * torch.rand(self.position.shape, generator=self.generator)
        self.position = torch.where(mask, start, self.position)
        self.age = torch.where(mask, 0.0, self.age)
        return self.observe()

    def observe(self) -> Observation:
        return Observation(self.position[:, None], torch.stack([self.position, self.age], 1))

    def step(self, action: Tensor) -> Step:
        self.position = self.position + action[:, 0]
        self.age = self.age + 1
        self.visits += len(self.age)
        final = self.observe()
        terminated = self.position.abs() > LIMIT
        truncated = (self.age >= self.spec.episode_length) & ~terminated
        shown = self.restart(terminated | truncated)
        return Step(
            actor_obs=shown.actor_obs,
            critic_obs=shown.critic_obs,
            reward=-final.actor_obs[:, 0].abs(),
            terminated=terminated,
            truncated=truncated,
            final_actor_obs=final.actor_obs,
            final_critic_obs=final.critic_obs,
            info={"age": self.age},
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        visits, self.visits = self.visits, 0.0
        return {"visits": LocalState(value=torch.tensor([visits], dtype=torch.float64))}

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        rng = self.generator.get_state()
        return {"position": self.position, "age": self.age, "visits": self.visits, "rng": rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.age, self.visits = state["position"], state["age"], state["visits"]
        self.generator.set_state(state["rng"])

    def close(self) -> None:
        pass


def broken(**methods: Any) -> type[Walk]:
    return type("BrokenWalk", (Walk,), methods)


def broken_spec(**changes: Any) -> type[Walk]:
    def init(self: Walk, **args: Any) -> None:
        Walk.__init__(self, **args)
        self.spec = replace(self.spec, **changes)

    return broken(__init__=init)


def broken_step(change: Any) -> type[Walk]:
    return broken(step=lambda self, action: change(Walk.step(self, action)))


def differs_in_evaluation(self: Walk, **args: Any) -> None:
    Walk.__init__(self, **args)
    if args["evaluation"]:
        self.spec = replace(self.spec, control_period_s=0.2)


def writes_into_action(self: Walk, action: Tensor) -> Step:
    return Walk.step(self, action.mul_(0.5))


def shows_final_after_done(self: Walk, action: Tensor) -> Step:
    step = Walk.step(self, action)
    return replace(step, actor_obs=step.final_actor_obs + 1)


def never_truncates(self: Walk, action: Tensor) -> Step:
    self.age = self.age.clamp(max=3)
    return Walk.step(self, action)


def ignores_seed(self: Walk, seed: int) -> Observation:
    return Walk.reset(self, 7)


def reset_goes_on(self: Walk, seed: int) -> Observation:
    generator = getattr(self, "generator", None)
    observation = Walk.reset(self, seed)
    self.generator = generator or self.generator
    return observation


def unseeded(self: Walk, seed: int) -> Observation:
    return Walk.reset(self, seed + id(self) % 1000)


def resets_everyone(self: Walk, mask: Tensor) -> Observation:
    return self.restart(torch.full_like(mask, bool(mask.any())))


def resets_nobody(self: Walk, mask: Tensor) -> Observation:
    return self.observe()


def reports(**states: LocalState) -> type[Walk]:
    return broken(report_shard_state=lambda self: states)


def writes_into_fleet(self: Walk, state: Mapping[str, Tensor]) -> None:
    state["visits"].add_(1)


def forgets_rng(self: Walk) -> dict[str, Any]:
    return {**Walk.state_dict(self), "rng": torch.Generator().manual_seed(0).get_state()}


def forgets_visits(self: Walk) -> dict[str, Any]:
    return {**Walk.state_dict(self), "visits": 0.0}


class SharesItsState(Walk):
    """Advances in place the memory that `state_dict` gave away."""

    def step(self, action: Tensor) -> Step:
        ages = self.age
        step = super().step(action)
        self.age = ages.copy_(self.age)
        return step


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_walk_and_cartpole_are_env_shards():
    args = {"num_envs": 1, "device": torch.device("cpu"), "evaluation": False}
    assert isinstance(Walk(**args), EnvShard)
    assert isinstance(cartpole_swingup(**args), EnvShard)


def test_walk_keeps_the_contract():
    assert check_env_shard(Walk) == []


def test_cartpole_keeps_the_contract():
    assert check_env_shard(cartpole_swingup) == []


def test_cartpole_of_short_episodes_keeps_the_contract():
    assert check_env_shard(cartpole_swingup, num_envs=3, episode_length=7, decimation=1) == []


def test_env_that_cannot_be_saved_is_noted():
    def state_dict(self: Walk) -> dict[str, Any]:
        raise NotImplementedError

    (note,) = check_env_shard(broken(state_dict=state_dict))
    assert "state_dict is not implemented" in note


@pytest.mark.parametrize(
    ("env", "rule"),
    [
        (broken_spec(num_envs=9), "has 9 envs"),
        (broken_spec(action_high=torch.tensor([torch.inf])), r"joints \[0\] are infinite"),
        (broken(__init__=differs_in_evaluation), "spec.control_period_s must be the same"),
        (broken_spec(actor_obs_dim=2), r"actor_obs of reset is \(4, 1\) .*should be \(4, 2\)"),
        (broken_spec(critic_obs_dim=None), r"critic_obs of reset is \(4, 2\) .*should be None"),
        (broken_spec(episode_length=4, shard_states={}), "report_shard_state gives"),
        (broken(step=writes_into_action), "must not write into its action"),
        (
            broken_step(lambda s: replace(s, reward=s.reward.double())),
            r"reward of step is \(4,\) float64 .*should be \(4,\) float32",
        ),
        (
            broken_step(lambda s: replace(s, reward=s.reward.to("meta"))),
            r"reward of step is .*on meta: should be .*on cpu",
        ),
        (broken_step(lambda s: replace(s, reward=s.reward / 0)), "reward of step is not finite"),
        (
            broken_step(lambda s: replace(s, truncated=s.truncated.int())),
            "truncated of step is .*should be .* bool",
        ),
        (
            broken_step(lambda s: replace(s, truncated=s.truncated | s.terminated)),
            "are both true in envs",
        ),
        (
            broken_step(lambda s: replace(s, final_actor_obs=s.final_actor_obs / 0)),
            "final_actor_obs of step is not finite",
        ),
        (
            broken_step(lambda s: replace(s, final_critic_obs=None)),
            r"final_critic_obs of step is None: should be \(4, 2\)",
        ),
        (
            broken_step(lambda s: replace(s, final_actor_obs=s.actor_obs)),
            "final_actor_obs holds the last",
        ),
        (broken_step(lambda s: replace(s, info={"mean": s.reward.mean()})), r"info\['mean'\] is"),
        (broken_step(lambda s: replace(s, info={"done": s.truncated})), "should be floating point"),
        (broken(step=shows_final_after_done), "actor_obs after a done"),
        (broken(step=never_truncates), "go on"),
        (broken(reset=ignores_seed), "another seed gives another stream"),
        (broken(reset=reset_goes_on), "starts the stream again"),
        (broken(reset=unseeded), "one stream in two shards"),
        (broken(reset_envs=resets_everyone), "outside its mask alone"),
        (broken(reset_envs=resets_nobody), "where its mask is true"),
        (reports(hits=LocalState(value=f64(0))), r"gives \['hits'\], which spec.shard_states"),
        (
            reports(visits=LocalState(value=f64(0, 0))),
            r"report of 'visits' is \(2,\) .*should be \(1,\)",
        ),
        (reports(visits=LocalState(value=torch.zeros(1))), "'visits' is .*should be .* float64"),
        (reports(visits=LocalState(value=f64(0), weight=-1)), "weight -1, below 0"),
        (reports(visits=LocalState(value=f64(3))), "right after a report is not empty"),
        (broken(apply_shard_state=writes_into_fleet), "write into the fleet's view"),
        (broken(state_dict=forgets_rng), "continues as the saved one"),
        (SharesItsState, "continues as the saved one"),
        (broken(state_dict=forgets_visits), "reports as the saved one"),
    ],
)
def test_broken_env_is_told_which_rule_it_breaks(env: type[Walk], rule: str):
    with pytest.raises(AssertionError, match=rule):
        check_env_shard(env)
