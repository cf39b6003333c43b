from pathlib import Path

import numpy as np
import pytest

from tools.check_golden import main

GOLDEN = Path(__file__).parents[1] / "golden"


def perturbed_copy(directory: Path, name: str, key: str, amount: float) -> str:
    """A golden file with `amount` more in the first entry of one array."""
    with np.load(GOLDEN / name) as file:
        arrays = {key: np.array(file[key]) for key in file.files}
    changed = arrays[key].reshape(-1)
    changed[0] = changed[0] + amount
    arrays[key] = changed.reshape(arrays[key].shape)
    path = directory / name
    np.savez(path, allow_pickle=False, **arrays)
    return str(path)


def test_recorded_numbers_are_met(capsys):
    assert main([str(path) for path in sorted(GOLDEN.glob("*.npz"))]) == 0
    shown = capsys.readouterr().out
    for quantity in ("critic_grad", "target_after", "actor_loss", "n_step_reward"):
        assert quantity in shown


@pytest.mark.parametrize(
    ("name", "key", "amount"),
    [
        ("update_a.npz", "reward", 0.1),
        ("update_a.npz", "actor/net.3.weight", 0.01),
        ("update_a.npz", "target/qnets.1.net.6.weight", 0.1),
        ("update_a.npz", "critic_grad/qnets.1.net.4.bias", 1e-4),
        ("update_a.npz", "eps_pi", 0.5),
        ("update_b.npz", "log_alpha_after", 1e-4),
        ("update_b.npz", "critic_grad_norm", 1e-3),
        ("update_b.npz", "target_after/qnets.2.net.9.bias", 1e-4),
        ("update_b.npz", "critic_after/qnets.0.net.7.weight", 3e-4),
        ("nstep_a.npz", "n_step_reward", 1e-4),
        ("nstep_a.npz", "next_t", -1.0),
        ("nstep_b.npz", "n_eff", 1.0),
        ("nstep_b.npz", "next_trunc", -1),
    ],
)
def test_one_changed_number_is_found(tmp_path, name, key, amount):
    assert main([perturbed_copy(tmp_path, name, key, amount)]) == 1


def test_files_that_are_not_golden_are_refused_in_one_line(tmp_path, capsys):
    text, other = tmp_path / "text.npz", tmp_path / "other.npz"
    text.write_text("not an archive")
    np.savez(other, meta="{}", obs=np.zeros(3))
    for path in (tmp_path / "missing.npz", text, other, tmp_path):
        assert main([str(path)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert str(path) in shown.err


def test_a_missing_file_is_refused_before_any_is_checked(capsys):
    assert main([str(GOLDEN / "nstep_a.npz"), "missing.npz"]) == 2
    assert capsys.readouterr().out == ""
    assert main([]) == 2
