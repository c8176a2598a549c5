# make chat [MODEL=folder] set up, build and chat        make test       set up, build, run every test
# make serve [MODEL=folder] the same, over HTTP           make test-fast  some tests of every area
# make web [MODEL=folder]   the same, as a chat page
# make check               formatters, linters, types     make format     rewrite files in that format
# make docs                regenerate parts of docs/      make clean      remove what was built
# make recording           record docs/images/chat.svg    make pictures   take docs/images/web*.png
# Variables: MODEL (folder or hub name; by default the small model that ships), VENV (.venv),
#   PYTHON (python3), ARGS (for chat, serve and web), PYTEST_ARGS (for both kinds of test), JOBS (processors).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: install chat serve web test test-fast check format docs recording pictures clean

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
MODEL ?=
ARGS ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input install --quiet
STAMPS := $(VENV)/.stamps
SOURCES := CMakeLists.txt $(wildcard cmake/*) $(shell find cpp \( -name '*.h' -o -name '*.cc' -o -name '*.cu' \) -not -path 'cpp/tests/*')
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

install: $(STAMPS)/package

chat: $(STAMPS)/package
	@$(PY) -m lmchat.cli chat $(if $(MODEL),"$(MODEL)") $(ARGS)

serve: $(STAMPS)/package
	@exec $(PY) -m lmchat.cli serve $(if $(MODEL),"$(MODEL)") $(ARGS)

web: $(STAMPS)/package $(STAMPS)/web
	@exec $(PY) -m lmchat.cli web $(if $(MODEL),"$(MODEL)") $(ARGS)

test: $(STAMPS)/package $(STAMPS)/test
	$(PY) -m pytest $(PYTEST_ARGS)

test-fast: $(STAMPS)/package $(STAMPS)/test
	$(PY) -m pytest @tests/fast.txt $(PYTEST_ARGS)

check: $(STAMPS)/package $(STAMPS)/check
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(PY) -m mypy
	find cpp -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(STAMPS)/check
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	find cpp -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs $(VENV)/bin/clang-format -i

docs: $(STAMPS)/package
	$(PY) -m lmchat.cli.support_table docs/models.md
	$(PY) -m lmchat.cli.docs docs/cli.md
	$(PY) tools/python_api.py docs/python-api.md

recording: $(STAMPS)/package $(STAMPS)/test
	$(PY) tools/recording/record.py docs/images/chat.svg

pictures: $(STAMPS)/package $(STAMPS)/test
	$(PY) tools/pictures.py docs/images

clean:
	rm -rf build dist lmchat.egg-info turbomind/_C*.so $(STAMPS)/package
	rm -rf .pytest_cache .mypy_cache .ruff_cache

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is older than 3.10: set PYTHON=" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "could not create $(VENV): on Debian and Ubuntu install python3-venv" >&2; exit 2; }

$(STAMPS)/build: requirements/build.txt | $(PY)
	@echo "installing the build tools into $(VENV)"
	@$(PIP) -r requirements/build.txt
	@mkdir -p $(STAMPS) && touch $@

# Editable: a changed Python file needs nothing; a change of these files builds again. The links are
# for type checkers, which read folders in .pth files and not the import hook of setuptools.
$(STAMPS)/package: $(STAMPS)/build pyproject.toml setup.py $(SOURCES)
	@echo "building turbomind._C and installing lmchat (minutes the first time)"
	@$(PIP) --no-build-isolation --editable .
	@mkdir -p build/sources && ln -sfn ../../lmchat ../../turbomind build/sources/
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  | while read -r site; do echo "$(CURDIR)/build/sources" >"$$site/lmchat_sources.pth"; done
	@touch $@

$(STAMPS)/web: requirements/web.txt $(STAMPS)/build
	@echo "installing what the chat page needs"
	@$(PIP) -r requirements/web.txt
	@touch $@

$(STAMPS)/test: requirements/torch.txt requirements/web.txt requirements/test.txt $(STAMPS)/build
	@echo "installing what the tests need"
	@$(PIP) -r requirements/torch.txt
	@$(PIP) -r requirements/test.txt
	@touch $@

$(STAMPS)/check: requirements/check.txt | $(PY)
	@$(PIP) -r requirements/check.txt
	@mkdir -p $(STAMPS) && touch $@
