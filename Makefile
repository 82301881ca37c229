# Every target prepares its Python first: .venv from requirements.lock, or the one PYTHON names.
# `make help` prints what follows `##`.

.DEFAULT_GOAL := help
VERBS := train test check show recipes new inspect doctor launch bench lint setup clean help
SETTINGS := RECIPE PYTHON OVERRIDES NGPU ON NODES DRY NAME FROM VERBOSE ARGS JOBS
.PHONY: $(VERBS) environment

# Settings come from the command line alone: a NAME or DRY exported by the shell is not meant for us.
$(foreach s,$(SETTINGS),$(if $(filter environment%,$(origin $s)),$(eval undefine $s)))
RECIPE ?= quickstart
JOBS ?= 2

unknown := $(filter-out $(VERBS),$(MAKECMDGOALS))
ifneq ($(unknown),)
$(error "$(firstword $(unknown))" is none of: $(VERBS). Overrides are one word each: key=value, \
  without spaces around "=")
endif

# --- KEY=VALUE words of the command line -------------------------------------------------------
# MAKEOVERRIDES lists them last first, once per key, with blanks and backslashes escaped. Only the
# names are taken from there; $(value NAME) is what the user typed.
empty :=
space := $(empty) $(empty)
define newline


endef
escaped := $(subst \$(space),_,$(subst \\,_,$(MAKEOVERRIDES)))
names := $(foreach word,$(escaped),$(firstword $(subst =, ,$(word))))
reverse = $(if $1,$(call reverse,$(wordlist 2,$(words $1),$1)) $(firstword $1))
keys := $(strip $(call reverse,$(filter-out $(SETTINGS),$(names))))

letters := a b c d e f g h i j k l m n o p q r s t u v w x y z
lower_case = $(strip $(foreach letter,$(letters),$(findstring $(letter),$1)))
check_key = $(if $(call lower_case,$1),,$(error "$1" is not a setting; they are: $(SETTINGS))) \
  $(if $(filter command,$(firstword $(origin $1))),,$(error cannot read the override "$1"; \
    a key holds letters, digits, "_", "." and "/", a value no line break)) \
  $(if $(findstring $(newline),$(value $1)),$(error the value of "$1" holds a line break))
$(foreach key,$(keys),$(if $(call check_key,$(key)),))

# In single quotes nothing is special to the shell but the single quote itself.
quote = '$(subst ','\'',$1)'
overrides := $(foreach key,$(keys),$(call quote,$(key)=$(value $(key)))) $(value OVERRIDES)

# The words reach the program as arguments; they are no environment for it or what it starts.
unexport $(SETTINGS) $(keys) MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL

# --- how a verb runs ---------------------------------------------------------------------------
PY := $(if $(PYTHON),$(call quote,$(value PYTHON)),.venv/bin/python)
flag = $(if $(value $2),$1 $(call quote,$(value $2)))
switch = $(if $(filter-out 0,$(value $2)),$1)
recipe = --recipe $(call quote,$(value RECIPE))
# set -f: the shell must split OVERRIDES into words, but not match [a,b] against file names.
# exec: signals reach Python itself.
run = @set -f; exec $(PY) -m launch $@
pass = $(call switch,--verbose,VERBOSE) -- $(overrides)
plain = $(if $(strip $(overrides)),$(error "make $@" takes no overrides, got: $(overrides)))

environment:
	@sh launch/bootstrap.sh $(if $(PYTHON),check $(PY),install)

train: environment ## train RECIPE (quickstart): KEY=VALUE overrides, NGPU= ranks
	$(run) $(recipe) $(call flag,--ngpu,NGPU) $(pass)

check: environment ## compose RECIPE and run every check, without training
	$(run) $(recipe) $(call flag,--ngpu,NGPU) $(pass)

show: environment ## RECIPE's resolved settings, with the file that set each
	$(run) $(recipe) $(pass)

recipes: environment ## list the recipes: name, hardware, what they do
	$(plain)$(run)

new: environment ## copy a recipe: RECIPE=mine FROM=quickstart
	$(plain)$(run) $(recipe) $(call flag,--from,FROM)

inspect: environment ## RECIPE's data as the model sees it, decoded
	$(run) $(recipe) $(pass)

launch: environment ## start RECIPE elsewhere: ON=slurm|skypilot NODES=2, DRY=1 only prints
	$(run) $(recipe) $(call flag,--on,ON) $(call flag,--nodes,NODES) $(call flag,--ngpu,NGPU) \
	  $(call switch,--dry,DRY) $(pass)

bench: environment ## measure NAME against its floor and peers; no NAME lists the cases
	$(run) $(call flag,--name,NAME) $(pass)

test: environment ## all tests but the slow: ARGS="-k word", JOBS=2 at a time
	$(plain)@exec $(PY) -m pytest -m "not slow" $(if $(filter-out 0 1,$(JOBS)),-n $(JOBS)) $(ARGS)

lint: environment ## ruff (rules and format) and mypy
	$(plain)@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

setup: environment ## only prepare .venv
	$(plain)@echo "Ready: $(PY)"

doctor: ## versions, devices, memory, links; what is missing (installs nothing)
	$(plain)@python=$(if $(PYTHON),$(PY),$$(sh launch/bootstrap.sh find)) && exec "$$python" -m launch.doctor

clean: ## remove caches (runs and .venv stay)
	$(plain)@rm -rf .pytest_cache .ruff_cache .mypy_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@echo "make VERB [RECIPE=name or file.yaml] [key=value ...]"
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1 - \2/p' Makefile | awk -F ' - ' '{ printf "  %-9s %s\n", substr($$1, 3), $$2 }'
	@echo
	@echo "  make train RECIPE=quickstart training.steps=20 'components.full_recompute.enabled=true'"
	@echo
	@echo "key=value is one word: \"key = value\" does not reach the recipe. Quote what the shell"
	@echo "would read: 'data.paths=[a, b]'. A repeated key: the last one counts. What is no KEY=VALUE"
	@echo "goes into OVERRIDES, quoted as for the shell: OVERRIDES=\"~optimizer.foo 'x=[a, b]'\"."
	@echo "PYTHON=path uses an environment of yours instead of .venv; VERBOSE=1 shows tracebacks."
