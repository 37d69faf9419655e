"""Starts the training job on this machine: checks first, then workers, progress, and the reports.

Exit code 0 when the job did all its steps, 2 when it could not start, 1 when it failed on the way, 130 when it was
interrupted. No process of the job is left in any case.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from pipeline.launch import Cluster, Failure, Job, LaunchError, cluster_of, python_path
from scripts.training import checkpoint, report
from scripts.training.options import check, model_sizes, parse, plan_of
from scripts.training.progress import Progress

__all__ = ["main"]

WORKER = Path(__file__).with_name("train.py")

_ROOT = Path(__file__).resolve().parent.parent.parent
_SECONDS_BETWEEN_LOOKS = 0.2


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the job that the options describe and return the exit code."""
    options = parse(arguments)
    try:
        check(options)
        _check_out(options)
        _check_environment()
        cluster = cluster_of(options)
    except (ValueError, RuntimeError, ImportError) as error:
        return _refuse(error)
    signal.signal(signal.SIGTERM, _interrupt)
    job = _prepare(options, cluster)
    try:
        job.start()
        succeeded = _follow(job, options)
        if not succeeded:
            failure = job.failure()
            print(f"\ntraining failed: {failure}{_stages_of(failure, options)}", file=sys.stderr)
            return 1
    except LaunchError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("\ntraining interrupted; --resume goes on from the newest checkpoint", file=sys.stderr)
        return 130
    finally:
        job.stop()
    _report(options)
    return 0


def _refuse(error: Exception) -> int:
    print(f"cannot train: {error}", file=sys.stderr)
    return 2


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _check_environment() -> None:
    """See that MindSpore and the device are there. Imported here, so that a wrong MindSpore is told like the rest."""
    os.environ.setdefault("GLOG_v", "3")  # one sentence, and not MindSpore's warnings around it
    from hyper_parallel.platform.mindspore.environment import check_device, check_mindspore_version, device_target

    check_mindspore_version()
    check_device(device_target())


def _check_out(options: argparse.Namespace) -> None:
    """See that the output folder fits: a job of the same model to resume, or no job yet."""
    folder = options.out / "checkpoints"
    if options.resume:
        manifest = checkpoint.read_manifest(folder)
        checkpoint.check_model(folder, manifest, model_sizes(options), options.stages)
        if manifest["step"] >= options.steps:
            raise checkpoint.CheckpointError(
                f"{options.out} has done {manifest['step']} steps, and --steps is {options.steps} in all: "
                "give --steps more to go on"
            )
    elif checkpoint.complete_steps(folder):
        raise checkpoint.CheckpointError(
            f"{options.out} holds an earlier job: go on with it by --resume, or give another --out"
        )


def _prepare(options: argparse.Namespace, cluster: Cluster) -> Job:
    """Clear what an earlier job in the folder left and may mislead, and write the options for the workers."""
    options.out.mkdir(parents=True, exist_ok=True)
    metrics = options.out / "metrics.jsonl"
    if not options.resume:
        metrics.unlink(missing_ok=True)
    else:
        report.drop_metrics_after(metrics, checkpoint.read_manifest(options.out / "checkpoints")["step"])
    for file in options.out.glob("ranks/rank-*.json"):
        file.unlink()
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    report.write_json(options.out / "options.json", plain)
    command = [str(WORKER), str(options.out / "options.json")]
    return Job(command, cluster, options.out / "logs", _environment())


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": python_path(_ROOT)}


def _follow(job: Job, options: argparse.Namespace) -> bool:
    """Show progress until the job ends; return whether it succeeded."""
    with Progress(options.out / "metrics.jsonl", options.steps, job.cluster.ranks) as progress:
        while True:
            outcome = job.poll()
            progress.look()
            if outcome is not None:
                return outcome
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _stages_of(failure: Failure, options: argparse.Namespace) -> str:
    """Return which stages the failed rank holds, when the failure itself does not say where it was."""
    if failure.rank is None or failure.stage is not None:
        return ""
    return f"; rank {failure.rank} runs stage {', '.join(map(str, plan_of(options).placement.stages_of(failure.rank)))}"


def _report(options: argparse.Namespace) -> None:
    """Draw the pictures, write the summary, and let the model write a sample."""
    metrics = report.read_metrics(options.out / "metrics.jsonl")
    ranks = report.read_ranks(options.out)
    summary = report.summarise(metrics, ranks)
    report.write_json(options.out / "summary.json", summary)
    if metrics:
        report.draw_losses(metrics, options.out / "loss.png")
    report.draw_timeline(options.out, ranks)
    for name, value in summary.items():
        print(f"{name:32} {value}")
    if options.sample_bytes > 0:
        _write_sample(options)
    print(f"results in {options.out}")


def _write_sample(options: argparse.Namespace) -> None:
    """Run the sampler in a process of its own: it wants a MindSpore without workers."""
    command = [sys.executable, "-m", "scripts.training.sample", "--out", str(options.out)]
    command += ["--bytes", str(options.sample_bytes)]
    done = subprocess.run(
        command, env={**os.environ, **_environment()}, cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"no sample was written: {last}", file=sys.stderr)
    else:
        print("the model wrote:\n" + done.stdout)


if __name__ == "__main__":
    sys.exit(main())
