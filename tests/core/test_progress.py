import pytest

from fastsac.core.progress import cosine_decay


@pytest.mark.parametrize(
    ("done", "scale"), [(0.0, 1.0), (1 / 3, 0.8), (0.5, 0.6), (1.0, 0.2), (1.5, 0.2)]
)
def test_learning_rates_fall_along_half_a_cosine(done: float, scale: float):
    # 0.2 + 0.8 * (1 + cos(pi * done)) / 2, and cos(pi / 3) is a half
    assert cosine_decay(done, 0.2) == pytest.approx(scale)


def test_a_final_ratio_of_one_keeps_the_learning_rates():
    assert {cosine_decay(done / 7, 1.0) for done in range(8)} == {1.0}
