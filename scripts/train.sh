#!/usr/bin/env bash
# Sets up what is needed, then trains a small language model through a pipeline. See --help.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$ROOT/scripts/setup.sh"
ready_environment "" || exit 1
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m scripts.training.launch "$@"
