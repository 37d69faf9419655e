"""The training job on two machines: two network namespaces of this one, joined by a virtual cable."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scripts.training.report import read_metrics
from tests.st.harness import SMALL_JOB

pytestmark = pytest.mark.st

ROOT = Path(__file__).resolve().parents[2]
PORT = 8118


class Hosts:
    """Two namespaces, each with an address of its own, and the commands that were started in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"pipeline-{os.getpid()}-{number}" for number in range(2)]
        self.addresses = ["10.213.77.1", "10.213.77.2"]
        self.jobs: list[subprocess.Popen[str]] = []

    def join(self) -> None:
        """Make the namespaces and the cable between them."""
        ends = [f"pl{os.getpid()}e{number}" for number in range(2)]
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, self.addresses):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                _ip("-n", name, "link", "set", device, "up")

    def start(self, *options: str) -> None:
        """Start the job on both, two workers each."""
        for number, name in enumerate(self.names):
            where = ["--nodes", "2", "--node-rank", str(number), "--workers", "2", "--port", str(PORT)]
            job = [
                *where,
                "--master-addr",
                self.addresses[0],
                "--out",
                str(self.out(number)),
                *SMALL_JOB,
                "--sample-bytes",
                "0",
                *options,
            ]
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "scripts.training.launch", *job]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            pipe = subprocess.PIPE
            self.jobs.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))

    def out(self, number: int) -> Path:
        """The output folder on one of the hosts."""
        return self.folder / f"host{number}"

    def ended(self, timeout: float) -> list[tuple[int, str, str]]:
        """Exit code, standard output and error of the job on each host."""
        outputs = [job.communicate(timeout=timeout) for job in self.jobs]
        return [(job.returncode, *output) for job, output in zip(self.jobs, outputs)]

    def processes(self) -> list[psutil.Process]:
        """What works in the namespaces."""
        found = []
        for name in self.names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            found += [psutil.Process(int(pid)) for pid in listed.stdout.split() if psutil.pid_exists(int(pid))]
        return found

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {log}\n{log.read_text()[-2000:]}" for log in sorted(self.folder.rglob("*.log")))

    def close(self) -> None:
        """End what is left and take the namespaces away, the cable goes with them."""
        for process in self.processes():
            process.kill()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system does not allow network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (package iproute2)")
    hosts = Hosts(tmp_path)
    try:
        hosts.join()
        yield hosts
        assert not hosts.processes()
    finally:
        hosts.close()


def test_two_hosts_train_one_model(hosts: Hosts) -> None:
    hosts.start("--steps", "5")
    ended = hosts.ended(timeout=150)
    assert [code for code, _, _ in ended] == [0, 0], f"{ended}\n{hosts.logs()}"
    losses = [line["loss"] for line in read_metrics(hosts.out(1) / "metrics.jsonl")]
    assert len(losses) == 5 and losses[-1] < losses[0]
    for number in range(2):
        summary = json.loads((hosts.out(number) / "summary.json").read_text())
        assert set(summary["peak_memory_mib"]) == {str(2 * number), str(2 * number + 1)}
        assert (summary["block_runs_per_micro_batch"], summary["excluded_runs_per_micro_batch"]) == (2, 1)


def test_a_worker_killed_on_one_host_ends_the_job_on_both(hosts: Hosts) -> None:
    hosts.start("--steps", "100000")
    deadline = time.monotonic() + 100
    while not read_metrics(hosts.out(1) / "metrics.jsonl"):
        assert time.monotonic() < deadline and all(job.poll() is None for job in hosts.jobs), hosts.logs()
        time.sleep(0.1)
    (victim,) = [process for process in hosts.processes() if _is_rank(process, 2)]
    victim.send_signal(signal.SIGKILL)
    ended = hosts.ended(timeout=60)
    for code, _, error in ended:
        assert code == 1 and "training failed: rank 2" in error and "stage 2" in error, f"{ended}\n{hosts.logs()}"


def _is_rank(process: psutil.Process, rank: int) -> bool:
    """Whether a process is a worker; msrun and what follows its logs have much the same environment."""
    environment, command = process.environ(), process.cmdline()
    is_script = len(command) > 1 and command[1].endswith("train.py")
    return is_script and environment.get("MS_ROLE") == "MS_WORKER" and environment.get("RANK_ID") == str(rank)
