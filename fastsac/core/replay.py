"""Replay shards: memory that one collector writes and its learner rank reads.

Time-major: vector step t lives in ring row t % (capacity + 1), and the next observation of a
transition is the observation of the next row. Only a truncated transition has its true final
observation elsewhere, in a side ring. Nobody locks: the sample windows of a tick leave out every
row, and the side ring spares every slot, that the writer may touch meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastsac.core.shared_memory import SharedTensors, TensorLayout
from fastsac.core.transition import Batch, concatenate

TERMINATED, TRUNCATED, VALID = 1, 2, 4
"""Bits of a transition's flags. Without VALID it is never sampled."""

TAKEOVER_TIMEOUT_S = 60.0
"""How long a replay shard's last writer, being killed, may take to end; a stopped one takes 5 s."""


@dataclass(frozen=True, kw_only=True)
class ReplayLayout:
    """Sizes of a replay shard."""

    capacity: int
    """Vector steps kept."""
    num_envs: int
    """Environments of the shard."""
    actor_obs_dim: int
    critic_obs_dim: int | None
    """None when the critic sees the actor's observation."""
    action_dim: int
    final_slots: int
    """True final observations kept."""

    @property
    def ring(self) -> int:
        """Rows of the ring: one more than transitions, for the newest observation."""
        return self.capacity + 1

    def tensors(self) -> TensorLayout:
        rows, envs, slots = self.ring, self.num_envs, self.final_slots
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "rows_written": ((1,), torch.int64),
            "actor_obs": ((rows, envs, self.actor_obs_dim), torch.float32),
            "action": ((rows, envs, self.action_dim), torch.float32),
            "reward": ((rows, envs), torch.float32),
            "flags": ((rows, envs), torch.uint8),
            "final_slot": ((rows, envs), torch.int32),
            # one slot more than the ring has, for what is not kept
            "final_actor_obs": ((slots + 1, self.actor_obs_dim), torch.float32),
            "final_owner": ((slots + 1,), torch.int64),
            "final_cursor": ((1,), torch.int64),
        }
        if self.critic_obs_dim is not None:
            layout["critic_obs"] = ((rows, envs, self.critic_obs_dim), torch.float32)
            layout["final_critic_obs"] = ((slots + 1, self.critic_obs_dim), torch.float32)
        return layout


class ReplayStorage:
    """The memory of a replay shard; unpickled in another process, it maps the same memory."""

    def __init__(self, layout: ReplayLayout, memory: SharedTensors) -> None:
        self.layout = layout
        self._memory = memory
        self._rows_written = memory["rows_written"]
        self.actor_obs = memory["actor_obs"]
        self.action = memory["action"]
        self.reward = memory["reward"]
        self.flags = memory["flags"]
        self.final_slot = memory["final_slot"]
        self.final_actor_obs = memory["final_actor_obs"]
        self.final_owner = memory["final_owner"]
        """Vector step that owns each slot of the side ring, -1 for none."""
        self.final_cursor = memory["final_cursor"]
        """Slot that is granted next."""
        separate = layout.critic_obs_dim is not None
        self.critic_obs = memory["critic_obs"] if separate else None
        self.final_critic_obs = memory["final_critic_obs"] if separate else None

    @classmethod
    def allocate(
        cls, layout: ReplayLayout, device: torch.device, directory: str, name: str
    ) -> ReplayStorage:
        """Reserve a shard's memory, on CPU in a file without a name on the disk of `directory`.

        Raises:
            ValueError: there is no room for it.
        """
        memory = SharedTensors.allocate(
            layout.tensors(), device=device, directory=directory, name=name
        )
        storage = cls(layout, memory)
        storage.final_owner.fill_(-1)
        return storage

    @property
    def rows_written(self) -> int:
        """Vector steps committed."""
        return int(self._rows_written)

    def commit(self) -> None:
        """Count one more vector step, after its data."""
        self._rows_written += 1

    def own(self) -> None:
        """Become its one writer, after another that ended; what that one had begun is undone.

        Raises:
            ValueError: another process writes it.
        """
        self._memory.own(TAKEOVER_TIMEOUT_S)
        self.final_owner.masked_fill_(self.final_owner >= self._rows_written, -1)

    def close(self) -> None:
        """Give the memory back once nobody maps it any more."""
        self._memory.close()

    def __reduce__(self) -> tuple[type[ReplayStorage], tuple[ReplayLayout, SharedTensors]]:
        return type(self), (self.layout, self._memory)


