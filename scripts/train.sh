#!/usr/bin/env bash
# Sets up what is needed, then trains a small language model through a pipeline. See --help.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$ROOT/scripts/setup.sh"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
for argument in "$@"; do
    if [ "$argument" = -h ] || [ "$argument" = --help ]; then
        exec "$(find_python)" -m scripts.training.options "$argument"
    fi
done
ready_environment "" || exit 1
exec "$PYTHON" -m scripts.training.launch "$@"
