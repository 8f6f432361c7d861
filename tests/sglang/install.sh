#!/usr/bin/env bash
# install.sh VENV [VERSION]: put a real SGLang that can serve on a CPU into a virtual environment of its own.
#
# It is installed by uv, which takes 20 s where pip takes 3 minutes; uv looks for wheels where pip is told to
# (PIP_FIND_LINKS), so a CPU build of torch is found in the same place. Python: $PYTHON, 3.10 or newer.
set -euo pipefail
venv=${1:?usage: install.sh VENV [VERSION]}
version=${2:-0.5.21}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q uv
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"
fi
"$venv/bin/uv" pip install -q --python "$venv/bin/python" -r "$here/requirements.txt"
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps torchvision==0.28.0 "sglang==$version"
"$venv/bin/python" -c 'from importlib.metadata import version; print("sglang", version("sglang"))'
