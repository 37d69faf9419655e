# Sourced by train.sh and test.sh: a virtual environment with this package in it.
#
# ready_environment EXTRAS   makes or reuses .venv in the repository and sets PYTHON. EXTRAS is "" or, say, "[test]".

# PyPI has MindSpore 2.10 for Python 3.10 to 3.12. Who has it for 3.9 names that Python in PYTHON_FOR_VENV.
find_python() {
    local candidate check='import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'
    if [ -n "${PYTHON_FOR_VENV:-}" ]; then
        command -v "$PYTHON_FOR_VENV"
        return
    fi
    for candidate in python3.11 python3.12 python3.10 python3 python; do
        if "$candidate" -c "$check" >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

ready_environment() {
    local extras="$1" venv="$ROOT/.venv" python wanted stamp
    PYTHON="$venv/bin/python"
    wanted="$(cksum <"$ROOT/pyproject.toml")"
    stamp="$venv/.installed-with${extras//[^a-z]/-}"
    if [ -x "$PYTHON" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return 0
    fi
    # One at a time: two commands started together would write the same folder.
    exec 9>"$ROOT/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        exec 9>&-
        return 0
    fi
    if ! [ -x "$PYTHON" ]; then
        python="$(find_python)" || {
            echo "No Python from 3.10 to 3.12 with venv was found: install one (on Debian: apt install python3 python3-venv)," \
                "or name it in PYTHON_FOR_VENV." >&2
            return 1
        }
        echo "making $venv with $("$python" --version)" >&2
        "$python" -m venv "$venv" || return 1
    fi
    echo "installing the package and its dependencies into $venv (once; a few minutes)" >&2
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$ROOT$extras" || {
        echo "The installation failed: see pip's message above, and run this command again when it is mended." >&2
        return 1
    }
    printf '%s' "$wanted" >"$stamp"
    exec 9>&-
}