class ReplayWriter:
    """Appends vector steps to a shard, after those that it already holds; its only writer."""

    def __init__(self, storage: ReplayStorage) -> None:
        self._storage = storage
        self._rows = storage.rows_written

    @property
    def current_actor_obs(self) -> Tensor:
        """(num_envs, actor_obs_dim), of the row that `append` completes."""
        return self._storage.actor_obs[self._rows % self._storage.layout.ring]

    def start(self, actor_obs: Tensor, critic_obs: Tensor | None) -> None:
        """Write the observation that the next action is for, between ticks.

        Once rows are written, this means that every environment was reset: the newest
        transitions that were not done have no next observation any more and are never sampled.
        """
        if self._rows:
            newest = self._storage.flags[(self._rows - 1) % self._storage.layout.ring]
            newest.masked_fill_((newest & (TERMINATED | TRUNCATED)) == 0, 0)
        self._write_obs(actor_obs, critic_obs)

    def append(
        self,
        *,
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        valid: Tensor,
        final_actor_obs: Tensor,
        final_critic_obs: Tensor | None,
        actor_obs: Tensor,
        critic_obs: Tensor | None,
        oldest_readable: int,
    ) -> Tensor:
        """Commit one vector step.

        Args:
            valid: (num_envs,) bool; other transitions are never sampled, and may hold NaN.
            final_actor_obs: (num_envs, dim), read where `truncated`.
            actor_obs: (num_envs, dim) observation that the next action is for.
            oldest_readable: lowest vector step that a rank may read during this tick.

        Returns:
            0-dim int64: truncated transitions that lost their final observation, because the
            side ring was full; they are never sampled.
        """
        s, row = self._storage, self._rows % self._storage.layout.ring
        slot, kept = self._grant_slots(truncated & valid, oldest_readable)
        lost = truncated & valid & ~kept
        # a GPU copies every row, rather than wait to know which ones are kept
        envs = kept.nonzero().flatten() if kept.device.type == "cpu" else slice(None)
        s.final_actor_obs[slot[envs]] = final_actor_obs[envs]
        if s.final_critic_obs is not None:
            assert final_critic_obs is not None, "the layout has critic observations"
            s.final_critic_obs[slot[envs]] = final_critic_obs[envs]
        s.action[row] = action
        s.reward[row] = torch.where(valid, reward, 0)
        s.final_slot[row] = slot
        s.flags[row] = (
            TERMINATED * terminated + TRUNCATED * truncated + VALID * (valid & ~lost)
        ).to(torch.uint8)
        self._rows += 1
        self._write_obs(actor_obs, critic_obs)
        s.commit()
        return lost.sum()

    def _grant_slots(self, wanted: Tensor, oldest_readable: int) -> tuple[Tensor, Tensor]:
        """A side-ring slot per env, and whether it is one to keep (the last one is not).

        A slot is free once its owner is older than any readable row. Owners ascend around the
        ring, so the free slots are the ones right after the cursor.
        """
        s, num_slots = self._storage, self._storage.layout.final_slots
        order = wanted.cumsum(0) - 1
        candidate = (s.final_cursor + order) % num_slots
        kept = wanted & (order < num_slots) & (s.final_owner[candidate] < oldest_readable)
        slot = torch.where(kept, candidate, num_slots)
        s.final_owner.index_fill_(0, slot, self._rows)
        s.final_cursor.copy_((s.final_cursor + kept.sum()) % num_slots)
        return slot, kept

    def _write_obs(self, actor_obs: Tensor, critic_obs: Tensor | None) -> None:
        row = self._rows % self._storage.layout.ring
        self._storage.actor_obs[row] = actor_obs
        if self._storage.critic_obs is not None:
            assert critic_obs is not None, "the layout has critic observations"
            self._storage.critic_obs[row] = critic_obs


class Window(NamedTuple):
    """Vector steps low <= t < high of one shard, which may be sampled."""

    low: int
    high: int


def sample_window(rows_written: int, capacity: int, vector_steps_ahead: int) -> Window:
    """What may be read while the writer adds up to `vector_steps_ahead` vector steps.

    With W rows written and k steps ahead, the last one to come is W + k - 1. It writes the
    observation of W + k, in the ring row that held vector step W + k - (capacity + 1): one below
    the window's low end. The window is empty where k leaves nothing.
    """
    return Window(max(0, rows_written + vector_steps_ahead - capacity), rows_written)


