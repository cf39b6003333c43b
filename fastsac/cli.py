"""The command line: `fastsac train`, `resume`, `eval`, `plot`, `motion check`, `list-tasks`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fastsac.signals import Stopped, StopRequest

if TYPE_CHECKING:
    from fastsac.run import RunResult

# torch, ray and the like are imported inside the commands, so that --help is instant

Overrides = Sequence[tuple[str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for what the user can correct, 1 for a run
    that failed, 130 or 143 for what SIGINT or SIGTERM stopped: a run that trains saves a
    checkpoint first. A reader of the output that goes away stops nothing."""
    sys.path.append(os.getcwd())  # a task may be the module:Class of a file beside the user
    try:
        with StopRequest():
            args, overrides = _parse(list(sys.argv[1:] if argv is None else argv))
            return args.command(args, overrides)
    except ValueError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_status


def _train(args: argparse.Namespace, overrides: Overrides) -> int:
    from fastsac.config_files import load_config

    config = load_config(args.config, overrides)
    from fastsac.trainer import train  # only now: a refusal need not wait for torch

    return _run_to_the_end(lambda: train(config, runtime=args.runtime, address=args.address))


def _resume(args: argparse.Namespace, overrides: Overrides) -> int:
    total_env_steps = None
    for field, _ in overrides:
        if field != "total_env_steps":
            raise ValueError(
                f"{field}: a resumed run keeps its configuration, only total_env_steps can change"
            )
    from fastsac.run import run_config
    from fastsac.trainer import resume

    if overrides:
        total_env_steps = run_config(args.run, overrides).total_env_steps

    return _run_to_the_end(
        lambda: resume(
            args.run, total_env_steps=total_env_steps, runtime=args.runtime, address=args.address
        )
    )


def _run_to_the_end(run: Callable[[], RunResult]) -> int:
    from rich.console import Console

    from fastsac.metrics import print_while_read
    from fastsac.report import draw_curve, result_table
    from fastsac.trainer import TrainingError

    try:
        result = run()
    except TrainingError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    console = Console()
    with console.capture() as table:
        console.print(result_table(result.run_dir))
    print_while_read(table.get() + f"curve: {draw_curve(result.run_dir)}\nrun: {result.run_dir}")
    return result.exit_status


def _eval(args: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    from rich.console import Console
    from rich.table import Table

    from fastsac.evaluation import evaluate_run

    result = evaluate_run(args.run, num_episodes=args.episodes, seed=args.seed)
    returns = result.returns.double()
    table = Table(show_header=False)
    table.add_row("episodes", f"{returns.numel()}")
    table.add_row("return, mean", f"{returns.mean():.2f}")
    table.add_row("return, standard deviation", f"{returns.std(correction=0):.2f}")
    table.add_row("return, lowest and highest", f"{returns.min():.2f}, {returns.max():.2f}")
    table.add_row("episode length, mean", f"{result.lengths.double().mean():.1f} env steps")
    table.add_row("survived", f"{(~result.terminated).double().mean():.1%} of the episodes")
    for name, values in result.info.items():
        table.add_row(f"{name}, mean", f"{values.mean():.4f}")
    table.add_row("policy version", f"{result.policy_version:,} updates")
    table.add_row("trained for", f"{result.env_steps:,} env steps")
    Console().print(table)
    return 0


def _plot(args: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    if args.curriculum:
        from fastsac.curriculum_plot import draw_curriculum as draw
    else:
        from fastsac.report import draw_curve as draw
    print(draw(args.run))
    return 0


def _check_motion(args: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    from rich.console import Console
    from rich.table import Table

    from collectors.tasks.motion import load_motion
    from collectors.tasks.motion_check import describe, describe_fit

    motion = load_motion(args.file)
    rows = describe(motion)
    if args.robot:
        rows |= {f"{args.robot}: {n}": v for n, v in describe_fit(motion, args.robot).items()}
    table = Table(show_header=False)
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)
    return 0


def _list_tasks(args: argparse.Namespace, overrides: Overrides) -> int:
    del args, overrides
    from rich.console import Console
    from rich.table import Table

    from collectors.env import ADAPTERS, TASKS, resolve_task
    from fastsac.config_files import load_config, shipped_configs

    configs: dict[str, list[str]] = {}
    for name in shipped_configs():
        configs.setdefault(load_config(name).env.task, []).append(name)
    table = Table("task", "what it is", "shipped configurations")
    for task in TASKS:
        doc = (resolve_task(task).__doc__ or "").strip().partition("\n")[0]
        table.add_row(task, doc, ", ".join(configs.pop(task, [])))
    for task, names in configs.items():
        table.add_row(task, "A task of another library.", ", ".join(names))
    for prefix in ADAPTERS:
        table.add_row(f"{prefix}:ID", f"Any of its tasks (extra `{prefix}`).", "")
    Console().print(table)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def _make_parser() -> _Parser:
    parser = _Parser(prog="fastsac", description="Off-policy FastSAC for robots.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[..., int], text: str, epilog: str = "") -> _Parser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=epilog, allow_abbrev=False
        )
        sub.set_defaults(command=command)
        return sub

    train = add(
        "train",
        _train,
        "Train from scratch in a new run folder.",
        "Any field of the configuration can be set: --seed 3 --algorithm.batch_size 1024",
    )
    train.add_argument("config", metavar="CONFIG", help="a YAML file or a shipped name")
    resume = add(
        "resume",
        _resume,
        "Go on from a run's newest whole checkpoint.",
        "--total_env_steps N gives the run a new end.",
    )
    resume.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    for command in (train, resume):
        command.add_argument(
            "--runtime",
            choices=("ray", "inline"),
            default="ray",
            help="Ray actors (default), or everything in this process",
        )
        command.add_argument(
            "--address", help="of a Ray cluster; without it one starts on this machine"
        )
    evaluate = add("eval", _eval, "Evaluate a run's newest checkpoint, deterministic policy.")
    evaluate.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    evaluate.add_argument("--episodes", type=_integer(1), default=32, help="default: 32")
    evaluate.add_argument("--seed", type=_integer(0), default=1, help="default: 1")
    plot = add("plot", _plot, "Draw a run's learning curve, or its curriculum, as a PNG image.")
    plot.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    plot.add_argument(
        "--curriculum", action="store_true", help="bins of its shard states over env steps"
    )
    motion = add("motion", _check_motion, "Say what is in a motion file, and if it fits a robot.")
    motion.add_argument("action", choices=["check"])
    motion.add_argument("file", metavar="FILE", type=Path, help="an npz file")
    motion.add_argument("--robot", help="humanoid or g1: refuse the file if it does not fit")
    add("list-tasks", _list_tasks, "List the tasks and the configurations that come along.")
    return parser


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"given {text!r}, should be an integer of at least {minimum}"
            )
        return int(text)

    return parse


def _parse(argv: list[str]) -> tuple[argparse.Namespace, Overrides]:
    """Options of the command, and the configuration fields among the arguments."""
    own = {"--runtime", "--address", "--help"}
    takes_fields = argv[:1] in (["train"], ["resume"])
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not takes_fields or not name.startswith("--") or name in own:
            rest.append(argument)
            continue
        if not equals:
            value = next(arguments, "--")
            if value.startswith("--"):
                raise ValueError(f"{name} has no value: write {name} VALUE")
        overrides.append((name.removeprefix("--"), value))
    return _make_parser().parse_args(rest), overrides
