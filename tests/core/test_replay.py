import json
import math
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fastsac.core.replay import (
    VALID,
    ReplayLayout,
    ReplaySampler,
    ReplayStorage,
    ReplayWriter,
    Window,
    sample_window,
)
from oracles.replay import ReplayOracle, Transition

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
GAMMA = 0.9
KINDS = ["plain", "terminated", "truncated", "both", "dropped", "dropped truncated"]


def layout(**sizes) -> ReplayLayout:
    defaults = {"capacity": 4, "num_envs": 2, "final_slots": 8, "critic_obs_dim": 3}
    return ReplayLayout(actor_obs_dim=2, action_dim=1, **(defaults | sizes))


@dataclass
class Shard:
    """A real shard and its oracle, fed with the same transitions.

    Every stored number says which shard, vector step and environment it belongs to, and what it
    is, so that nothing can be mistaken for anything else.
    """

    number: int
    storage: ReplayStorage
    oracle: ReplayOracle = field(init=False)
    writer: ReplayWriter = field(init=False)

    def __post_init__(self) -> None:
        self.oracle = ReplayOracle(self.storage.layout.final_slots)
        self.writer = ReplayWriter(self.storage)
        codes = self._codes(0)
        self.writer.start(_obs(codes), self._critic(_critic_obs(codes)))

    def append(self, kinds: list[str], oldest_readable: int = 0) -> int:
        """Write one vector step of these kinds, one per env; returns the lost finals."""
        t = len(self.oracle.rows)
        codes, following = self._codes(t), self._codes(t + 1)
        final_obs, final_critic_obs = _obs(codes + 0.5), _critic_obs(codes + 0.5)
        dropped = torch.tensor(["dropped" in kind for kind in kinds])
        truncated = torch.tensor(["truncated" in kind or kind == "both" for kind in kinds])
        terminated = torch.tensor([kind in ("terminated", "both") for kind in kinds])
        reward = codes.masked_fill(dropped, math.nan)
        lost = self.writer.append(
            action=codes[:, None] + 0.125,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=~dropped,
            final_actor_obs=torch.where(truncated[:, None], final_obs, math.nan),
            final_critic_obs=self._critic(
                torch.where(truncated[:, None], final_critic_obs, math.nan)
            ),
            actor_obs=_obs(following),
            critic_obs=self._critic(_critic_obs(following)),
            oldest_readable=oldest_readable,
        )
        row = []
        for env, kind in enumerate(kinds):
            code = float(codes[env])
            after = code + 0.5 if bool(truncated[env]) else float(following[env])
            row.append(
                Transition(
                    obs=(code, -code),
                    critic_obs=(code, 2 * code, 3 * code),
                    action=(code + 0.125,),
                    reward=code,
                    next_obs=(after, -after),
                    next_critic_obs=(after, 2 * after, 3 * after),
                    terminated=kind in ("terminated", "both"),
                    truncated=bool(truncated[env]),
                    valid="dropped" not in kind,
                )
            )
        expected = self.oracle.append(row, oldest_readable)
        assert int(lost) == expected
        return expected

    def window(self, vector_steps_ahead: int = 0) -> Window:
        rows, capacity = self.storage.rows_written, self.storage.layout.capacity
        return sample_window(rows, capacity, vector_steps_ahead)

    def _codes(self, t: int) -> torch.Tensor:
        return 4096.0 * self.number + 8 * t + torch.arange(self.storage.layout.num_envs)

    def _critic(self, critic_obs: torch.Tensor) -> torch.Tensor | None:
        return None if self.storage.layout.critic_obs_dim is None else critic_obs


def _obs(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, None] * torch.tensor([1.0, -1.0])


def _critic_obs(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, None] * torch.tensor([1.0, 2.0, 3.0])


