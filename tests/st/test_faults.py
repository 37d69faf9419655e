"""A rank raises, is killed, hangs or is stopped in mid-step: every rank ends soon, with one message that says where."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.st import harness

pytestmark = pytest.mark.st

RANKS = 3
TIMEOUT = 5
PLACE = "rank 1, stage 1, action 1B2 ("
ROW = "  row 1 of plan 1f1b+prefire: ... "
CAUSES = {
    "raise": "ValueError: no luck",
    "kill": "the process is gone (killed, ended, or its connection was lost)",
    "hang": f"has been running for more than {TIMEOUT} s",
    "freeze": f"the process has not answered for {TIMEOUT} s",
}
SAYS_IT_ITSELF = {"raise", "hang"}


@pytest.mark.parametrize("how", ["raise", "kill", "hang", "freeze"])
def test_every_rank_ends_with_one_message(tmp_path: Path, how: str) -> None:
    outcome = harness.run_job("fault.py", RANKS, tmp_path, arguments=[how, str(TIMEOUT)], timeout=60.0, settle=4.0)
    assert outcome.failure is not None, outcome.logs()
    assert (outcome.failure.rank, outcome.failure.stage, outcome.failure.action) == (1, 1, "1B2"), outcome.logs()
    assert outcome.seconds < 60.0
    for rank in range(RANKS):
        log = (tmp_path / f"worker_{rank}.log").read_text(errors="replace")
        told = log.count(PLACE)
        assert told == (1 if rank != 1 or how in SAYS_IT_ITSELF else 0), outcome.logs()
        if told:
            message = log[log.index(PLACE) :]
            assert CAUSES[how] in message
            assert ROW in message and ">>1B2<<" in message
    assert [result["steps"] for result in outcome.results.values()] == [1] * RANKS, "a step ended on some ranks only"
    assert not left_behind(tmp_path)


def test_rank_0_is_killed(tmp_path: Path) -> None:
    """The monitor goes with it."""
    arguments = ["kill", str(TIMEOUT), "0"]
    outcome = harness.run_job("fault.py", 2, tmp_path, arguments=arguments, timeout=60.0, settle=4.0)
    assert outcome.failure is not None and outcome.failure.rank == 0, outcome.logs()
    assert "Rank 1 ends because of rank 0, stage 0, action 0" in (tmp_path / "worker_1.log").read_text()
    assert not left_behind(tmp_path)


def left_behind(log_dir: Path) -> list[int]:
    """Processes of the job that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PIPELINE_LOG_DIR") == str(log_dir) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
