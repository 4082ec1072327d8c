#!/usr/bin/env python3
"""Writes operators.safetensors: what PyTorch's operators make of sample inputs, for tests/ops_golden.cpp.

A sample is named "operator/number". The header's metadata hold its attributes, "key=value key=value", and "torch" and
"seed". Its tensors are "operator/number/" with
  in0, in1, ...          inputs; a missing one was left out
  out0, out1, ...        outputs
  grad0, grad1, ...      for inputs that have one, the gradient of the sum of outputs times cotangents; element i of
                         output k has the cotangent sin(1 + 2.3 i + k)
  second0, second1, ...  the gradient of the sum of squares of all of those gradients, where PyTorch has it
Derivatives are in float64. Made with PyTorch 1.13.0.
"""

import itertools
import json
import math
import struct
from pathlib import Path

import torch
import torch.nn.functional as F

SEED = 20240229
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES = list(NAMES)
INF, NAN = math.inf, math.nan

generator = torch.Generator().manual_seed(SEED)
tensors, metadata, counts = {}, {}, {}


# ---- inputs: constants, and those that have derivatives

def const(*shape, low=-2.0, high=2.0, dtype=torch.float64):
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return (values if dtype.is_floating_point else values.floor()).to(dtype)


def var(*shape, low=-2.0, high=2.0):
    return const(*shape, low=low, high=high).requires_grad_()


def whole(*shape, low=0, high=5, dtype=torch.int64):
    return const(*shape, low=low, high=high, dtype=dtype)


def mask(*shape):
    return const(*shape) > 0


def values(*v, dtype=torch.float64):
    return torch.tensor(v, dtype=dtype)


# ---- samples

def text(v):
    if isinstance(v, bool):
        return str(int(v))
    if isinstance(v, (list, tuple)):
        return ",".join(map(text, v))
    return str(v)


def keep(name, t):
    tensors[name] = t.detach().clone().contiguous()


def sample(op, f, *inputs, once=False, derivatives=True, **attributes):
    """f(*inputs); attributes are what the C++ side calls them. once: PyTorch has no second derivative."""
    name = f"{op}/{counts.setdefault(op, 0)}"
    counts[op] += 1
    out = f(*inputs)
    out = list(out) if isinstance(out, (list, tuple)) else [out]
    metadata[name] = " ".join(f"{k}={text(v)}" for k, v in attributes.items())
    for i, x in enumerate(inputs):
        if x is not None:
            keep(f"{name}/in{i}", x)
    for k, y in enumerate(out):
        keep(f"{name}/out{k}", y)
    at = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    smooth = [(k, y) for k, y in enumerate(out) if y.requires_grad]
    if not at or not smooth or not derivatives:
        return
    cotangent = lambda k, y: torch.sin(1 + 2.3 * torch.arange(y.numel(), dtype=y.dtype) + k).reshape(y.shape)
    total = sum((y * cotangent(k, y)).sum() for k, y in smooth)
    first = torch.autograd.grad(total, [inputs[i] for i in at], create_graph=not once, allow_unused=True)
    for i, g in zip(at, first):
        if g is not None:
            keep(f"{name}/grad{i}", g)
    squares = sum((g * g).sum() for g in first if g is not None)
    if once or not squares.requires_grad:
        return
    for i, h in zip(at, torch.autograd.grad(squares, [inputs[i] for i in at], allow_unused=True)):
        if h is not None:
            keep(f"{name}/second{i}", h)


def if_supported(op, f, *inputs, **attributes):
    """A sample of a dtype that PyTorch's operator may lack on the CPU."""
    try:
        f(*inputs)
    except (RuntimeError, TypeError, IndexError):
        return
    sample(op, f, *inputs, **attributes)


SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-20, -1e-20, 30.0, -30.0, 700.0]


# ---- elementwise

def unary():
    sqrt2 = math.sqrt(2)
    positive = {"sqrt", "rsqrt", "log", "log2"}
    plain = dict(neg=torch.neg, abs=torch.abs, sign=torch.sign, square=torch.square, sqrt=torch.sqrt, rsqrt=torch.rsqrt,
                 reciprocal=torch.reciprocal, exp=torch.exp, expm1=torch.expm1, log=torch.log, log1p=torch.log1p, log2=torch.log2,
                 sin=torch.sin, cos=torch.cos, erf=torch.erf, floor=torch.floor, ceil=torch.ceil, round=torch.round,
                 isnan=torch.isnan, isinf=torch.isinf, isfinite=torch.isfinite, logical_not=torch.logical_not, tanh=torch.tanh,
                 sigmoid=torch.sigmoid, relu=torch.relu, step=lambda x: torch.heaviside(x, torch.zeros((), dtype=x.dtype)),
                 gelu=F.gelu, gelu_tanh=lambda x: F.gelu(x, approximate="tanh"), normal_cdf=lambda x: torch.erfc(-x / sqrt2) / 2,
                 silu=F.silu, mish=F.mish, hardswish=F.hardswish,
                 hardsigmoid=lambda x: (x + 3).clamp(0, 6) / 6)  # PyTorch's own has no second derivative
    entries = [(name, f, {}) for name, f in plain.items()]
    entries += [("pow", lambda x, e=e: torch.pow(x, e), dict(exponent=e)) for e in (2.5, 3.0, -1.0)]
    entries += [("leaky_relu", lambda x, s=s: F.leaky_relu(x, s), dict(negative_slope=s)) for s in (0.01, 0.3)]
    entries += [("elu", lambda x, a=a: F.elu(x, a), dict(alpha=a)) for a in (1.0, 0.4)]
    entries += [("softplus", lambda x, b=b, t=t: F.softplus(x, b, t), dict(beta=b, threshold=t)) for b, t in ((1.0, 20.0), (2.0, 1.5))]
    for name, f, attributes in entries:
        low, high = (0.1, 4) if name in positive or name == "pow" else (-0.9, 3) if name == "log1p" else (0.3, 3) if name == "reciprocal" else (-4, 4)
        for shape, stretch in (((), 1), ((7,), 1), ((3, 5), 0.01), ((2, 3, 4), 4), ((2, 1, 3, 2), 1)):
            if (name == "log1p" and stretch > 1) or not attributes and name in ("exp", "expm1") and stretch > 1:
                stretch = 1
            sample(name, f, var(*shape, low=low * stretch, high=high * stretch), derivatives=name != "step", **attributes)
        for dtype in (torch.float64, torch.float32):
            if_supported(name, f, values(*SPECIAL, dtype=dtype), **attributes)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if_supported(name, f, const(17, low=low, high=high, dtype=dtype), **attributes)
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
            if_supported(name, f, whole(6, low=0 if name in positive or dtype in (torch.uint8, torch.bool) else -3, dtype=dtype), **attributes)


