"""The configuration of a run: frozen, checked once when it is built, trusted afterwards.

`Config` is the tree that a YAML file holds. A field says its unit and whether it counts for the
whole fleet (global) or for one part of it. Everything that is derived (`*_per_shard`,
`*_per_rank`, `*_per_tick`) divides exactly or the configuration is refused.
"""

from __future__ import annotations

import difflib
import math
from fractions import Fraction
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

MAX_ERRORS = 5
"""Wrong fields that one message lists."""
MAX_SHOWN = 60
"""Characters of a given value that a message repeats."""

Schedule = Literal["overlap", "alternate"]
RuleKind = Literal["linear_ema", "weighted_mean", "resolve_one", "sum", "max", "none"]


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

    @field_validator("*", mode="before")
    @classmethod
    def _whole_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `1e6` as a float; a whole one is as good as an integer."""
        assert info.field_name is not None
        wants_int = cls.model_fields[info.field_name].annotation is int
        whole = isinstance(value, float) and value.is_integer()
        return int(value) if wants_int and whole else value


class EnvConfig(_Section):
    task: str
    """Task name (`fastsac list-tasks`) or `module:Class` of an `EnvShard`."""
    num_envs: int = Field(gt=0, le=10_000_000)
    """Environments in the whole fleet (global)."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments for the environment's constructor: plain values, lists and mappings."""
    shard_args: list[dict[str, JsonValue]] = Field(default_factory=list)
    """One mapping per collector, in shard order, whose entries take the place of those in `args`:
    shards that are unequal on purpose. Empty: all shards are made alike."""

    def args_of(self, shard: int) -> dict[str, JsonValue]:
        """The constructor's arguments in one shard."""
        return self.args | (self.shard_args[shard] if self.shard_args else {})


class FleetConfig(_Section):
    num_ranks: int = Field(default=1, gt=0, le=10_000)
    """Learner processes; the world size of the gradient all-reduce."""
    collectors_per_rank: int = Field(default=1, gt=0, le=1000)
    """Collectors (each one env shard and one replay shard) on the host of each rank."""
    schedule: Schedule = "overlap"
    """`overlap`: collect and learn at the same time on tick-old data; `alternate`: in turn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where networks, replay and simulation live; `auto` takes CUDA when Ray's nodes offer it."""
    threads_per_rank: int = Field(default=1, gt=0, le=1024)
    """CPU threads of each learner rank."""
    threads_per_collector: int = Field(default=1, gt=0, le=1024)
    """CPU threads of each collector."""
    cpus_per_rank: float = Field(default=1.0, gt=0, le=1024)
    """CPUs that Ray reserves for each rank."""
    cpus_per_collector: float = Field(default=0.5, gt=0, le=1024)
    """CPUs that Ray reserves for each collector."""
    collector_restarts: int = Field(default=3, ge=0, le=1000)
    """Restarts of each collector within 10 minutes, after which the run ends; 0 ends it at the
    first failure."""
    collective_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """Longest wait of an all-reduce for a missing rank, s."""

    @property
    def num_shards(self) -> int:
        return self.num_ranks * self.collectors_per_rank


class ReplayConfig(_Section):
    steps_per_env: int = Field(default=1024, gt=1, le=100_000_000)
    """Transitions kept per environment (vector steps of history)."""
    n_step: int = Field(default=1, gt=0, le=1000)
    """Rewards summed before the bootstrap, env steps."""
    final_slots_per_env: float = Field(default=4.0, gt=0, le=10_000)
    """True final observations of truncated transitions kept, per environment (a shard's total is
    rounded up)."""
    dir: str = "/dev/shm"
    """Folder of the memory-mapped replay shards on CPU."""


