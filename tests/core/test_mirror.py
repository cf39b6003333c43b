import pytest
import torch

from fastsac.core.mirror import Mirror, Reflection, mirror_rows
from fastsac.core.transition import Batch


def pair() -> Reflection:
    """Two joints that swap with a change of sign."""
    return Reflection(torch.tensor([1, 0]), torch.tensor([-1.0, -1.0]))


def test_entries_move_to_their_partners_with_their_sign():
    reflection = Reflection.join([Reflection.of_signs(1, -1, 1), pair()])
    mirrored = reflection(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    assert mirrored.tolist() == [[1.0, -2.0, 3.0, -5.0, -4.0]]


def test_mirrored_twice_is_the_same():
    x = torch.randn(7, 5)
    reflection = Reflection.join([pair(), Reflection.of_signs(-1), pair()])
    assert torch.equal(reflection(reflection(x)), x)


@pytest.mark.parametrize(
    ("index", "sign"),
    [
        ([0, 0], [1.0, 1.0]),
        ([1, 2, 0], [1.0, 1.0, 1.0]),
        ([1, 0], [1.0, -1.0]),
        ([0], [2.0]),
        ([0, 1], [1.0]),
    ],
)
def test_what_is_no_reflection_is_refused(index: list[int], sign: list[float]):
    with pytest.raises(ValueError, match="is no reflection: give a signed permutation"):
        Reflection(torch.tensor(index), torch.tensor(sign))


@pytest.mark.parametrize("asymmetric", [True, False])
def test_only_chosen_rows_of_a_batch_are_mirrored(asymmetric: bool):
    obs, next_obs = torch.tensor([[1.0, 2.0]] * 2), torch.tensor([[3.0, 4.0]] * 2)
    critic_obs, next_critic_obs = torch.tensor([[5.0]] * 2), torch.tensor([[6.0]] * 2)
    batch = Batch(
        obs=obs,
        critic_obs=critic_obs if asymmetric else obs,
        action=torch.tensor([[7.0, 8.0]] * 2),
        reward=torch.tensor([9.0, 10.0]),
        next_obs=next_obs,
        next_critic_obs=next_critic_obs if asymmetric else next_obs,
        terminated=torch.tensor([False, True]),
        discount=torch.tensor([0.9, 0.8]),
    )
    mirror = Mirror(
        actor_obs=pair(),
        critic_obs=Reflection.of_signs(-1) if asymmetric else None,
        action=Reflection.of_signs(1, -1),
    )
    seen = mirror_rows(batch, torch.tensor([True, False]), mirror)
    assert seen.obs.tolist() == [[-2.0, -1.0], [1.0, 2.0]]
    assert seen.next_obs.tolist() == [[-4.0, -3.0], [3.0, 4.0]]
    assert seen.action.tolist() == [[7.0, -8.0], [7.0, 8.0]]
    if asymmetric:
        assert seen.critic_obs.tolist() == [[-5.0], [5.0]]
        assert seen.next_critic_obs.tolist() == [[-6.0], [6.0]]
    else:
        assert seen.critic_obs is seen.obs
        assert seen.next_critic_obs is seen.next_obs
    assert seen.reward is batch.reward
    assert seen.terminated is batch.terminated
    assert seen.discount is batch.discount
