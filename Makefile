# The commands of the project. `make help` lists them; each is a thin call of a script in tools/.
BUILD := build
JOBS ?= $(shell nproc)
# ccache finds units with a precompiled header only with these.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
CONFIGURE = cmake -S . -B $(BUILD) -G Ninja $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache)

.DEFAULT_GOAL := help
.PHONY: help run build test test-all test-gpu bench bench-gpu report notebooks lint format setup clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

run: build ## set up, build, check GPT-2's attention (batch 8, seqlen 1024, causal) and race it against standard attention
	$(BUILD)/cli/fattn compare --preset gpt2-small --batch 8 --seqlen 1024 --causal

build: ## set up what is missing and build the library and the command line in release mode, in build/
	@tools/setup.sh build
	@$(CONFIGURE) --log-level=WARNING
	cmake --build $(BUILD) --parallel $(JOBS) --target fattn fattn_static fattn_cli

test: ## set up, build and pass everything; ends with the line "N passed, N failed"
	@tools/setup.sh test
	@python3 tools/test.py --jobs $(JOBS)

test-all: ## the stages of `make test` and the long ones (whole table under sanitizers, longer fuzzing)
	@tools/setup.sh test
	@python3 tools/test.py --jobs $(JOBS) --long

bench: build ## the speed table of this machine, as shares of its peak measured in the same run
	$(BUILD)/cli/fattn bench --suite cpu

test-gpu: build ## on a machine with a GPU: the table of cases on it, compute-sanitizer; ends with "N passed, N failed"
	cmake --build $(BUILD) --parallel $(JOBS) --target test_cuda_gpu test_cuda_v3_gpu test_cuda_algorithms_gpu test_cuda_pages_gpu test_cuda_dropout_gpu test_ops_gpu test_ops_training_gpu test_ops_training_rows_gpu test_ops_process_sum_gpu test_gpt2_gpu test_gpt2_train_gpu test_gpt2_group_gpu fattn_torch
	@python3 tools/test_gpu.py

bench-gpu: build ## the speed table of the GPU against torch's backends; its record goes to docs/results/
	$(BUILD)/cli/fattn bench --suite cuda --json $(BUILD)/gpu-suite.json
	@python3 tools/gpu_results.py $(BUILD)/gpu-suite.json

report: build ## docs/report: a page of the records in docs/results, in English and Chinese
	@python3 tools/make_report.py

notebooks: ## the course in docs/lab as notebooks for Jupyter, in English and Chinese, in build/notebooks
	@tools/python_venv.sh
	@$(BUILD)/venv/bin/python tools/notebooks.py

lint: ## check the format (clang-format), C++ (clang-tidy), Python (pyflakes) and shell scripts (shellcheck)
	@tools/setup.sh build lint
	@tools/lint.sh

format: ## rewrite the C and C++ sources with clang-format
	@tools/setup.sh lint
	@tools/lint.sh --fix

setup: ## install what the tests and lint need (`make run` and `make test` set up what they need by themselves)
	@tools/setup.sh build test lint

clean: ## remove build/ and what wheels are built in
	rm -rf $(BUILD) build-wheel*
