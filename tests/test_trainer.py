import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same_tree, counted_metrics, saved_state, small_config
from probes import AlwaysBroken, BreaksSometimes, ConstantReward

from fastsac.core.config import ConfigError
from fastsac.core.replay import ReplayStorage
from fastsac.evaluation import evaluate_run
from fastsac.trainer import TrainingError, resume, train


def test_same_seed_gives_the_same_run_bit_for_bit(tmp_path):
    runs = [train(small_config(tmp_path), runtime="inline").run_dir for _ in range(2)]
    assert counted_metrics(runs[0]) == counted_metrics(runs[1])
    assert_same_tree(saved_state(runs[0]), saved_state(runs[1]))


def test_another_seed_gives_another_run(tmp_path):
    runs = [train(small_config(tmp_path, seed=s), runtime="inline").run_dir for s in (1, 2)]
    first, second = (saved_state(run)["learners"]["learner"]["actor"] for run in runs)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("schedule", "staleness"), [("overlap", 4), ("alternate", 0)])
def test_staleness_and_update_to_data_ratio_are_exact(tmp_path, schedule, staleness):
    config = small_config(tmp_path, fleet={"schedule": schedule})
    records = counted_metrics(train(config, runtime="inline").run_dir)
    learning = [r for r in records if r["fleet/utd"] > 0]
    assert len(learning) > 10
    # 2 updates of 32 per vector step of 16 envs
    assert {r["fleet/utd"] for r in learning} == {2 / 16}
    assert {r["fleet/replay_ratio"] for r in learning} == {4.0}
    assert {r["fleet/staleness"] for r in learning[1:]} == {staleness}


def test_learning_starts_when_told_and_never_before_one_batch(tmp_path):
    config = small_config(tmp_path, algorithm={"learning_starts": 7})
    records = counted_metrics(train(config, runtime="inline").run_dir)
    # overlap: a tick of 2 vector steps learns from the rows before it, so the first one that
    # finds at least 7 is the fifth
    assert [r["fleet/updates"] for r in records[:6]] == [0, 0, 0, 0, 4, 8]
    config = small_config(tmp_path, algorithm={"learning_starts": 0, "batch_size": 96})
    records = counted_metrics(train(config, runtime="inline").run_dir)
    assert [r["fleet/updates"] for r in records[:5]] == [0, 0, 0, 4, 8]


def test_finished_episodes_of_all_shards_are_counted(tmp_path):
    records = counted_metrics(train(small_config(tmp_path), runtime="inline").run_dir)
    # every episode lasts 2 env steps of reward 1, and a tick has 2 vector steps
    assert {r["train/return"] for r in records} == {2.0}
    assert {r["train/episodes"] for r in records} == {16.0}
    assert records[-1]["eval/return"] == 2.0
    assert records[-1]["eval/episode_length"] == 2.0


def test_resume_continues_counters_parameters_and_records(tmp_path):
    first = train(small_config(tmp_path), runtime="inline")
    before = saved_state(first.run_dir)
    second = resume(first.run_dir, total_env_steps=960, runtime="inline")
    after = saved_state(second.run_dir)
    assert second.run_dir == first.run_dir
    assert after["progress"]["env_steps"] == 960
    assert after["progress"]["updates"] > before["progress"]["updates"]
    assert after["normalizer"]["actor"]["count"] == 960
    steps = [r["env_steps"] for r in counted_metrics(first.run_dir)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 960


def test_resume_of_a_complete_run_is_refused(tmp_path):
    result = train(small_config(tmp_path), runtime="inline")
    with pytest.raises(ConfigError, match="complete at 640 env steps: give --total_env_steps"):
        resume(result.run_dir, runtime="inline")


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run: give a folder that holds a config\.yaml"):
        resume(tmp_path, runtime="inline")


def test_non_finite_transitions_are_dropped_counted_and_kept_for_inspection(tmp_path):
    config = small_config(tmp_path, max_nonfinite_rate=1.0)
    result = train(config, env=BreaksSometimes, runtime="inline")
    records = counted_metrics(result.run_dir)
    dumps = sorted((result.run_dir / "nonfinite").glob("*.npz"))
    # env 0 of both shards in every seventh of 40 vector steps
    assert sum(r["train/nonfinite"] for r in records) == 10 == len(dumps)
    with np.load(dumps[0]) as dump:
        assert np.isnan(dump["reward"])
        assert dump["env"] == 0
    assert all(np.isfinite(r["learner/critic_loss"]) for r in records if "learner/critic_loss" in r)
    assert max(r.get("replay/reward_max", 1.0) for r in records) == 1.0


def test_a_run_of_non_finite_values_stops_with_a_reason(tmp_path):
    with pytest.raises(TrainingError, match="had non-finite values, more than max_nonfinite_rate"):
        train(small_config(tmp_path), env=AlwaysBroken, runtime="inline")


def test_one_stop_signal_checkpoints_and_leaves(tmp_path):
    class StopsItself(ConstantReward):
        calls = 0

        def step(self, action):
            StopsItself.calls += 1
            if StopsItself.calls == 10:
                signal.raise_signal(signal.SIGTERM)
            return super().step(action)

    handler = signal.getsignal(signal.SIGTERM)
    result = train(small_config(tmp_path), env=StopsItself, runtime="inline")
    state = saved_state(result.run_dir)
    assert result.exit_status == 143
    assert not result.summary["complete"]
    assert state["progress"]["env_steps"] == counted_metrics(result.run_dir)[-1]["env_steps"] < 640
    assert signal.getsignal(signal.SIGTERM) == handler
    resumed = resume(result.run_dir, env=ConstantReward, runtime="inline")
    assert resumed.exit_status == 0
    assert resumed.summary["env_steps"] == 640


def test_a_failing_evaluation_does_not_cost_the_training(tmp_path):
    class CannotBeEvaluated(ConstantReward):
        def __init__(self, *, num_envs, device, evaluation):
            super().__init__(num_envs=num_envs, device=device, evaluation=evaluation)
            self.evaluation = evaluation

        def reset(self, seed):
            if self.evaluation:
                raise RuntimeError("no evaluation scene")
            return super().reset(seed)

    with pytest.raises(TrainingError, match=r"failed in an evaluation: .*no evaluation scene"):
        train(small_config(tmp_path), env=CannotBeEvaluated, runtime="inline")
    [run_dir] = tmp_path.iterdir()
    assert saved_state(run_dir)["progress"]["env_steps"] == 640


def test_training_works_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(train(small_config(tmp_path), runtime="inline"))
    )
    thread.start()
    thread.join()
    assert results[0].summary["complete"]