def binary():
    smooth = dict(add=torch.add, sub=torch.sub, mul=torch.mul, div=torch.div, maximum=torch.maximum, minimum=torch.minimum,
                  pow_tensor=torch.pow, atan2=torch.atan2, fmod=torch.fmod)
    compare = dict(eq=torch.eq, ne=torch.ne, lt=torch.lt, le=torch.le, gt=torch.gt, ge=torch.ge, logical_and=torch.logical_and,
                   logical_or=torch.logical_or, logical_xor=torch.logical_xor)
    shapes = (((7,), (7,)), ((3, 5), (5,)), ((2, 1, 4), (3, 1)), ((), (3,)), ((4,), ()), ((2, 3), (2, 3)), ((1, 4), (3, 4)))
    for name, f in (smooth | compare).items():
        low, high = (0.2, 3) if name in ("pow_tensor", "div", "fmod") else (-2, 2)
        for a, b in shapes:
            if name in smooth:
                sample(name, f, var(*a, low=low, high=high), var(*b, low=low, high=high))
            else:
                sample(name, f, whole(*a, high=3).double(), whole(*b, high=3).double())
        pairs = list(itertools.product(SPECIAL[:9], repeat=2))
        for dtype in (torch.float64, torch.float32):
            sample(name, f, values(*(a for a, _ in pairs), dtype=dtype), values(*(b for _, b in pairs), dtype=dtype))
        if name in ("maximum", "minimum", "atan2") or name.startswith("logical"):
            continue
        for number in (2, 0.5, -1.5):  # beside a tensor, on either side
            if name in smooth:
                sample(name, lambda x: f(x, number), var(5, low=low, high=high), b=number)
            if name in ("add", "sub", "mul", "div") or name == "pow_tensor" and number > 0:
                sample(name, lambda x: f(number, x) if name == "pow_tensor" else {"add": lambda: number + x, "sub": lambda: number - x,
                       "mul": lambda: number * x, "div": lambda: number / x}[name](), var(5, low=0.3, high=3), a=number)
            for dtype in DTYPES:
                if_supported(name, lambda x: f(x, number), whole(5, low=1, high=4, dtype=dtype) if dtype != torch.bool else mask(5), b=number)
    for a, b in itertools.product(DTYPES, repeat=2):  # promotion
        make = lambda dtype, *shape: const(*shape, low=1, high=4, dtype=dtype) if dtype != torch.bool else mask(*shape)
        for op, f in (("add", torch.add), ("mul", torch.mul), ("div", torch.div), ("maximum", torch.maximum), ("fmod", torch.fmod), ("lt", torch.lt)):
            if_supported(op, f, make(a, 3), make(b, 3))
        for op, f in (("add", torch.add), ("sub", torch.sub)):
            if_supported(op, f, make(a, 3), make(b))
        if_supported("minimum", torch.minimum, make(a), make(b))
        sample("cast", lambda x: x.to(b), values(0, 1, 2, 3, 100, 255, dtype=torch.float64).to(a), dtype=NAMES[b])
    for dtype in DTYPES:
        sample("relu_grad", lambda y, g: torch.ops.aten.threshold_backward(g, y, 0), const(3, 4, dtype=dtype), const(3, 4, dtype=dtype)) if dtype in (
            torch.float64, torch.float32, torch.bfloat16) else None
    edges = [0.1, 1 / 3, 65504, 65519.9, 65520, 1e5, 6e-8, 2.9e-8, 1e-40, 3.3895e38, 1e39, -2.5, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-11, INF, -INF, NAN]
    for b in (torch.float32, torch.float16, torch.bfloat16):
        for a in (torch.float64, torch.float32):
            sample("cast", lambda x: x.to(b), values(*edges, dtype=torch.float64).to(a), dtype=NAMES[b])
    for shape in ((), (5,), (2, 3)):
        sample("cast", lambda x: x.to(torch.float64), var(*shape), dtype="F64")


