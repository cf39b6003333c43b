"""The loop: collect and learn tick by tick, merge what the fleet saw, publish what it learnt.

Who waits for whom in one tick of the `overlap` schedule::

    driver      policy v ─┬────────────────────────────── wait, merge ── policy v + U
    collectors            ├─ act with v, append k vector steps ─┤
    ranks                 └─ U updates on the rows before v ────┘

The driver moves references and small numbers; transitions stay in memory that a collector
writes and its rank maps.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from collectors.env import EnvFactory, EnvSpec
from collectors.group import CollectorGroup
from collectors.guard import EnvError, task_name
from fastsac.core.config import Config, ConfigError, parse_config
from fastsac.core.curriculum import curriculum_metrics
from fastsac.core.executor import Executor, WorkerDied
from fastsac.core.metrics import Mean, MetricValue, reduce_over_fleet
from fastsac.core.progress import Progress, cosine_decay, updates_owed
from fastsac.fleet import Fleet, env_spec, fleet_seeds, make_fleet
from fastsac.run import Due, Run, RunResult, new_run_dir, open_run, remove_unused
from fastsac.runtime import Runtime, open_executor
from fastsac.signals import StopRequest
from fastsac.tick_clock import TickClock
from learner.update import all_finite


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line for the user."""


def train(
    config: Config,
    *,
    env: EnvFactory | str | None = None,
    runtime: Runtime = "ray",
    address: str | None = None,
) -> RunResult:
    """Train from scratch in a new run folder.

    Args:
        env: a class, or the `"module:Class"` path of one, in the place of `config.env.task`.
        runtime: `ray` for actors on a cluster, `inline` for everything in this process.
        address: of a Ray cluster; None starts one on this machine.

    Raises:
        ValueError: this configuration, environment or cluster cannot be trained on.
        TrainingError: a process or an environment failed, the learner diverged, or too many
            transitions were not finite.
    """
    if env is not None:
        config = _with_task(config, env)
    spec = env_spec(config, env)
    run_dir = new_run_dir(config)
    try:
        return _run(config, env, spec, run_dir, None, runtime, address)
    except (ValueError, KeyboardInterrupt):
        remove_unused(run_dir)
        raise


def resume(
    run_dir: Path,
    *,
    total_env_steps: int | None = None,
    env: EnvFactory | None = None,
    runtime: Runtime = "ray",
    address: str | None = None,
) -> RunResult:
    """Go on from the newest whole checkpoint of a run.

    Learner, normaliser, shard states, counters and generators continue exactly; the replay
    starts empty and the environments start fresh episodes.

    Args:
        total_env_steps: a new end of the run; None keeps the configured one.
        env: the class that the run was started with, where its path cannot be imported.

    Raises:
        ValueError: no run or no whole checkpoint there, or the run is complete.
        TrainingError: a process or an environment failed, the learner diverged, or too many
            transitions were not finite.
    """
    run_dir = Path(run_dir).resolve()
    config, state = open_run(run_dir)
    if total_env_steps is not None:
        config = parse_config(config.model_dump() | {"total_env_steps": total_env_steps})
    done = state["progress"]["env_steps"]
    if done >= config.total_env_steps:
        raise ConfigError(
            f"{run_dir} is complete at {done} env steps: give --total_env_steps above that"
        )
    return _run(config, env, env_spec(config, env), run_dir, state, runtime, address)


