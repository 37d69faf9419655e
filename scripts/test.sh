#!/usr/bin/env bash
# Sets up what is needed, then checks the code and runs the tests.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
    cat <<'TEXT'
usage: scripts/test.sh [--ut | --st] [pytest options]

Makes its own virtual environment in .venv, then runs
  1. ruff (check and format),
  2. the unit tests, two at a time (pytest-xdist),
  3. the multi-process tests, one at a time, under msrun.

  --ut    only 1 and 2
  --st    only 3
  -h, --help

Everything else goes to pytest, as: scripts/test.sh --ut -k chunk -x
TEXT
}

parts="ut st"
options=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --ut) parts="ut" ;;
        --st) parts="st" ;;
        *) options+=("$argument") ;;
    esac
done

. "$ROOT/scripts/setup.sh"
ready_environment "[test]" || exit 1
cd "$ROOT"

status=0
run() {
    local code=0
    "$@" || code=$?
    # 5: pytest found no test, as when -k names one of the other part.
    if [ "$code" -ne 0 ] && { [ "$code" -ne 5 ] || [ "${#options[@]}" -eq 0 ]; }; then status=1; fi
}

for part in $parts; do
    if [ "$part" = ut ]; then
        run "$PYTHON" -m ruff check .
        run "$PYTHON" -m ruff format --check .
        run "$PYTHON" -m pytest tests/ut -n 2 -q ${options[@]+"${options[@]}"}
    else
        run "$PYTHON" -m pytest tests/st -q -p no:xdist ${options[@]+"${options[@]}"}
    fi
done
exit "$status"
