#!/usr/bin/env bash
# Installs the locked CPU stack into the virtual environment VENV: requirements/install.sh VENV
set -euo pipefail
venv=${1:?usage: requirements/install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
python=$venv/bin/python
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
pip() { "$python" -m pip install --disable-pip-version-check --quiet --no-deps "$@"; }

# torch first: from the sources pip is configured with where they have the CPU build, else from PyTorch's own index.
if [ "$version" = 3.11 ]; then
    torch=(--require-hashes -r "$here/torch-cpu.lock")
elif [ "$version" = 3.12 ]; then
    echo "note: the lock file is proven on Python 3.11 only; on 3.12 torch is pinned by version, not by hash" >&2
    torch=("$(grep -o '^torch==[^ ]*' "$here/torch-cpu.lock")")
else
    echo "error: Python $version; flowrl's lock file is for 3.11 (proven) and 3.12. Choose one: make PYTHON=python3.11 ..." >&2
    exit 2
fi
echo "installing torch (CPU build)" >&2
pip "${torch[@]}" 2>/dev/null || pip --index-url https://download.pytorch.org/whl/cpu "${torch[@]}"
echo "installing the other locked packages (about 90 s, 3.8 GB on disk)" >&2
pip --require-hashes -r "$here/cpu.lock"
pip --no-build-isolation --editable "$here/.."