def _run(
    config: Config,
    env: EnvFactory | str | None,
    spec: EnvSpec,
    run_dir: Path,
    state: dict[str, Any] | None,
    runtime: Runtime,
    address: str | None,
) -> RunResult:
    """Build the fleet, train, and close everything that was opened."""
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        executor, device = stack.enter_context(open_executor(config.fleet, runtime, address))
        stop.take_again()
        # runs of one name in different folders may start in the same second
        run_id = f"{run_dir.name}-{zlib.crc32(os.fsencode(run_dir.resolve())):08x}"
        fleet = make_fleet(executor, config, env or config.env.task, spec, device, run_id)
        stack.enter_context(closing(fleet.collectors))
        stack.enter_context(closing(fleet.learners))
        try:
            fleet.start(state)
        except EnvError as error:
            raise ConfigError(str(error)) from error
        except WorkerDied as error:
            raise TrainingError(str(error)) from error
        run = stack.enter_context(closing(Run(run_dir, config, fleet.progress)))
        stop.defer()
        try:
            _train(config, fleet, executor, run, stop)
        except (EnvError, WorkerDied) as error:
            raise TrainingError(_rescue(config, fleet, run, error)) from error
        complete = fleet.progress.env_steps >= config.total_env_steps
        summary = run.finish(fleet.progress, complete=complete)
    return RunResult(
        run_dir=run_dir, summary=summary, exit_status=0 if complete else stop.exit_status
    )


def _train(config: Config, fleet: Fleet, executor: Executor, run: Run, stop: StopRequest) -> None:
    """The loop, until the configured env steps are done or a stop is asked for."""
    collectors, learners, progress = fleet.collectors, fleet.learners, fleet.progress
    evaluation_due = Due(config.evaluation.interval_env_steps, progress.env_steps)
    checkpoint_due = Due(config.checkpoint.interval_env_steps, progress.env_steps)
    record_due = Due(max(1, config.log.interval_env_steps), progress.env_steps)

    fleet_state = fleet.bus.values()
    policy = executor.share(learners.publish(progress.updates, fleet.normalizer.published()))
    failure = ""
    while progress.env_steps < config.total_env_steps and not (stop or failure):
        clock = TickClock()
        collecting = collectors.collect(policy, fleet_state)
        reports = None
        if config.fleet.schedule == "alternate":  # the ranks may read what was just written
            reports = collectors.wait(collecting)
        owed = updates_owed(
            rows_written=collectors.rows_written,
            readable_transitions=collectors.readable_transitions,
            batch_size_per_rank=config.batch_size_per_rank,
            learning_starts=config.algorithm.learning_starts,
            updates_per_tick=config.algorithm.updates_per_tick,
        )
        staleness = progress.updates - collectors.acted_version
        lr_scale = cosine_decay(
            progress.env_steps / config.total_env_steps, config.algorithm.final_lr_ratio
        )
        learning = learners.update(owed, collectors.windows(), policy, lr_scale)
        learned = learners.wait(learning)
        if reports is None:
            reports = collectors.wait(collecting)
        clock.mark("time/wait")

        progress.count(
            env_steps=collectors.inserted,
            vector_steps=config.algorithm.vector_steps_per_tick,
            updates=owed,
            samples=owed * config.algorithm.batch_size,
            nonfinite=sum(report.nonfinite for report in reports),
        )
        fleet_state = fleet.bus.merge([report.shard_state for report in reports])
        fleet.normalizer.merge([report.moments for report in reports])
        clock.mark("time/merge")
        published = learners.publish(progress.updates, fleet.normalizer.published())
        policy = executor.share(published)
        clock.mark("time/publish")

        run.count(reduce_over_fleet([report.metrics for report in learned]))
        run.count(reduce_over_fleet([report.metrics for report in reports]))
        run.count(clock.metrics(learned, reports, config.fleet.schedule))
        run.count({"learner/lr_scale": lr_scale, "fleet/collectors": float(len(reports))})
        run.count(_fleet_metrics(fleet, fleet_state, staleness))
        run.dump(reports)
        run.note_restarts(collectors.take_failures())
        if not all(report.finite for report in learned):
            run.write(progress)
            raise TrainingError(_divergence(config, progress, run))  # and nothing is saved
        failure = _nonfinite_failure(config, progress, run)
        last = progress.env_steps >= config.total_env_steps
        evaluating = evaluation_due(progress.env_steps) or last
        saving = checkpoint_due(progress.env_steps) or last
        if saving:  # before an evaluation, whose failure must not cost the training
            _save(config, progress, run, fleet.state_dict())
        if evaluating:
            run.count(_evaluate(config, collectors, policy))
        if record_due(progress.env_steps) or evaluating or saving or stop or failure:
            run.count(curriculum_metrics(fleet.bus.distributions()))
            run.write(progress, fleet.bus.bins())
    if run.saved_at != progress.env_steps:
        _save(config, progress, run, fleet.state_dict())
    if failure:
        raise TrainingError(failure)


