#!/usr/bin/env bash
# Everything that `make test` and `make demo` need, inside this checkout: .venv, the C extensions, the demo model.
# Safe to run again: finished steps are recognised by stamps over what they depend on, and cost seconds.
#   PYTHON=python3.12   another interpreter (3.11 or newer)
#   CFLAGS / LDFLAGS    where a libfabric outside the system's folders lies
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
LOG=.kvferry/setup.log
MODEL=.kvferry/models/SmolLM2-135M-Instruct
SYSTEM_PACKAGES=(python3 python3-venv python3-dev gcc libc6-dev libfabric-dev)

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
quietly() { "$@" >>$LOG 2>&1 || { tail -n 40 $LOG >&2; fail "failed (all of it in $LOG): $*"; }; }

python_is_new_enough() { "$PYTHON" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

headers_are_there() {
    local include
    include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])') || return 1
    # shellcheck disable=SC2086
    printf '#include <rdma/fabric.h>\n#include <Python.h>\n' | cc ${CFLAGS:-} "-I$include" -E - >/dev/null 2>&1
}

install_system_packages() {
    local as_root=()
    local advice="ask an administrator for: apt-get install ${SYSTEM_PACKAGES[*]}
       (or build libfabric yourself and name it through CFLAGS=-I... and LDFLAGS=-L...)"
    command -v apt-get >/dev/null || fail "Python 3.11, a C compiler or libfabric's headers are missing, and this is no Debian: install them, then run this again"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || fail "system packages are missing and this user may not install them; $advice"
        as_root=(sudo)
    fi
    say "installing ${SYSTEM_PACKAGES[*]}"
    "${as_root[@]}" apt-get update -qq || fail "apt-get update failed; $advice"
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends \
        "${SYSTEM_PACKAGES[@]}" >/dev/null || fail "apt-get could not install; $advice"
}

ensure_system() {
    if ! { python_is_new_enough && headers_are_there; }; then install_system_packages; fi
    python_is_new_enough || fail "$PYTHON is older than 3.11 or lacks venv: name a newer one with PYTHON=..."
    headers_are_there || fail "libfabric's or Python's headers are still missing"
}

digest() { cat "$@" 2>/dev/null | sha256sum | cut -d ' ' -f 1; }

ensure_dependencies() {
    [ -x $VENV/bin/python ] || { say "creating $VENV"; "$PYTHON" -m venv $VENV; }
    local now stamp=$VENV/kvferry-dependencies
    now="$($VENV/bin/python --version) $(digest constraints.txt pyproject.toml setup.py) $PWD"
    [ "$(cat $stamp 2>/dev/null)" = "$now" ] && return
    local install=(quietly "$VENV/bin/python" -m pip install --disable-pip-version-check)
    say "installing torch"
    "${install[@]}" "$(grep '^torch==' constraints.txt)"
    say "installing the pinned dependencies"
    "${install[@]}" -c constraints.txt setuptools cffi
    "${install[@]}" -c constraints.txt --no-build-isolation -e '.[dev]'
    printf '%s' "$now" >$stamp
}

ensure_extension() { # package, what it is
    local now stamp=$VENV/kvferry-$1-extension
    now="$($VENV/bin/python --version) $(digest "$1"/_build.py "$1"/core/*.c "$1"/core/*.h)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$now" ] && $VENV/bin/python -c "import $1._core" 2>/dev/null && return
    say "compiling $2"
    quietly $VENV/bin/python -m "$1._build"
    $VENV/bin/python -c "import $1._core" || fail "$2: compiled, but cannot be loaded"
    printf '%s' "$now" >"$stamp"
}

ensure_model() {
    [ -e $MODEL/kvferry-model ] || say "fetching and converting the demo model (about a minute, once)"
    TQDM_DISABLE=1 $VENV/bin/python -m deploy.model $MODEL
}

mkdir -p .kvferry
exec 9>.kvferry/setup.lock
flock 9 # two makes at once: the second finds everything done
: >$LOG
ensure_system
ensure_dependencies
ensure_extension fabric "the libfabric core"
ensure_extension engine "the CPU kernels"
ensure_extension bench "what the benchmarks need in C"
ensure_model
