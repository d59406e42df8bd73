#!/usr/bin/env bash
# Builds .venv from a hash-locked requirements file and installs the project into it, or rewrites the locks.
#   scripts/bootstrap.sh core    what running the project needs     (requirements/core.txt)
#   scripts/bootstrap.sh dev     and what its tests and lints need  (requirements/dev.txt)
#   scripts/bootstrap.sh lock    recompute requirements/*.txt
# Needs Python >= 3.12 and a package registry. uv is used where it is found, else installed into .bootstrap/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
minor_wanted=12
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}" PIP_DISABLE_PIP_VERSION_CHECK=1 UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
# A mirror that pip is told of in the environment serves uv too.
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"; fi

say() { printf '%s\n' "$*" >&2; }

# Version managers put shims on the PATH that exist and fail, so a candidate counts only if it runs.
runs() { "$@" >/dev/null 2>&1; }
is_new_enough() { runs "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, $minor_wanted))"; }

# HOME may be a scratch folder (CI, containers): pyenv is looked for in the account's own home as well.
account_home() { getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python \
        "$(account_home)"/.pyenv/versions/3.1[2-9]*/bin/python; do
        if [ -n "$candidate" ] && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

find_uv() {
    local candidate python
    for candidate in "${UV:-}" uv "$HOME/.local/bin/uv" .bootstrap/bin/uv; do
        if [ -n "$candidate" ] && runs "$candidate" --version; then
            command -v "$candidate"
            return
        fi
    done
    python=$(find_python) || python=python3
    if ! runs "$python" -c "import venv, ensurepip"; then
        say "Neither uv nor a Python with the venv module was found: install Python >= 3.$minor_wanted, or set PYTHON to it."
        return 1
    fi
    say "Installing uv into .bootstrap"
    "$python" -m venv --clear .bootstrap
    .bootstrap/bin/python -m pip install --quiet --require-hashes --only-binary :all: -r requirements/build.txt >&2
    echo .bootstrap/bin/uv
}

lock() {
    local compile=("$1" pip compile --quiet --no-config --universal --python-version "3.$minor_wanted" --upgrade
        --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock")
    printf 'uv\nhatchling>=1.27\n' | "${compile[@]}" -o requirements/build.txt - >/dev/null
    "${compile[@]}" pyproject.toml -o requirements/core.txt >/dev/null
    # The constraint makes the test environment a superset of what users run, version by version.
    "${compile[@]}" pyproject.toml --extra train --extra dev -c requirements/core.txt -o requirements/dev.txt >/dev/null
    local jax
    jax=$(sed -n 's/^jax\(==[^ ;]*\).*/\1/p' requirements/core.txt)
    printf '%s\n' "jax-cuda13-plugin$jax" "jax-cuda13-pjrt$jax" nvidia-cuda-nvcc nvidia-nvvm |
        "${compile[@]}" --no-deps -o requirements/gpu-compiler.txt - >/dev/null
}

install() {
    local uv="$1" group="$2" python
    if ! is_new_enough .venv/bin/python; then
        python=$(find_python) || python=$("$uv" python find ">=3.$minor_wanted" 2>/dev/null) || {
            say "No Python >= 3.$minor_wanted was found; asking uv to download one."
            "$uv" python install "3.$minor_wanted" >&2
            python=$("$uv" python find ">=3.$minor_wanted")
        }
        "$uv" venv --quiet --clear --python "$python" .venv
    fi
    say "Installing requirements/$group.txt into .venv"
    "$uv" pip install --quiet --python .venv/bin/python --require-hashes -r "requirements/$group.txt"
    "$uv" pip install --quiet --python .venv/bin/python --no-deps \
        --build-constraints requirements/build.txt -e .
    # XLA's compiler for GPUs, in a folder of its own: only what compiles for a GPU looks there, since JAX would take it
    # for a GPU in the environment. It needs neither a GPU nor a driver.
    if [ "$group" = dev ] && [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
        "$uv" pip install --quiet --python .venv/bin/python --no-deps --require-hashes \
            --target .venv/gpu-compiler -r requirements/gpu-compiler.txt
    fi
    touch ".venv/.installed-$group"
}

case "${1:-}" in
    core | dev) uv=$(find_uv) && install "$uv" "$1" ;;
    lock) uv=$(find_uv) && lock "$uv" ;;
    *) say "usage: scripts/bootstrap.sh core | dev | lock" && exit 2 ;;
esac
