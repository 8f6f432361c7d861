#!/usr/bin/env bash
# install.sh FOLDER: put SpecForge and speculators into virtual environments of their own, at FOLDER/specforge and
# FOLDER/speculators. Their pins of torch and SGLang are left aside: the packages are installed without dependencies,
# and beside them what their readers and an offline training import. A CPU build of torch is enough; Triton is there
# for its interpreter, on which SpecForge's loss runs without a GPU. Python: $PYTHON.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
torch=torch==2.13.0

"${PYTHON:-python3}" -m venv "$folder/specforge"
"$folder/specforge/bin/pip" install -q "$torch" numpy "transformers==5.12.1" "datasets>=4,<=5.1" "pydantic>=2" \
  pyyaml tqdm safetensors psutil
"$folder/specforge/bin/pip" install -q --no-deps specforge==0.2.0 accelerate==1.16.0 yunchang==0.6.4 triton==3.9.0

"${PYTHON:-python3}" -m venv "$folder/speculators"
"$folder/speculators/bin/pip" install -q "$torch" "numpy>=2,<=2.5.4" safetensors "datasets>=4,<=5.1" "transformers==5.12.1" \
  "openai>=2" httpx "loguru>=0.7.2,<=0.7.3" "pydantic>=2" "pydantic-settings>=2" psutil
"$folder/speculators/bin/pip" install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
