#!/usr/bin/env bash
# The first hour on a machine with GPUs: tests, equal bits, then every benchmark of GPUs, in one
# report. Parts go on when one before them has failed; each has a limit. See docs/cuda_worker.md.
#
#   bench/first_gpu_hour.sh [--list] [FOLDER [PART...]]
#
# The report is FOLDER/report.md; the default is build/gpu. Named parts alone run, where some are
# named. --list prints parts, their limits and commands, and runs nothing. PYTHON needs torch for GPUs (`pip install "headrace[gpu]"`) and what requirements-dev.txt has.
# FlashInfer is measured if it is installed, sums if there are two GPUs.
set -u
cd "$(dirname "$0")/.."
lists=
[ "${1:-}" != --list ] || { lists=1 && shift; }
out=${1:-build/gpu}
parts=" ${*:2} "
python=${PYTHON:-.venv/bin/python}
report=$out/report.md
failed=0
total=0
export PYTHONPATH=bench${PYTHONPATH:+:$PYTHONPATH} TEST_S=${TEST_S:-0}

# part NAME SECONDS CMD...: run a part; its output is in a file of its own, the end of it in the report.
part() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    [[ $parts =~ ^\ *$ || $parts == *" $name "* ]] || return 0
    total=$((total + limit))
    [ ! $lists ] || { echo "$name, $limit s: $*" && return 0; }
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

bench() { # bench SCRIPT[-WHAT] SECONDS ARGS...: run a benchmark, whose line of JSON is kept
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" "bench/${name%%-*}.py" "$@"
    [ $lists ] || [ ! -f "$out/$name.log" ] || grep '^{' "$out/$name.log" | tail -n 1 >"$out/$name.json"
}

[ $lists ] || mkdir -p "$out"
[ $lists ] || {
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
export FAMILIES_TABLE=1 # all families with states, and their served texts, not some of them
# What is wrong here makes all figures worthless: the protocol, then bits, then graphs. Ranks of the
# all-reduce wait for each other on the GPU: few of its tests run beside each other.
tests all_reduce_tests 240 2 $worker/parallel
tests kernel_tests 360 "$many" $worker/cuda/attention $worker/cuda/kernels $worker/cuda/matrices
# Convolutions, delta nets, Mamba and Mamba-2; routers and experts in every format.
tests mixer_tests 240 "$many" $worker/cuda/mixers $worker/cuda/mixtures
tests executor_tests 360 "$many" $worker/cuda --ignore=$worker/cuda/attention \
    --ignore=$worker/cuda/kernels --ignore=$worker/cuda/matrices \
    --ignore=$worker/cuda/mixers --ignore=$worker/cuda/mixtures
tests served_tests 180 2 tests/system/test_device.py -k however_steps_run
tests host_tier_tests 240 1 tests/system/test_host_tier.py
bench cuda_kernels 300 --rounds 10
bench cuda_mixers 180 --rounds 10
bench cuda_decode 150 --rounds 10
bench cuda_prefill 90 --rounds 5
bench cuda_page_copies 120 --rounds 5
bench cuda_all_reduce 180 --rounds 10
bench cuda_idle 90 --rounds 3
bench cuda_throughput 180 --rounds 1
# States, latents, experts: all that their steps launch, in graphs.
bench cuda_throughput-lfm2 120 --rounds 1 --shape lfm2-1.2b
bench cuda_throughput-delta 120 --rounds 1 --shape qwen3.5-9b
bench cuda_throughput-latents 120 --rounds 1 --shape minicpm3-4b
bench cuda_throughput-experts 120 --rounds 1 --shape qwen3-30b-a3b
bench cuda_trickle 120 --rounds 1
bench cuda_generate_batch 180 --rounds 1
if [ $lists ]; then
    echo "$((total / 60)) minutes at most"
    exit
fi
echo "the report is $report"
exit $failed
