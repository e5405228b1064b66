#!/usr/bin/env bash
# Sourced by local.sh and node.sh. Asks torch, not nvidia-smi, for this host's GPUs, so that MIG and
# CUDA_VISIBLE_DEVICES count.

num_gpus() {
  python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
}

# numa_options RANKS [SETTING=VALUE ...]: options of torchrun that keep each rank on the CPUs near
# its GPU. None on a host of one NUMA node, without numactl, which torchrun calls, or where some rank
# has no GPU of its own.
numa_options() {
  [[ $(numactl --hardware 2>/dev/null) =~ ^available:\ ([0-9]+) && ${BASH_REMATCH[1]} -gt 1 ]] ||
    return 0
  [[ " $* " == *" device=cpu "* || $1 -gt $(num_gpus) ]] || echo --numa-binding node
}
