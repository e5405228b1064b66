#!/usr/bin/env bash
# local.sh and node.sh source this file. It asks torch, not nvidia-smi, for this host's GPUs, because
# torch takes MIG and CUDA_VISIBLE_DEVICES into account.

num_gpus() {
  python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
}

# numa_options RANKS [SETTING=VALUE ...]: options of torchrun that keep each rank on the CPUs near
# its GPU. There are none on a host with one NUMA node, without numactl (which torchrun calls), or if
# ranks share a GPU.
numa_options() {
  [[ $(numactl --hardware 2>/dev/null) =~ ^available:\ ([0-9]+) && ${BASH_REMATCH[1]} -gt 1 ]] ||
    return 0
  [[ " $* " == *" device=cpu "* || $1 -gt $(num_gpus) ]] || echo --numa-binding node
}
