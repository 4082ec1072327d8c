#!/usr/bin/env python3
"""Writes optimizers.safetensors: what PyTorch's optimizers make of one parameter in 20 steps, in float64.

The gradient of step i at parameter p is sin((i + 1) p) + p / 8. Each entry is [20, 12]: the parameter after every step.
Lion, LAMB and Muon are not in the version used, and NAdam keeps its product of momenta in float32 there and counts one of
them twice: these are written here from their papers. LAMB and Muon step [3, 4] and [4, 3] matrices of the same elements.
L-BFGS minimises the functions below, in as many calls of step. Made with PyTorch 1.13.0.
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


def trajectory(make, shape=(N,)):
    p = start().reshape(shape).requires_grad_()
    opt = make([p])
    out = []
    for i in range(STEPS):
        p.grad = gradient(p.detach(), i)
        opt.step()
        out.append(p.detach().clone())
    return torch.stack(out).reshape(STEPS, N)


def bowl(p):
    scale = torch.arange(1, N + 1, dtype=torch.float64) / 4
    return (scale * torch.log(torch.cosh(p))).sum() + ((p[1:] - p[:-1]) ** 2).sum() / 2


def rosenbrock(p):
    return (100 * (p[1:] - p[:-1] ** 2) ** 2 + (1 - p[:-1]) ** 2).sum()


def minimised(f, **options):
    p = start().requires_grad_()
    opt = torch.optim.LBFGS([p], **options)
    out = []

    def closure():
        opt.zero_grad()
        loss = f(p)
        loss.backward()
        return loss

    for _ in range(STEPS):
        opt.step(closure)
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


class LAMB(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                b1, b2 = group["betas"]
                s["t"] += 1
                s["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m, v = s["m"] / (1 - b1 ** s["t"]), s["v"] / (1 - b2 ** s["t"])
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                p -= group["lr"] * p.norm() / u.norm() * u


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-2, momentum=0.95, nesterov=True, weight_decay=0.0, match_adamw=False, steps=5):
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
                                      match_adamw=match_adamw, steps=steps))

    @staticmethod
    def orthogonal(g, steps):
        a, b, c = 3.4445, -4.7750, 2.0315
        x = g.T if g.shape[0] > g.shape[1] else g
        x = x / (x.norm() + 1e-7)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if g.shape[0] > g.shape[1] else x

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                u = self.orthogonal(p.grad.lerp(m, group["momentum"]) if group["nesterov"] else m, group["steps"])
                rows, columns = p.shape
                scale = 0.2 * max(rows, columns) ** 0.5 if group["match_adamw"] else max(1, rows / columns) ** 0.5
                p *= 1 - group["lr"] * group["weight_decay"]
                p -= group["lr"] * scale * u


o = torch.optim
MATRICES = {
    "lamb": ((3, 4), lambda p: LAMB(p, lr=0.02)),
    "lamb_decay": ((12,), lambda p: LAMB(p, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)),
    "muon": ((3, 4), lambda p: Muon(p, lr=0.02)),
    "muon_tall": ((4, 3), lambda p: Muon(p, lr=0.05, momentum=0.8, nesterov=False, weight_decay=0.1, steps=4)),
    "muon_adamw": ((4, 3), lambda p: Muon(p, lr=0.02, momentum=0.9, weight_decay=0.1, match_adamw=True)),
}
MINIMISED = {
    "lbfgs": lambda: minimised(bowl, lr=0.5, max_iter=3, history_size=4),
    "lbfgs_wolfe": lambda: minimised(rosenbrock, max_iter=2, history_size=5, line_search_fn="strong_wolfe"),
}
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
    tensors = {name: trajectory(make) for name, make in CASES.items()}
    tensors |= {name: trajectory(make, shape) for name, (shape, make) in MATRICES.items()}
    tensors |= {name: make() for name, make in MINIMISED.items()}
    write(Path(__file__).with_suffix(".safetensors"), tensors)
