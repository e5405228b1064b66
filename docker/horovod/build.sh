#!/usr/bin/env bash
# Build a wheel of Horovod against the torch that PYTHON imports, and print its path.
#   usage: build.sh PYTHON DIRECTORY
# DIRECTORY caches one wheel per version of torch and Python. The build needs g++ and, in PYTHON's
# environment, cmake, setuptools, wheel and what Horovod's launcher imports (the extra `horovod`). The
# build reads HOROVOD_* variables. With nvcc and NCCL, set HOROVOD_GPU_OPERATIONS=NCCL.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,3s/^# *//p' "$0" >&2; exit 2; }
python=$1
here=$(cd "$(dirname "$0")" && pwd)

version=$("$python" -c 'import sys, torch; print(f"torch-{torch.__version__}-python-{sys.version_info.major}.{sys.version_info.minor}")')
mkdir -p "$2/$version"
cache=$(cd "$2/$version" && pwd)
if ! ls "$cache"/horovod-*.whl >/dev/null 2>&1; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  {
    "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
      --require-hashes --requirement "$here/requirements.txt" --dest "$work"
    tar -C "$work" -xzf "$work"/horovod-*.tar.gz
    rm "$work"/horovod-*.tar.gz
    patch -d "$work"/horovod-* -p1 <"$here/cxx17.patch"
    echo "building Horovod for $version: about four minutes on two cores"
    PATH=$(dirname "$python"):$PATH HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
      HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
      "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work" \
      "$work"/horovod-*
    mv "$work"/horovod-*.whl "$cache"
  } >&2
fi
ls "$cache"/horovod-*.whl