class ReplaySampler:
    """Draws transitions uniformly from the shards of a rank and gathers them into batches."""

    def __init__(self, storages: Sequence[ReplayStorage], n_step: int, gamma: float) -> None:
        self._storages = list(storages)
        self._n_step = n_step
        self._gamma = gamma
        sizes = [s.layout.ring * s.layout.num_envs for s in self._storages]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        """First cell of each shard in the union of their (ring row, env) cells."""
        self._windows: Sequence[Window] = []

    def count(self, windows: Sequence[Window]) -> int:
        """Transitions that can be sampled."""
        return int(self._valid(windows).sum())

    def draw(
        self,
        windows: Sequence[Window],
        num_batches: int,
        batch_size: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Cells of `num_batches` batches, drawn with replacement, (num_batches, batch_size) int64.

        Each batch is in ascending order, so that gathering walks through memory, shard by shard.

        Raises:
            ValueError: every transition in the windows was dropped.
        """
        self._windows = list(windows)
        valid = self._valid(windows)
        count = int(valid.sum())
        if count == 0:
            raise ValueError(
                "every transition that could be sampled was dropped for a non-finite value: "
                "mend the environment"
            )
        shape = (num_batches, batch_size)
        position = torch.randint(count, shape, generator=generator, device=valid.device)
        if count < valid.numel():
            position = valid.nonzero().flatten()[position]
        return self._cells(position, windows).sort(1).values

    def gather(self, cells: Tensor) -> Batch:
        """The (n-step) transitions that start in `cells`, one row of `draw`, (batch,)."""
        if len(self._storages) == 1:
            return self._gather_shard(0, cells)
        bounds = torch.tensor(self._starts[1:-1], device=cells.device)
        parts = cells.tensor_split(torch.searchsorted(cells, bounds).cpu())
        return concatenate(
            [
                self._gather_shard(shard, part - self._starts[shard])
                for shard, part in enumerate(parts)
            ]
        )

    def _valid(self, windows: Sequence[Window]) -> Tensor:
        """Whether each transition in the windows, by shard, time and env, may be sampled."""
        flags = []
        for storage, window in zip(self._storages, windows, strict=True):
            rows = torch.arange(*window, device=storage.flags.device) % storage.layout.ring
            flags.append(storage.flags.index_select(0, rows).flatten())
        return (torch.cat(flags) & VALID) > 0

    def _cells(self, position: Tensor, windows: Sequence[Window]) -> Tensor:
        """Cells of the transitions that are `position`-th in the order of `_valid`."""
        cells, first = position, 0
        for storage, window, start in zip(self._storages, windows, self._starts, strict=False):
            num_envs, ring = storage.layout.num_envs, storage.layout.ring
            cell = (position - first + window.low * num_envs) % (ring * num_envs) + start
            cells = torch.where(position >= first, cell, cells)
            first += (window.high - window.low) * num_envs
        return cells

    def _gather_shard(self, shard: int, cells: Tensor) -> Batch:
        """Transitions of one shard, whose own cells count from 0."""
        s = self._storages[shard]
        num_envs, num_cells = s.layout.num_envs, s.layout.ring * s.layout.num_envs
        last, reward, discount = self._sum_rewards(s, cells, self._windows[shard].high - 1)
        following = (last + num_envs) % num_cells
        flags = _take(s.flags, last)
        truncated = (flags & TRUNCATED) > 0
        slots = _take(s.final_slot, last)
        obs = _take(s.actor_obs, cells)
        next_obs = _take(s.actor_obs, following)
        next_obs = _replace(next_obs, truncated, s.final_actor_obs, slots)
        critic_obs, next_critic_obs = obs, next_obs
        if s.critic_obs is not None and s.final_critic_obs is not None:
            critic_obs = _take(s.critic_obs, cells)
            next_critic_obs = _take(s.critic_obs, following)
            next_critic_obs = _replace(next_critic_obs, truncated, s.final_critic_obs, slots)
        return Batch(
            obs=obs,
            critic_obs=critic_obs,
            action=_take(s.action, cells),
            reward=reward,
            next_obs=next_obs,
            next_critic_obs=next_critic_obs,
            terminated=(flags & TERMINATED) > 0,
            discount=discount,
        )

    def _sum_rewards(
        self, s: ReplayStorage, cells: Tensor, newest: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Last cell, discounted reward sum and bootstrap discount of each n-step window.

        A window ends after n steps, at the first done, before a dropped transition, or at the
        newest vector step.
        """
        num_envs, num_cells = s.layout.num_envs, s.layout.ring * s.layout.num_envs
        last, total = cells, _take(s.reward, cells)
        discount = torch.full_like(total, self._gamma)
        going = torch.ones_like(cells, dtype=torch.bool)
        for _ in range(self._n_step - 1):
            following = (last + num_envs) % num_cells
            going &= (_take(s.flags, last) & (TERMINATED | TRUNCATED)) == 0
            going &= last // num_envs != newest % s.layout.ring
            going &= (_take(s.flags, following) & VALID) > 0
            total = total + torch.where(going, discount * _take(s.reward, following), 0)
            discount = torch.where(going, discount * self._gamma, discount)
            last = torch.where(going, following, last)
        return last, total, discount


def _take(column: Tensor, cells: Tensor) -> Tensor:
    """Rows of a `(ring, num_envs, ...)` column; three times as fast as `column[cells]` on CPU."""
    return column.flatten(0, 1).index_select(0, cells)


def _replace(next_obs: Tensor, truncated: Tensor, finals: Tensor, slots: Tensor) -> Tensor:
    """`next_obs` with true final observations where `truncated` (batch,)."""
    if next_obs.device.type == "cpu":
        rows = truncated.nonzero().flatten()
        next_obs[rows] = finals[slots[rows]]
        return next_obs
    return torch.where(truncated[:, None], finals[slots], next_obs)
