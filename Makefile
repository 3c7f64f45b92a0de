## crossrank: reproduce failures of distributed training, judged against a measured floor
##
## A run of your own that is wrong needs no make, only this in its Python (pip install PATH):
##   torchrun --nproc-per-node=4 -m harness.watch train.py     its options: -m harness.watch --help
##
##   make repro scenario=NAME gpus=4   run one failure and say what is true; creates .venv first
##   make sweep scenario=NAME gpus=2,4 seed=1,2,3     every combination, in one table
##   make corpus gpus=4                every scenario, or scenarios=A,B or family=X; gpus=2,3,4,8 for
##                                     several numbers of ranks; continue=latest after Ctrl-C
##   make corpus-diff a=previous b=latest   what two of them say otherwise: torch, gloo and NCCL,
##                                     numbers of ranks (a=latest@2 b=latest@4)
##   make list [family=X]              the scenarios, what each one shows, how it last ended here
##   make show scenario=NAME           its claims, arms, cause, the code that differs, the last verdict
##   make new scenario=NAME            the two files a scenario of your own starts from
##   make predict                      foresee what code does before it runs; scored, with a history
##   make judge run=results/NAME/RUN   recompute the verdict of a finished run, without ranks; the
##                                     newest one with run=latest or run=results/NAME
##   make report run=results/NAME/RUN  write its report again
##   make doctor                       what this machine can run, to paste into an issue
##
##   make test [args='-k floor -x']    all tests that this machine can run, side by side (args='-n 0':
##                                     one after another)
##   make check                        lint, types, layers, test: what CI runs
##   make lint | types | layers        one part of it          make format   repair the style
##   make test-gpu                     only the tests that need a CUDA device
##   make bench                        speed, as ratios
##   make wheel                        build dist/crossrank-*.whl, and try it where nothing else is
##   make readme                       the scenarios in README.md, and what each found in
##                                     scenarios/README.md, from the newest runs
##   make claims                       every statement of the two articles, and what runs say of it
##   make integrations                 Lightning, Transformers and their like, for the tests of them
##   make lock                         write constraints*.txt again (needs uv)
##   make clean                        remove caches and dist/; .venv and results/ stay
##
##   PYTHON=/path/to/python3           the Python to use; if it has torch, that torch is used
##   VENV=.venv                        where the environment lives
##
## Every other KEY=VALUE reaches Hydra as typed, quoted for the shell where the shell needs it:
##   make repro scenario=NAME 'scenario.sizes=[1,2]' "tracker.project=two words"
## Hydra's own options need the module itself: .venv/bin/python -m launch --cfg job scenario=NAME
##
## Exit codes of `python -m launch`: 0 verdict as the scenario expects, 10 another verdict,
## 11 inconclusive, 12 prerequisite missing, 2 wrong command line, 130 interrupted. make turns every
## code but 0 into 2: scripts read verdict.json in the run's folder, or call the module.

VENV ?= .venv
PYTHON ?= python3

.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:
TARGETS := help repro sweep corpus corpus-diff list show new predict judge report readme claims \
           doctor test check lint types layers format test-gpu bench wheel integrations lock clean
.PHONY: $(TARGETS) FORCE

# make would expand the `$` in an exported value, and fail at an unmatched one. The values travel
# in MAKEFLAGS instead, which launch/make_arguments.py reads.
unexport $(foreach word,$(MAKEOVERRIDES),$(firstword $(subst =, ,$(word))))

VENV_PYTHON := $(VENV)/bin/python
READY := $(VENV)/.crossrank-stamp
WITH := -I -S launch/make_arguments.py
RUN := @$(VENV_PYTHON) $(WITH)
LISTER := $(if $(wildcard $(READY)),$(VENV_PYTHON),$(PYTHON))
# Empty unless somebody chose a Python; then the environment is compared with it every time.
CHOSEN := $(filter-out file,$(firstword $(origin PYTHON)))

# make would run the target first and complain about the rest of the line afterwards.
STRAY := $(filter-out $(TARGETS) $(READY),$(MAKECMDGOALS))
ifneq ($(STRAY),)
$(error crossrank: no target named $(STRAY). Settings are typed as key=value; `make help` lists all)
endif

