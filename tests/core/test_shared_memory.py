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
    connection.send(pickle.dumps(shared))
    connection.recv()


@pytest.fixture
def owner(tmp_path):
    """A process that owns memory and waits to be killed, and that memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=own_until_killed, args=(tmp_path, there))
    process.start()
    assert here.poll(60)
    yield process, pickle.loads(here.recv())
    process.kill()
    process.join()


def test_memory_of_a_living_owner_is_not_taken(owner):
    _, shared = owner
    with pytest.raises(ValueError, match="another process still writes"):
        shared.own()


def test_memory_of_a_killed_owner_lives_on_in_whoever_maps_it(owner):
    process, shared = owner
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    shared.own()
    shared["numbers"][1] = 5
    assert pickle.loads(pickle.dumps(shared))["numbers"].tolist() == [7, 5, 7, 7]


def test_memory_has_no_name_at_any_time_after_it_is_made(tmp_path):
    shared = allocate(tmp_path)
    assert not list(tmp_path.iterdir())
    attached = pickle.loads(pickle.dumps(shared))
    shared["flags"][1] = 5
    shared.close()
    assert attached["flags"].tolist() == [0, 5, 0]


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"No such file or directory\): set replay\.dir"):
        allocate(tmp_path / "missing")


def test_memory_that_is_gone_is_not_made_anew_by_a_reader(tmp_path):
    shared = allocate(tmp_path)
    pickled = pickle.dumps(shared)
    shared.close()
    with pytest.raises(ValueError, match="is gone: the process that held it ended"):
        pickle.loads(pickled)
    assert not list(tmp_path.iterdir())
