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
        refresh="apt-get update -qq" install="apt-get install -y -qq --no-install-recommends $2"
    elif command -v dnf >/dev/null 2>&1; then
        refresh=":" install="dnf install -y -q $3"
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
        as_root="sudo -n"
    else
        say "Missing: $1. Run this once, then start again:"
        say "    sudo sh -c '$refresh && $install'"
        return 1
    fi
    say "Installing $1: $install"
    # -n keeps sudo from asking; the environment variable keeps Debian's packages from asking.
    # shellcheck disable=SC2086  # words are meant to split
    if ! { $as_root $refresh && $as_root env DEBIAN_FRONTEND=noninteractive $install; } >&2 </dev/null; then
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

_system_for_build() {
    if [ "$(uname -s)" = Darwin ] && command -v brew >/dev/null 2>&1 && brew --prefix gmp >/dev/null 2>&1; then
        # Homebrew's folder is not on the compiler's path.
        CFLAGS="-I$(brew --prefix gmp)/include ${CFLAGS-}" LDFLAGS="-L$(brew --prefix gmp)/lib ${LDFLAGS-}"
        export CFLAGS LDFLAGS
    fi
    if _can_build "$1"; then return; fi
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(uname -s)" = Darwin ]; then
        # Up to 3.12 there is a wheel, and nothing is compiled.
        case "$version" in 3.11 | 3.12) return ;; esac
        say "A dependency of libp2p has to be compiled for Python $version, with GMP. Run these once, then start again:"
        say "    xcode-select --install"
        say "    brew install gmp"
        return 1
    fi
    _install_system "a C compiler with the headers of GMP and Python (for a dependency of libp2p)" \
        "gcc libc6-dev libgmp-dev python$version-dev" \
        "gcc gmp-devel python$([ "$("$1" -P -c 'import sys; print(sys.executable)')" = /usr/bin/python3 ] && echo 3 || echo "$version")-devel" \
        "gcc gmp" || return 1
    if ! _can_build "$1"; then
        say "The headers of Python $version or of GMP are still missing for $1."
        say "If that Python did not come from your package manager, install its development files, or name another"
        say "Python:   MESHINFER_PYTHON=/usr/bin/python3 $0"
        return 1
    fi
}

_check_platform() {
    # Said here, since pip would only say "no matching distribution".
    if [ "$(uname -s)" = Linux ] && ! getconf GNU_LIBC_VERSION >/dev/null 2>&1; then
        say "MLX, the engine, is published for Linux systems with glibc 2.35 or newer; this one has another C library."
        say "Use Debian 12, Ubuntu 22.04, Fedora 36 or newer (a container will do)."
        return 1
    fi
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

    _check_platform || return 1
    if ! { [ -x "$PYTHON" ] && _fits "$PYTHON" && "$PYTHON" -m pip --version; } >/dev/null 2>&1; then
        base=$(_find_python) || return 1
        if ! "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            _install_system "Python's venv module" "python$version-venv" "python3" "python" || return 1
        fi
        say "Making a virtual environment in $venv with $("$base" --version)"
        "$base" -m venv --clear "$venv" || return 1
    fi
    if ! "$PYTHON" -c 'import fastecdsa' >/dev/null 2>&1; then
        _system_for_build "$PYTHON" || return 1
    fi
    say "Installing meshinfer and what it needs (the first time takes a minute or two)"
    if ! "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$root$extras" >&2; then
        say "pip could not install everything; its messages are above. Start again once the cause is gone:"
        say "what is already there is kept."
        return 1
    fi
    _stamp_text >"$venv/.meshinfer-$1"
}
