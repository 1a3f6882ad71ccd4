#!/usr/bin/env bash
# Run the GPU tests, the benchmark and the example on this machine's GPU; their results are files in $OUT (bench/results).
# With two GPUs the tests of two run too. Needs the packages of the extras test, bench and examples; nothing is installed. CCE_GIT_TREE names the code where git cannot.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.:kernels XLA_PYTHON_CLIENT_PREALLOCATE=false
out=${OUT:-bench/results}
python=${PYTHON:-python3}
status=0
{
  echo "git tree: ${CCE_GIT_TREE:-$(git rev-parse 'HEAD^{tree}')}"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  $python -m pytest -m gpu tests -n 8 -p no:cacheprovider --durations=5 -k "not classifier_of_more and not alone" 2>&1 &&
    timeout 180 $python -m pytest -m gpu tests -p no:cacheprovider -k "classifier_of_more or alone" 2>&1  # all of the memory
} | tee "$out/gpu-tests.txt" || status=1
$python -m bench --out "$out/bench" "$@" || status=1
$python -m bench --out "$out/bench-float32" --dtype float32 --precision highest --shape 4096x4096x128256 \
  --data trained --method cce_jax "full logits (XLA)" --rounds 3 || status=1
$python -m bench.bridge --out "$out/bridge.json" || status=1
$python examples/train_lm.py --out "$out/train_lm.png" >"$out/train_lm.txt" || status=1
exit $status
