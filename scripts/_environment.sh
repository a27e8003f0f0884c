# shellcheck shell=sh
# The checkout's own virtual environment: made when it is missing, completed when it is behind.
#
# Sourced by demo, test and check, which call `environment runtime` or `environment dev` and then
# use "$PYTHON". Plain POSIX sh: it must run on a machine that has Python and nothing of ours.
#
# A stamp in the environment names what it was made from (this folder, the Python, pyproject.toml),
# so that a second run costs one comparison and not a conversation with a package index. pip is
# called plainly: the machine's own configuration (mirrors, certificates, caches) stays in force.
#
#   MESHINFER_VENV     another place for the environment than .venv
#   MESHINFER_PYTHON   the Python to make it with, instead of the first fitting one

say() { printf '%s\n' "$*" >&2; }

# --- Python ------------------------------------------------------------------------------------

_fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

_find_python() {
    # The system's choice first. Newer ones last: a new Python waits months for everybody's wheels.
    for candidate in ${MESHINFER_PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if command -v "$candidate" >/dev/null 2>&1 && _fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "meshinfer needs Python 3.11 or newer; found: $(python3 --version 2>/dev/null || echo none)."
    case "$(uname -s)" in
        Darwin) say "Install one with:   brew install python@3.12      (or from https://www.python.org/downloads/)" ;;
        *) say "Install one with your package manager: apt-get install python3.11, dnf install python3.12, …" ;;
    esac
    say "To use one that is not on the PATH:   MESHINFER_PYTHON=/path/to/python3 $0"
    return 1
}

# --- the system's packages ---------------------------------------------------------------------

# Install system packages where nobody has to be asked, else say exactly what to run.
# usage: _install_system WHAT-FOR  APT-PACKAGES  DNF-PACKAGES  PACMAN-PACKAGES
_install_system() {
    if command -v apt-get >/dev/null 2>&1; then
        refresh="apt-get update -q" install="apt-get install -y -q --no-install-recommends $2"
    elif command -v dnf >/dev/null 2>&1; then
        refresh="true" install="dnf install -y -q $3"
    elif command -v pacman >/dev/null 2>&1; then
        refresh="pacman -Sy" install="pacman -S --noconfirm --needed $4"
    else
        say "Missing: $1."
        say "Install with your package manager what Debian calls:   $2"
        return 1
    fi
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo -n" # fails rather than asks
    else
        say "Missing: $1. Run this once, as root, then start again:"
        if [ "$refresh" = true ]; then say "    $install"; else say "    $refresh && $install"; fi
        return 1
    fi
    say "Installing $1: $install"
    # Debian's packages ask questions on install unless told not to. Words are meant to split.
    # shellcheck disable=SC2086
    if ! { $as_root $refresh && $as_root env DEBIAN_FRONTEND=noninteractive $install; } >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        say "That failed. Missing: $1."
        return 1
    fi
}

# fastecdsa, which libp2p needs, is a C extension over GMP and has no wheel for Linux (nor, for
# Python 3.13, for macOS).
_can_build() {
    compiler=$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')
    include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    # shellcheck disable=SC2086  # CC may carry options
    printf '#include <Python.h>\n#include <gmp.h>\n' |
        $compiler ${CFLAGS-} -I"$include" -E -x c - >/dev/null 2>&1
}

