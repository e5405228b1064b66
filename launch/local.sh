#!/usr/bin/env bash
# Train on this machine, with one rank per GPU or with the number of ranks that you set.
#
#   launch/local.sh [--ranks N] [SETTING=VALUE ...]
#
#   launch/local.sh strategy=onebit model=alexnet_small
#   launch/local.sh --ranks 2 strategy=overlap batch_size=256
#
# torchrun's store, Gloo and NCCL listen only on the loopback interface.
set -euo pipefail

fail() {
  echo "local.sh: error: $*" >&2
  exit 2
}

ranks=
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0"; exit 0 ;;
    --ranks) ranks=${2-}; shift 2 || fail "--ranks needs a number" ;;
    -*) fail "$1: no such option (--help)" ;;
    *) break ;;
  esac
done
for setting in "$@"; do
  [[ $setting != -* ]] || fail "$setting: options come before settings"
done
command -v torchrun >/dev/null || fail "torchrun is not on the PATH; first: . .venv/bin/activate"
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$(readlink -f "$0")")/gpus.sh"
if [ -z "$ranks" ]; then
  ranks=$(num_gpus)
  [ "$ranks" != 0 ] || fail "torch sees no GPU here; say how many ranks: --ranks N"
fi
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || fail "--ranks $ranks: must be a number from 1 to 9999"

# shellcheck disable=SC2046  # options, or none
exec python -m lab.distributed.torchrun --nproc-per-node "$ranks" $(numa_options "$ranks" "$@") \
  -m lab.train "$@"