class AlgorithmConfig(_Section):
    batch_size: int = Field(default=8192, gt=0, le=16_777_216)
    """Transitions per update, all ranks together (global)."""
    updates_per_vector_step: float = Field(default=8.0, ge=1e-6, le=100_000)
    """Updates per vector step of the fleet; the knob of the update-to-data ratio."""
    weight_publish_interval: int = Field(default=8, gt=0, le=1_000_000)
    """Updates between two publications of the policy: the updates of one tick."""
    learning_starts: int = Field(default=10, ge=0, le=10**12)
    """Vector steps before the first update."""
    actor_hidden: int = Field(default=512, ge=4, le=16_384, multiple_of=4)
    """Width h of the actor's layers h, h/2, h/4."""
    critic_hidden: int = Field(default=768, ge=4, le=16_384, multiple_of=4)
    """Width h of each critic's layers h, h/2, h/4."""
    num_q: int = Field(default=2, gt=0, le=100)
    """Critics in the ensemble."""
    num_atoms: int = Field(default=101, ge=2, le=10_000)
    """Atoms of the value distribution (C51)."""
    v_min: float = Field(default=-20.0, ge=-1e9, le=1e9)
    """Lowest return on the critic's support."""
    v_max: float = Field(default=20.0, ge=-1e9, le=1e9)
    """Highest return on the critic's support."""
    critic_target: Literal["each", "min", "mean"] = "each"
    """Each critic learns its own target, the target of lowest mean value, or the averaged one."""
    gamma: float = Field(default=0.97, gt=0, lt=1)
    """Discount per env step."""
    tau: float = Field(default=0.125, gt=0, le=1)
    """Share of the critic that moves into its target network per update (Polyak)."""
    policy_frequency: int = Field(default=4, gt=0, le=1_000_000)
    """Updates per actor step."""
    actor_lr: float = Field(default=3e-4, gt=0, le=1)
    """AdamW learning rate of the actor."""
    critic_lr: float = Field(default=3e-4, gt=0, le=1)
    """AdamW learning rate of the critics."""
    alpha_lr: float = Field(default=3e-4, gt=0, le=1)
    """AdamW learning rate of log alpha."""
    final_lr_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of every learning rate that is left at the end of the run; it falls along a cosine."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """AdamW moment decays."""
    weight_decay: float = Field(default=1e-3, ge=0, le=1)
    """AdamW weight decay of actor and critics (log alpha has none)."""
    max_grad_norm: float = Field(default=0.0, ge=0, le=1e9)
    """Global-norm clip of actor and critic gradients; 0 leaves them as they are."""
    alpha_init: float = Field(default=1e-3, gt=0, le=1e6)
    """Temperature at the start."""
    target_entropy_ratio: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Target entropy = -action_dim * this ratio, nats."""
    log_std_min: float = Field(default=-5.0, ge=-20, le=10)
    """Lowest log standard deviation of the policy."""
    log_std_max: float = Field(default=0.0, ge=-20, le=10)
    """Highest log standard deviation of the policy."""
    normalize_observations: bool = True
    """Standardise observations with the fleet-wide running mean and variance."""
    symmetry: bool = False
    """Mirror a random half of every batch, where the environment has a left-right symmetry."""

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
        if self._vector_steps_per_tick.denominator != 1:
            # n / (p / q) is whole exactly when p divides n
            nearest = _nearest_multiples(
                self.weight_publish_interval, Fraction(str(self.updates_per_vector_step)).numerator
            )
            raise ValueError(
                f"weight_publish_interval {self.weight_publish_interval} is "
                f"{float(self._vector_steps_per_tick):g} vector steps at updates_per_vector_step "
                f"{self.updates_per_vector_step:g}, not a whole number: nearest valid {nearest}"
            )
        return self

    @property
    def _vector_steps_per_tick(self) -> Fraction:
        """Exact in decimals: 3 updates at 0.1 per vector step are 30 vector steps."""
        return self.weight_publish_interval / Fraction(str(self.updates_per_vector_step))

    @property
    def updates_per_tick(self) -> int:
        return self.weight_publish_interval

    @property
    def vector_steps_per_tick(self) -> int:
        return int(self._vector_steps_per_tick)


class EvaluationConfig(_Section):
    interval_env_steps: int = Field(default=0, ge=0, le=10**15)
    """Fleet-wide env steps between evaluations; 0 evaluates at the end only."""
    num_episodes: int = Field(default=32, gt=0, le=1_000_000)
    """Episodes per evaluation, one per evaluation environment (global)."""


class CheckpointConfig(_Section):
    interval_env_steps: int = Field(default=0, ge=0, le=10**15)
    """Fleet-wide env steps between checkpoints; 0 saves at the end only."""
    keep: int = Field(default=2, gt=0, le=1_000_000)
    """Newest checkpoints kept."""


