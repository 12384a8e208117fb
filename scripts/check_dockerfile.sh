#!/usr/bin/env bash
# Carries out the Dockerfile in a clean Debian root and starts the server in it, for want of a container engine.
#
#   scripts/check_dockerfile.sh [--target cpu|cuda]
#
# Needs root and debootstrap, and takes minutes. The root is of the same Debian release as the base image; its Python
# is Debian's, of the same minor version, or the check says that it cannot be made. This machine's settings of pip,
# name resolution and certificates are passed on. Settings, all optional:
#   STREAMSERVE_DEBIAN_MIRROR   where debootstrap fetches packages
#   STREAMSERVE_DEBIAN_ROOT     folder of a root that an earlier run made; made if it is not there
#   TMPDIR                      where roots are; 4 GB for a CPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
  echo "error: this needs root and debootstrap (apt-get install debootstrap)" >&2
  exit 1
fi

image=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
[[ $image =~ ^python:([0-9]+\.[0-9]+)\.[0-9]+-slim-([a-z]+)$ ]] || { echo "error: $image is not understood" >&2; exit 1; }
python=${BASH_REMATCH[1]} release=${BASH_REMATCH[2]}

work=$(mktemp -d --tmpdir streamserve-image.XXXXXX)
# The mounts are in a namespace of their own and gone by then, so nothing else can be removed with it.
trap 'rm -rf --one-file-system "$work"' EXIT

base=${STREAMSERVE_DEBIAN_ROOT:-$work/base}
if [ ! -e "$base/bin/sh" ]; then
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$release" "$base" \
    "${STREAMSERVE_DEBIAN_MIRROR:-http://deb.debian.org/debian}"
fi
has=$(chroot "$base" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$has" != "$python" ]; then
  echo "error: $release has Python $has, the base image $python" >&2
  exit 1
fi
unshare --mount --propagation private python3 scripts/check_dockerfile.py --work "$work" --base "$base" "$@"
