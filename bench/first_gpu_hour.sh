#!/usr/bin/env bash
# The first hour on a machine with GPUs: tests, equal bits, then every benchmark of GPUs, in one
# report. Parts go on when one before them has failed; each has a limit. See docs/cuda_worker.md.
#
#   bench/first_gpu_hour.sh [FOLDER [PART...]]
#
# The report is FOLDER/report.md; the default is build/gpu. Named parts alone run, where some are
# named. PYTHON needs torch for GPUs (`pip install "headrace[gpu]"`) and what requirements-dev.txt has.
# FlashInfer is measured if it is installed, sums if there are two GPUs.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
parts=" ${*:2} "
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
report=$out/report.md
failed=0
export PYTHONPATH=bench${PYTHONPATH:+:$PYTHONPATH} TEST_S=${TEST_S:-0}

# part NAME SECONDS CMD...: run a part; its output is in a file of its own, the end of it in the report.
part() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    [[ $parts =~ ^\ *$ || $parts == *" $name "* ]] || return 0
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
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
    part "$name" "$limit" "$python" "bench/$name.py" "$@"
    [ ! -f "$out/$name.log" ] || grep '^{' "$out/$name.log" | tail -n 1 >"$out/$name.json"
}

{
    printf '# The first hour on a GPU\n\n%s, commit %s\n\n```\n' \
        "$(date -u +%FT%TZ)" "$(git rev-parse --short HEAD)"
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv
    nvidia-smi topo -m
    "$python" -m pip list 2>/dev/null | grep -iE '^(torch|triton|cuda|nvidia-|flashinfer|numpy)'
    printf '```\n'
} >"$report" 2>&1

tests() { # tests NAME SECONDS AT_ONCE PATHS...: run tests; SIGINT at the limit has failures printed
    part "$1" "$2" "$python" -m pytest -n "$3" --tb=short "${@:4}"
}

worker=tests/engine_proc/worker
many=$(($(nproc) < 16 ? $(nproc) : 16))
# What is wrong here makes all figures worthless: the protocol, then bits, then graphs. Ranks of the
# all-reduce wait for each other on the GPU: few of its tests run beside each other.
tests all_reduce_tests 600 2 $worker/parallel
tests kernel_tests 900 "$many" $worker/cuda/attention $worker/cuda/kernels $worker/cuda/matrices
tests executor_tests 900 "$many" $worker/cuda --ignore=$worker/cuda/attention \
    --ignore=$worker/cuda/kernels --ignore=$worker/cuda/matrices
tests host_tier_test 240 1 tests/system/test_host_tier.py
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
