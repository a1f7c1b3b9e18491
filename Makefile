# Thin: every target is a script or an entry point that can be called without make.
PYTHON_IN_VENV := .venv/bin/python
ARGS ?=

.PHONY: setup test sim test-slow test-gpu test-rdma demo up down lint format fabric kernels

setup:  ## .venv, pinned dependencies, the C extensions, the demo model
	@deploy/setup.sh

test: setup  ## all tests but those marked slow, in two processes; ARGS="-k name" for some, ARGS="-n 0 --pdb" for one process
	$(PYTHON_IN_VENV) -m pytest -n 2 $(ARGS)

test-slow: setup  ## what takes minutes: every pair of shardings, lost devices, long random streams; ARGS="-k shardings" for some
	$(PYTHON_IN_VENV) -m pytest -m slow $(ARGS)

sim: setup  ## the protocol in simulation: a million seeds, or until one fails; ARGS="--seeds 5000 --from 7"
	$(PYTHON_IN_VENV) -m tests.simulation $(ARGS)

test-gpu:  ## what needs a CUDA device, with whatever Python is there; installs nothing
	$(or $(wildcard $(PYTHON_IN_VENV)),python3) -m pytest -m gpu tests/gpu $(ARGS)

test-rdma:  ## what needs an RDMA NIC (EFA, ConnectX), and a GPU too where there is one; installs nothing
	$(or $(wildcard $(PYTHON_IN_VENV)),python3) -m pytest -m rdma tests/rdma $(ARGS)

demo: setup  ## one prefill node, three decode nodes, a router; real prompts; the books checked
	@.venv/bin/kvferry demo $(ARGS)

up: setup  ## start a cluster and leave it running; ARGS="--decode 2 --port 8000"
	@.venv/bin/kvferry up $(ARGS)

down:  ## stop it
	@.venv/bin/kvferry down

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

fabric:  ## recompile the libfabric core after a change to fabric/core
	$(PYTHON_IN_VENV) -m fabric._build

kernels:  ## recompile the CPU kernels after a change to engine/core
	$(PYTHON_IN_VENV) -m engine._build
