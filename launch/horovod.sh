#!/usr/bin/env bash
# Train with Horovod, which `make horovod` builds.
#
#   launch/horovod.sh --ranks N [--hosts HOST:SLOTS,...] [SETTING=VALUE ...]
#
#   launch/horovod.sh --ranks 2 strategy=onebit
#   launch/horovod.sh --ranks 8 --hosts node1:4,node2:4 strategy=horovod
#
# Ranks on other hosts are started over ssh, with the same paths. HOROVOD_GLOO_IFACE names the hosts'
# network interface. HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME tune Horovod's tensor fusion.
set -euo pipefail

fail() {
  echo "horovod.sh: error: $*" >&2
  exit 2
}

ranks='' hosts=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0"; exit 0 ;;
    --ranks) ranks=${2-}; shift 2 || fail "--ranks needs a number" ;;
    --hosts) hosts=${2-}; [ -n "$hosts" ] || fail "--hosts needs a list"; shift 2 ;;
    -*) fail "$1: no such option (--help)" ;;
    *) break ;;
  esac
done
[ -n "$ranks" ] || fail "--ranks is missing (--help)"
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || fail "--ranks $ranks: must be a number from 1 to 9999"
for setting in "$@"; do
  [[ $setting != -* ]] || fail "$setting: options come before settings"
done
command -v horovodrun >/dev/null ||
  fail "horovodrun is not on the PATH; first: make horovod, . .venv/bin/activate"

# macOS has bash 3.2, in which an empty array is an unset variable.
exec horovodrun --gloo -np "$ranks" ${hosts:+--hosts "$hosts"} python -m lab.train comm=horovod "$@"