class Fleet:
    """Shards of one rank, their sampler, and what the oracles say that it must give."""

    def __init__(self, directory: str | Path, layouts: list[ReplayLayout], n_step: int) -> None:
        self.shards = [
            Shard(number, ReplayStorage.allocate(sizes, CPU, str(directory), f"shard{number}"))
            for number, sizes in enumerate(layouts)
        ]
        self.n_step = n_step
        self.sampler = ReplaySampler([shard.storage for shard in self.shards], n_step, GAMMA)
        self.generator = torch.Generator().manual_seed(3)

    def sampleable(self, windows: list[Window]) -> list[tuple[int, int, int]]:
        """(shard, t, env) of all that may be drawn."""
        return [
            (shard.number, t, env)
            for shard, window in zip(self.shards, windows, strict=True)
            for t, env in shard.oracle.sampleable(*window)
        ]

    def cell(self, shard: int, t: int, env: int) -> int:
        sizes = [s.storage.layout.ring * s.storage.layout.num_envs for s in self.shards]
        one = self.shards[shard].storage.layout
        return sum(sizes[:shard]) + t % one.ring * one.num_envs + env

    def draw_all(self, windows: list[Window]) -> torch.Tensor:
        """Every cell that draws give, once; so many draws that none is missed."""
        draws = 64 * max(1, self.sampler.count(windows))
        drawn = self.sampler.draw(windows, 2, draws, self.generator)
        assert torch.equal(drawn, drawn.sort(1).values)
        return drawn.unique()

    def check(self, windows: list[Window], cells: torch.Tensor) -> None:
        """`cells` are exactly what may be sampled, and come back whole."""
        found = {self.cell(*where): where for where in self.sampleable(windows)}
        assert cells.tolist() == sorted(found)
        batch = self.sampler.gather(cells)
        expected = []
        for cell in cells.tolist():
            shard, t, env = found[cell]
            newest = windows[shard].high - 1
            expected.append(self.shards[shard].oracle.n_step(t, env, self.n_step, GAMMA, newest))
        first, last = [e.first for e in expected], [e.last for e in expected]
        assert batch.obs.tolist() == [list(e.obs) for e in first]
        assert batch.action.tolist() == [list(e.action) for e in first]
        assert batch.terminated.tolist() == [e.terminated for e in last]
        assert batch.reward.tolist() == pytest.approx([e.reward for e in expected], rel=1e-6)
        assert batch.discount.tolist() == pytest.approx([e.discount for e in expected], rel=1e-6)
        # after a termination the next observation may be anything
        kept = ~batch.terminated
        going = [e for e in last if not e.terminated]
        assert batch.next_obs[kept].tolist() == [list(e.next_obs) for e in going]
        if self.shards[0].storage.layout.critic_obs_dim is None:
            assert batch.critic_obs is batch.obs
            assert batch.next_critic_obs is batch.next_obs
        else:
            assert batch.critic_obs.tolist() == [list(e.critic_obs) for e in first]
            assert batch.next_critic_obs[kept].tolist() == [list(e.next_critic_obs) for e in going]

    def close(self) -> None:
        for shard in self.shards:
            shard.storage.close()


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A folder in memory, so that asking for too much fills no disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


LAYOUTS = st.builds(
    layout,
    capacity=st.integers(3, 6),
    num_envs=st.integers(1, 3),
    final_slots=st.integers(1, 6),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    layouts=st.lists(LAYOUTS, min_size=1, max_size=3),
    shared_obs=st.booleans(),
    n_step=st.integers(1, 4),
    data=st.data(),
)
def test_all_that_may_be_sampled_comes_back_whole_while_the_writer_goes_on(
    layouts, shared_obs, n_step, data
):
    if shared_obs:
        layouts = [replace(one, critic_obs_dim=None) for one in layouts]
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(directory, layouts, n_step)
        for _ in range(data.draw(st.integers(1, 7), "ticks")):
            ahead = [data.draw(st.integers(0, 3), "vector steps") for _ in fleet.shards]
            windows = [s.window(k) for s, k in zip(fleet.shards, ahead, strict=True)]
            readable = fleet.sampleable(windows)
            assert fleet.sampler.count(windows) == len(readable)
            cells = fleet.draw_all(windows) if readable else None
            for step in range(max(ahead) + 1):
                if cells is not None:
                    fleet.check(windows, cells)
                for shard, window, k in zip(fleet.shards, windows, ahead, strict=True):
                    if step < k:
                        num_envs = shard.storage.layout.num_envs
                        kinds = st.lists(
                            st.sampled_from(KINDS), min_size=num_envs, max_size=num_envs
                        )
                        shard.append(data.draw(kinds), oldest_readable=window.low)
        fleet.close()


