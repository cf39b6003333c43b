"""What merging shard states costs the driver: all reports of a tick at once, or one combined
report per host; and what a host pays for combining its own.

    python tools/bench_merge.py --shards 64 1024 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from fastsac.core.curriculum import curriculum_metrics
from fastsac.core.merge_rules import MergeRule
from fastsac.core.shard_state import (
    LocalState,
    Report,
    ShardReport,
    ShardStateBus,
    combine_reports,
    rule_texts,
)

VECTOR_STEPS, ROUNDS = 8, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--shards-per-host", type=int, default=32)
    parser.add_argument("--bins", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="numbers instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = [measure(shards, args.shards_per_host, args.bins) for shards in args.shards]
    if args.json:
        print(json.dumps(results))
        return
    table = Table(*results[0], title=f"{args.bins} bins, 4 states; medians of {ROUNDS}, ms")
    for result in results:
        texts = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in result.values()]
        table.add_row(*texts)
    Console().print(table)


def make_rules(bins: int) -> dict[str, MergeRule]:
    """Four states: three that are merged, and what the shards sample from."""
    return {
        "failures": MergeRule(kind="linear_ema", size=bins, rate=0.001),
        "returns": MergeRule(kind="weighted_mean", size=bins, window=1000.0),
        "visits": MergeRule(kind="sum", size=bins),
        "sampling": MergeRule(kind="none", size=bins, distribution=True),
    }


def make_reports(
    shards: int, rules: dict[str, MergeRule], ticks: int, generator: torch.Generator
) -> list[list[ShardReport]]:
    """Reports of every tick; every shard has tensors of its own, as those that arrive have."""

    def state(rule: MergeRule) -> LocalState:
        value = torch.rand(rule.size, generator=generator, dtype=torch.float64)
        return LocalState(value=value / value.sum())

    values = [{name: state(rule) for name, rule in rules.items()} for _ in range(shards)]
    return [
        [
            ShardReport(
                shard=shard,
                first_step=tick * VECTOR_STEPS,
                last_step=(tick + 1) * VECTOR_STEPS - 1,
                states=values[shard],
                rules=rule_texts(rules),
            )
            for shard in range(shards)
        ]
        for tick in range(ticks)
    ]


def measure(shards: int, shards_per_host: int, bins: int) -> dict[str, float | int]:
    """Median times, ms, over `ROUNDS` ticks after a first one."""
    rules = make_rules(bins)
    ticks = make_reports(shards, rules, ROUNDS + 1, torch.Generator().manual_seed(1))
    per_host = [
        [reports[at : at + shards_per_host] for at in range(0, shards, shards_per_host)]
        for reports in ticks
    ]
    combine_ms = _median_ms([lambda r=hosts[0]: combine_reports(r, rules) for hosts in per_host])
    combined: list[list[Report]] = [
        [combine_reports(reports, rules) for reports in hosts] for hosts in per_host
    ]
    flat, tree = ShardStateBus(rules), ShardStateBus(rules)
    merge_ms = _median_ms([lambda r=reports: flat.merge(r) for reports in ticks])
    merge_hosts_ms = _median_ms([lambda r=reports: tree.merge(r) for reports in combined])
    for name, value in flat.values().items():
        torch.testing.assert_close(tree.values()[name], value, rtol=1e-12, atol=0)
    metrics_ms = _median_ms([lambda: curriculum_metrics(flat.distributions())] * (ROUNDS + 1))
    return {
        "shards": shards,
        "hosts": len(combined[0]),
        "driver, shard by shard": merge_ms,
        "driver, host by host": merge_hosts_ms,
        "one host": combine_ms,
        "drift metrics": metrics_ms,
    }


def _median_ms(calls: list[Callable[[], object]]) -> float:
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])  # the first call warms up


if __name__ == "__main__":
    main()
