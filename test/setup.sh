#!/bin/sh
# Install the distribution packages that building and testing need (and those named as arguments), or say which
# command does. Asks the package database only, so a machine that has them all loses no time.
set -eu
packages="gcc make pkg-config libstb-dev libutf8proc-dev libjansson-dev libssl-dev libedit-dev libmicrohttpd-dev libcurl4-openssl-dev curl python3 python3-venv $*"
command -v dpkg-query >/dev/null || exit 0 # not Debian: the compiler will name what is missing
missing=""
for p in $packages; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q "ok installed" || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ]; then run=""
elif sudo -n true 2>/dev/null; then run="sudo"
else
    echo "vlm.c needs these packages; please run:  sudo apt-get update && sudo apt-get install$missing" >&2
    exit 1
fi
echo "installing:$missing"
$run apt-get update -qq
DEBIAN_FRONTEND=noninteractive $run apt-get install -y -qq --no-install-recommends $missing >/dev/null