def test_window_leaves_out_exactly_the_rows_that_the_writer_may_overwrite(tmp_path):
    fleet = Fleet(tmp_path, [layout(capacity=4, num_envs=1)], 1)
    [shard] = fleet.shards
    for _ in range(11):
        shard.append(["plain"])
    assert shard.window(0) == (7, 11)
    assert shard.window(3) == (10, 11)
    before = shard.storage.actor_obs.clone()
    for _ in range(3):
        shard.append(["plain"])
    changed = (shard.storage.actor_obs != before).any(2).flatten()
    held = {t % 5: t for t in range(7, 12)}
    assert {held[row] for row in changed.nonzero().flatten().tolist()} == {7, 8, 9}
    fleet.close()


def test_truncation_gives_the_true_final_observation_and_termination_a_flag(tmp_path):
    fleet = Fleet(tmp_path, [layout(num_envs=3)], 1)
    [shard] = fleet.shards
    shard.append(["plain", "truncated", "terminated"])
    batch = fleet.sampler.gather(fleet.draw_all([shard.window()]))
    # env e of vector step 0 is coded e; its final observation e + 0.5; the reset's 8 + e
    assert batch.next_obs[:2, 0].tolist() == [8.0, 1.5]
    assert batch.terminated.tolist() == [False, False, True]
    fleet.close()


def test_truncations_without_a_slot_are_counted_and_never_sampled(tmp_path):
    fleet = Fleet(tmp_path, [layout(num_envs=3, final_slots=2)], 1)
    [shard] = fleet.shards
    assert shard.append(["truncated"] * 3) == 1
    assert shard.append(["truncated", "plain", "plain"]) == 1
    windows = [shard.window()]
    cells = fleet.draw_all(windows)
    assert cells.tolist() == [fleet.cell(0, *where) for where in [(0, 0), (0, 1), (1, 1), (1, 2)]]
    fleet.check(windows, cells)
    # vector step 0 is no longer readable, so its two slots can be granted again
    assert shard.append(["plain", "truncated", "truncated"], oldest_readable=1) == 0
    fleet.close()


def test_new_writer_on_old_memory_spares_the_final_observations_in_use(tmp_path):
    fleet = Fleet(tmp_path, [layout(num_envs=1, final_slots=2)], 1)
    [shard] = fleet.shards
    shard.append(["truncated"])
    shard.writer = ReplayWriter(shard.storage)
    assert shard.append(["truncated"]) == 0
    assert shard.append(["truncated"]) == 1
    windows = [shard.window()]
    fleet.check(windows, fleet.draw_all(windows))
    fleet.close()


def test_reset_of_all_envs_unlists_transitions_whose_next_observation_is_gone(tmp_path):
    fleet = Fleet(tmp_path, [layout(num_envs=3)], 3)
    [shard] = fleet.shards
    shard.append(["plain"] * 3)
    shard.append(["plain", "truncated", "terminated"])
    shard.writer.start(torch.full((3, 2), -1.0), torch.full((3, 3), -1.0))
    cells = fleet.draw_all([shard.window()])
    assert cells.tolist() == [fleet.cell(0, *w) for w in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]]
    batch = fleet.sampler.gather(cells)
    assert batch.next_obs[~batch.terminated, 0].tolist() == [8.0, 9.5, 9.5]
    fleet.close()


def test_nothing_valid_is_an_error_that_says_so(tmp_path):
    fleet = Fleet(tmp_path, [layout()], 1)
    fleet.shards[0].append(["dropped", "dropped"])
    with pytest.raises(ValueError, match="non-finite"):
        fleet.sampler.draw([fleet.shards[0].window()], 1, 4, fleet.generator)
    fleet.close()


