# make demo | make test | make lint: each sets up what it needs. TORCH=2.11.0 uses that torch in its own environment.

TORCH ?=
PYTHON ?= python3
ARGS ?=
# Test processes side by side, a file each; 0: one after the other.
WORKERS ?= 2

VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PINS := $(VENV)/constraints.txt

# One thread a process unless told otherwise: tests and the CPU demo run several processes side by side.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint setup clean

demo: $(READY)
	@mkdir -p results/local
	@out=results/local/demo-$$(date +%Y%m%d-%H%M%S)-$$$$.jsonl; \
	$(BIN)/offbench run --arm overlap --numa --results $$out; status=$$?; \
	echo; $(BIN)/offbench report $$out || exit; exit $$status

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(READY)
	$(BIN)/ruff check offbench tests
	$(BIN)/ruff format --check offbench tests
	$(BIN)/mypy

setup: $(READY)

# PIP_CONSTRAINT and UV_CONSTRAINT replace a constraint that the machine's own configuration may hold, and reach the
# build backend as well.
$(READY): pyproject.toml constraints.txt
	@mkdir -p $(VENV)
	@if command -v uv >/dev/null; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV); \
	else \
		$(PYTHON) -m venv $(VENV); \
	fi
	@sed 's/^torch==.*/torch==$(or $(TORCH),$(shell sed -n "s/^torch==//p" constraints.txt))/' constraints.txt > $(PINS)
	@if command -v uv >/dev/null; then \
		UV_CONSTRAINT=$(CURDIR)/$(PINS) UV_BUILD_CONSTRAINT=$(CURDIR)/$(PINS) \
			uv pip install --python $(BIN)/python -e '.[dev]'; \
	else \
		PIP_CONSTRAINT=$(CURDIR)/$(PINS) PIP_DISABLE_PIP_VERSION_CHECK=1 \
			$(BIN)/python -m pip install --quiet -e '.[dev]'; \
	fi
	@touch $@

clean:
	rm -rf .venv .venv-torch-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
