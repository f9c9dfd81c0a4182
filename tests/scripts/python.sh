#!/bin/sh
# python.sh: prints a python that has torch, numpy, safetensors and transformers, or nothing and on stderr why not.
# torch and numpy are Debian's (python3-torch: $PYTHON or /usr/bin/python3); the others come from PyPI, once, to an
# environment of their own in $BUILD/python. Versions are fixed: these go with Debian 12's torch 1.13.
build=${BUILD:-build}
python=${PYTHON:-/usr/bin/python3}
packages='transformers==4.33.3 safetensors==0.8.0'
why() { echo "$*" >&2; exit 0; }
"$python" -c 'import numpy, torch' 2>/dev/null || why "$python has no torch (Debian: apt-get install python3-torch)"
if [ "$(cat "$build/python/packages" 2>/dev/null)" != "$packages" ]; then
    rm -rf "$build/python"
    mkdir -p "$build" || exit 0
    "$python" -m venv --system-site-packages "$build/python" >"$build/python.log" 2>&1 ||
        why "$python -m venv fails (Debian: apt-get install python3-venv)"
    timeout 400 "$build/python/bin/python" -m pip install --disable-pip-version-check $packages >>"$build/python.log" 2>&1 ||
        why "pip cannot install $packages: $(tail -n 1 "$build/python.log")"
    echo "$packages" >"$build/python/packages"
fi
"$build/python/bin/python" -c 'import torch, numpy, safetensors.torch, transformers' 2>>"$build/python.log" ||
    why "$build/python is broken: $(tail -n 1 "$build/python.log")"
case $build in /*) ;; *) build=$PWD/$build ;; esac
echo "$build/python/bin/python"
