import numpy as np
import pytest

from tools.curriculum_ab import ARMS, interval, iqm, main

SMALL = (
    *("algorithm.batch_size=64", "algorithm.actor_hidden=16", "algorithm.critic_hidden=16"),
    *("env.num_envs=16", "replay.steps_per_env=100", "evaluation.num_episodes=8"),
)


def test_the_interquartile_mean_leaves_out_both_ends():
    # of eight values, the two lowest and the two highest
    assert iqm(np.array([9.0, 1.0, 2.0, 3.0, 100.0, 4.0, 5.0, -50.0])) == pytest.approx(3.5)


def test_an_interval_holds_the_mean_and_is_a_number_alone_where_nothing_varies():
    middle, rest = interval([1.0, 2.0, 3.0, 4.0, 5.0]).split(" ", 1)
    low, high = (float(part) for part in rest.strip("[]").split(", "))
    assert low < float(middle) == 3 < high
    assert interval([2.0, 2.0]) == "2"


def test_every_arm_is_trained_once_and_compared(tmp_path, capsys):
    sizes = [part for field in SMALL for part in ("--set", field)]
    command = [str(tmp_path), "--seeds", "1", "--env-steps", "1600", "--episodes", "24", *sizes]
    main(command)
    table = capsys.readouterr().out
    runs = {arm: list(tmp_path.glob(f"{arm}-seed1/*/summary.json")) for arm in ARMS}
    assert [len(found) for found in runs.values()] == [1] * len(ARMS)
    written = {arm: found[0].stat().st_mtime_ns for arm, found in runs.items()}
    header = next(line for line in table.splitlines() if line.startswith("| measure"))
    assert header == "| measure | " + " | ".join(ARMS) + " |"
    drift = next(line for line in table.splitlines() if line.startswith("| drift, last"))
    alone, *_, pooled = (float(cell) for cell in drift.strip("| ").split(" | ")[1:])
    assert pooled < 1e-9 < alone
    assert (tmp_path / "curriculum_ab.png").is_file()

    main(command)  # and is kept
    assert capsys.readouterr().out == table
    assert {arm: found[0].stat().st_mtime_ns for arm, found in runs.items()} == written
