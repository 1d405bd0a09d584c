#!/usr/bin/env bash
# Every op on a GPU: right, in CUDA graphs, on a second GPU, then how fast; under eight minutes.
#   bench/gpu.sh [--minutes M] [--out DIR]    needs PyTorch, Triton and einops, nothing installed
#   bench/gpu.sh --dry                        the same lines on a CPU, tiny and interpreted
# Wheels in bench/wheels/ (einops, Liger, ...) are put on the path where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
path=typings:bench
for wheel in bench/wheels/*.whl; do
  if [ -e "$wheel" ]; then path=$path:$wheel; fi
done
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
for argument in "$@"; do
  if [ "$argument" = --dry ]; then export TRITON_INTERPRET=1 PYTHONPATH=$PYTHONPATH:tests; fi
done
exec "$python" bench/gpu.py "$@"