@pytest.mark.parametrize(("name", "num_past_newest"), [("nstep_a", 0), ("nstep_b", 442)])
def test_n_step_windows_agree_with_the_golden_numbers(tmp_path, name, num_past_newest):
    golden = np.load(GOLDEN / f"{name}.npz")
    meta = json.loads(str(golden["meta"]))
    steps, num_envs, n, gamma = (meta[k] for k in ("steps", "num_envs", "n", "gamma"))
    sizes = layout(
        capacity=meta["capacity"],
        num_envs=num_envs,
        final_slots=steps * num_envs,
        critic_obs_dim=None,
    )
    storage = ReplayStorage.allocate(sizes, CPU, str(tmp_path), name)
    writer = ReplayWriter(storage)

    def obs(t: float) -> torch.Tensor:
        return torch.stack([torch.full((num_envs,), t), torch.arange(num_envs).float()], 1)

    done, truncated = (torch.from_numpy(golden[k]) for k in ("done", "truncated"))
    writer.start(obs(0.0), None)
    for t in range(steps):
        writer.append(
            action=torch.zeros(num_envs, 1),
            reward=torch.from_numpy(golden["reward"][t]),
            terminated=done[t] & ~truncated[t],
            truncated=truncated[t],
            valid=torch.ones(num_envs, dtype=torch.bool),
            final_actor_obs=obs(t + 0.5),
            final_critic_obs=None,
            actor_obs=obs(t + 1.0),
            critic_obs=None,
            oldest_readable=0,
        )
    sampler = ReplaySampler([storage], n, gamma)
    sampler.draw([sample_window(steps, meta["capacity"], 0)], 1, 1, torch.Generator())
    start, env = golden["sample_t"], golden["sample_env"]
    batch = sampler.gather(torch.from_numpy(start % storage.layout.ring * num_envs + env))
    next_done, next_truncated = golden["next_done"] == 1, golden["next_trunc"] == 1
    np.testing.assert_array_equal(batch.obs.numpy(), np.stack([start, env], 1))
    # also where the window is cut at the newest row: its recorded next_trunc says "bootstrap"
    np.testing.assert_array_equal(batch.terminated.numpy(), next_done & ~next_truncated)
    # the observation of t + 1 stands for t + 0.5 unless the episode was cut off there
    next_t = np.where(next_done, golden["next_t"], golden["next_t"] + 0.5)
    going = ~batch.terminated.numpy()
    np.testing.assert_array_equal(batch.next_obs.numpy()[going], np.stack([next_t, env], 1)[going])

    # Recorded windows that want more rows than there are run on into the ring's oldest rows:
    # the README beside the numbers asks for a cut, so there its words are the oracle.
    past_newest = ~next_done & (start + n > steps)
    assert past_newest.sum() == num_past_newest
    kept = ~past_newest
    expected = golden["n_step_reward"], gamma ** golden["n_eff"].astype(np.float64)
    for ours, theirs in zip((batch.reward, batch.discount), expected, strict=True):
        np.testing.assert_allclose(ours.numpy()[kept], theirs[kept], rtol=1e-5, atol=1e-6)
    for i in past_newest.nonzero()[0]:
        rewards = golden["reward"][start[i] :, env[i]].astype(np.float64)
        powers = gamma ** np.arange(len(rewards))
        assert float(batch.reward[i]) == pytest.approx(float(rewards @ powers), rel=1e-5, abs=1e-6)
        assert float(batch.discount[i]) == pytest.approx(gamma ** len(rewards), rel=1e-6)
    storage.close()


def wrapped_fleet(directory: Path, *, dropped: bool) -> tuple[Fleet, list[Window]]:
    """Two shards of unequal size and fill; the first one's ring has wrapped."""
    fleet = Fleet(directory, [layout(capacity=6, num_envs=3), layout(capacity=9)], 1)
    for shard, rows in zip(fleet.shards, (11, 4), strict=True):
        for t in range(rows):
            kinds = ["plain"] * shard.storage.layout.num_envs
            kinds[t % len(kinds)] = "dropped" if dropped else "plain"
            shard.append(kinds)
    return fleet, [shard.window(1) for shard in fleet.shards]


@pytest.mark.parametrize("dropped", [False, True])
def test_draws_are_uniform_over_the_union_of_the_shards(tmp_path, dropped):
    fleet, windows = wrapped_fleet(tmp_path, dropped=dropped)
    sampleable = [fleet.cell(*where) for where in fleet.sampleable(windows)]
    drawn = fleet.sampler.draw(windows, 20, 1000, fleet.generator)
    counts = torch.bincount(drawn.flatten(), minlength=max(sampleable) + 1)
    assert counts.sum() == counts[sampleable].sum()
    assert chisquare(counts[sampleable].numpy()).pvalue > 0.01
    fleet.close()


def test_draws_repeat_for_a_generator_state(tmp_path):
    fleet, windows = wrapped_fleet(tmp_path, dropped=True)
    state = fleet.generator.get_state()
    first = fleet.sampler.draw(windows, 3, 50, fleet.generator)
    second = fleet.sampler.draw(windows, 3, 50, fleet.generator)
    fleet.generator.set_state(state)
    assert torch.equal(first, fleet.sampler.draw(windows, 3, 50, fleet.generator))
    assert not torch.equal(first, second)
    fleet.close()


