"""The package as a user installs it, without the repository around it."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_trains_the_demo_by_name(tmp_path):
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*build, "--wheel-dir", str(tmp_path), str(REPOSITORY), cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    run(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
        cwd=site.parent,
    )
    # the installed packages come before the repository, which is on this interpreter's path
    installed = {"PYTHONPATH": str(site)}
    where = run("-c", "import fastsac; print(fastsac.__file__)", cwd=tmp_path, **installed)
    assert where.startswith(str(site))
    small = "--total_env_steps 320 --env.num_envs 8 --algorithm.batch_size 32".split()
    small += "--replay.steps_per_env 200 --evaluation.num_episodes 2".split()
    command = ["-m", "fastsac", "train", "cartpole-swingup", "--runtime", "inline", *small]
    run(*command, "--log.dir", str(tmp_path / "runs"), cwd=tmp_path, **installed)
    [run_dir] = (tmp_path / "runs").iterdir()
    assert (run_dir / "summary.json").is_file()
    assert (run_dir / "curve.png").is_file()
