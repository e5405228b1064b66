#!/usr/bin/env bash
# Train on several nodes. Run the same command on every node, in any order, within ten minutes.
#
#   launch/node.sh --rendezvous HOST:PORT --job NAME --nodes N|MIN:MAX --ranks N
#                  [--restarts N] [--wait SECONDS] [--address ADDRESS] [SETTING=VALUE ...]
#
#   --rendezvous  a port on one of the nodes, which all other nodes must be able to reach, and which
#                 no other job uses
#   --job         name of the job, the same on all nodes. With the name of an earlier job, its run
#                 continues
#   --nodes       number of nodes. With MIN:MAX, the job continues if nodes fail, on at least MIN
#   --ranks       number of ranks on each node: one per GPU
#   --restarts    how often to restart failed ranks (0). The remaining ranks continue from the
#                 newest checkpoint, so set checkpoint_every
#   --wait        seconds to wait for more nodes once MIN nodes have joined (30)
#   --address     address of this node, if other nodes cannot reach it by its host name
#
#   launch/node.sh --rendezvous node1:29400 --job a1 --nodes 2 --ranks 4 strategy=onebit
#   launch/node.sh --rendezvous node1:29400 --job a2 --nodes 1:4 --ranks 8 --restarts 3 \
#                  checkpoint_every=100 strategy=overlap batch_size=2048
#
# If a node has several network interfaces, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one
# that connects the nodes, such as eth0. NCCL_IB_HCA selects InfiniBand adapters, and
# NCCL_DEBUG=INFO prints what NCCL chose. runs_dir must be on a file system that all nodes share.
set -euo pipefail

fail() {
  echo "node.sh: error: $*" >&2
  exit 2
}

rendezvous='' job='' nodes='' ranks='' restarts=0 wait=30 address=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0"; exit 0 ;;
    --rendezvous | --job | --nodes | --ranks | --restarts | --wait | --address)
      declare "${1#--}=${2-}"; shift 2 || fail "$1 needs a value" ;;
    -*) fail "$1: no such option (--help)" ;;
    *) break ;;
  esac
done
for option in rendezvous job nodes ranks; do
  [ -n "${!option}" ] || fail "--$option is missing (--help)"
done
[[ $rendezvous =~ ^.+:([1-9][0-9]{0,4})$ && ${BASH_REMATCH[1]} -lt 65536 ]] ||
  fail "--rendezvous $rendezvous: must be HOST:PORT, with a port from 1 to 65535"
[[ $nodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ && ${nodes%:*} -le ${nodes#*:} ]] ||
  fail "--nodes $nodes: must be N or MIN:MAX"
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || fail "--ranks $ranks: must be a number from 1 to 9999"
for option in restarts wait; do
  [[ ${!option} =~ ^[0-9]+$ ]] || fail "--$option ${!option}: must be a number"
done
for setting in "$@"; do
  [[ $setting != -* ]] || fail "$setting: options come before settings"
done
command -v torchrun >/dev/null || fail "torchrun is not on the PATH; first: . .venv/bin/activate"

# shellcheck source-path=SCRIPTDIR
. "$(dirname "$(readlink -f "$0")")/gpus.sh"

# Nodes may start minutes apart, but torchrun alone tries to reach the rendezvous for only one minute.
conf=last_call_timeout=$wait,read_timeout=600
options=()
if [ -n "$address" ]; then
  options=(--local-addr "$address")
  if getent ahosts "${rendezvous%:*}" | awk '{ print $1 }' | grep -Fx "$address" >/dev/null; then
    conf+=,is_host=true
  fi
fi
options+=(--rdzv-conf "$conf")

# In torchrun's own store, restarted ranks would find the keys of earlier ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# shellcheck disable=SC2046  # options, or none
exec torchrun --nnodes "$nodes" --nproc-per-node "$ranks" --max-restarts "$restarts" \
  --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id "$job" \
  "${options[@]}" $(numa_options "$ranks" "$@") -m lab.train "$@"