def test_cells_beyond_2_to_the_24_are_exact(tmp_path):
    sizes = ReplayLayout(
        capacity=4110,
        num_envs=4096,
        actor_obs_dim=1,
        critic_obs_dim=None,
        action_dim=1,
        final_slots=1,
    )
    assert sizes.ring * sizes.num_envs > 2**24
    storage = ReplayStorage.allocate(sizes, CPU, str(tmp_path), "large")
    storage.actor_obs.copy_(torch.arange(sizes.ring).view(-1, 1, 1).expand(-1, 4096, 1))
    storage.action.copy_(torch.arange(4096).view(1, -1, 1).expand(sizes.ring, -1, 1))
    storage.flags.fill_(VALID)
    # the same memory twice puts the second shard's cells at twice the distance
    sampler = ReplaySampler([storage, storage], 1, GAMMA)
    windows = [Window(0, 4110), Window(0, 4110)]
    assert sampler.count(windows) == 2 * 4110 * 4096
    cells = sampler.draw(windows, 1, 20_000, torch.Generator().manual_seed(0))[0]
    assert cells.max() > 2**24 + 2**23
    assert (cells % 2).float().mean() == pytest.approx(0.5, abs=0.02)
    batch = sampler.gather(cells)
    row = cells // 4096 % sizes.ring
    assert torch.equal(batch.obs[:, 0].long(), row)
    assert torch.equal(batch.action[:, 0].long(), cells % 4096)
    assert torch.equal(batch.next_obs[:, 0].long(), row + 1)
    storage.close()


def answer_from_another_process(storage: ReplayStorage, connection) -> None:
    """Say what is in the shard each time it is asked."""
    sampler = ReplaySampler([storage], 1, GAMMA)
    for _ in iter(connection.recv, "end"):
        rows = storage.rows_written
        cells = sampler.draw([Window(0, rows)], 1, 400, torch.Generator())[0].unique()
        batch = sampler.gather(cells)
        connection.send((rows, batch.obs[:, 0].tolist(), batch.next_obs[:, 0].tolist()))


def test_another_process_reads_the_writers_memory_even_after_it_is_closed(tmp_path):
    shard = Shard(0, ReplayStorage.allocate(layout(), CPU, str(tmp_path), "shard"))
    shard.append(["plain", "truncated"])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    # a daemon, so that a failed assertion does not leave pytest waiting for it
    reader = context.Process(
        target=answer_from_another_process, args=(shard.storage, there), daemon=True
    )
    reader.start()

    def ask() -> tuple[int, list[float], list[float]]:
        here.send("ask")
        assert here.poll(60)
        return here.recv()

    assert ask() == (1, [0.0, 1.0], [8.0, 1.5])
    shard.append(["truncated", "plain"])
    assert ask() == (2, [0.0, 1.0, 8.0, 9.0], [8.0, 1.5, 8.5, 17.0])
    shard.storage.close()
    shard.append(["plain", "plain"])
    assert ask() == (3, [0.0, 1.0, 8.0, 9.0, 16.0, 17.0], [8.0, 1.5, 8.5, 17.0, 24.0, 25.0])
    here.send("end")
    reader.join(60)
    assert reader.exitcode == 0


def test_memory_is_aligned_and_may_be_closed_twice(tmp_path):
    storage = ReplayStorage.allocate(layout(num_envs=3), CPU, str(tmp_path), "shard")
    tensors = [value for value in vars(storage).values() if isinstance(value, torch.Tensor)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    storage.close()
    storage.close()
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_a_one_line_error_that_leaves_nothing(memory_dir):
    with pytest.raises(ValueError, match=r"bytes are free.*replay\.steps_per_env") as caught:
        ReplayStorage.allocate(layout(capacity=10**12), CPU, str(memory_dir), "shard")
    message = str(caught.value)
    assert "\n" not in message
    assert "replay.dir" in message
    needed = layout(capacity=10**12).tensors()
    data = sum(math.prod(shape) * dtype.itemsize for shape, dtype in needed.values())
    assert f"{data:,}"[:12] in message
    assert list(memory_dir.iterdir()) == []


def test_missing_folder_is_an_error_that_names_the_setting(tmp_path):
    with pytest.raises(ValueError, match=r"No such file.*replay\.dir") as caught:
        ReplayStorage.allocate(layout(), CPU, str(tmp_path / "absent"), "shard")
    assert "\n" not in str(caught.value)
