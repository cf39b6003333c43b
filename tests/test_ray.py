"""The runtime on real clusters: a head and a second node, each `ray start`ed on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import assert_same_tree, counted_metrics, saved_state, small_config

from fastsac.core.config import ConfigError
from fastsac.metrics import read_metrics
from fastsac.trainer import train

REPOSITORY = Path(__file__).parents[1]
FASTSAC = [sys.executable, "-m", "fastsac"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# a run of seconds on the shipped task, as `--field value` arguments
SMALL_CARTPOLE = [
    "--env.num_envs",
    "8",
    "--replay.steps_per_env",
    "200",
    "--algorithm.batch_size",
    "32",
    "--algorithm.actor_hidden",
    "16",
    "--algorithm.critic_hidden",
    "16",
    "--algorithm.num_atoms",
    "11",
    "--evaluation.num_episodes",
    "2",
    "--evaluation.interval_env_steps",
    "0",
    "--log.tensorboard",
    "false",
]


@dataclass(frozen=True)
class Cluster:
    address: str
    jobs_url: str
    env: dict[str, str]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.1)


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Two nodes of two CPUs. They end by themselves: `ray stop` would end other clusters too."""
    port, jobs_port = free_port(), free_port()
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    env["PYTHONPATH"] = str(REPOSITORY / "tests")  # where the probes are
    log = (tmp_path_factory.mktemp("ray") / "ray.log").open("w")
    common = ["--block", "--num-cpus=2", "--object-store-memory=100000000"]
    head = [f"--port={port}", f"--dashboard-port={jobs_port}", "--node-ip-address=127.0.0.1"]
    nodes: list[subprocess.Popen] = []

    def start(*arguments: str) -> None:
        # The agent that starts jobs has a fixed port, which another cluster may have taken.
        agent_port = f"--dashboard-agent-listen-port={free_port()}"
        command = [*RAY, "start", *common, agent_port, *arguments]
        nodes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    with contextlib.ExitStack() as stack:

        def stop() -> None:
            for node in reversed(nodes):
                node.terminate()
            for node in nodes:
                node.wait(timeout=60)

        stack.callback(stop)
        start("--head", *head)
        wait_until(lambda: answers(port) and answers(jobs_port), "the head answers")
        start(f"--address=127.0.0.1:{port}")
        import ray

        ray.init(f"127.0.0.1:{port}")
        wait_until(lambda: len(ray.nodes()) == 2, "the second node joins")
        ray.shutdown()
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{jobs_port}", env)


def test_ray_gives_the_numbers_of_inline(cluster, tmp_path):
    config = small_config(tmp_path)
    ray_run = train(config, address=cluster.address).run_dir
    inline_run = train(config, runtime="inline").run_dir
    assert counted_metrics(ray_run) == counted_metrics(inline_run)
    assert_same_tree(saved_state(ray_run), saved_state(inline_run))


def test_two_ranks_on_two_nodes_repeat_bit_for_bit(cluster, tmp_path):
    # a bundle takes the two CPUs of a node, so the ranks meet across nodes
    config = small_config(
        tmp_path, fleet={"num_ranks": 2, "collectors_per_rank": 1, "cpus_per_collector": 1}
    )
    first, second = (train(config, address=cluster.address).run_dir for _ in range(2))
    assert counted_metrics(first) == counted_metrics(second)
    assert_same_tree(saved_state(first), saved_state(second))


def test_a_fleet_that_can_never_be_placed_is_refused(cluster, tmp_path):
    config = small_config(tmp_path, fleet={"num_ranks": 4, "collectors_per_rank": 1})
    with pytest.raises(ConfigError, match=r"wants 4 x .*the hosts have CPU 2 GPU 0; CPU 2"):
        train(config, address=cluster.address)


def test_no_cluster_at_the_address_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no Ray cluster answers at"):
        train(small_config(tmp_path), address=f"127.0.0.1:{free_port()}")


def test_transitions_never_pass_through_the_object_store(cluster, tmp_path):
    """The rank reads rows that the collector writes after it attached."""
    # a rank that had received a copy would sample zeros, not rewards of 1
    result = train(small_config(tmp_path), address=cluster.address)
    assert result.summary["metrics"]["replay/reward_min"] == 1.0


