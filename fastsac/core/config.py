"""The configuration of a run: frozen, checked once when it is built, trusted afterwards.

`Config` is the tree that a YAML file holds. A field says its unit and whether it counts for the
whole fleet (global) or for one part of it. Everything that is derived (`*_per_shard`,
`*_per_rank`, `*_per_tick`) divides exactly or the configuration is refused.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Schedule = Literal["overlap", "alternate"]


class ConfigError(ValueError):
    """A configuration that cannot run; its message is one line for the user."""


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class EnvConfig(_Section):
    task: str
    """Task name (`fastsac list-tasks`) or `module:Class` of an `EnvShard`."""
    num_envs: int = Field(gt=0)
    """Environments in the whole fleet (global)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the environment's constructor."""


class FleetConfig(_Section):
    num_ranks: int = Field(default=1, gt=0)
    """Learner processes; the world size of the gradient all-reduce."""
    collectors_per_rank: int = Field(default=1, gt=0)
    """Collectors (each one env shard and one replay shard) on the host of each rank."""
    schedule: Schedule = "overlap"
    """`overlap`: collect and learn at the same time on tick-old data; `alternate`: in turn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where networks, replay and simulation live; `auto` takes CUDA when Ray's nodes offer it."""
    threads_per_rank: int = Field(default=1, gt=0)
    """CPU threads of each learner rank."""
    threads_per_collector: int = Field(default=1, gt=0)
    """CPU threads of each collector."""
    cpus_per_rank: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each rank."""
    cpus_per_collector: float = Field(default=0.5, gt=0)
    """CPUs that Ray reserves for each collector."""
    collective_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait of an all-reduce for a missing rank, s."""

    @property
    def num_shards(self) -> int:
        return self.num_ranks * self.collectors_per_rank


class ReplayConfig(_Section):
    steps_per_env: int = Field(default=1024, gt=1)
    """Transitions kept per environment (vector steps of history)."""
    n_step: int = Field(default=1, gt=0)
    """Rewards summed before the bootstrap, env steps."""
    final_slots_per_env: float = Field(default=4.0, gt=0)
    """True final observations of truncated transitions kept, per environment."""
    dir: str = "/dev/shm"
    """Folder of the memory-mapped replay shards on CPU."""


class AlgorithmConfig(_Section):
    batch_size: int = Field(default=8192, gt=0)
    """Transitions per update, all ranks together (global)."""
    updates_per_vector_step: float = Field(default=8.0, gt=0)
    """Updates per vector step of the fleet; the knob of the update-to-data ratio."""
    weight_publish_interval: int = Field(default=8, gt=0)
    """Updates between two publications of the policy: the updates of one tick."""
    learning_starts: int = Field(default=10, ge=0)
    """Vector steps before the first update."""
    actor_hidden: int = Field(default=512, ge=4, multiple_of=4)
    """Width h of the actor's layers h, h/2, h/4."""
    critic_hidden: int = Field(default=768, ge=4, multiple_of=4)
    """Width h of each critic's layers h, h/2, h/4."""
    num_q: int = Field(default=2, gt=0)
    """Critics in the ensemble."""
    num_atoms: int = Field(default=101, ge=2)
    """Atoms of the value distribution (C51)."""
    v_min: float = -20.0
    """Lowest return on the critic's support."""
    v_max: float = 20.0
    """Highest return on the critic's support."""
    critic_target: Literal["each", "min", "mean"] = "each"
    """Each critic learns its own target, the target of lowest mean value, or the averaged one."""
    gamma: float = Field(default=0.97, gt=0, lt=1)
    """Discount per env step."""
    tau: float = Field(default=0.125, gt=0, le=1)
    """Share of the critic that moves into its target network per update (Polyak)."""
    policy_frequency: int = Field(default=4, gt=0)
    """Updates per actor step."""
    actor_lr: float = Field(default=3e-4, gt=0)
    """AdamW learning rate of the actor."""
    critic_lr: float = Field(default=3e-4, gt=0)
    """AdamW learning rate of the critics."""
    alpha_lr: float = Field(default=3e-4, gt=0)
    """AdamW learning rate of log alpha."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """AdamW moment decays."""
    weight_decay: float = Field(default=1e-3, ge=0)
    """AdamW weight decay of actor and critics (log alpha has none)."""
    max_grad_norm: float = Field(default=0.0, ge=0)
    """Global-norm clip of actor and critic gradients; 0 leaves them as they are."""
    alpha_init: float = Field(default=1e-3, gt=0)
    """Temperature at the start."""
    target_entropy_ratio: float = 0.0
    """Target entropy = -action_dim * this ratio, nats."""
    log_std_min: float = -5.0
    """Lowest log standard deviation of the policy."""
    log_std_max: float = 0.0
    """Highest log standard deviation of the policy."""
    normalize_observations: bool = True
    """Standardise observations with the fleet-wide running mean and variance."""

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        _refuse_unless(
            self.v_min < self.v_max,
            f"v_min {self.v_min:g} is not below v_max {self.v_max:g}: give v_min < v_max",
        )
        _refuse_unless(
            self.log_std_min < self.log_std_max,
            f"log_std_min {self.log_std_min:g} is not below log_std_max {self.log_std_max:g}: "
            "give log_std_min < log_std_max",
        )
        _refuse_unless(
            all(0 <= beta < 1 for beta in self.betas),
            f"betas {list(self.betas)} are not both in [0, 1): give for example [0.9, 0.95]",
        )
        vector_steps = self.weight_publish_interval / self.updates_per_vector_step
        if not vector_steps.is_integer():
            raise ValueError(self._nearest_publish_intervals())
        return self

    def _nearest_publish_intervals(self) -> str:
        given, ratio = self.weight_publish_interval, self.updates_per_vector_step
        whole = [n for n in range(1, 4 * given + 64) if (n / ratio).is_integer()]
        nearest = sorted(sorted(whole, key=lambda n: abs(n - given))[:2])
        advice = f"nearest valid: {nearest}" if nearest else "change updates_per_vector_step"
        return (
            f"weight_publish_interval {given} is {given / ratio:g} vector steps at "
            f"updates_per_vector_step {ratio:g}, not a whole number: {advice}"
        )

    @property
    def updates_per_tick(self) -> int:
        return self.weight_publish_interval

    @property
    def vector_steps_per_tick(self) -> int:
        return int(self.weight_publish_interval / self.updates_per_vector_step)


class EvaluationConfig(_Section):
    interval_env_steps: int = Field(default=0, ge=0)
    """Fleet-wide env steps between evaluations; 0 evaluates at the end only."""
    num_episodes: int = Field(default=32, gt=0)
    """Episodes per evaluation, one per evaluation environment (global)."""


class CheckpointConfig(_Section):
    interval_env_steps: int = Field(default=0, ge=0)
    """Fleet-wide env steps between checkpoints; 0 saves at the end only."""
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints kept."""


