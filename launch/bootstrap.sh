#!/bin/sh
# Prepares the Python environment that every Makefile target runs in. Run from the root.
#
#   bootstrap.sh install         .venv from requirements.lock, unless it is there and current
#   bootstrap.sh check PYTHON    an environment of the user's own: never installs, only checks it
#   bootstrap.sh find            print an interpreter that `make doctor` can use; installs nothing
#
# POSIX shell alone, as it runs before any Python is known to exist.
set -u

LOCK=requirements.lock
VENV=.venv
STAMP=$VENV/installed.sha256
LOG=$VENV/install.log
SIZE_GB=7 # of a finished .venv, rounded up; torch's CUDA libraries are half of it
SUPPORTED='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

fail() {
    printf '%s\n' "$@" >&2
    exit 2
}

checksum() { sha256sum <"$LOCK" | cut -d ' ' -f 1; }

supported() { "$1" -c "$SUPPORTED" >/dev/null 2>&1; }

can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

find_python() { # find_python TEST: the first supported interpreter that passes TEST as well
    for candidate in python3 python3.13 python3.12 python3.11; do
        if supported "$candidate" && "$1" "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

no_python() {
    fail "No Python 3.11, 3.12 or 3.13 on PATH (python3: $(python3 -V 2>&1 || true))." \
        "Install one (Debian, Ubuntu: apt install python3 python3-venv) or name yours:" \
        "    make train PYTHON=/path/to/python"
}

make_venv() {
    python=$(find_python supported) || no_python
    if ! can_make_venv "$python"; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        python=$(find_python can_make_venv) ||
            fail "Python $version is here but cannot create virtual environments (no ensurepip)." \
                "Debian, Ubuntu: apt install python$version-venv"
    fi
    "$python" -m venv --clear "$VENV" || fail "$python -m venv $VENV failed (see above)."
}

need_space() { # pip would find out after minutes, and leave torn packages
    free_kb=$(df -Pk . | tail -n 1 | sed 's/  *[0-9]*%.*//; s/.* //')
    [ "$free_kb" -ge $((SIZE_GB * 1000000)) ] ||
        fail "The packages need $SIZE_GB GB in $(pwd), where $((free_kb / 1000000)) GB are free." \
            "Free some space, or name an environment elsewhere:" \
            "    make train PYTHON=/path/to/python"
}

usable() { # an installation that was cut short left its log but no stamp: packages may be torn
    supported "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 &&
        { [ -f "$STAMP" ] || [ ! -e "$LOG" ]; }
}

current() { # the stamp holds the lock's checksum, and the interpreter behind .venv still runs
    [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(checksum)" ] && supported "$VENV/bin/python"
}

install_locked() {
    usable || { rm -rf "$VENV" && need_space && make_venv; }
    # Removed before and written after, by a rename: an interrupted install leaves no stamp.
    rm -f "$STAMP"
    echo "Installing $(grep -c '^[A-Za-z0-9]' "$LOCK") locked packages into $VENV" \
        "(once: a few minutes, $SIZE_GB GB with the CUDA libraries) ..."
    started=$(date +%s)
    if ! "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check \
        --progress-bar off --no-compile --require-hashes -r "$LOCK" >"$LOG" 2>&1; then
        tail -n 25 "$LOG" >&2
        fail "" "The installation failed: the lines above end $LOG." \
            "Run the same command to try again, or PYTHON=... to use an environment of your own."
    fi
    # pip compiles on one core, 40 s of its time; this takes them all. Packages ship files that are
    # not meant for this Python, which is no fault of the installation.
    "$VENV/bin/python" -m compileall -qq -j 0 "$VENV"/lib/python*/site-packages >>"$LOG" 2>&1 || :
    checksum >"$STAMP.new" && mv "$STAMP.new" "$STAMP"
    echo "Installed in $(($(date +%s) - started)) s."
}

install() {
    current && return 0
    # Two first runs at once: the second waits, then finds the work done.
    if command -v flock >/dev/null 2>&1; then
        exec 9<"$LOCK"
        flock 9
        current && return 0
    fi
    install_locked
}

check() {
    command -v "$1" >/dev/null 2>&1 || fail "PYTHON=$1: no such program."
    supported "$1" || fail "PYTHON=$1 is $("$1" -V 2>&1); the project runs on Python 3.11 to 3.13."
    "$1" -m launch.pins || exit 2
}

case "${1:-}" in
install) install ;;
check) check "${2:?the interpreter to check}" ;;
find)
    if supported "$VENV/bin/python"; then
        echo "$VENV/bin/python"
    else
        find_python supported || no_python
    fi
    ;;
*) fail "usage: bootstrap.sh install | check PYTHON | find" ;;
esac
