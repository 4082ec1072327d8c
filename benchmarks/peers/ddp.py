"""PyTorch's DistributedDataParallel on workloads of benchmarks/ddp, each rank with a whole batch: one JSON line a case and way.

torchrun --nproc-per-node 2 benchmarks/peers/ddp.py resnet50 gpt2

Rounds of the plain and the distributed step take turns; medians of the slowest rank.
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from peers import Torch

WORKLOADS = {"mlp_small": ("mlp:784,256,128,10", 128, 0, "sgd"), "resnet18": ("resnet18", 512, 0, "sgd"), "resnet50": ("resnet50", 256, 0, "sgd"),
             "gpt2": ("gpt:12,12,768,50304", 32, 1024, "adamw")}


def measure(peer, steps):
    dist.barrier()
    start = time.perf_counter()
    peer.run(steps)
    ms = torch.tensor((time.perf_counter() - start) * 1e3 / steps, device="cuda")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.item()


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    for case in sys.argv[1:]:
        model, batch, context, optimizer = WORKLOADS[case]
        for how in ["eager", "compile"]:
            plain, together = Torch(), Torch()
            together.wrapped = lambda net: DistributedDataParallel(net, device_ids=[local], gradient_as_bucket_view=True)
            for peer in (plain, together):
                peer.open(model, batch, context, optimizer, "fp16", how, f"cuda:{local}")
                peer.run(5)
            steps = max(1, min(50, int(100 / measure(plain, 2))))
            times = [[measure(plain, steps), measure(together, steps)] for _ in range(7)]
            alone, ms = (statistics.median(t[i] for t in times) for i in range(2))
            if dist.get_rank() == 0:
                print(json.dumps({"peer": plain.name + " DistributedDataParallel", "case": case, "precision": "fp16", "how": how, "ranks": dist.get_world_size(),
                                  "scaling": "weak", "plain_ms": round(alone, 5), "ms": round(ms, 5), "overhead_percent": round(100 * (ms / alone - 1), 2)}), flush=True)
            plain.close(), together.close()
            del plain, together
            torch.cuda.empty_cache()
    dist.destroy_process_group()


main()