class LogConfig(_Section):
    dir: str = "runs"
    """Folder that receives the run's folder."""
    interval_env_steps: int = Field(default=0, ge=0, le=10**15)
    """Fleet-wide env steps between log records; 0 logs every tick."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""


class Config(_Section):
    """One run. `load_config` builds it from YAML and command-line overrides."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run's folder: letters, digits, '.', '_' and '-'."""
    seed: int = Field(default=1, ge=0, le=2**63 - 1)
    """Root of every random stream of the run."""
    total_env_steps: int = Field(gt=0, le=10**15)
    """Fleet-wide env steps to train for; the run ends with the first tick that reaches it."""
    max_nonfinite_rate: float = Field(default=0.01, ge=0, le=1)
    """Share of transitions with a non-finite value above which the run stops."""
    env: EnvConfig
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    shard_state: dict[str, RuleKind] = Field(default_factory=dict)
    """Merge rules that take the place of the environment's, by state (docs/curriculum-sync.md)."""

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
        given = len(self.env.shard_args)
        _refuse_unless(
            given in (0, shards),
            f"env.shard_args has {given} mappings, the fleet has {shards} collectors: give one for "
            "each, or none at all",
        )
        # while the learners sample, an overlapped tick overwrites the oldest rows
        steps_per_env, batch_size = self.replay.steps_per_env, self.algorithm.batch_size
        overlapped = self.fleet.schedule == "overlap"
        overwritten = self.algorithm.vector_steps_per_tick * overlapped
        needed = max(math.ceil(batch_size / self.env.num_envs), self.replay.n_step)
        _refuse_unless(
            steps_per_env >= overwritten + needed,
            f"replay.steps_per_env {steps_per_env} leaves {max(0, steps_per_env - overwritten)} "
            f"vector steps to sample, algorithm.batch_size {batch_size} and replay.n_step "
            f"{self.replay.n_step} need {needed}: give at least {overwritten + needed}",
        )
        self._check_that_it_learns()
        return self

    def _check_that_it_learns(self) -> None:
        """Refuse a run that ends before its first update."""
        batch = math.ceil(self.algorithm.batch_size / self.env.num_envs)
        needed = max(self.algorithm.learning_starts, batch)
        # a tick learns from the rows before it, or, alternating, from its own too
        tick = self.algorithm.vector_steps_per_tick
        ticks = math.ceil(needed / tick) + (self.fleet.schedule == "overlap")
        least = (max(ticks, 1) - 1) * tick * self.env.num_envs + 1
        _refuse_unless(
            self.total_env_steps >= least,
            f"total_env_steps {self.total_env_steps} ends before the first update: "
            f"algorithm.learning_starts {self.algorithm.learning_starts} and a batch of "
            f"{self.algorithm.batch_size} need {needed} vector steps of {self.env.num_envs} env "
            f"steps: give total_env_steps of at least {least}, or lower them",
        )

    @property
    def num_envs_per_shard(self) -> int:
        return self.env.num_envs // self.fleet.num_shards

    @property
    def batch_size_per_rank(self) -> int:
        return self.algorithm.batch_size // self.fleet.num_ranks

    @property
    def final_slots_per_shard(self) -> int:
        return math.ceil(self.replay.final_slots_per_env * self.num_envs_per_shard)


def parse_config(fields: dict[str, Any]) -> Config:
    """Build a `Config` from plain data.

    Raises:
        ConfigError: one line naming the field, what was given, what is allowed.
    """
    try:
        return Config.model_validate(fields)
    except ValidationError as error:
        lines = [_one_line(item) for item in error.errors()]
        more = [f"and {len(lines) - MAX_ERRORS} more"] if len(lines) > MAX_ERRORS else []
        raise ConfigError("; ".join(lines[:MAX_ERRORS] + more)) from None


def shown(value: Any) -> str:
    """A given value as a message repeats it: on one line, not at length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, endless nesting
        text = f"a {type(value).__name__} too long to show"
    return shortened(text)


def shortened(text: str) -> str:
    """`text` on one line, cut off after `MAX_SHOWN` characters."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def nearest_fields(path: str) -> list[str]:
    """The three dotted names of fields or sections most like `path`."""
    leaf = path.rpartition(".")[2]

    def likeness(name: str) -> float:
        names = ((path, name), (leaf, name.rpartition(".")[2]))
        return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in names)

    return sorted(_field_names(Config), key=likeness, reverse=True)[:3]


def _field_names(section: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in section.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            names += _field_names(field.annotation, f"{prefix}{name}.")
    return names


def _one_line(item: Any) -> str:
    """One pydantic error as `field: given, allowed`."""
    loc = item["loc"]
    if loc[:2] == ("env", "args"):
        loc = loc[:3]  # below it, pydantic mixes its own words into the location
    path = shortened(".".join(str(part) for part in loc))
    if item["type"] == "value_error":
        return f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
    if item["type"] == "missing":
        return f"{path} is missing: add it"
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown field, nearest are {', '.join(nearest_fields(path))}"
    allowed: str = _ALLOWED.get(item["type"]) or item["msg"].removeprefix("Input ")
    return f"{path}: given {shown(item['input'])}, {allowed[0].lower()}{allowed[1:]}"


_ALLOWED = {
    "model_type": "should be a section of fields, or be left out",
    "string_type": "should be text: put it in quotes",
    "tuple_type": "should be a list",
    "invalid-json-value": "should be a number, text, boolean, list or mapping",
}
"""Clearer than pydantic's own words, by its error type."""


def _refuse_unless(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _refuse_unless_divides(name: str, value: int, parts_name: str, parts: int) -> None:
    _refuse_unless(
        value % parts == 0,
        f"{name} {value} does not divide by {parts} ({parts_name}): "
        f"nearest valid {_nearest_multiples(value, parts)}",
    )


def _nearest_multiples(value: int, of: int) -> list[int]:
    """The positive multiples next below and above a `value` that is not one itself."""
    below = value - value % of
    return [n for n in (below, below + of) if n > 0]
