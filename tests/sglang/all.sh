#!/usr/bin/env bash
# all.sh [FOLDER]: run the tests that need SGLang with every version that is supported, in environments that are
# made under FOLDER (/tmp/sglang-envs) where they are not there yet. About 12 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=${1:-/tmp/sglang-envs}
pythons=
for version in 0.5.17 0.5.21 0.5.23; do
  [ -x "$folder/$version/bin/python" ] || tests/sglang/install.sh "$folder/$version" "$version"
  pythons=${pythons:+$pythons:}$folder/$version/bin/python
done
EIGHTZEROS_SGLANG_PYTHON=$pythons exec "${PYTEST:-.venv/bin/pytest}" -m sglang -s tests/test_sglang_server.py
