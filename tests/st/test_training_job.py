"""The training job as a user starts it: gradients, resume, bad input, lost workers, and what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import psutil
import pytest
from mindspore import Tensor

from hyper_parallel.platform.mindspore.environment import prepare_process
from scripts.training.data import Text
from scripts.training.model import ModelShape, StageModel
from scripts.training.options import model_sizes, parse
from scripts.training.report import read_metrics, write_json
from tests.st.harness import SMALL_JOB, run_job

pytestmark = pytest.mark.st

ROOT = Path(__file__).resolve().parents[2]
QUIET = ["--sample-bytes", "0", "--validate-every", "5"]
FAULTY = f"""
import sys
from pathlib import Path
from scripts.training import launch
launch.WORKER = Path({str(ROOT / "tests" / "st" / "workers" / "training_fault.py")!r})
sys.exit(launch.main())
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).choice(["one ", "two ", "three ", "many\n"], 20_000)
    file.write_text("".join(words.tolist()))
    return file


@pytest.fixture(scope="module")
def ten_steps(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a job of ten steps."""
    out = tmp_path_factory.mktemp("job") / "out"
    _train(out, text, "--steps", "10")
    return out


def _command(out: Path, text: Path, *options: str, fault: str = "") -> list[str]:
    arguments = [*SMALL_JOB, *QUIET, "--out", str(out), "--data", str(text), *options]
    return [sys.executable, *(["-c", FAULTY] if fault else ["-m", "scripts.training.launch"]), *arguments]


def _environment(fault: str = "") -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TRAINING_FAULT": fault}


def _train(out: Path, text: Path, *options: str, code: int = 0, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run the job to its end; ``fault`` as in `workers/training_fault.py`."""
    done = subprocess.run(
        _command(out, text, *options, fault=fault),
        cwd=ROOT,
        env=_environment(fault),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    logs = "" if done.returncode == code else "".join(f.read_text()[-3000:] for f in (out / "logs").glob("*.log"))
    assert done.returncode == code, done.stdout + done.stderr + logs
    assert not _left(out)
    return done


def _left(out: Path) -> list[psutil.Process]:
    """Processes whose command names the output folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found += [process for part in process.info["cmdline"] or [] if part.startswith(str(out))][:1]
    return found


def test_gradients_equal_one_process_without_checkpointing(text: Path, tmp_path: Path) -> None:
    options = parse([*SMALL_JOB, "--data", str(text), "--out", str(tmp_path / "out")])
    (tmp_path / "out").mkdir()
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    write_json(tmp_path / "options.json", plain)
    outcome = run_job("training_gradients.py", 4, tmp_path / "logs", [str(tmp_path / "options.json")])
    assert outcome.failure is None, outcome.logs()
    measured: dict[str, np.ndarray] = {}
    for rank in range(4):
        measured.update(np.load(tmp_path / "out" / f"gradients-{rank}.npz"))

    prepare_process()
    model = StageModel(ModelShape(**model_sizes(options)))
    weights = list(model.trainable_params())
    inputs, labels = Text(text, options.length, options.seed).batch(1, options.batch)
    _, expected = ms.value_and_grad(model, None, weights)(Tensor(inputs), Tensor(labels))
    assert set(measured) == {weight.name for weight in weights}
    for weight, gradient in zip(weights, expected):
        largest = np.abs(gradient.asnumpy()).max()
        assert np.abs(gradient.asnumpy() - measured[weight.name]).max() <= 1e-6 * largest, weight.name


def test_each_block_runs_twice_and_each_excluded_region_once(ten_steps: Path) -> None:
    summary = json.loads((ten_steps / "summary.json").read_text())
    assert summary["block_runs_per_micro_batch"] == 2
    assert summary["excluded_runs_per_micro_batch"] == 1
    for rank in range(4):
        record = json.loads((ten_steps / "ranks" / f"rank-{rank}.json").read_text())
        assert record["micro_batches"] == 40
        assert {n: c for n, c in record["runs"].items() if n.startswith("block")} == {f"block layer{rank}": 80}
        assert [c for n, c in record["runs"].items() if n.startswith("excluded")] == [40, 40]


def test_the_output_folder_holds_what_was_promised(ten_steps: Path) -> None:
    summary = json.loads((ten_steps / "summary.json").read_text())
    assert summary["steps"] == 10 and summary["last_loss"] < summary["first_loss"]
    assert summary["tokens_per_s"] > 0 and set(summary["peak_memory_mib"]) == {"0", "1", "2", "3"}
    metrics = read_metrics(ten_steps / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 11))
    assert [line["step"] for line in metrics if "validation_loss" in line] == [5, 10]
    for name in ("loss.png", "timeline.png"):
        assert (ten_steps / name).read_bytes().startswith(b"\x89PNG")
    assert (ten_steps / "plan.csv").read_text().startswith("0F0")
    assert len(json.loads((ten_steps / "timeline.json").read_text())["events"]) == 4
    assert {f"worker_{rank}.log" for rank in range(4)} <= {file.name for file in (ten_steps / "logs").iterdir()}


def test_ten_and_ten_steps_are_twenty_bit_for_bit(ten_steps: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(ten_steps, tmp_path / "resumed")
    for name, options in (("resumed", ["--resume"]), ("whole", [])):
        _train(tmp_path / name, text, "--steps", "20", *options)
    resumed, whole = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("resumed", "whole"))
    assert [line["step"] for line in resumed] == list(range(1, 21))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert [line.get("validation_loss") for line in resumed] == [line.get("validation_loss") for line in whole]


def test_a_port_in_use_is_one_sentence(text: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _train(tmp_path / "out", text, "--port", str(port), code=2)
    assert done.stderr.strip().count("\n") == 0
    assert f"port {port}" in done.stderr and "choose another with --port" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "9"], "cannot be cut into 4 equal micro-batches"),
        (["--layers", "2"], "--layers 2 is fewer than --stages 4"),
        (["--data", "nowhere.txt"], "does not exist"),
        (["--workers", "3"], "--stages 4 does not match 3 workers"),
        (["--resume"], "found no complete checkpoint"),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], words: str, text: Path, tmp_path: Path) -> None:
    done = _train(tmp_path / "out", text, *options, code=2)
    assert words in done.stderr and done.stderr.strip().count("\n") == 0 and done.stdout == ""


def test_resuming_another_model_is_one_sentence(ten_steps: Path, text: Path) -> None:
    done = _train(ten_steps, text, "--steps", "30", "--resume", "--width", "16", code=2)
    assert "another model: width 32 (now 16)" in done.stderr and done.stderr.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", ["ValueError: no luck today"]), ("kill", ["the process is gone", "rank 2 was ended by SIGKILL"])],
)
def test_a_fault_in_mid_step_ends_the_job(how: str, words: list[str], text: Path, tmp_path: Path) -> None:
    """Rank, stage, action and cause are on the terminal that started the job, and the plan's row."""
    start = time.monotonic()
    done = _train(tmp_path / "out", text, "--steps", "100000", code=1, fault=f"{how}:2:3")
    assert time.monotonic() - start < 60, "with the time to start"
    assert "training failed: rank 2, stage 2, action 2B2 (" in done.stderr and ">>2B2<<" in done.stderr
    for word in words:
        assert word in done.stderr
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == 2


def test_a_crash_while_writing_a_checkpoint_loses_nothing(ten_steps: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = _train(out, text, "--steps", "100000", "--checkpoint-every", "2", code=1, fault="kill-in-checkpoint:2:4")
    assert "training failed: rank 2" in done.stderr and "SIGKILL" in done.stderr and "stage 2" in done.stderr
    _train(out, text, "--steps", "6", "--resume")
    resumed, whole = (read_metrics(folder / "metrics.jsonl") for folder in (out, ten_steps))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole[:6]]


def _wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and process.poll() is None:
        if len(read_metrics(out / "metrics.jsonl")) >= step:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the job did not start: " + str(process.communicate()))


def _start(out: Path, text: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        _command(out, text, *options),
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupted_job_leaves_no_process(text: Path, tmp_path: Path) -> None:
    process = _start(tmp_path / "out", text, "--steps", "100000")
    _wait_for_step(process, tmp_path / "out", 1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in error
    assert not _left(tmp_path / "out")


def test_a_killed_launcher_leaves_no_process(text: Path, tmp_path: Path) -> None:
    process = _start(tmp_path / "out", text, "--steps", "100000")
    _wait_for_step(process, tmp_path / "out", 1)
    left = _left(tmp_path / "out")
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