def test_inline_refuses_more_than_one_rank(tmp_path):
    config = small_config(tmp_path, fleet={"num_ranks": 2})
    with pytest.raises(ConfigError, match=r"holds 1 rank, fleet\.num_ranks is 2"):
        train(config, runtime="inline")


def test_symmetry_is_refused_where_the_environment_has_none(tmp_path):
    config = small_config(tmp_path, algorithm={"symmetry": True})
    with pytest.raises(ConfigError, match=r"algorithm\.symmetry .* no left-right symmetry: set it"):
        train(config, runtime="inline")
    assert not any(tmp_path.iterdir())


def test_wrong_env_args_are_refused_before_anything_starts(tmp_path):
    config = small_config(tmp_path, env={"args": {"gravity": 3}})
    with pytest.raises(ConfigError, match=r"env.args .*gravity.* do not fit"):
        train(config, runtime="inline")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("replay", {"dir": "/no/such/folder"}, r"set replay\.dir to a folder with room"),
        ("fleet", {"num_ranks": 2}, "holds 1 rank"),
        ("log", {"dir": "/dev/null/runs"}, r"log\.dir '/dev/null/runs' cannot hold a run"),
    ],
)
def test_what_is_refused_leaves_no_run_folder(tmp_path, section, values, message):
    with pytest.raises(ValueError, match=message):
        train(small_config(tmp_path, **{section: values}), runtime="inline")
    assert not any(tmp_path.iterdir())


def test_no_shared_memory_is_left_behind(tmp_path):
    shards = tmp_path / "shm"
    shards.mkdir()
    train(small_config(tmp_path, replay={"dir": str(shards)}), runtime="inline")
    assert not list(shards.iterdir())


def test_runs_of_one_name_that_start_together_do_not_share_memory(tmp_path, monkeypatch):
    shards = tmp_path / "shm"
    shards.mkdir()
    seen = []
    allocate = ReplayStorage.allocate

    def spy(layout, device, directory, name):
        seen.append(name)
        return allocate(layout, device, directory, name)

    monkeypatch.setattr(ReplayStorage, "allocate", spy)

    def same_name(config):
        folder = Path(config.log.dir) / "same"
        folder.mkdir(parents=True)
        return folder

    monkeypatch.setattr("fastsac.trainer.new_run_dir", same_name)
    for folder in ("a", "b"):
        train(small_config(tmp_path / folder, replay={"dir": str(shards)}), runtime="inline")
    assert len(set(seen)) == len(seen) == 4


def test_evaluation_of_a_run_uses_its_policy_and_normaliser(tmp_path):
    result = train(small_config(tmp_path), runtime="inline")
    evaluation = evaluate_run(Path(result.run_dir), num_episodes=6, seed=3)
    assert evaluation.returns.tolist() == [2.0] * 6
    assert evaluation.policy_version == result.summary["updates"]
    assert evaluation.env_steps == 640