class LogConfig(_Section):
    dir: str = "runs"
    """Folder that receives the run's folder."""
    interval_env_steps: int = Field(default=0, ge=0)
    """Fleet-wide env steps between log records; 0 logs every tick."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""


class Config(_Section):
    """One run. `load_config` builds it from YAML and command-line overrides."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run's folder: letters, digits, '.', '_' and '-'."""
    seed: int = Field(default=1, ge=0)
    """Root of every random stream of the run."""
    total_env_steps: int = Field(gt=0)
    """Fleet-wide env steps to train for; the run ends with the first tick that reaches it."""
    max_nonfinite_rate: float = Field(default=0.01, ge=0, le=1)
    """Share of transitions with a non-finite value above which the run stops."""
    env: EnvConfig
    fleet: FleetConfig = FleetConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        shards, ranks = self.fleet.num_shards, self.fleet.num_ranks
        _refuse_unless_divides("env.num_envs", self.env.num_envs, "collectors", shards)
        _refuse_unless_divides(
            "algorithm.batch_size", self.algorithm.batch_size, "fleet.num_ranks", ranks
        )
        _refuse_unless_divides(
            "evaluation.num_episodes", self.evaluation.num_episodes, "collectors", shards
        )
        tick = self.algorithm.vector_steps_per_tick
        window = self.replay.steps_per_env - tick * (self.fleet.schedule == "overlap")
        _refuse_unless(
            window >= self.replay.n_step,
            f"replay.steps_per_env {self.replay.steps_per_env} leaves {window} vector steps to "
            f"sample beside a tick of {tick}: give at least {tick + self.replay.n_step}",
        )
        transitions = window * self.env.num_envs
        needed = -(-self.algorithm.batch_size // self.env.num_envs) + tick
        _refuse_unless(
            transitions >= self.algorithm.batch_size,
            f"replay.steps_per_env {self.replay.steps_per_env} holds {transitions} transitions "
            f"to sample, fewer than algorithm.batch_size {self.algorithm.batch_size}: give "
            f"replay.steps_per_env of at least {needed}",
        )
        return self

    @property
    def num_envs_per_shard(self) -> int:
        return self.env.num_envs // self.fleet.num_shards

    @property
    def batch_size_per_rank(self) -> int:
        return self.algorithm.batch_size // self.fleet.num_ranks

    @property
    def final_slots_per_shard(self) -> int:
        return max(1, round(self.replay.final_slots_per_env * self.num_envs_per_shard))


def parse_config(fields: dict[str, Any]) -> Config:
    """Build a `Config` from plain data.

    Raises:
        ConfigError: one line naming the field, what was given, what is allowed.
    """
    try:
        return Config.model_validate(fields)
    except ValidationError as error:
        raise ConfigError("; ".join(_one_line(item) for item in error.errors())) from None


def _one_line(item: Any) -> str:
    """One pydantic error as `field: given, allowed`."""
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error":
        prefix = f"{path}: " if path else ""
        return prefix + str(item["ctx"]["error"])
    if item["type"] == "missing":
        return f"{path} is missing: add it"
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown field; allowed here: {', '.join(_siblings(item['loc']))}"
    return f"{path}: given {item['input']!r}; {item['msg'][0].lower()}{item['msg'][1:]}"


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Names of the fields beside the last part of `loc`."""
    section: Any = Config
    for part in loc[:-1]:
        section = section.model_fields[part].annotation
    return sorted(section.model_fields)


def _refuse_unless(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _refuse_unless_divides(name: str, value: int, parts_name: str, parts: int) -> None:
    if value % parts:
        below, above = value - value % parts, value - value % parts + parts
        nearest = [n for n in (below, above) if n > 0]
        raise ValueError(
            f"{name} {value} does not divide by {parts} ({parts_name}): nearest valid {nearest}"
        )