def _fleet_metrics(
    fleet: Fleet, fleet_state: Mapping[str, Tensor], staleness: int
) -> dict[str, MetricValue]:
    metrics: dict[str, MetricValue] = {
        "fleet/staleness": float(staleness),
        "fleet/normalizer_count": float(fleet.normalizer.moments.actor.count),
        "fleet/collector_restarts": fleet.collectors.restarts,
        "fleet/lost_env_steps": fleet.collectors.lost_env_steps,
        "replay/fill": fleet.collectors.fill,
    }
    return metrics | {f"shard_state/{n}": float(v.mean()) for n, v in fleet_state.items()}


def _evaluate(config: Config, collectors: CollectorGroup, policy: Any) -> dict[str, MetricValue]:
    started = time.perf_counter()
    seed = int(fleet_seeds(config).evaluation.generate_state(1)[0])
    report = collectors.evaluate(policy, seed)
    episodes = float(report.returns.numel())
    return {
        "eval/return": Mean(float(report.returns.sum()), episodes),
        "eval/return_min": float(report.returns.min()),
        "eval/episode_length": Mean(float(report.lengths.sum()), episodes),
        "eval/survival": Mean(float((~report.terminated).sum()), episodes),
        **{f"eval/env/{n}": Mean(float(v.sum()), episodes) for n, v in report.info.items()},
        "time/evaluate": time.perf_counter() - started,
    }


def _nonfinite_failure(config: Config, progress: Progress, run: Run) -> str:
    """Why the run has to end, when dropped transitions are more than an accident."""
    allowed = max(config.env.num_envs, config.max_nonfinite_rate * progress.env_steps)
    if progress.nonfinite <= allowed:
        return ""
    return (
        f"{progress.nonfinite} of {progress.env_steps} transitions had non-finite values, "
        f"more than max_nonfinite_rate {config.max_nonfinite_rate:g} (and one per env): "
        f"see {run.dir / 'nonfinite'} and mend the environment"
    )


def _save(config: Config, progress: Progress, run: Run, state: dict[str, Any]) -> None:
    """Write a checkpoint, unless it would take the place of a good one."""
    if not all_finite(state["learners"]["learner"]):
        raise TrainingError(_divergence(config, progress, run))
    run.save(progress.env_steps, state)


def _divergence(config: Config, progress: Progress, run: Run) -> str:
    """What to do about a learner whose numbers are not finite any more."""
    a = config.algorithm
    newest = f"at {run.saved_at:,} env steps" if run.saved_at else "none"
    return (
        f"the learner diverged: a loss, gradient or parameter is not finite after "
        f"{progress.updates:,} updates (algorithm.critic_lr {a.critic_lr:g}, actor_lr "
        f"{a.actor_lr:g}, alpha_lr {a.alpha_lr:g}): train anew with lower ones or with "
        f"algorithm.max_grad_norm; newest checkpoint: {newest}"
    )


def _rescue(config: Config, fleet: Fleet, run: Run, error: EnvError | WorkerDied) -> str:
    """Save what a failed tick left whole; returns why it failed and how to go on."""
    reason = str(error)
    if isinstance(error, EnvError):
        reason += f"; traceback in {run.keep_traceback(error)}"
    with suppress(WorkerDied):  # without the learners there is nothing new to save
        state = fleet.salvage()
        run.write(fleet.progress)
        if run.saved_at != fleet.progress.env_steps:
            _save(config, fleet.progress, run, state)
    return f"{reason} (`fastsac resume {run.dir}` goes on from the newest checkpoint)"


def _with_task(config: Config, env: EnvFactory | str) -> Config:
    """`config` naming `env`, so that the run's folder says what it was trained on."""
    section = config.env.model_copy(update={"task": task_name(env)})
    return config.model_copy(update={"env": section})
