from __future__ import annotations

from typing import Any

import pytest

from fastsac.core.config import Config, ConfigError, nearest_fields, parse_config


def fields(**changes: Any) -> dict[str, Any]:
    """A small valid configuration; `section__field=value` changes one field of a section."""
    tree: dict[str, Any] = {
        "name": "test",
        "total_env_steps": 1000,
        "env": {"task": "task", "num_envs": 8},
        "algorithm": {"batch_size": 64},
    }
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(fields(**changes))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_derived_sizes_are_the_quotients() -> None:
    config = parse_config(
        fields(
            total_env_steps=10_000,
            env__num_envs=96,
            fleet__num_ranks=2,
            fleet__collectors_per_rank=3,
            evaluation__num_episodes=6,
            algorithm__updates_per_vector_step=0.5,
            algorithm__weight_publish_interval=3,
            replay__final_slots_per_env=0.2,
        )
    )
    assert config.fleet.num_shards == 6
    assert config.num_envs_per_shard == 16
    assert config.batch_size_per_rank == 32
    assert config.algorithm.updates_per_tick == 3
    assert config.algorithm.vector_steps_per_tick == 6
    assert config.final_slots_per_shard == 4  # 3.2 rounded up


def test_whole_numbers_of_either_kind_fit_integers_and_floats() -> None:
    config = parse_config(
        fields(total_env_steps=1e6, algorithm__tau=1, algorithm__betas=[0, 0.9], seed=2.0)
    )
    assert (config.total_env_steps, config.seed) == (1_000_000, 2)
    assert isinstance(config.total_env_steps, int)
    assert config.algorithm.tau == 1.0
    assert isinstance(config.algorithm.tau, float)
    assert config.algorithm.betas == (0.0, 0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": True}, "seed: given True, should be a valid integer"),
        ({"seed": 1.5}, "seed: given 1.5, should be a valid integer"),
        ({"seed": float("inf")}, "seed: given inf, should be a valid integer"),
        ({"algorithm__tau": True}, "algorithm.tau: given True, should be a valid number"),
        ({"algorithm__tau": "a lot"}, "algorithm.tau: given 'a lot', should be a valid number"),
        ({"algorithm__tau": float("nan")}, "algorithm.tau: given nan, should be a finite number"),
        ({"algorithm__betas": [True, 0.9]}, "algorithm.betas.0: given True"),
        ({"algorithm__betas": 0.9}, "algorithm.betas: given 0.9, should be a list"),
        ({"name": 7}, "name: given 7, should be text: put it in quotes"),
        ({"algorithm": None}, "algorithm: given None, should be a section of fields"),
        ({"env__args": {"a": [{"b": {1}}]}}, "env.args.a: given {1}, should be a number, text"),
    ],
)
def test_wrong_types_name_field_value_and_what_is_allowed(
    change: dict[str, Any], message: str
) -> None:
    assert refusal(**change).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm__tau": 2}, "algorithm.tau: given 2, should be less than or equal to 1"),
        ({"algorithm__gamma": 1}, "algorithm.gamma: given 1, should be less than 1"),
        ({"env__num_envs": 0}, "env.num_envs: given 0, should be greater than 0"),
        ({"algorithm__actor_hidden": 6}, "algorithm.actor_hidden: given 6, should be a multiple"),
        ({"fleet__schedule": "later"}, "fleet.schedule: given 'later', should be 'overlap' or"),
        ({"algorithm__v_min": 20}, "algorithm: v_min 20 is not below v_max 20"),
        ({"algorithm__log_std_max": -5}, "algorithm: log_std_min -5 is not below log_std_max -5"),
        ({"algorithm__betas": [0.9, 1]}, "algorithm: betas [0.9, 1.0] are not both in [0, 1)"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    assert refusal(**change).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"env__num_envs": 100, "fleet__collectors_per_rank": 3},
            "env.num_envs 100 does not divide by 3 (collectors): nearest valid [99, 102]",
        ),
        (
            {"algorithm__batch_size": 65, "fleet__num_ranks": 2},
            "algorithm.batch_size 65 does not divide by 2 (fleet.num_ranks): "
            "nearest valid [64, 66]",
        ),
        (
            {"evaluation__num_episodes": 1, "fleet__num_ranks": 2},
            "evaluation.num_episodes 1 does not divide by 2 (collectors): nearest valid [2]",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_nearest(change: dict[str, Any], message: str) -> None:
    assert refusal(**change) == message


def test_arguments_of_a_shard_take_the_place_of_the_common_ones() -> None:
    common = {"env__args": {"mass": 1.0, "seed": 3}, "fleet__num_ranks": 2}
    alike = parse_config(fields(**common)).env
    unequal = parse_config(fields(**common, env__shard_args=[{}, {"mass": 2.0, "wind": True}])).env
    assert alike.args_of(1) == unequal.args_of(0) == {"mass": 1.0, "seed": 3}
    assert unequal.args_of(1) == {"mass": 2.0, "seed": 3, "wind": True}
    assert refusal(**common, env__shard_args=[{}]) == (
        "env.shard_args has 1 mappings, the fleet has 2 collectors: give one for each, or none "
        "at all"
    )


@pytest.mark.parametrize(
    ("interval", "ratio", "nearest"),
    [(3, 2, "[2, 4]"), (10, 4, "[8, 12]"), (1, 8, "[8]"), (4, 1.5, "[3, 6]")],
)
def test_tick_of_a_part_of_a_vector_step_is_refused_with_nearest(
    interval: int, ratio: float, nearest: str
) -> None:
    message = refusal(
        algorithm__weight_publish_interval=interval, algorithm__updates_per_vector_step=ratio
    )
    assert f"weight_publish_interval {interval} is {interval / ratio:g} vector steps" in message
    assert message.endswith(f"nearest valid {nearest}")


@pytest.mark.parametrize(("ratio", "vector_steps"), [(0.1, 70), (0.7, 10), (1.4, 5), (7, 1)])
def test_vector_steps_of_a_tick_are_exact_in_decimals(ratio: float, vector_steps: int) -> None:
    config = parse_config(
        fields(
            algorithm__weight_publish_interval=7,
            algorithm__updates_per_vector_step=ratio,
        )
    )
    assert config.algorithm.vector_steps_per_tick == vector_steps


@pytest.mark.parametrize(
    ("schedule", "n_step", "needed", "least"),
    # 64 transitions are 8 vector steps of 8 envs; a tick overwrites 2 vector steps
    [("alternate", 1, 8, 8), ("overlap", 1, 8, 10), ("overlap", 9, 9, 11)],
)
def test_replay_must_hold_a_batch_and_n_steps_beside_a_tick(
    schedule: str, n_step: int, needed: int, least: int
) -> None:
    changes = {
        "fleet__schedule": schedule,
        "replay__n_step": n_step,
        "algorithm__updates_per_vector_step": 4,
    }
    message = refusal(replay__steps_per_env=least - 1, **changes)
    assert message == (
        f"replay.steps_per_env {least - 1} leaves {needed - 1} vector steps to sample, "
        f"algorithm.batch_size 64 and replay.n_step {n_step} need {needed}: "
        f"give at least {least}"
    )
    parse_config(fields(replay__steps_per_env=least, **changes))


def test_unknown_fields_are_refused_with_the_nearest_names() -> None:
    message = refusal(algorithm__batchsize=3)
    assert message.startswith(
        "algorithm.batchsize: unknown field, nearest are algorithm.batch_size,"
    )
    assert nearest_fields("batch_size")[0] == "algorithm.batch_size"
    assert nearest_fields("algoritm")[0] == "algorithm"


def test_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^name is missing: add it; .*env\.task is missing"):
        parse_config({"env": {"num_envs": 8}})


def test_all_wrong_fields_are_reported_in_one_line() -> None:
    message = refusal(seed=-1, algorithm__tau=3, algorithm__x=1, nam="a")
    for part in ("seed: given -1", "algorithm.tau: given 3", "algorithm.x: unk", "nam: unknown"):
        assert part in message


def test_config_is_frozen() -> None:
    config = parse_config(fields())
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 2  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test


def test_every_field_has_a_docstring() -> None:
    sections = [Config, *(f.annotation for f in Config.model_fields.values())]
    for section in sections:
        for name, field in getattr(section, "model_fields", {}).items():
            is_section = hasattr(field.annotation, "model_fields")
            assert is_section or field.description, f"{section}.{name}"
