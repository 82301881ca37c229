# Every target prepares its Python first: .venv from requirements.lock, or the one PYTHON names.
# `make help` prints what follows `##`.

.DEFAULT_GOAL := help
VERBS := train test check show recipes new inspect memory doctor launch bench tune lint setup clean help
SETTINGS := RECIPE PYTHON OVERRIDES NGPU ON NODES DRY NAME FROM SAMPLE STEP ALL VERBOSE ARGS JOBS
.PHONY: $(VERBS) environment

# Settings come from the command line alone: a NAME or DRY exported by the shell is not meant for us.
$(foreach _s,$(SETTINGS),$(if $(filter environment%,$(origin $(_s))),$(eval undefine $(_s))))
_new_name := $(value RECIPE)
RECIPE ?= quickstart
JOBS ?= 2

_unknown := $(filter-out $(VERBS),$(MAKECMDGOALS))
ifneq ($(_unknown),)
$(error "$(firstword $(_unknown))" is none of: $(VERBS). Overrides are one word each: key=value, \
  without spaces around "=")
endif

ifneq ($(strip $(ARGS)),)
ifeq ($(filter test,$(MAKECMDGOALS)),)
$(error ARGS goes to pytest, in `make test`; elsewhere write KEY=VALUE words: \
  make bench NAME=chunked_loss size=full)
endif
endif

# --- KEY=VALUE words of the command line -------------------------------------------------------
# MAKEOVERRIDES lists them last first, once per key, with blanks and backslashes escaped. Only the
# names are taken from there; $(value NAME) is what the user typed. As a word of the command line
# replaces a variable of this file, ours begin with "_".
_empty :=
_space := $(_empty) $(_empty)
_tab := $(_empty)	$(_empty)
define _newline


endef
_escaped := $(subst \$(_tab),_,$(subst \$(_space),_,$(subst \\,_,$(MAKEOVERRIDES))))
_names := $(foreach _w,$(_escaped),$(firstword $(subst =, ,$(_w))))
_reverse = $(if $1,$(call _reverse,$(wordlist 2,$(words $1),$1)) $(firstword $1))
_keys := $(strip $(call _reverse,$(filter-out $(SETTINGS),$(_names))))

_letters := a b c d e f g h i j k l m n o p q r s t u v w x y z
_lower_case = $(strip $(foreach _l,$(_letters),$(findstring $(_l),$1)))
_check_key = $(if $(call _lower_case,$1),,$(error "$1" is not a setting; they are: $(SETTINGS))) \
  $(if $(filter command,$(firstword $(origin $1))),,$(error cannot read the override "$1"; \
    a key holds letters, digits, "_", "." and "/", a value no line break)) \
  $(if $(findstring $(_newline),$(value $1)),$(error the value of "$1" holds a line break))
$(foreach _k,$(_keys),$(if $(call _check_key,$(_k)),))

# In single quotes nothing is special to the shell but the single quote itself.
_quote = '$(subst ','\'',$1)'
_overrides := $(foreach _k,$(_keys),$(call _quote,$(_k)=$(value $(_k)))) $(value OVERRIDES)

# The words reach the program as arguments; they are no environment for it or what it starts.
unexport $(SETTINGS) $(_keys) MAKEFLAGS MFLAGS MAKEOVERRIDES

# --- how a verb runs ---------------------------------------------------------------------------
PY := $(if $(PYTHON),$(call _quote,$(value PYTHON)),.venv/bin/python)
_flag = $(if $(value $2),$1 $(call _quote,$(value $2)))
_switch = $(if $(filter-out 0,$(value $2)),$1)
_recipe = --recipe $(call _quote,$(value RECIPE))
# set -f: the shell must split OVERRIDES into words, but not match [a,b] against file names.
# exec: signals reach Python itself.
_run = @set -f; exec $(PY) -m launch $@
_pass = $(call _switch,--verbose,VERBOSE) -- $(_overrides)
_plain = $(if $(strip $(_overrides)),$(error "make $@" takes no overrides, got: $(_overrides)))

environment:
	@sh launch/bootstrap.sh $(if $(PYTHON),check $(PY),install)

train: environment ## train RECIPE (quickstart): KEY=VALUE overrides, NGPU= ranks
	$(_run) $(_recipe) $(call _flag,--ngpu,NGPU) $(_pass)

check: environment ## compose RECIPE and run every check, without training
	$(_run) $(_recipe) $(call _flag,--ngpu,NGPU) $(_pass)

show: environment ## RECIPE's resolved settings, with the file that set each (ALL=1: defaults too)
	$(_run) $(_recipe) $(call _switch,--all,ALL) $(_pass)

recipes: environment ## list the recipes: name, hardware, what they do
	$(_plain)$(_run)

new: environment ## copy a recipe: RECIPE=mine FROM=quickstart
	$(_plain)$(_run) --recipe $(call _quote,$(_new_name)) $(call _flag,--from,FROM)

inspect: environment ## RECIPE's data as the model sees it, decoded (SAMPLE=0 is the first)
	$(_run) $(_recipe) $(call _flag,--sample,SAMPLE) $(_pass)

memory: environment ## draw RECIPE's device memory over one training step (STEP=2), by category
	$(_run) $(_recipe) $(call _flag,--ngpu,NGPU) $(call _flag,--step,STEP) $(_pass)

launch: environment ## start RECIPE on a cluster: ON=slurm or skypilot, NODES=2; DRY=1 only prints
	$(_run) $(_recipe) $(call _flag,--on,ON) $(call _flag,--nodes,NODES) $(call _flag,--ngpu,NGPU) \
	  $(call _switch,--dry,DRY) $(_pass)

bench: environment ## measure NAME against its floor and its peers (no NAME: list the cases)
	$(_run) $(call _flag,--name,NAME) $(_pass)

tune: environment ## measure fla's and sparse attention's kernels on this GPU, write their files
	$(_plain)@exec $(PY) -m kernels.tuned

# A module's tests run on one worker: many share a fixture that trains for half a minute. Modules
# keep their order, tests/distributed before tests/unit, so that the last ones are short.
_several := --dist loadscope --no-loadscope-reorder
test: environment ## all tests but the slow (ARGS="-k 'one or two'" for pytest, JOBS=2 at a time)
	$(_plain)@exec $(PY) -m pytest -m "not slow" $(if $(filter-out 0 1,$(JOBS)),-n $(JOBS) $(_several)) $(ARGS)

lint: environment ## ruff (rules and format) and mypy
	$(_plain)@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

setup: environment ## only prepare .venv
	$(_plain)@echo "Ready: $(PY)"

doctor: ## what this machine has and what is missing (installs nothing)
	$(_plain)@python=$(if $(PYTHON),$(PY),$$(sh launch/bootstrap.sh find)) && \
	  exec "$$python" -m launch.doctor

clean: ## remove caches (runs and .venv stay)
	$(_plain)@rm -rf .pytest_cache .ruff_cache .mypy_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@echo "make VERB [RECIPE=name or file.yaml] [key=value ...]"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  make train RECIPE=quickstart training.steps=20 components.layer_recompute.enabled=true"
	@echo
	@echo "key=value is one word: \"key = value\" does not reach the recipe. Quote what the shell"
	@echo "would read: 'data.paths=[a, b]'. Of a repeated key the last one counts. What make would"
	@echo "read itself goes into OVERRIDES, quoted for the shell: OVERRIDES=\"'k:=v' 'x=[a, b]'\"."
	@echo "PYTHON=path uses an environment of yours instead of .venv; VERBOSE=1 shows tracebacks."