def test_a_strangers_packages_in_the_working_directory_do_not_win(cluster, tmp_path):
    for name in ("learner", "collectors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the stranger won')\n")
    script = Path(sys.executable).parent / "fastsac"
    command = [str(script), "train", "cartpole-swingup", "--address", cluster.address]
    command += [*SMALL_CARTPOLE, "--total_env_steps", "160", "--log.dir", "runs"]
    done = subprocess.run(command, cwd=tmp_path, env=cluster.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


def submit(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*RAY, "job", "submit", f"--address={cluster.jobs_url}", "--working-dir=."]
    command += [*arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=cluster.env, capture_output=True, text=True, check=False
    )


def entrypoint(*arguments: str) -> list[str]:
    return ["--", *FASTSAC, *arguments]


def test_ray_job_submit_trains_on_two_nodes_and_shows_its_log(cluster, tmp_path):
    done = submit(
        cluster,
        *entrypoint("train", "configs/cartpole-swingup.yaml", *SMALL_CARTPOLE),
        *["--total_env_steps", "320", "--log.dir", str(tmp_path), "--fleet.num_ranks", "2"],
        *["--fleet.collectors_per_rank", "1", "--fleet.cpus_per_collector", "1"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [run_dir] = tmp_path.iterdir()
    assert str(run_dir) in done.stdout
    assert json.loads((run_dir / "summary.json").read_text())["complete"]


def test_ray_job_submit_hands_on_a_refusal(cluster):
    done = submit(cluster, *entrypoint("train", "cartpole-swingup", "--env.num_envs", "7"))
    assert done.returncode == 1
    assert "env.num_envs 7 does not divide by 2" in done.stdout


def test_ray_job_stop_checkpoints_and_resume_continues(cluster, tmp_path):
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(cluster.jobs_url)
    arguments = ["train", "cartpole-swingup", *SMALL_CARTPOLE, "--total_env_steps", "100000000"]
    job = client.submit_job(
        entrypoint=" ".join([*FASTSAC, *arguments, "--log.dir", str(tmp_path)]),
        runtime_env={
            "working_dir": str(REPOSITORY),
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"},
        },
    )

    def is_learning() -> bool:
        runs = list(tmp_path.glob("*/metrics.jsonl"))
        return bool(runs) and any(r["fleet/updates"] > 0 for r in read_metrics(runs[0].parent))

    wait_until(is_learning, "the job learns")
    client.stop_job(job)
    wait_until(lambda: client.get_job_status(job) == JobStatus.STOPPED, "the job stops")
    [run_dir] = tmp_path.iterdir()
    stopped_at = saved_state(run_dir)["progress"]["env_steps"]
    resume = [*FASTSAC, "resume", str(run_dir), "--address", cluster.address]
    resume += ["--total_env_steps", str(stopped_at + 160)]
    done = subprocess.run(resume, env=cluster.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert saved_state(run_dir)["progress"]["env_steps"] == stopped_at + 160


def writer_of(shard: int, directory: Path) -> int:
    """Process that holds a replay shard's memory locked: its collector."""
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            held = os.readlink(entry).startswith(f"{directory}/") and f"-shard{shard}-" in (
                os.readlink(entry)
            )
            if held and "lock:" in (entry.parents[1] / "fdinfo" / entry.name).read_text():
                return int(entry.parts[2])
    raise AssertionError(f"nobody writes shard {shard} in {directory}")


def holders(directory: Path) -> set[int]:
    """Processes that have anything open in a folder, also what has no name any more."""
    found = set[int]()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(f"{directory}/"):
                found.add(int(entry.parts[2]))
    return found


@contextlib.contextmanager
def training(cluster: Cluster, tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """An endless run of two collectors, with its replay shards in `tmp_path`/shards."""
    (tmp_path / "shards").mkdir()
    command = [*FASTSAC, "train", "cartpole-swingup", "--address", cluster.address]
    command += [*SMALL_CARTPOLE, "--total_env_steps", "100000000"]
    command += ["--replay.dir", str(tmp_path / "shards"), "--log.dir", str(tmp_path / "runs")]
    command += ["--log.interval_env_steps", "0", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=cluster.env, **pipes) as process:
        try:
            wait_until(lambda: newest(tmp_path, "fleet/updates") > 0, "the run learns")
            yield process
        finally:
            process.kill()


def newest(tmp_path: Path, metric: str) -> float:
    """A metric's last value in the only run, 0 before there is one."""
    runs = list(tmp_path.glob("runs/*/metrics.jsonl"))
    records = read_metrics(runs[0].parent) if runs else []
    return records[-1][metric] if records else 0.0


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_collector_that_dies_or_hangs_is_replaced_and_loses_no_transition(
    cluster, tmp_path, fault
):
    with training(cluster, tmp_path) as process:
        collector = writer_of(1, tmp_path / "shards")
        os.kill(collector, fault)
        wait_until(lambda: newest(tmp_path, "fleet/collector_restarts") == 1, "a restart")
        before = newest(tmp_path, "fleet/env_steps")
        wait_until(lambda: newest(tmp_path, "fleet/env_steps") > before + 400, "the run goes on")
        wait_until(lambda: not Path(f"/proc/{collector}").exists(), "the old process ends")
        wait_until(lambda: newest(tmp_path, "fleet/collectors") == 2, "both shards collect")
        assert writer_of(1, tmp_path / "shards") != collector
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert "a collector is restarted: " in output + errors
    [run_dir] = tmp_path.glob("runs/*")
    last = read_metrics(run_dir)[-1]
    env_steps = saved_state(run_dir)["progress"]["env_steps"]
    assert env_steps == last["fleet/env_steps"] > before
    wait_until(lambda: not holders(tmp_path / "shards"), "its memory is free")


def test_a_collector_that_may_not_be_restarted_is_named_and_leaves_no_memory_behind(
    cluster, tmp_path
):
    with training(cluster, tmp_path, "--fleet.collector_restarts", "0") as process:
        os.kill(writer_of(1, tmp_path / "shards"), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the process of Collector of rank 0 died" in errors
    assert not list((tmp_path / "shards").iterdir())
    wait_until(lambda: not holders(tmp_path / "shards"), "its memory is free")


def test_a_killed_driver_leaves_no_process_and_no_memory_behind(cluster, tmp_path):
    with training(cluster, tmp_path) as process:
        held = holders(tmp_path / "shards")
        assert len(held) == 3  # two collectors and their rank
        process.kill()
        process.communicate(timeout=60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held), "they end")
    assert not list((tmp_path / "shards").iterdir())