ifneq ($(words $(VENV)),1)
$(error crossrank: VENV is "$(VENV)"; make needs a path without spaces)
endif

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

$(READY): constraints.txt pyproject.toml $(VENV_PYTHON) $(if $(CHOSEN),FORCE)
	@command -v $(PYTHON) >/dev/null || \
	  { echo "crossrank: there is no $(PYTHON); type: make PYTHON=/path/to/python3.12 ..." >&2; \
	    exit 1; }
	@$(PYTHON) launch/bootstrap.py $(if $(CHOSEN),,--default) $(VENV)

# Made by the rule above. A dangling link, as in a folder mounted into a container, counts as absent.
$(VENV_PYTHON): ;
FORCE: ;

repro: $(READY)
	$(RUN) all launch

sweep: $(READY)
	$(RUN) all launch -m

corpus: $(READY)
	$(RUN) all launch.corpus

corpus-diff: $(READY)
	$(RUN) all launch.corpus.diff

# Needs no package, so it waits for no installation.
list:
	@$(LISTER) launch/bootstrap.py --check
	@$(LISTER) $(WITH) all launch.list

show: $(READY)
	$(RUN) all launch.show

new: $(READY)
	$(RUN) all launch.new

predict: $(READY)
	$(RUN) all launch.predict

judge: $(READY)
	$(RUN) only run launch.judge

report: $(READY)
	$(RUN) only run launch.report

readme: $(READY)
	$(RUN) only "" launch.readme

claims: $(READY)
	$(RUN) only "" launch.claims

doctor: $(READY)
	$(RUN) only "" launch.doctor

test: $(READY)
	$(RUN) only 'args*' pytest -n auto --maxprocesses 4 --dist loadscope

test-gpu: $(READY)
	$(RUN) only 'args*' pytest -m gpu

bench: $(READY)
	$(RUN) only '' tests.benchmarks

check: lint types layers test

lint: $(READY)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .

types: $(READY)
	@$(VENV_PYTHON) -m mypy

layers: $(READY)
	@$(VENV_PYTHON) -c 'from importlinter.cli import lint_imports_command as run; run(["--no-logo"])'

format: $(READY)
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

wheel: $(READY)
	@$(VENV_PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@$(VENV_PYTHON) -m pytest tests/test_wheel.py tests/test_wheel_watch.py
	@ls dist/*.whl

# In two parts: an installation that is ended in the middle leaves packages that cannot be imported.
DOWNLOAD_S ?= 600
integrations: $(READY)
	@env -u PIP_CONSTRAINT timeout $(DOWNLOAD_S) $(VENV_PYTHON) -m pip download --quiet --quiet \
	  --no-deps --only-binary :all: --dest build/integrations -r constraints-integrations.txt
	@env -u PIP_CONSTRAINT PIP_USER=0 $(VENV_PYTHON) -m pip install --quiet --quiet --no-deps \
	  --no-index --no-compile --find-links build/integrations -r constraints-integrations.txt

lock:
	@mkdir -p build
	@printf '%s\n' filelock fsspec jinja2 networkx setuptools sympy typing-extensions \
	  > build/torch-needs.txt
	@echo "torch ; python_version < '3'" > build/no-torch.txt
	@sed '/^torch==/q' constraints.txt > build/constraints.txt
	@uv pip compile --quiet --universal --python-version 3.10 --extra repro --extra dev \
	  --overrides build/no-torch.txt --no-annotate --no-header \
	  pyproject.toml build/torch-needs.txt >> build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@sed '/^torch==/d' constraints.txt > build/beside-torch.txt
	@sed '/^#/!d' constraints-integrations.txt > build/integrations.txt
	@uv pip compile --quiet --universal --python-version 3.10 --extra integrations \
	  --overrides build/no-torch.txt --constraints build/beside-torch.txt --no-annotate --no-header \
	  pyproject.toml | grep -vxFf constraints.txt >> build/integrations.txt
	@mv build/integrations.txt constraints-integrations.txt

clean:
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find harness scenarios launch tests -name __pycache__ -prune -exec rm -rf {} +
