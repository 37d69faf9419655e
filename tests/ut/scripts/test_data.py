"""The text: which bytes a step sees follows from seed and step alone, and held-out bytes are never trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.training.data import Text
from scripts.training.text_files import DataError, check_data, default_data


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes())
    return path


@settings(deadline=None, max_examples=20)
@given(step=st.integers(0, 10_000), batch=st.integers(1, 9))
def test_a_step_sees_the_same_bytes_whenever_it_is_asked(file: Path, step: int, batch: int) -> None:
    first, second = Text(file, 16, seed=3), Text(file, 16, seed=3)
    second.batch(step + 1, batch)
    for one, other in zip(first.batch(step, batch), second.batch(step, batch)):
        np.testing.assert_array_equal(one, other)


def test_labels_are_the_next_bytes(file: Path) -> None:
    inputs, labels = Text(file, 16, seed=1).batch(5, 4)
    assert inputs.shape == labels.shape == (4, 16) and inputs.dtype == np.int32
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])


def test_steps_and_seeds_differ(file: Path) -> None:
    text = Text(file, 16, seed=1)
    assert not np.array_equal(text.batch(1, 4)[0], text.batch(2, 4)[0])
    assert not np.array_equal(text.batch(1, 4)[0], Text(file, 16, seed=2).batch(1, 4)[0])


def test_the_held_out_part_is_not_trained_on(file: Path) -> None:
    text = Text(file, 16, seed=1)
    training = text.training.tobytes()
    for row in text.validation(8)[0]:
        assert row.tobytes() != b"" and row.astype(np.uint8).tobytes() not in training


def test_a_folder_gives_its_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a" * 9000)
    (tmp_path / "b.bin").write_bytes(b"b" * 9000)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.txt").write_text("d" * 9000)
    text = Text(tmp_path, 16, seed=1)
    assert set(np.concatenate((text.training, text.held_out)).tolist()) == {ord("a"), ord("d")}


@pytest.mark.parametrize("content", [b"", b"short"])
def test_too_little_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match="give more text"):
        Text(tmp_path / "text.txt", 16, seed=1)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without text files"):
        check_data(tmp_path)


def test_the_default_text_is_there() -> None:
    check_data(default_data())
