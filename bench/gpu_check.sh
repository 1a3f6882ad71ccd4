#!/usr/bin/env bash
# Run the GPU tests, the benchmarks and the example on this machine's GPU; results are files in $OUT (bench/results).
# With two GPUs the tests of two run too. Needs the packages of the extras test, bench and examples; installs nothing.
# CCE_GIT_TREE names the code where git cannot.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.:kernels XLA_PYTHON_CLIENT_PREALLOCATE=false
out=${OUT:-bench/results}
python=${PYTHON:-python3}
gpu_tests="$python -m pytest -m gpu tests -p no:cacheprovider -rfE"
status=0
{
  echo "git tree: ${CCE_GIT_TREE:-$(git rev-parse 'HEAD^{tree}')}"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  timeout 300 $gpu_tests -n 8 --durations=5 -k "not classifier_of_more and not alone" 2>&1
} >"$out/gpu-tests.txt" || status=1
$python -m bench --out "$out/bench" "$@" || status=1
$python -m bench.bridge --out "$out/bridge.json" || status=1
$python -m bench --out "$out/bench-float32" --dtype float32 --precision highest --shape 4096x4096x128256 \
  --data trained --method cce_jax "full logits (XLA)" --rounds 3 || status=1
$python examples/train_lm.py --out "$out/train_lm.png" >"$out/train_lm.txt" || status=1
# These take all of the memory, one of them 60 GB of float64: by themselves.
timeout 180 $gpu_tests -k "classifier_of_more or alone" >>"$out/gpu-tests.txt" 2>&1 || status=1
exit $status
