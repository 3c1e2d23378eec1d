#!/usr/bin/env bash
# The first hour on a machine with GPUs: tests, equal bits, then every benchmark of GPUs, in one
# report. Parts go on when one before them has failed; each has a limit. See docs/cuda_worker.md.
#
#   bench/first_gpu_hour.sh [FOLDER]       the report is FOLDER/report.md; the default is build/gpu
#
# It needs a virtual environment in .venv with torch for GPUs (`pip install "headrace[gpu]"`) and what
# requirements-dev.txt has. FlashInfer is measured if it is installed, sums if there are two GPUs.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
mkdir -p "$out"
report=$out/report.md
failed=0
export PYTHONPATH=bench TEST_S=0

# part NAME SECONDS CMD...: run a part; its output is in a file of its own, the end of it in the report.
part() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    {
        printf '\n## %s\n\n`%s`\n\nended with %d after %d s\n\n```\n' \
            "$name" "$*" $status $((SECONDS - began))
        grep -v '^{' "$out/$name.log" | tail -n 40
        printf '```\n'
    } >>"$report"
    echo "$name: ended with $status after $((SECONDS - began)) s"
}

bench() { # bench NAME SECONDS ARGS...: run a benchmark, whose line of JSON is kept
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" .venv/bin/python "bench/$name.py" "$@"
    grep '^{' "$out/$name.log" | tail -n 1 >"$out/$name.json"
}

{
    printf '# The first hour on a GPU\n\n%s, commit %s\n\n```\n' \
        "$(date -u +%FT%TZ)" "$(git rev-parse --short HEAD)"
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv
    nvidia-smi topo -m
    .venv/bin/pip list 2>/dev/null | grep -iE '^(torch|triton|cuda|nvidia-|flashinfer|numpy)'
    printf '```\n'
} >"$report" 2>&1

tests=tests/engine_proc/worker
# What is wrong here makes all figures worthless: the protocol, then bits, then graphs.
part all_reduce_tests 600 .venv/bin/pytest -q -n 0 $tests/parallel
part kernel_tests 900 .venv/bin/pytest -q -n 0 $tests/cuda/kernels $tests/cuda/matrices
part executor_tests 900 .venv/bin/pytest -q -n 0 $tests/cuda --ignore=$tests/cuda/kernels \
    --ignore=$tests/cuda/matrices
bench cuda_kernels 420 --rounds 10
bench cuda_decode 240 --rounds 10
bench cuda_prefill 180 --rounds 5
bench cuda_all_reduce 300 --rounds 10
bench cuda_idle 180 --rounds 3
bench cuda_throughput 420 --rounds 1
bench cuda_trickle 240 --rounds 1
bench cuda_generate_batch 420 --rounds 1
echo "the report is $report"
exit $failed
