import pytest
import torch
from probes import BreaksSometimes, ConstantReward, Probe, TerminatedOrTruncated

from collectors.collector import Collector, CollectorSeeds
from collectors.guard import EnvError
from fastsac.core.normalizer import Normalizer, ObsNormalizers
from fastsac.core.policy import PolicySpec, PublishedPolicy
from fastsac.core.replay import ReplaySampler, sample_window

NUM_ENVS = 6
CAPACITY = 8
SPEC = PolicySpec(
    obs_dim=2,
    action_low=-torch.ones(1),
    action_high=torch.ones(1),
    hidden=8,
    log_std_min=-5.0,
    log_std_max=0.0,
)


def make_collector(tmp_path, env: type[Probe] = TerminatedOrTruncated, **overrides) -> Collector:
    settings = {
        "shard": 0,
        "env": env,
        "env_args": {},
        "num_envs": NUM_ENVS,
        "num_evaluation_envs": 2,
        "policy": SPEC,
        "replay_capacity": CAPACITY,
        "final_slots": 4 * NUM_ENVS,
        "replay_dir": str(tmp_path),
        "replay_name": "shard0",
        "seeds": CollectorSeeds(actions=1, env=2),
        "device": "cpu",
    }
    collector = Collector(**(settings | overrides))
    collector.start(0, {})
    return collector


def published(seed: int = 0) -> PublishedPolicy:
    actor = SPEC.make_actor(torch.Generator().manual_seed(seed))
    parameters = torch.nn.utils.parameters_to_vector(actor.parameters()).detach()
    return PublishedPolicy(
        version=seed,
        parameters=parameters,
        normalizers=ObsNormalizers(Normalizer.identity(2), None),
    )


def test_policy_acts_on_the_reset_observation_and_the_replay_keeps_the_final_one(tmp_path):
    collector = make_collector(tmp_path)
    acted_on, steps = [], []
    sample, step = collector._policy.sample, collector._env.step

    def spy_sample(obs, generator):
        acted_on.append(obs.clone())
        return sample(obs, generator)

    def spy_step(action):
        steps.append(step(action))
        return steps[-1]

    collector._policy.sample, collector._env.step = spy_sample, spy_step
    collector.collect(published(), {}, 6, 0)
    truncated = [s for s in steps if bool(s.truncated.any())]
    assert truncated
    for before, after in zip(steps, acted_on[1:], strict=False):
        assert torch.equal(after, before.actor_obs)
    # a reset tosses a coin for the start state, so some resets differ from the final observation
    assert any(
        not torch.equal(s.actor_obs[s.truncated], s.final_actor_obs[s.truncated]) for s in truncated
    )
    sampler = ReplaySampler([collector.storage()], 1, 0.9)
    indices = sampler.draw([sample_window(6, CAPACITY, 0)], 1, 600, torch.Generator())
    batch = sampler.gather(indices[0])
    # the probe's start state never changes within an episode: only a true final observation
    # keeps it where the transition did not terminate
    kept = ~batch.terminated
    assert torch.equal(batch.next_obs[kept, 0], batch.obs[kept, 0])
    collector.close()


def test_moments_count_each_observation_acted_on_once(tmp_path):
    collector = make_collector(tmp_path)
    acted_on = []
    sample = collector._policy.sample
    collector._policy.sample = lambda obs, generator: (
        acted_on.append(obs.clone()),
        sample(obs, generator),
    )[1]
    for tick in range(2):
        acted_on.clear()
        moments = collector.collect(published(), {}, 3, 0).moments.actor
        everything = torch.cat(acted_on).double()
        assert moments.count == 3 * NUM_ENVS, tick
        torch.testing.assert_close(moments.mean, everything.mean(0))
        torch.testing.assert_close(moments.m2, everything.var(0, correction=0) * moments.count)
    collector.close()


def test_a_non_finite_transition_is_dropped_and_its_env_starts_afresh(tmp_path):
    collector = make_collector(tmp_path, BreaksSometimes)
    report = collector.collect(published(), {}, 7, 0)
    assert report.nonfinite == 1
    assert [int(dump["env"]) for dump in report.dumps] == [0]
    sampler = ReplaySampler([collector.storage()], 1, 0.9)
    window = sample_window(7, CAPACITY, 0)
    assert sampler.count([window]) == 7 * NUM_ENVS - 1
    # env 0 finished 3 episodes of return 2 before its seventh env step, which began a fourth
    assert report.metrics["train/episodes"] == 3 * NUM_ENVS
    after = collector.collect(published(), {}, 2, 0)
    # env 0 restarted: its episode ends one env step later than the others', in the second step
    assert after.metrics["train/episodes"] == NUM_ENVS
    collector.close()


def test_evaluation_leaves_training_as_it_was(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, evaluated = (make_collector(tmp_path / name) for name in "ab")
    for tick in range(3):
        if tick:
            evaluated.evaluate(published(), seed=5)
        one = plain.collect(published(tick), {}, 2, 0)
        other = evaluated.collect(published(tick), {}, 2, 0)
        assert torch.equal(one.moments.actor.mean, other.moments.actor.mean)
    assert torch.equal(plain.storage().action, evaluated.storage().action)
    plain.close()
    evaluated.close()


def test_evaluation_counts_one_episode_per_environment(tmp_path):
    collector = make_collector(tmp_path, ConstantReward)
    report = collector.evaluate(published(), seed=0)
    assert report.returns.tolist() == [2.0, 2.0]
    assert report.lengths.tolist() == [2, 2]
    collector.close()


def test_shard_reports_cover_the_vector_steps_without_gap_or_overlap(tmp_path):
    collector = make_collector(tmp_path)
    spans = []
    for steps in (2, 3):
        state = collector.collect(published(), {}, steps, 0).shard_state
        spans.append((state.first_step, state.last_step))
    assert spans == [(0, 1), (2, 4)]
    collector.close()


def test_shards_with_other_seeds_act_differently(tmp_path):
    actions = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        collector = make_collector(
            tmp_path / str(seed), seeds=CollectorSeeds(actions=seed, env=seed)
        )
        collector.collect(published(), {}, 4, 0)
        actions.append(collector.storage().action[:4].clone())
        collector.close()
    assert not torch.equal(*actions)


def test_an_env_that_shows_nan_after_a_reset_is_refused(tmp_path):
    class StartsBroken(ConstantReward):
        def reset_envs(self, mask):
            observation = super().reset_envs(mask)
            observation.actor_obs[0, 0] = torch.nan
            return observation

    with pytest.raises(EnvError, match="observations right after a reset are not finite"):
        make_collector(tmp_path, StartsBroken)