def ternary():
    for shapes in (((6,), (6,), (6,)), ((2, 3), (3,), (2, 1)), ((4,), (), (4,)), ((1, 3), (2, 3), (3,)), ((2, 1, 2), (3, 1), (2,))):
        abc = lambda low=-2.0, high=2.0: [var(*s, low=low, high=high) for s in shapes]
        sample("lerp", torch.lerp, *abc())
        for v in (1.0, -0.7):
            sample("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=v), *abc(), value=v)
            sample("addcdiv", lambda x, a, b: torch.addcdiv(x, a, b, value=v), *abc(0.5, 3), value=v)
        a, b, c = shapes
        sample("clamp", lambda x, low, high: torch.minimum(torch.maximum(x, low), high), var(*a, low=-3, high=3), var(*b, low=-2, high=0), var(*c, low=0.5, high=2))
        sample("where", torch.where, mask(*a), var(*b), var(*c))
        sample("masked_fill", lambda x, m: x.masked_fill(m, 1.5), var(*torch.broadcast_shapes(*shapes)), mask(*b), value=1.5)
        sample("masked_fill", lambda x, m, v: x.masked_fill(m, v), var(*torch.broadcast_shapes(*shapes)), mask(*c), var())
    for w in (0.0, 0.25, 0.75, 1.0):
        sample("lerp", lambda a, b: torch.lerp(a, b, w), var(3, 4), var(4), weight=w)
    for low, high in ((-1.0, 1.0), (0.5, 0.25), (-0.1, 3.0)):
        sample("clamp", lambda x: torch.clamp(x, low, high), var(4, 5), low=low, high=high)
        sample("clamp", lambda x: torch.clamp(x, low, high), values(*SPECIAL), low=low, high=high)
        sample("clamp", lambda x: torch.clamp(x, low, high), const(9, dtype=torch.float32), low=low, high=high)
        sample("clamp", lambda x: torch.clamp(x, low, high), const(9, dtype=torch.bfloat16), low=low, high=high)
    sample("clamp", lambda x: torch.clamp(x, 1, 3), whole(9), low=1, high=3)
    for a, b in itertools.product(DTYPES, repeat=2):
        sample("where", torch.where, mask(4), const(4, low=0, dtype=a), const(4, low=0, dtype=b))
    for dtype in DTYPES:
        sample("masked_fill", lambda x, m: x.masked_fill(m, 1), const(2, 5, low=0, dtype=dtype), mask(5), value=1)
        if_supported("addcmul", torch.addcmul, *(const(5, low=1, high=3, dtype=dtype) for _ in range(3)), value=1.0)
        if_supported("addcdiv", torch.addcdiv, *(const(5, low=1, high=3, dtype=dtype) for _ in range(3)), value=1.0)
        if_supported("lerp", torch.lerp, *(const(5, low=0, high=2, dtype=dtype) for _ in range(3)))


def in_place():
    for shapes in (((5,), (5,)), ((2, 3), (3,)), ((2, 3, 2), (3, 1)), ((3,), ())):
        for alpha in (1.0, -0.5):
            sample("add_", lambda x, y: x.clone().add_(y, alpha=alpha), *(const(*s) for s in shapes), alpha=alpha)
        sample("mul_", lambda x, y: x.clone().mul_(y), *(const(*s) for s in shapes))
        sample("copy_", lambda x, y: x.clone().copy_(y), *(const(*s) for s in shapes))
        sample("lerp_", lambda x, y: x.clone().lerp_(y, 0.3), *(const(*s) for s in shapes), weight=0.3)
        sample("fill_", lambda x: x.clone().fill_(0.7), const(*shapes[0]), value=0.7)
    for a, b in itertools.product(DTYPES, repeat=2):
        sample("copy_", lambda x, y: x.clone().copy_(y), const(3, low=0, dtype=a), const(3, low=0, dtype=b))
    for count in (1, 3):
        many = [const(*s) for s in ((4,), (2, 3), ())[:count]]
        sample("total_norm", lambda *x: torch.stack([t.norm() for t in x]).norm(), *many)
        sample("clamp_all_", lambda *x: [t.clamp(-0.5, 0.5) for t in x], *many, limit=0.5)
        sample("scale_all_", lambda *x: [t * 0.25 for t in x], *many, factor=0.25)


# ---- reductions, scans, order

def over(x, dims):
    return tuple(range(x.dim())) if dims is None else dims


def product(x, dims, keepdim):
    if dims is None:
        return x.prod()
    for d in sorted((d % x.dim() for d in dims), reverse=True):
        x = x.prod(d, keepdim=keepdim)
    return x


def every(x, dims, keepdim, f):
    for d in sorted((d % x.dim() for d in over(x, dims)), reverse=True):
        x = f(x, d, keepdim=keepdim)
    return x if x.dtype == torch.uint8 or x.dtype == torch.bool else x.bool()


def reductions():
    spread = (((), None, False), ((7,), None, False), ((3, 5), (0,), False), ((3, 5), (1,), True), ((2, 3, 4), (0, 2), False), ((2, 3, 4), (-2,), True),
              ((2, 3, 4), None, False), ((2, 3, 2, 2), (1, 2, 3), False), ((33,), (0,), False), ((1, 6), (1,), False))
    entries = dict(
        sum=lambda x, d, k: x.sum(over(x, d), keepdim=k), mean=lambda x, d, k: x.mean(over(x, d), keepdim=k), prod=product,
        logsumexp=lambda x, d, k: x.logsumexp(over(x, d), keepdim=k), amax=lambda x, d, k: x.amax(over(x, d), keepdim=k),
        amin=lambda x, d, k: x.amin(over(x, d), keepdim=k), all=lambda x, d, k: every(x, d, k, torch.all), any=lambda x, d, k: every(x, d, k, torch.any),
        count_nonzero=lambda x, d, k: torch.count_nonzero(x, over(x, d)) if not k else torch.count_nonzero(x, over(x, d)).unsqueeze(d[0]))
    for name, f in entries.items():
        for shape, dims, keepdim in spread:
            attributes = (dict(dims=dims) if dims is not None else {}) | (dict(keepdim=1) if keepdim else {})
            of = lambda x: f(x, dims, keepdim)
            if name in ("all", "any", "count_nonzero"):
                sample(name, of, whole(*shape, high=2).double(), **attributes)
                continue
            sample(name, of, var(*shape, low=0.5, high=1.8) if name == "prod" else var(*shape), **attributes)
        row = values(*([1.0, 2.0, 3.0], [NAN, 0.0, 1.0], [INF, 1.0, 2.0], [-INF, 0.0, 1.0], [INF, -INF, 0.0], [-INF] * 3, [0.0, -0.0, 0.0]))
        sample(name, lambda x: f(x, (1,), False), row, dims=(1,))
        for dtype in DTYPES:
            if_supported(name, lambda x: f(x, (1,), False), const(3, 4, low=0, high=2, dtype=dtype), dims=(1,))
            if_supported(name, lambda x: f(x, None, False), const(9, low=0, high=2, dtype=dtype))
    for name in ("amax", "amin"):  # ties share the gradient
        sample(name, lambda x: getattr(x, name)(1), whole(4, 6, high=3).double().requires_grad_(), dims=(1,))
    for shape, dims, keepdim in spread:
        if shape == ():
            continue
        attributes = (dict(dims=dims) if dims is not None else {}) | (dict(keepdim=1) if keepdim else {})
        for correction in (0, 1):
            kw = dict(unbiased=bool(correction), keepdim=keepdim)
            sample("var", lambda x: torch.var(x, over(x, dims), **kw), var(*shape), correction=correction, **attributes)
            sample("stddev", lambda x: torch.std(x, over(x, dims), **kw), var(*shape), correction=correction, **attributes)
        for p in (2.0, 1.0, 3.0, 0.5, INF, -INF, 0.0):
            sample("norm", lambda x: torch.linalg.vector_norm(x, p, over(x, dims), keepdim), var(*shape), p=p, derivatives=p not in (0.0, 0.5), **attributes)
        if dims is None:
            sample("argmax", torch.argmax, const(*shape))
            sample("argmin", torch.argmin, const(*shape))
        elif len(dims) == 1:
            sample("argmax", lambda x: x.argmax(dims[0], keepdim), const(*shape), dim=dims[0], **(dict(keepdim=1) if keepdim else {}))
            sample("argmin", lambda x: x.argmin(dims[0], keepdim), const(*shape), dim=dims[0], **(dict(keepdim=1) if keepdim else {}))
            for name in ("max", "min"):
                sample(name, lambda x: getattr(torch, name)(x, dims[0], keepdim), var(*shape), dim=dims[0], **(dict(keepdim=1) if keepdim else {}))
    for dtype in DTYPES:
        for name in ("argmax", "argmin"):
            if_supported(name, lambda x: getattr(torch, name)(x, 1), torch.stack([torch.randperm(5, generator=generator) for _ in range(3)]).to(dtype), dim=1)
        for name in ("max", "min"):
            if_supported(name, lambda x: getattr(torch, name)(x, 0), torch.stack([torch.randperm(5, generator=generator) for _ in range(5)]).T.to(dtype), dim=0)
        for name in ("var", "stddev"):
            if_supported(name, lambda x: getattr(torch, name[:3])(x, 1), const(3, 4, dtype=dtype), dims=(1,), correction=1)
        if_supported("norm", lambda x: torch.linalg.vector_norm(x, 2.0, 1), const(3, 4, dtype=dtype), dims=(1,), p=2.0)


def scans_and_order():
    for shape, dim in (((7,), 0), ((3, 5), 0), ((3, 5), 1), ((2, 3, 4), 1), ((2, 3, 4), -1), ((1, 4), 0), ((33,), -1), ((4, 2, 2), 0)):
        for name in ("cumsum", "cumprod"):
            f = getattr(torch, name)
            sample(name, lambda x: f(x, dim), var(*shape, low=0.5, high=1.5), dim=dim)
            sample(name, lambda x: f(x.flip(dim), dim).flip(dim), var(*shape, low=0.5, high=1.5), dim=dim, reverse=1)
        for descending in (False, True):
            sample("sort", lambda x: torch.sort(x, dim=dim, descending=descending, stable=True), var(*shape), dim=dim, descending=descending)
            k = max(1, shape[dim] // 2)
            sample("topk", lambda x: torch.topk(x, k, dim, largest=descending), var(*shape), dim=dim, k=k, largest=descending)
    for descending in (False, True):  # equal elements keep their order; NaN is the largest
        sample("sort", lambda x: torch.sort(x, dim=1, descending=descending, stable=True), whole(4, 9, high=4).double(), dim=1, descending=descending)
        sample("sort", lambda x: torch.sort(x, dim=0, descending=descending, stable=True), values(1, NAN, INF, -INF, 0, 2, NAN), dim=0, descending=descending)
    zeros = const(3, 4)
    zeros[0, 1] = zeros[1, 0] = zeros[1, 2] = 0
    for dim in (0, 1):
        sample("cumprod", lambda x: torch.cumprod(x, dim), zeros.clone().requires_grad_(), dim=dim)
        sample("prod", lambda x: torch.prod(x, dim), zeros.clone().requires_grad_(), dims=(dim,))
    for dtype in DTYPES:
        for name in ("cumsum", "cumprod"):
            if_supported(name, lambda x: getattr(torch, name)(x, 1), const(3, 5, low=0, high=2, dtype=dtype), dim=1)
        if_supported("sort", lambda x: torch.sort(x, dim=1, stable=True), const(3, 6, low=0, high=9, dtype=dtype), dim=1)


# ---- shape

def shapes():
    for shape, to in (((3,), (2, 3)), ((2, 1), (2, 4)), ((1, 3, 1), (2, 3, 5)), ((), (2, 2)), ((2, 3), (2, 3)), ((1,), (1, 1, 4))):
        sample("expand", lambda x: x.expand(to), var(*shape), shape=to)
        sample("sum_to", lambda x: x.sum_to_size(shape) if shape else x.sum(), var(*to), shape=shape)
    for shape, order in (((2, 3), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4), (0, 2, 1)), ((5,), (0,)), ((2, 1, 3, 2), (3, 1, 0, 2)), ((2, 2, 3), (-1, 0, 1))):
        sample("permute", lambda x: x.permute(order), var(*shape), order=order)
    for shape, a, b in (((2, 3), 0, 1), ((2, 3, 4), -1, 0), ((2, 3, 4), 1, 2), ((4, 1), 1, 0), ((2, 3, 2, 2), 0, 3), ((3,), 0, 0)):
        sample("transpose", lambda x: x.transpose(a, b), var(*shape), a=a, b=b)
        sample("movedim", lambda x: x.movedim(a, b), var(*shape), a=a, b=b)
    for shape, dim, begin, end, step in (((7,), 0, 1, 6, 2), ((3, 5), 1, 0, 5, 3), ((3, 5), 0, 1, 2, 1), ((2, 3, 4), -1, 1, 4, 2), ((2, 3, 4), 1, -2, 3, 1), ((9,), 0, 0, 9, 4)):
        n = shape[dim]
        index = (slice(None),) * (dim % len(shape)) + (slice(begin, end, step),)
        sample("slice", lambda x: x[index], var(*shape), dim=dim, begin=begin, end=end, step=step)
        part = torch.zeros(shape)[index].shape
        sample("slice_scatter", lambda x: torch.zeros(shape, dtype=x.dtype).slice_scatter(x, dim, begin % n, end, step), var(*part), shape=shape, dim=dim,
               begin=begin % n, step=step)
        sample("narrow", lambda x: x.narrow(dim, begin % n, 2 if n - begin % n >= 2 else 1), var(*shape), dim=dim, begin=begin % n, length=2 if n - begin % n >= 2 else 1)
        sample("select", lambda x: x.select(dim, begin), var(*shape), dim=dim, index=begin)
        sample("split", lambda x: x.split(2, dim), var(*shape), size=2, dim=dim)
        sample("split", lambda x: x.split([1, n - 1], dim), var(*shape), sizes=[1, n - 1], dim=dim)
        sample("chunk", lambda x: x.chunk(2, dim), var(*shape), n=2, dim=dim)
        sample("unsqueeze", lambda x: x.unsqueeze(dim), var(*shape), dim=dim)
        sample("squeeze", lambda x: x.squeeze(dim), var(*(1 if d == dim % len(shape) else s for d, s in enumerate(shape))), dim=dim)
        for count in (1, 2, 3):
            sample("cat", lambda *x: torch.cat(x, dim), *(var(*(s + k if d == dim % len(shape) else s for d, s in enumerate(shape))) for k in range(count)), dim=dim)
            sample("stack", lambda *x: torch.stack(x, dim), *(var(*shape) for _ in range(count)), dim=dim)
    for shape, dim in (((3, 0, 1), 2), ((0, 2), 0), ((2, 0), 0)):
        sample("cat", lambda *x: torch.cat(x, dim), const(*shape), const(*shape), dim=dim)
        sample("stack", lambda *x: torch.stack(x, dim), const(*shape), const(*shape), dim=dim)
    for shape, offset, a, b in (((3, 4), 0, 0, 1), ((3, 4), 1, 0, 1), ((4, 3), -2, 0, 1), ((2, 3, 3), 0, 1, 2), ((2, 3, 4), 1, 2, 0), ((2, 3, 4), -1, -1, -2)):
        sample("diagonal", lambda x: x.diagonal(offset, a, b), var(*shape), offset=offset, dim1=a, dim2=b)
        part = torch.zeros(shape).diagonal(offset, a, b).shape
        sample("diagonal_scatter", lambda x: torch.diagonal_scatter(torch.zeros(shape, dtype=x.dtype), x, offset, a, b), var(*part), shape=shape, offset=offset, dim1=a, dim2=b)
    for shape, to in (((6,), (2, 3)), ((2, 3), (6,)), ((2, 3, 4), (4, -1)), ((), (1, 1)), ((4, 1), (2, 2)), ((2, 6), (3, 2, 2))):
        sample("reshape", lambda x: x.reshape(to), var(*shape), shape=to)
        sample("view", lambda x: x.view(to), var(*shape), shape=to)
        sample("flatten", lambda x: x.flatten(), var(*shape))
    for first, last in ((0, 1), (1, 2), (-2, -1), (0, -1)):
        sample("flatten", lambda x: x.flatten(first, last), var(2, 3, 4), first=first, last=last)
    for dtype in DTYPES:
        sample("permute", lambda x: x.permute(1, 0), const(2, 3, low=0, dtype=dtype), order=(1, 0))
        sample("slice", lambda x: x[:, 1:], const(2, 3, low=0, dtype=dtype), dim=1, begin=1, end=3, step=1)
        sample("stack", lambda *x: torch.stack(x), const(3, low=0, dtype=dtype), const(3, low=0, dtype=dtype), dim=0)
        sample("cat", lambda *x: torch.cat(x), const(3, low=0, dtype=dtype), const(2, low=0, dtype=dtype), dim=0)
        sample("diagonal", lambda x: x.diagonal(), const(3, 3, low=0, dtype=dtype), offset=0, dim1=0, dim2=1)


def rearrangements():
    for shape, pads in (((2, 3, 5), (1, 2)), ((1, 2, 4, 5), (1, 0, 2, 1)), ((2, 2, 4), (3, 3)), ((1, 1, 3, 3), (2, 2, 2, 2)), ((1, 2, 3, 4), (0, 3, 0, 0)), ((1, 1, 5, 6), (-1, 2, 1, -2)),
                        ((1, 1, 2, 3, 3), (1, 1, 0, 2, 1, 1)), ((3, 1, 7), (6, 0))):
        for mode in ("constant", "reflect", "replicate"):
            if mode == "constant":
                sample("pad", lambda x: F.pad(x, pads, value=0.5), var(*shape), pads=pads, mode=mode, value=0.5)
            else:
                sample("pad", lambda x: F.pad(x, pads, mode=mode), var(*shape), pads=pads, mode=mode)
    for shape, pads in (((4,), (1, 2)), ((2, 3), (0, 1, 1, 0)), ((2, 3), (-1, 0)), ((2, 3, 2), (1, 1, 0, 0, 2, 1))):
        sample("pad", lambda x: F.pad(x, pads), var(*shape), pads=pads, mode="constant", value=0)
    for shape, dims in (((5,), (0,)), ((2, 3), (0, 1)), ((2, 3), (-1,)), ((2, 3, 4), (0, 2)), ((2, 3, 4), (1,)), ((1, 4), (0,))):
        sample("flip", lambda x: x.flip(dims), var(*shape), dims=dims)
        for shift in (1, -2, 7):
            shifts = tuple(shift + d for d in range(len(dims)))
            sample("roll", lambda x: x.roll(shifts, dims), var(*shape), dims=dims, shifts=shifts)
    for shape, repeats in (((3,), (2,)), ((2, 3), (2, 2)), ((2,), (3, 2)), ((), (4,)), ((2, 1, 2), (1, 3, 2)), ((1, 2), (2, 1, 1))):
        sample("repeat", lambda x: x.repeat(repeats), var(*shape), repeats=repeats)
    for shape, diagonal in (((3, 3), 0), ((3, 4), 1), ((4, 3), -1), ((2, 3, 3), 0), ((2, 2, 3, 2), 1), ((1, 5), 2), ((5, 1), -3)):
        sample("tril", lambda x: x.tril(diagonal), var(*shape), diagonal=diagonal)
        sample("triu", lambda x: x.triu(diagonal), var(*shape), diagonal=diagonal)
    for dtype in DTYPES:
        if_supported("flip", lambda x: x.flip(1), const(2, 3, low=0, dtype=dtype), dims=(1,))
        if_supported("roll", lambda x: x.roll(1, 1), const(2, 3, low=0, dtype=dtype), dims=(1,), shifts=(1,))
        if_supported("repeat", lambda x: x.repeat(2, 1), const(2, 3, low=0, dtype=dtype), repeats=(2, 1))
        if_supported("tril", torch.tril, const(3, 3, low=0, dtype=dtype), diagonal=0)
        if_supported("triu", torch.triu, const(3, 3, low=0, dtype=dtype), diagonal=0)
        if_supported("pad", lambda x: F.pad(x, (1, 1), value=1), const(2, 3, low=0, dtype=dtype), pads=(1, 1), mode="constant", value=1)


# ---- products, convolutions, pools

def products():
    for a, b in (((3, 4), (4, 5)), ((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 3)), ((2, 3, 4), (4, 2)), ((2, 3, 4), (2, 4, 2)), ((3, 2, 3, 2), (2, 2, 4)), ((2, 1, 2, 3), (3, 3, 2)),
                 ((1, 1), (1, 1)), ((7, 17), (17, 3)), ((5,), (2, 5, 3))):
        sample("matmul", torch.matmul, var(*a), var(*b))
    for n, m, k, o in ((1, 1, 1, 1), (2, 3, 4, 5), (3, 2, 7, 1), (1, 5, 2, 6)):
        sample("bmm", torch.bmm, var(n, m, k), var(n, k, o))
        for beta, alpha in ((1.0, 1.0), (0.5, -2.0), (0.0, 1.5)):
            # With beta 0, PyTorch's baddbmm multiplies whatever the fresh memory held by 0.
            f = lambda c, a, b: torch.baddbmm(c, a, b, beta=beta, alpha=alpha) if beta else alpha * torch.bmm(a, b)
            sample("baddbmm", f, var(n, m, o), var(n, m, k), var(n, k, o), beta=beta, alpha=alpha)
            sample("baddbmm", f, var(o), var(n, m, k), var(n, k, o), beta=beta, alpha=alpha)
            f = lambda c, a, b: torch.addmm(c, a, b, beta=beta, alpha=alpha)
            sample("addmm", f, var(m, o), var(m, k), var(k, o), beta=beta, alpha=alpha)
            sample("addmm", f, var(m, 1), var(m, k), var(k, o), beta=beta, alpha=alpha)
        sample("dot", torch.dot, var(m * k), var(m * k))
        sample("outer", torch.outer, var(m), var(k))
        for lead in ((), (n,), (2, n)):
            x, w, b = var(*lead, k), var(o, k), var(o)
            sample("linear", F.linear, x, w, b)
            sample("linear", F.linear, var(*lead, k), var(o, k), None)
            sample("linear_relu", lambda x, w, b: F.relu(F.linear(x, w, b)), var(*lead, k), var(o, k), var(o))
            sample("linear_gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), var(*lead, k), var(o, k), var(o))
    for equation, *operands in (("ij,jk->ik", (2, 3), (3, 4)), ("bij,bjk->bik", (2, 3, 2), (2, 2, 3)), ("ij->ji", (2, 3)), ("ij->", (2, 3)), ("ii->i", (3, 3)), ("ii", (3, 3)),
                                ("i,j->ij", (2,), (3,)), ("ij,j", (2, 3), (3,)), ("bhqd,bhkd->bhqk", (1, 2, 3, 2), (1, 2, 2, 2)), ("...ij,...jk->...ik", (2, 1, 2, 3), (2, 3, 2)),
                                ("ij,jk,kl->il", (2, 3), (3, 2), (2, 4)), ("ijk,ilm,njm,nlk,abc->", (2, 2, 2), (2, 1, 2), (2, 2, 2), (2, 1, 2), (1, 2, 1)), ("a...,b...->ab...", (2, 3), (2, 3)),
                                ("ij,ij->ij", (2, 3), (2, 3)), ("ba,ca->bc", (2, 4), (3, 4)), ("ijj->i", (2, 3, 3))):
        sample("einsum", lambda *x: torch.einsum(equation, *x), *(var(*s) for s in operands), equation=equation)
    for dtype in (torch.float32, torch.bfloat16):
        sample("matmul", torch.matmul, const(5, 9, dtype=dtype), const(9, 4, dtype=dtype))
        sample("linear", F.linear, const(5, 9, dtype=dtype), const(4, 9, dtype=dtype), const(4, dtype=dtype))
        sample("bmm", torch.bmm, const(2, 5, 9, dtype=dtype), const(2, 9, 4, dtype=dtype))


CONVOLUTIONS = [  # size of x, kernel, channels in and out, then options
    ((5,), (3,), 2, 3, {}), ((7,), (3,), 2, 4, dict(stride=(2,), padding=(1,))), ((6,), (2,), 4, 4, dict(groups=4, dilation=(2,))), ((4,), (1,), 3, 2, {}),
    ((4, 5), (3, 3), 2, 3, {}), ((5, 4), (3, 2), 2, 2, dict(stride=(2, 1), padding=(1, 1))), ((5, 6), (2, 3), 4, 2, dict(groups=2, padding=(0, 1))), ((6, 5), (2, 2), 2, 3, dict(dilation=(2, 3))),
    ((4, 4), (3, 3), 3, 3, dict(groups=3, padding=(1, 1))), ((3, 3), (1, 1), 3, 4, {}), ((5, 5), (3, 3), 1, 2, dict(stride=(2, 2), padding=(2, 2), dilation=(2, 2))),
    ((3, 3, 3), (2, 2, 2), 2, 2, {}), ((3, 4, 3), (2, 3, 1), 2, 2, dict(stride=(1, 2, 1), padding=(1, 1, 0))), ((3, 3, 4), (1, 2, 2), 2, 4, dict(groups=2, dilation=(1, 1, 2))),
]


def convolutions():
    for size, kernel, c, o, options in CONVOLUTIONS:
        d = len(size)
        groups = options.get("groups", 1)
        f = getattr(F, f"conv{d}d")
        for bias in (True, False):
            sample(f"conv{d}d", lambda x, w, b: f(x, w, b, **options), var(2, c, *size), var(o, c // groups, *kernel), var(o) if bias else None, **options)
        if options.get("stride", (1,) * d) == (1,) * d:
            same = {k: v for k, v in options.items() if k != "padding"}
            sample(f"conv{d}d", lambda x, w, b: f(x, w, b, padding="same", **same), var(1, c, *size), var(o, c // groups, *kernel), var(o), **(same | dict(padding="same")))
        if d == 2:
            sample("conv2d_relu", lambda x, w, b: F.relu(f(x, w, b, **options)), var(2, c, *size), var(o, c // groups, *kernel), var(o), **options)
            out = f(torch.zeros(2, c, *size), torch.zeros(o, c // groups, *kernel), **options).shape
            sample("conv2d_input", lambda g, w: torch.nn.grad.conv2d_input((2, c, *size), w, g, **options), var(*out), var(o, c // groups, *kernel), size=size, **options)
            sample("conv2d_weight", lambda x, g: torch.nn.grad.conv2d_weight(x, (o, c // groups, *kernel), g, **options), var(2, c, *size), var(*out), kernel=kernel, **options)
            spaced = {k: v for k, v in options.items() if k != "groups"}
            sample("unfold", lambda x: F.unfold(x, kernel, **spaced), var(2, c, *size), kernel=kernel, **spaced)
            columns = F.unfold(torch.zeros(1, c, *size), kernel, **spaced).shape
            sample("fold", lambda x: F.fold(x, size, kernel, **spaced), var(2, *columns[1:]), size=size, kernel=kernel, **spaced)
        if d < 3:
            g = getattr(F, f"conv_transpose{d}d")
            for more in (False, True):
                extra = dict(output_padding=tuple(s - 1 for s in options["stride"])) if more and "stride" in options else {}
                if more and not extra:
                    continue
                for bias in (True, False):
                    sample(f"conv_transpose{d}d", lambda x, w, b: g(x, w, b, **(options | extra)), var(2, c, *size), var(c, o // groups if o % groups == 0 else o, *kernel),
                           var(o) if bias else None, **(options | extra))
    f32 = torch.float32  # not bf16: PyTorch's own is up to dozens of roundings off on the CPU
    sample("conv2d", lambda x, w, b: F.conv2d(x, w, b), const(1, 2, 5, 5, dtype=f32), const(3, 2, 3, 3, dtype=f32), const(3, dtype=f32))


POOLS = [  # size, kernel, options
    ((6,), (2,), {}), ((7,), (3,), dict(stride=(2,), padding=(1,))), ((8,), (3,), dict(stride=(2,), ceil_mode=True)), ((9,), (2,), dict(stride=(3,))),
    ((4, 6), (2, 2), {}), ((5, 5), (3, 2), dict(stride=(2, 1), padding=(1, 1))), ((5, 6), (2, 3), dict(stride=(2, 2), ceil_mode=True)), ((4, 4), (3, 3), dict(stride=(1, 1), padding=(1, 1))),
    ((7, 5), (3, 3), dict(stride=(3, 2), padding=(1, 0), ceil_mode=True)), ((1, 1), (1, 1), {}),
]


def pools():
    for size, kernel, options in POOLS:
        d = len(size)
        most, mean = getattr(F, f"max_pool{d}d"), getattr(F, f"avg_pool{d}d")
        for n, c in ((1, 1), (2, 3)):
            sample(f"max_pool{d}d", lambda x: most(x, kernel, **options), var(n, c, *size), kernel=kernel, **options)
            for include in (True, False):
                sample(f"avg_pool{d}d", lambda x: mean(x, kernel, **options, count_include_pad=include), var(n, c, *size), kernel=kernel, count_include_pad=include, **options)
        if min(size) > 4:
            sample(f"max_pool{d}d", lambda x: most(x, kernel, **options, dilation=2) if not options.get("ceil_mode") else most(x, kernel, **options), var(2, 2, *size), kernel=kernel,
                   **(options | ({} if options.get("ceil_mode") else dict(dilation=(2,) * d))))
    for size, to in (((6,), (3,)), ((7,), (3,)), ((5,), (1,)), ((3,), (5,)), ((6, 4), (3, 2)), ((5, 7), (3, 4)), ((4, 4), (1, 1)), ((3, 2), (4, 5)), ((5, 3), (5, 1))):
        d = len(size)
        for n, c in ((1, 1), (2, 2)):
            sample(f"adaptive_avg_pool{d}d", lambda x: getattr(F, f"adaptive_avg_pool{d}d")(x, to), var(n, c, *size), size=to)
            sample(f"adaptive_max_pool{d}d", lambda x: getattr(F, f"adaptive_max_pool{d}d")(x, to), var(n, c, *size), size=to)
    for size, to in (((3, 3), (6, 6)), ((4, 5), (2, 3)), ((2, 3), (5, 4)), ((1, 1), (3, 2)), ((5, 4), (5, 8)), ((3, 4), (1, 1)), ((7, 2), (3, 5))):
        for n, c in ((1, 1), (2, 3)):
            sample("resize", lambda x: F.interpolate(x, to), var(n, c, *size), size=to, mode="nearest")
            for corners in (False, True):
                sample("resize", lambda x: F.interpolate(x, to, mode="bilinear", align_corners=corners), var(n, c, *size), size=to, mode="bilinear", align_corners=corners)
    for n, c, h, w, r in ((1, 1, 2, 3, 2), (2, 2, 1, 2, 3), (1, 3, 2, 2, 1), (2, 1, 3, 1, 2)):
        sample("pixel_shuffle", lambda x: F.pixel_shuffle(x, r), var(n, c * r * r, h, w), r=r)
        sample("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, r), var(n, c, h * r, w * r), r=r)


# ---- normalisation, softmax, attention

def norms():
    for shape in ((4, 3), (2, 3, 5), (2, 3, 2, 3), (3, 1, 4), (2, 2, 2, 2, 2), (5, 2, 1, 1)):
        c = shape[1]
        w, b, mean, variance = (lambda: var(c)), (lambda: var(c)), (lambda: const(c)), (lambda: const(c, low=0.5))
        for eps in (1e-5, 0.1):
            for training in (False, True):
                f = lambda x, w, b, m, v: F.batch_norm(x, m.clone() if m is not None else None, v.clone() if v is not None else None, w, b, training, 0.2, eps)
                attributes = dict(training=training, eps=eps, momentum=0.2)

                def moved(x, w, b, m, v):
                    m, v = m.clone(), v.clone()
                    return F.batch_norm(x, m, v, w, b, training, 0.2, eps), m, v
                if eps == 0.1:
                    sample("batch_norm", moved, var(*shape), w(), b(), mean(), variance(), running=1, **attributes)
                sample("batch_norm", f, var(*shape), None, None, mean(), variance(), **attributes)
                if training:
                    sample("batch_norm", f, var(*shape), w(), b(), None, None, **attributes)
                sample("batch_norm_relu", lambda *a: F.relu(f(*a)), var(*shape), w(), b(), mean(), variance(), **attributes)
                sample("batch_norm_add_relu", lambda x, z, *a: F.relu(f(x, *a) + z), var(*shape), var(*shape), w(), b(), mean(), variance(), **attributes)
            if len(shape) > 2 and math.prod(shape[2:]) > 1:
                sample("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=eps), var(*shape), w(), b(), eps=eps)
                sample("instance_norm", lambda x: F.instance_norm(x, eps=eps), var(*shape), eps=eps)
            for k in (1, 2):
                rows = shape[-k:]
                if math.prod(rows) == 1:
                    continue
                sample("layer_norm", lambda x, w, b: F.layer_norm(x, rows, w, b, eps), var(*shape), var(*rows), var(*rows), shape=rows, eps=eps)
                sample("layer_norm", lambda x: F.layer_norm(x, rows, eps=eps), var(*shape), shape=rows, eps=eps)
                rms = lambda x, w=None: x / (x.square().mean(tuple(range(-k, 0)), keepdim=True) + eps).sqrt() * (1 if w is None else w)
                sample("rms_norm", rms, var(*shape), var(*rows), shape=rows, eps=eps)
                sample("rms_norm", rms, var(*shape), shape=rows, eps=eps)
    for shape, groups in (((2, 4), 2), ((2, 4, 3), 2), ((1, 6, 2, 2), 3), ((3, 2, 5), 1), ((2, 4, 2, 3), 4), ((2, 6, 2), 6)):
        c = shape[1]
        for eps in (1e-5, 0.1):
            sample("group_norm", lambda x, w, b: F.group_norm(x, groups, w, b, eps), var(*shape), var(c), var(c), groups=groups, eps=eps)
            sample("group_norm", lambda x: F.group_norm(x, groups, eps=eps), var(*shape), groups=groups, eps=eps)
    for dtype in (torch.float32, torch.bfloat16):
        sample("layer_norm", lambda x: F.layer_norm(x, (9,)), const(4, 9, dtype=dtype), shape=(9,), eps=1e-5)


def softmaxes():
    for shape, dim in (((5,), 0), ((3, 4), 0), ((3, 4), 1), ((2, 3, 4), 1), ((2, 3, 4), -1), ((1, 7), -1), ((2, 33), 1), ((4, 1), 1), ((2, 2, 2, 3), 2)):
        for stretch in (1, 20):
            sample("softmax", lambda x: x.softmax(dim), var(*shape, low=-stretch, high=stretch), dim=dim)
            sample("log_softmax", lambda x: x.log_softmax(dim), var(*shape, low=-stretch, high=stretch), dim=dim)
    rows = values([1.0, 2.0, 3.0], [NAN, 0.0, 1.0], [INF, 1.0, 2.0], [-INF, 0.0, 1.0], [-INF] * 3, [1e4, 0.0, -1e4])
    for dtype in (torch.float64, torch.float32):
        sample("softmax", lambda x: x.softmax(1), rows.to(dtype), dim=1)
        sample("log_softmax", lambda x: x.log_softmax(1), rows.to(dtype), dim=1)
    for dtype in (torch.float32, torch.bfloat16):
        sample("softmax", lambda x: x.softmax(1), const(3, 9, dtype=dtype), dim=1)
        sample("log_softmax", lambda x: x.log_softmax(1), const(3, 9, dtype=dtype), dim=1)


def attend(q, k, v, m=None, causal=False, scale=None):
    if q.dim() == 4 and q.size(1) != k.size(1):
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), 1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -INF)
    if m is not None:
        scores = scores.masked_fill(~m, -INF) if m.dtype == torch.bool else scores + m
    return scores.softmax(-1) @ v


def attention():
    for b, h, g, t, s, d, e in ((1, 1, 1, 1, 1, 1, 1), (2, 2, 2, 3, 4, 5, 3), (1, 4, 2, 5, 5, 3, 3), (1, 3, 1, 2, 6, 4, 2), (2, 1, 1, 4, 4, 2, 5)):
        qkv = lambda: (var(b, h, t, d), var(b, g, s, d), var(b, g, s, e))
        sample("scaled_dot_product_attention", attend, *qkv())
        sample("scaled_dot_product_attention", lambda q, k, v: attend(q, k, v, scale=0.3), *qkv(), scale=0.3)
        sample("scaled_dot_product_attention", lambda q, k, v: attend(q, k, v, causal=True), *qkv(), causal=1)
        seen = mask(t, s)
        seen[:, 0] = True
        sample("scaled_dot_product_attention", attend, *qkv(), seen)
        sample("scaled_dot_product_attention", attend, *qkv(), var(b, h, t, s))
        sample("scaled_dot_product_attention", lambda q, k, v, m: attend(q, k, v, m, causal=True), *qkv(), const(h, 1, s), causal=1)
        sample("scaled_dot_product_attention", attend, var(b, t, d), var(b, s, d), var(b, s, e))


# ---- losses

def reduced(v, reduction):
    return v if reduction == "none" else v.mean() if reduction == "mean" else v.sum()


def losses():
    for reduction in ("none", "mean", "sum"):
        r = dict(reduction=reduction)
        for n, c, more in ((5, 4, ()), (2, 3, (4,)), (1, 2, (2, 2))):
            target = lambda: whole(n, *more, high=c)
            ignored = target()
            ignored.view(-1)[0] = 1
            if ignored.numel() > 1:
                ignored.view(-1)[-1] = 0
            x = lambda: var(n, c, *more)
            for smoothing in (0.0, 0.2):
                s = dict(label_smoothing=smoothing)
                sample("cross_entropy", lambda x, t: F.cross_entropy(x, t, **r, **s), x(), target(), **r, **s)
                sample("cross_entropy", lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=1, **r, **s), x(), ignored, const(c, low=0.2), ignore_index=1, **r, **s)
                sample("cross_entropy", lambda x, t: F.cross_entropy(x, t, **r, **s), x(), var(n, c, *more).softmax(1).detach().requires_grad_(), **r, **s)
                sample("cross_entropy", lambda x, t, w: F.cross_entropy(x, t, w, **r, **s), x(), const(n, c, *more).softmax(1), const(c, low=0.2), **r, **s)
            sample("nll_loss", lambda x, t: F.nll_loss(x, t, **r), x(), target(), **r)
            sample("nll_loss", lambda x, t, w: F.nll_loss(x, t, w, ignore_index=1, **r), x(), ignored, const(c, low=0.2), ignore_index=1, **r)
        for shape in ((), (5,), (2, 3), (2, 2, 3)):
            x = lambda low=-2.0, high=2.0: var(*shape, low=low, high=high)
            sample("mse_loss", lambda x, y: F.mse_loss(x, y, **r), x(), x(), **r)
            sample("l1_loss", lambda x, y: F.l1_loss(x, y, **r), x(), x(), **r)
            for delta in (1.0, 0.4):
                sample("huber_loss", lambda x, y: F.huber_loss(x, y, delta=delta, **r), x(), x(), delta=delta, **r)
                sample("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, beta=delta, **r), x(), x(), beta=delta, **r)
            p = lambda: x(0.05, 0.95)
            sample("binary_cross_entropy", lambda p, t: F.binary_cross_entropy(p, t, **r), p(), p().detach(), **r)
            sample("binary_cross_entropy", lambda p, t, w: F.binary_cross_entropy(p, t, w, **r), p(), p().detach(), p().detach(), **r)
            sample("binary_cross_entropy_with_logits", lambda x, t: F.binary_cross_entropy_with_logits(x, t, **r), x(-6, 6), p().detach(), **r)
            sample("binary_cross_entropy_with_logits", lambda x, t, w, q: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=q, **r), x(-6, 6), p().detach(), p().detach(),
                   const(low=0.5, high=3) if not shape else const(shape[-1], low=0.5, high=3), **r)
            for by_batch in (False, True) if reduction == "mean" and shape else (False,):
                torch_r = dict(reduction="batchmean") if by_batch else r
                more = dict(by_batch=1) if by_batch else {}
                sample("kl_div", lambda x, t: F.kl_div(x, t, **torch_r), x(), p(), **r, **more)
                sample("kl_div", lambda x, t: F.kl_div(x, t, log_target=True, **torch_r), x(), x(), log_target=1, **r, **more)
            for full in (False, True):
                sample("gaussian_nll_loss", lambda x, t, v: F.gaussian_nll_loss(x, t, v, full=full, **r), x(), x(), x(0.2, 2), full=full, **r) if shape else None
                sample("poisson_nll_loss", lambda x, t: F.poisson_nll_loss(x, t, full=full, **r), x(), x(0, 4).detach(), full=full, log_input=1, **r)
                sample("poisson_nll_loss", lambda x, t: F.poisson_nll_loss(x, t, log_input=False, full=full, eps=1e-3, **r), x(0.2, 3), x(0, 4).detach(), full=full, log_input=0, eps=1e-3, **r)
            sign = lambda *s: torch.where(mask(*s), 1.0, -1.0).double()
            for margin in (1.0, 0.3):
                m = dict(margin=margin)
                sample("hinge_embedding_loss", lambda x, y: F.hinge_embedding_loss(x, y, **m, **r), x(), sign(*shape), **m, **r)
                sample("hinge_loss", lambda x, y: reduced((margin - y * x).clamp(min=0), reduction), x(), sign(*shape), **m, **r)
                sample("margin_ranking_loss", lambda a, b, y: F.margin_ranking_loss(a, b, y, **m, **r), x(), x(), sign(*shape), **m, **r)
        for n, d in ((1, 3), (4, 5), (6, 2)):
            x = lambda: var(n, d)
            for margin in (0.0, 0.4):
                sample("cosine_embedding_loss", lambda a, b, y: F.cosine_embedding_loss(a, b, y, margin=margin, **r), x(), x(), sign(n), margin=margin, **r)
            for p, swap, margin in ((2.0, False, 1.0), (1.0, False, 0.5), (3.0, True, 1.0), (2.0, True, 2.0)):
                sample("triplet_margin_loss", lambda a, b, c: F.triplet_margin_loss(a, b, c, margin=margin, p=p, swap=swap, eps=1e-3, **r), x(), x(), x(), margin=margin, p=p, swap=swap, eps=1e-3, **r)
        for t, n, c, s in ((4, 1, 3, 1), (8, 2, 4, 3), (12, 3, 3, 4)):
            targets = whole(n, s, low=1, high=c)
            steps, lengths = torch.tensor([t - k for k in range(n)]), torch.tensor([max(1, s - k) for k in range(n)])
            # Of logits: PyTorch's gradient is right only in those.
            sample("ctc_loss", lambda x, y, i, l: F.ctc_loss(x.log_softmax(2), y, i, l, **r), var(t, n, c), targets, steps, lengths, once=True, **r)
            sample("ctc_loss", lambda x, y, i, l: F.ctc_loss(x.log_softmax(2), y, i, l, blank=c - 1, zero_infinity=True, **r), var(t, n, c), targets - 1, steps, lengths, once=True,
                   blank=c - 1, zero_infinity=1, **r)


# ---- indices

def indices():
    for shape, dim, picked in (((5,), 0, (3,)), ((3, 4), 0, (2, 4)), ((3, 4), 1, (3, 6)), ((2, 3, 4), 1, (2, 5, 4)), ((2, 3, 4), -1, (1, 2, 3)), ((4, 2), 0, (4, 1))):
        n = shape[dim]
        where = whole(*picked, high=n)
        sample("gather", lambda x, i: x.gather(dim, i), var(*shape), where, dim=dim)
        sample("scatter_add", lambda x, i, s: x.scatter_add(dim, i, s), var(*shape), where, var(*picked), dim=dim)
        order = torch.stack([torch.randperm(n, generator=generator) for _ in range(math.prod(shape) // n)])  # no index twice
        unique = order.reshape([s for d, s in enumerate(shape) if d != dim % len(shape)] + [n]).movedim(-1, dim)[tuple(slice(0, min(p, s)) for p, s in zip(picked, shape))]
        sample("scatter", lambda x, i, s: x.scatter(dim, i, s), var(*shape), unique, var(*unique.shape), dim=dim)
        sample("scatter", lambda x, i: x.scatter(dim, i, 0.5), var(*shape), where, dim=dim, value=0.5)
        for count in (1, 4):
            rows = whole(count, high=n)
            part = [count if d == dim % len(shape) else s for d, s in enumerate(shape)]
            sample("index_select", lambda x, i: x.index_select(dim, i), var(*shape), rows, dim=dim)
            for alpha in (1.0, -0.5):
                sample("index_add", lambda x, i, s: x.index_add(dim, i, s, alpha=alpha), var(*shape), rows, var(*part), dim=dim, alpha=alpha)
        sample("take", lambda x, i: x.take(i), var(*shape), whole(*picked, high=math.prod(shape)))
        sample("masked_select", lambda x, m: x.masked_select(m), var(*shape), mask(*shape))
        sample("masked_select", lambda x, m: x.masked_select(m), var(*shape), mask(shape[-1]))
        sample("nonzero", torch.nonzero, whole(*shape, high=2).double())
        sample("one_hot", lambda t: F.one_hot(t, n), whole(*picked, high=n), classes=n)
    for n, width, picked in ((5, 3, (4,)), (4, 1, (2, 3)), (7, 2, ()), (3, 4, (2, 1, 2))):
        for padding in (None, 1, -1):
            more = {} if padding is None else dict(padding_idx=padding)
            sample("embedding", lambda w, i: F.embedding(i, w, **more), var(n, width), whole(*picked, high=n), once=False, **more)
    for dtype in DTYPES:
        x = lambda *shape: const(*shape, low=0, dtype=dtype)
        rows = torch.tensor([2, 0, 1])
        sample("gather", lambda x, i: x.gather(0, i), x(4), rows, dim=0)
        sample("index_select", lambda x, i: x.index_select(0, i), x(4, 2), rows, dim=0)
        if_supported("scatter_add", lambda x, i, s: x.scatter_add(0, i, s), x(4), rows, x(3), dim=0)
        if_supported("scatter", lambda x, i, s: x.scatter(0, i, s), x(4), rows, x(3), dim=0)
        if_supported("index_add", lambda x, i, s: x.index_add(0, i, s), x(4), rows, x(3), dim=0, alpha=1)
        if_supported("take", lambda x, i: x.take(i), x(2, 3), rows)
        sample("nonzero", torch.nonzero, x(3, 4))
        sample("masked_select", lambda x, m: x.masked_select(m), x(6), mask(6))


def write(path):
    header, data = {"__metadata__": metadata}, bytearray()
    for name, t in tensors.items():
        raw = t.view(torch.int16).numpy().tobytes() if t.dtype == torch.bfloat16 and t.dim() else (
            t.reshape(1).view(torch.int16).numpy().tobytes() if t.dtype == torch.bfloat16 else t.numpy().tobytes())
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in (unary, binary, ternary, in_place, reductions, scans_and_order, shapes, rearrangements, products, convolutions, pools, norms, softmaxes, attention, losses, indices):
        family()
    metadata |= {"torch": torch.__version__, "seed": str(SEED)}
    write(Path(__file__).with_suffix(".safetensors"))
    cases = {op: sum(name.split("/")[0] == op and "/in" not in name for name in tensors) for op in counts}
    print(len(counts), "operators,", sum(counts.values()), "samples,", sum(cases.values()), "cases; most:", sorted(cases.items(), key=lambda e: -e[1])[:5])
