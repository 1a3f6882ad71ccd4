#!/usr/bin/env bash
# Run the GPU tests, the benchmarks and the example on this machine's GPU; results are files in $OUT (bench/results).
# Arguments: which parts of $parts below; all of them without any.
# With several GPUs: the parts "several" and "devices". Needs the packages of the extras test, bench and examples; installs nothing.
# CCE_GIT_TREE names the code where git cannot.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
out=${OUT:-bench/results}
python=${PYTHON:-python3}
gpu_tests="$python -m pytest -m gpu tests -p no:cacheprovider -p no:benchmark -rfE"

tests() {
  echo "git tree: ${CCE_GIT_TREE:-$(git rev-parse 'HEAD^{tree}')}"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  timeout 400 $gpu_tests -n 8 --durations=5 -k "not classifier_of_more and not alone" 2>&1
  timeout 900 $python -m tests.search --shapes gpu --seed 1 --cases 240 --processes 12 --shrink 0 2>&1
}
# These take all of the memory, one of them 60 GB of float64, which its process keeps: by themselves.
alone() {
  timeout 300 $gpu_tests -k "alone and not classifier_of_more" 2>&1
  local failed=$?
  timeout 300 $gpu_tests -k classifier_of_more 2>&1 && return $failed
}
several() { timeout 900 $gpu_tests -k "test_devices_gpu or on_gpus or two_devices or ddp" 2>&1; }
devices() {
  count=$(nvidia-smi -L | wc -l)
  [ "$count" -gt 1 ] && $python -m bench.devices --gpus 1 2 $([ "$count" -ge 4 ] && echo 4) --out "$out/devices"
}
shapes() { $python -m bench --out "$out/heads"; }
more_data() {
  $python -m bench --out "$out/flat" --shape gemma2-2b llama3-8b --data flat --method cce_jax "cce_jax all"
  for precision in high highest; do
    $python -m bench --out "$out/float32-$precision" --dtype float32 --precision $precision --shape 4096x4096x128256 \
      --method cce_jax "cce_jax 1 GiB" "full logits (XLA)"
  done
  $python -m bench.engines --out "$out/engines.json"
  $python -m bench.tolerance --out "$out/tolerance.json"
}
profile() { $python -m bench.profile --out "$out/profile.json"; }
tune() { $python -m bench.tune --out "$out/tune.json"; }
torch() { $python -m bench.bridge --out "$out/bridge.json" && $python -m bench.ignored --out "$out/ignored.json"; }
numbers() { $python -m bench.log_probs --out "$out/log-probs.json" && $python -m bench.divergence --out "$out/divergence.json"; }
hugging_face() { $python -m bench.hugging_face --out "$out/hugging-face"; }
example() { $python examples/compare_losses.py --out "$out/train_lm.png"; }
sparsity() { $python -m bench.sparsity --out "$out/sparsity"; }
training() { $python -m bench.training --out "$out/training"; }

parts="tests shapes more_data profile tune torch numbers hugging_face example training sparsity alone"
[ "$(nvidia-smi -L | wc -l)" -gt 1 ] && parts="$parts several devices"
status=0
for part in ${@:-$parts}; do
  case $part in
    tests | alone | several) "$part" >"$out/gpu-$part.txt" ;;
    *) "$part" ;;
  esac || { status=1; echo "$part failed"; }
done
exit $status