# All that the system has to have before pip can do the rest: named, and installed, in one go.
# usage: _prepare_linux PYTHON
_prepare_linux() {
    # Said here, since pip would only say "no matching distribution".
    if ! getconf GNU_LIBC_VERSION >/dev/null 2>&1; then
        say "MLX, the engine, is published for Linux systems with glibc 2.35 or newer; this one has another C library."
        say "Use Debian 12, Ubuntu 22.04, Fedora 36 or newer (a container will do)."
        return 1
    fi
    what="" apt="" dnf="" pacman=""
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        what="Python's venv module" apt="python$version-venv" dnf="python3" pacman="python"
    fi
    if ! { "$PYTHON" -c 'import fastecdsa' || _can_build "$1"; } >/dev/null 2>&1; then
        what="${what:+$what and }a C compiler with the headers of GMP and Python (a dependency of libp2p is compiled)"
        apt="$apt gcc libc6-dev libgmp-dev python$version-dev"
        # Fedora's own Python has the package without the minor version.
        if [ "$1" = /usr/bin/python3 ]; then dnf="gcc gmp-devel python3-devel"; else dnf="gcc gmp-devel python$version-devel"; fi
        pacman="$pacman gcc gmp"
    fi
    if [ -n "$what" ]; then _install_system "$what" "$apt" "$dnf" "$pacman" || return 1; fi
    if ! { "$PYTHON" -c 'import fastecdsa' || _can_build "$1"; } >/dev/null 2>&1; then
        say "The headers of Python $version (for $1) or of GMP are still missing."
        say "If that Python did not come from your package manager, install its development files, or name another"
        say "Python:   MESHINFER_PYTHON=/usr/bin/python3 $0"
        return 1
    fi
}

# usage: _prepare_macos PYTHON
_prepare_macos() {
    if gmp=$(brew --prefix --installed gmp 2>/dev/null); then
        # Homebrew's folder is not on the compiler's path.
        CFLAGS="-I$gmp/include ${CFLAGS-}" LDFLAGS="-L$gmp/lib ${LDFLAGS-}"
        export CFLAGS LDFLAGS
    fi
    # Up to 3.12 there is a wheel, and nothing is compiled.
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    case "$version" in 3.11 | 3.12) return ;; esac
    if { "$PYTHON" -c 'import fastecdsa' || _can_build "$1"; } >/dev/null 2>&1; then return; fi
    say "A dependency of libp2p has to be compiled for Python $version, with GMP. Run these once, then start again:"
    say "    xcode-select --install"
    say "    brew install gmp"
    say "or use a Python for which there is a wheel:   MESHINFER_PYTHON=python3.12 $0"
    return 1
}

# --- the environment ---------------------------------------------------------------------------

_stamp_text() { printf '%s %s %s\n' "$root" "$("$venv/bin/python" -V 2>&1)" "$(cksum <"$root/pyproject.toml")"; }

_is_current() {
    for kind in "$@"; do
        if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.meshinfer-$kind" 2>/dev/null)" = "$(_stamp_text)" ]; then
            return 0
        fi
    done
    return 1
}

# usage: environment runtime|dev   →   PYTHON is the environment's interpreter
environment() {
    root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
    venv=${MESHINFER_VENV:-$root/.venv}
    PYTHON=$venv/bin/python
    export PYTHON
    # What suffices for the tests suffices for the demo.
    if [ "$1" = dev ]; then wanted="dev" extras="[dev]"; else wanted="dev runtime" extras=""; fi
    # shellcheck disable=SC2086
    if _is_current $wanted; then return; fi

    base=$(_find_python) || return 1
    log=$(mktemp) || return 1
    trap 'rm -f "$log"' EXIT
    case "$(uname -s)" in
        Darwin) _prepare_macos "$base" || return 1 ;;
        *) _prepare_linux "$base" || return 1 ;;
    esac
    if ! { _fits "$PYTHON" && "$PYTHON" -m pip --version; } >/dev/null 2>&1; then
        say "Making a virtual environment in $venv with $("$base" --version)"
        "$base" -m venv --clear "$venv" || return 1
    fi
    say "Installing meshinfer and what it needs (the first time takes a minute or two)"
    if ! "$PYTHON" -m pip install --disable-pip-version-check -e "$root$extras" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        say "pip could not install everything; its last messages are above. Start again once the cause is gone:"
        say "what is already there is kept."
        return 1
    fi
    _stamp_text >"$venv/.meshinfer-$1"
    rm -f "$log"
}
