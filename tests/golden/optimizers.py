#!/usr/bin/env python3
"""Writes optimizers.safetensors: what PyTorch's optimizers make of one parameter in 20 steps, in float64.

The gradient of step i at parameter p is sin((i + 1) p) + p / 8. Each entry is [20, 12]: the parameter after every step.
Lion is not in PyTorch, and NAdam keeps its product of momenta in float32 there and, in the version used, counts one of
them twice: these two are written here from their papers. Made with PyTorch 1.13.0.
"""

import json
import struct
from pathlib import Path

import torch

STEPS, N = 20, 12


def start():
    return torch.linspace(-1.5, 2.0, N, dtype=torch.float64)


def gradient(p, i):
    return torch.sin((i + 1) * p) + p / 8


def trajectory(make):
    p = start().requires_grad_()
    opt = make([p])
    out = []
    for i in range(STEPS):
        p.grad = gradient(p.detach(), i)
        opt.step()
        out.append(p.detach().clone())
    return torch.stack(out)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                b1, b2 = group["betas"]
                update = torch.sign(b1 * m + (1 - b1) * p.grad)
                p -= group["lr"] * (update + group["weight_decay"] * p)
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class NAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, momentum_decay=4e-3):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decay=momentum_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, product=1.0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                b1, b2 = group["betas"]
                s["t"] += 1
                mu, following = (b1 * (1 - 0.5 * 0.96 ** (k * group["decay"])) for k in (s["t"], s["t"] + 1))
                s["product"] *= mu
                g = p.grad + group["weight_decay"] * p
                s["m"].mul_(b1).add_(g, alpha=1 - b1)
                s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
                size = (s["v"] / (1 - b2 ** s["t"])).sqrt() + group["eps"]
                p -= group["lr"] * (1 - mu) / (1 - s["product"]) * g / size
                p -= group["lr"] * following / (1 - s["product"] * following) * s["m"] / size


o = torch.optim
CASES = {
    "sgd": lambda p: o.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: o.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd_nesterov": lambda p: o.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda p: o.Adam(p, lr=0.02),
    "adam_decay": lambda p: o.Adam(p, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    "adam_amsgrad": lambda p: o.Adam(p, lr=0.02, betas=(0.8, 0.6), amsgrad=True),
    "adamw": lambda p: o.AdamW(p, lr=0.02, weight_decay=0.1),
    "adamax": lambda p: o.Adamax(p, lr=0.02, weight_decay=0.1),
    "nadam": lambda p: NAdam(p, lr=0.02, weight_decay=0.1, momentum_decay=0.01),
    "radam": lambda p: o.RAdam(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: o.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2, eps=1e-6),
    "adadelta": lambda p: o.Adadelta(p, lr=1.0, rho=0.8, eps=1e-4, weight_decay=0.1),
    "rmsprop": lambda p: o.RMSprop(p, lr=0.02, weight_decay=0.1),
    "rmsprop_centered": lambda p: o.RMSprop(p, lr=0.02, alpha=0.9, momentum=0.5, centered=True, eps=1e-3),
    "lion": lambda p: Lion(p, lr=0.01, betas=(0.85, 0.95), weight_decay=0.1),
}


def write(path, tensors):
    header, data = {}, b""
    for name, t in tensors.items():
        raw = t.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F64", "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    write(Path(__file__).with_suffix(".safetensors"), {name: trajectory(make) for name, make in CASES.items()})
