# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from collectors.tasks.kinematics import (
    Kinematics,
    quat_product,
    quat_to_matrix,
    rotation_angle,
    yaw_matrix,
)
from collectors.tasks.robots import load_robot
from oracles.tracking import body_frames

# Turned bodies, joints away from their body's origin, two on one body, a body without any, a joint
# whose angle does not start at 0, and two branches.
TREE = """
<mujoco>
  <worldbody>
    <body name="base" pos="1 2 3"><freejoint/><geom size="0.1"/>
      <body name="hip" pos="0.1 0.2 -0.1" quat="0.9 0.1 -0.3 0.2">
        <joint axis="0 1 0" pos="0.05 0 0.02"/><joint axis="1 0 1" pos="0 -0.1 0"/>
        <geom size="0.1"/>
        <body name="foot" pos="0 0.1 -0.3" euler="10 40 70">
          <joint axis="0 0 1" pos="0.1 0.1 0" ref="20"/><geom size="0.1"/>
        </body>
      </body>
      <body name="rack" pos="0 0 0.4" euler="0 30 0"><geom size="0.1"/>
        <body name="hand" pos="0.3 0 0"><joint axis="1 2 3"/><geom size="0.1"/></body>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


def model_of(name: str) -> mujoco.MjModel:
    if name == "tree":
        return mujoco.MjModel.from_xml_string(TREE)
    return load_robot(name).model


@pytest.mark.parametrize("name", ["tree", "quadruped"])
def test_bodies_are_where_mujoco_sees_them_and_move_as_it_says(name: str):
    model = model_of(name)
    names = tuple(model.body(i).name for i in range(model.nbody - 1, 0, -1))
    rng = np.random.default_rng(0)
    qpos = rng.uniform(-2, 2, (20, model.nq))
    qpos[:, 3:7] /= np.linalg.norm(qpos[:, 3:7], axis=1, keepdims=True)
    qvel = rng.normal(size=(20, model.nv))
    states = torch.tensor(qpos).float(), torch.tensor(qvel).float()
    bodies = Kinematics(model, names, torch.device("cpu"))(*states)
    for row in range(20):
        seen = body_frames(model, names, qpos[row], qvel[row])
        rotation = np.stack([r.as_matrix() for r in seen.rotation])
        np.testing.assert_allclose(bodies.position[row], seen.position, atol=2e-6)
        np.testing.assert_allclose(bodies.rotation[row], rotation, atol=2e-6)
        np.testing.assert_allclose(bodies.velocity[row], seen.velocity, atol=1e-5)
        np.testing.assert_allclose(bodies.turning[row], seen.turning, atol=1e-5)


directions = st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda v: np.linalg.norm(v) > 0.01)


@given(axis=directions, angle=st.floats(0, np.pi))
def test_an_angle_is_that_of_the_rotation_vector(axis: tuple[float, ...], angle: float):
    vector = angle * np.array(axis) / np.linalg.norm(axis)
    matrix = torch.tensor(Rotation.from_rotvec(vector).as_matrix())
    assert float(rotation_angle(matrix)) == pytest.approx(angle, abs=1e-7)
    assert float(rotation_angle(matrix.float())) == pytest.approx(angle, abs=2e-6)


def test_yaw_is_the_first_of_three_turns():
    yaw, tilts = np.linspace(-3, 3, 30), np.linspace(-1.2, 1.2, 30)
    whole = Rotation.from_euler("ZYX", np.stack([yaw, tilts, tilts[::-1]], 1))
    expected = Rotation.from_euler("z", yaw[:, None])
    np.testing.assert_allclose(
        yaw_matrix(torch.tensor(whole.as_matrix())), expected.as_matrix(), atol=1e-12
    )


def test_quaternions_turn_and_combine_as_rotations_do():
    rng = np.random.default_rng(0)
    a, b = (Rotation.from_quat(rng.normal(size=(30, 4))) for _ in range(2))
    first, second = (torch.tensor(np.roll(r.as_quat(), 1, axis=1)) for r in (a, b))
    np.testing.assert_allclose(quat_to_matrix(3 * first), a.as_matrix(), atol=1e-12)
    product = quat_to_matrix(quat_product(first, second))
    np.testing.assert_allclose(product, (a * b).as_matrix(), atol=1e-12)
