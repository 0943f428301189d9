"""`plan` shows values as they were understood."""

from pathlib import Path

from megatrain_cli.cli.plan import values_as_read
from megatrain_cli.config.load import load_config


def test_each_key_that_was_set_is_shown_as_it_was_read(tmp_path: Path) -> None:
    """CFG-01: a user sees whether 1e-5 became a number."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: t}\ntrain: {output_dir: r, max_steps: 2e5}\n"
        "optimizer: {learning_rate: 1E-5, max_grad_norm: null}\n"
    )
    assert values_as_read(load_config(path, ["data.train=[a, {path: b, format: text}]"])) == [
        (
            "data.train",
            f'[{{"path": "{tmp_path}/a"}}, {{"path": "{tmp_path}/b", "format": "text"}}]',
        ),
        ("model.path", f'"{tmp_path}/m"'),
        ("optimizer.learning_rate", "1e-05"),
        ("optimizer.max_grad_norm", "null"),
        ("train.max_steps", "200000"),
        ("train.output_dir", f'"{tmp_path}/r"'),
    ]
