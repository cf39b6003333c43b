"""Ray: the cluster, one placement-group bundle per rank, and actors that host our classes.

The only module that imports Ray. It knows nothing of collectors and learners: a class and its
arguments reach an actor as bytes, which are unpickled once our packages are found there.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import fastsac
from fastsac.core.config import ConfigError, FleetConfig
from fastsac.core.executor import Executor, InlineExecutor, WorkerDied, WorkerHung

Runtime = Literal["ray", "inline"]

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a cluster's first answer."""
PLACEMENT_TIMEOUT_S = 60.0
"""Longest wait for resources that the cluster has but others use."""


@contextmanager
def open_executor(
    fleet: FleetConfig, runtime: Runtime, address: str | None
) -> Iterator[tuple[Executor, str]]:
    """The executor of a run and the torch device of its actors; closes both at the end.

    Args:
        address: of a Ray cluster; None takes RAY_ADDRESS (set inside a Ray job), and without it
            starts a cluster on this machine for the time of the run.

    Raises:
        ConfigError: the runtime or the cluster cannot hold the fleet.
    """
    if runtime == "inline":
        if fleet.num_ranks > 1:
            raise ConfigError(
                f"runtime inline is one process and holds 1 rank, fleet.num_ranks is "
                f"{fleet.num_ranks}: set fleet.num_ranks 1 or use --runtime ray"
            )
        torch.set_num_threads(fleet.threads_per_rank)
        yield InlineExecutor(), _device(fleet.device, num_gpus=torch.cuda.device_count())
        return
    connect(address)
    import ray

    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        device = _device(fleet.device, num_gpus=num_gpus)
        executor = RayExecutor(fleet, gpus_per_bundle=1 if device == "cuda" else 0)
        try:
            yield executor, device
        finally:
            executor.close()
    finally:
        ray.shutdown()


def connect(address: str | None) -> None:
    """Join a Ray cluster, or start one on this machine that only this machine can reach.

    Raises:
        ConfigError: nothing answers at `address`.
    """
    if address in (None, "", "auto"):
        address = os.environ.get("RAY_ADDRESS") or address or "local"
    if address == "auto":
        address = _cluster_here()
    if address != "local" and not _answers(address):
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: give HOST:PORT of one that `ray start --head` "
            "shows, or leave --address out to train on this machine"
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {}
    if address == "local":
        local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        if "ray" not in sys.modules:  # it reads them when it is imported
            # without a token of this run, Ray would leave one in the user's home, after which
            # its command line asks for it everywhere
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    try:
        ray.init(address=address, **local)
    except BaseException:  # a signal, say: no half of a cluster is left behind
        ray.shutdown()
        raise


def _cluster_here() -> str:
    """HOST:PORT of the cluster that `ray start` began on this machine; asking Ray for one that
    has ended would take minutes."""
    from ray._common.utils import get_ray_address_file

    file = Path(get_ray_address_file(None))
    address = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if not address:
        raise ConfigError(
            f"no Ray cluster runs here ({file} names none): run `ray start --head`, give the "
            "HOST:PORT of one as --address, or leave --address out to train on this machine"
        )
    return address


