import multiprocessing
import os
import pickle
import signal

import pytest
import torch

from fastsac.core.shared_memory import SharedTensors

LAYOUT = {"numbers": ((4,), torch.float32), "flags": ((3,), torch.uint8)}
CPU = torch.device("cpu")


def allocate(directory) -> SharedTensors:
    return SharedTensors.allocate(LAYOUT, device=CPU, directory=str(directory), name="shard")


def own_until_killed(directory, connection) -> None:
    shared = allocate(directory)
    shared["numbers"].fill_(7)
    connection.send("there")
    connection.recv()


@pytest.fixture
def owner(tmp_path):
    """A process that owns the shard, and waits to be killed."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=own_until_killed, args=(tmp_path, there))
    process.start()
    assert here.poll(60)
    yield process
    process.kill()
    process.join()


def test_memory_of_a_living_owner_is_not_taken(tmp_path, owner):
    with pytest.raises(ValueError, match="is in use: wait until the process"):
        allocate(tmp_path)
    assert (tmp_path / "shard").exists()


def test_memory_that_a_killed_owner_left_is_replaced(tmp_path, owner):
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert (tmp_path / "shard").exists()
    shared = allocate(tmp_path)
    assert shared["numbers"].tolist() == [0.0] * 4
    shared.close()
    assert not list(tmp_path.iterdir())


def test_whoever_maps_it_can_give_it_back(tmp_path):
    shared = allocate(tmp_path)
    attached = pickle.loads(pickle.dumps(shared))
    shared["flags"][1] = 5
    attached.close()
    assert not list(tmp_path.iterdir())
    assert attached["flags"].tolist() == [0, 5, 0]
    shared.close()


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"No such file or directory\): set replay\.dir"):
        allocate(tmp_path / "missing")


def test_memory_that_is_gone_is_not_made_anew_by_a_reader(tmp_path):
    shared = allocate(tmp_path)
    pickled = pickle.dumps(shared)
    shared.close()
    with pytest.raises(ValueError, match="is gone: its collector has closed it"):
        pickle.loads(pickled)
    assert not list(tmp_path.iterdir())