def _answers(address: str) -> bool:
    """Whether something listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False


def _device(wanted: str, *, num_gpus: int) -> str:
    if wanted == "cuda" and num_gpus == 0:
        raise ConfigError("fleet.device is cuda and no GPU is there: set fleet.device cpu or auto")
    if wanted == "auto":
        return "cuda" if num_gpus else "cpu"
    return wanted


@dataclass(frozen=True)
class _Actor:
    handle: Any
    name: str


class RayExecutor:
    """Objects in Ray actors; the actors of one rank share a host."""

    def __init__(self, fleet: FleetConfig, *, gpus_per_bundle: int) -> None:
        import ray
        from ray.exceptions import GetTimeoutError
        from ray.util.placement_group import placement_group

        actors_per_bundle = 1 + fleet.collectors_per_rank
        cpus = fleet.cpus_per_rank + fleet.collectors_per_rank * fleet.cpus_per_collector
        bundle: dict[str, float] = {"CPU": cpus}
        if gpus_per_bundle:
            bundle["GPU"] = gpus_per_bundle
        _check_capacity(bundle, fleet.num_ranks)
        # Ray counts in steps of 1e-4; rounding down keeps the shares within the bundle
        self._gpus_per_actor = math.floor(1e4 * gpus_per_bundle / actors_per_bundle) / 1e4
        self._actor_class = ray.remote(_make_host_class())
        self._actors: list[_Actor] = []
        self._group = placement_group([bundle] * fleet.num_ranks, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except GetTimeoutError:
            free = ray.available_resources()
            self.close()
            raise ConfigError(
                f"the cluster is busy: {fleet.num_ranks} x {bundle} wanted, "
                f"CPU {free.get('CPU', 0):g} GPU {free.get('GPU', 0):g} free after "
                f"{PLACEMENT_TIMEOUT_S:g} s: wait for other jobs or lower fleet.cpus_per_*"
            ) from None

    def spawn(self, cls: type, *, bundle: int, cpus: float, threads: int, **kwargs: Any) -> _Actor:
        from ray.cloudpickle.cloudpickle import dumps
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        name = f"{cls.__name__} of rank {bundle}"
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        handle = self._actor_class.options(
            num_cpus=cpus, num_gpus=self._gpus_per_actor, scheduling_strategy=strategy
        ).remote(
            dumps((cls, kwargs)),
            packages_root=str(packages_root()),
            import_path=sys.path,
            threads=threads,
        )
        actor = _Actor(handle, name)
        self._actors.append(actor)
        return actor

    def share(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def call(self, handle: _Actor, method: str, *args: Any) -> Any:
        return handle.handle.call.remote(method, *args)

    def wait(self, pending: Sequence[Any]) -> list[Any]:
        import ray
        from ray.exceptions import ActorDiedError, RayTaskError

        try:
            return ray.get(list(pending))
        except ActorDiedError as error:
            names = {actor.handle._actor_id.hex(): actor.name for actor in self._actors}
            name = names.get(error.actor_id or "", "an actor")
            reason = str(error).strip().splitlines()[-1]
            raise WorkerDied(f"the process of {name} died: {reason}") from error
        except RayTaskError as error:
            if not isinstance(error.cause, Exception) or isinstance(error.cause, RayTaskError):
                raise
            raise error.cause from error

    def outcomes(
        self, pending: Sequence[Any], timeouts_s: Sequence[float] | None = None
    ) -> list[Any]:
        import ray

        started, late = time.monotonic(), dict[int, WorkerHung]()
        for index, timeout_s in enumerate(timeouts_s or ()):
            left_s = max(0.0, started + timeout_s - time.monotonic())
            ready, _ = ray.wait([pending[index]], timeout=left_s)
            if not ready:
                late[index] = WorkerHung(f"no answer within {timeout_s:.3g} s")
        return [late.get(index) or self._outcome(one) for index, one in enumerate(pending)]

    def _outcome(self, pending: Any) -> Any:
        try:
            return self.wait([pending])[0]
        except Exception as error:
            return error

    def kill(self, handle: _Actor) -> None:
        import ray

        ray.kill(handle.handle)
        self._actors.remove(handle)

    def host_address(self, *, bundle: int) -> str:
        import ray
        from ray.util.placement_group import placement_group_table

        node = placement_group_table(self._group)["bundles_to_node_id"][bundle]
        return next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)

    def close(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor.handle)
        remove_placement_group(self._group)


def packages_root() -> Path:
    """Folder that holds our three packages."""
    return Path(fastsac.__file__).resolve().parents[1]


def _check_capacity(bundle: dict[str, float], num_bundles: int) -> None:
    """Refuse a fleet that can never be placed; Ray itself would wait without a word."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = sum(
        int(min(node.get(resource, 0) / amount for resource, amount in bundle.items()))
        for node in nodes
    )
    if fits < num_bundles:
        has = "; ".join(f"CPU {n.get('CPU', 0):g} GPU {n.get('GPU', 0):g}" for n in nodes)
        raise ConfigError(
            f"the fleet wants {num_bundles} x {bundle}, each on one host; the hosts have {has}: "
            "lower fleet.num_ranks, fleet.collectors_per_rank or fleet.cpus_per_*, or add hosts"
        )


def _make_host_class() -> type:
    """The actor class. It is local, so that Ray ships it by value: a worker can unpickle it
    before it knows where our packages are."""

    class Host:
        def __init__(
            self, payload: bytes, *, packages_root: str, import_path: list[str], threads: int
        ) -> None:
            import ctypes
            import importlib
            import os.path
            import sys

            import torch
            from ray import cloudpickle

            # the driver's working directory comes first on a worker's path, and a stranger's
            # `learner` there must not win over ours
            ours = [packages_root] if os.path.isdir(packages_root) else []
            sys.path[:0] = ours
            packages = [importlib.import_module(n) for n in ("fastsac", "collectors", "learner")]
            del sys.path[: len(ours)]
            parents = {os.path.dirname(os.path.dirname(str(p.__file__))) for p in packages}
            if len(parents) != 1:
                raise ImportError(
                    f"fastsac, collectors and learner come from different folders {parents}: "
                    "start the job from a folder without packages of these names"
                )
            # what the driver can import, a user's environment say, the actor can import too
            sys.path += [entry for entry in import_path if entry not in sys.path]
            torch.set_num_threads(threads)
            # glibc gives an update's large tensors back to the system and faults them in again;
            # keeping them saves a tenth of an update. Elsewhere there is no mallopt.
            mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
            if mallopt is not None:
                m_trim_threshold, m_mmap_threshold = -1, -3  # names and numbers of malloc.h
                mallopt(m_mmap_threshold, 32 * 2**20)
                mallopt(m_trim_threshold, 2**30)
            cls, kwargs = cloudpickle.loads(payload)
            self._object = cls(**kwargs)

        def __repr__(self) -> str:
            return type(self._object).__name__  # the prefix of its lines in the driver's log

        def call(self, method: str, *args: Any) -> Any:
            return getattr(self._object, method)(*args)

    return Host
