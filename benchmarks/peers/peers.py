"""The workloads of halftone-bench for PyTorch and JAX: trains what standard input says, step by step (the lines are in bench/peers.h).

A step is zero_grad, forward, cross entropy, backward, optimizer; in fp16 with dynamic loss scaling. Data are random and on the device.
"""
import os
import sys
import time


class ProcessMemory:
    """By how much this process grew at most since then, in MiB: what training takes on the CPU."""

    def __init__(self):
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # the peak begins anew
        self.begin = self.read("VmRSS")

    def read(self, name):
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) / 1024 for line in f if line.startswith(name))

    def peak(self):
        return self.read("VmHWM") - self.begin


def sizes(model):  # "mlp:784,256,10", "gpt:layers,heads,width,vocabulary"
    return [int(n) for n in model.split(":")[1].split(",")]


# What a batch holds: the shape of one input (None: token numbers), and the number of classes.
def example(model):
    if model.startswith("mlp:"):
        return (sizes(model)[0],), sizes(model)[-1]
    if model.startswith("gpt:"):
        return None, sizes(model)[-1]
    return {"lenet": ((1, 28, 28), 10), "resnet18": ((3, 32, 32), 10), "resnet50": ((3, 224, 224), 1000)}[model]


class Torch:
    def __init__(self):
        global torch, nn, F
        import torch
        import torch.nn as nn
        import torch.nn.functional as F
        self.name = "torch " + torch.__version__
        # Of one machine with two frameworks: none gets more threads than the other.
        self.hows = ["eager", "compile", "graph"] if hasattr(torch, "compile") and torch.cuda.is_available() else ["eager"]
        self.wrapped = lambda net: net  # ddp.py trains on several GPUs

    def network(self, model, context):
        def conv(i, o, kernel, stride):
            return nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False)

        class Residual(nn.Module):  # a basic block, or a bottleneck
            def __init__(self, i, width, stride, bottleneck):
                super().__init__()
                out = 4 * width if bottleneck else width
                parts = [(1, 1), (3, stride), (1, 1)] if bottleneck else [(3, stride), (3, 1)]
                layers, at = [], i
                for n, (kernel, s) in enumerate(parts):
                    to = out if n + 1 == len(parts) else width
                    layers += [conv(at, to, kernel, s), nn.BatchNorm2d(to)] + ([nn.ReLU()] if n + 1 < len(parts) else [])
                    at = to
                self.body = nn.Sequential(*layers)
                self.short = nn.Sequential(conv(i, out, 1, stride), nn.BatchNorm2d(out)) if stride != 1 or i != out else nn.Identity()

            def forward(self, x):
                return F.relu(self.body(x) + self.short(x))

        class Block(nn.Module):
            def __init__(self, width, heads):
                super().__init__()
                self.heads = heads
                self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
                self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
                self.wide, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

            def attend(self, q, k, v):
                if hasattr(F, "scaled_dot_product_attention"):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
                later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                return scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype) @ v

            def forward(self, x):
                b, t, d = x.shape
                q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
                x = x + self.proj(self.attend(q, k, v).transpose(1, 2).reshape(b, t, d))
                return x + self.out(F.gelu(self.wide(self.norm2(x)), approximate="tanh"))

        class Gpt(nn.Module):
            def __init__(self, places, layers, heads, width, vocabulary):
                super().__init__()
                self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(places, width)
                self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
                self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
                self.head.weight = self.tokens.weight

            def forward(self, ids):
                x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
                return self.head(self.norm(self.blocks(x))).flatten(0, 1)

        if model.startswith("mlp:"):
            widths, layers = sizes(model), []
            for a, b in zip(widths, widths[1:]):
                layers += [nn.Linear(a, b), nn.ReLU()]
            return nn.Sequential(*layers[:-1])
        if model == "lenet":
            return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                 nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
        if model.startswith("gpt:"):
            return Gpt(context, *sizes(model))
        deep = model == "resnet50"
        if deep:
            layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        else:
            layers = [conv(3, 64, 3, 1), nn.BatchNorm2d(64), nn.ReLU()]
        at = 64
        for n, blocks in enumerate([3, 4, 6, 3] if deep else [2, 2, 2, 2]):
            width = 64 << n
            for i in range(blocks):
                layers.append(Residual(at, width, 2 if i == 0 and n > 0 else 1, deep))
                at = 4 * width if deep else width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(at, 1000 if deep else 10))

    def open(self, model, batch, context, optimizer, precision, how, device):
        kind = device.split(":")[0]
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("this PyTorch has no CUDA")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.benchmark = True
        self.kind = kind
        if kind == "cuda":
            torch.cuda.set_device(device if ":" in device else 0)
            if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
                torch._C._cuda_clearCublasWorkspaces()  # a stream's stays for ever
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        shape, classes = example(model)
        net = self.network(model, context).to(device)
        if shape is None:
            data = [(torch.randint(classes, (batch, context), device=device), torch.randint(classes, (batch * context,), device=device)) for _ in range(2)]
        else:
            data = [(torch.randn(batch, *shape, device=device), torch.randint(classes, (batch,), device=device)) for _ in range(2)]
        if kind == "cuda" and shape is not None and len(shape) == 3:
            net = net.to(memory_format=torch.channels_last)
            data = [(x.to(memory_format=torch.channels_last), t) for x, t in data]
        fused = {"fused": True} if kind == "cuda" and int(torch.__version__.split(".")[0]) > 1 else {}
        if optimizer == "sgd":
            opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, **fused)
        else:
            opt = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=how == "graph", **fused)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        if dtype is torch.float16 and kind == "cpu" and not hasattr(torch.amp, "GradScaler"):
            raise RuntimeError("this PyTorch has no fp16 on the CPU")
        scaled = precision == "fp16"
        scaler = torch.amp.GradScaler(kind, enabled=scaled) if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler(enabled=scaled)
        forward = self.wrapped(net)
        if how == "compile":
            forward = torch.compile(forward)

        def train(x, target):
            opt.zero_grad(set_to_none=True)
            with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = F.cross_entropy(forward(x), target)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            return loss

        self.step = self.captured(train, data) if how == "graph" else lambda i: train(*data[i % 2])
        self.done, self.memory = 0, kind == "cpu" and ProcessMemory()

    def captured(self, train, data):
        """A step whose first calls run on a stream aside, as PyTorch asks for, and the others replay one graph of it on inputs of its own."""
        inputs, side, graph, loss = [t.clone() for t in data[0]], torch.cuda.Stream(), torch.cuda.CUDAGraph(), None

        def step(i):
            nonlocal loss
            for own, given in zip(inputs, data[i % 2]):
                own.copy_(given)
            if i < 3:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    eager = train(*inputs)
                torch.cuda.current_stream().wait_stream(side)
                return eager
            if loss is None:
                with torch.cuda.graph(graph):
                    loss = train(*inputs)
            graph.replay()
            return loss

        return step

    def run(self, steps):
        for _ in range(steps):
            self.loss = self.step(self.done)
            self.done += 1
        if self.kind == "cuda":
            torch.cuda.synchronize()
        return self.loss

    def close(self):
        self.step = self.loss = None
        return self.memory.peak() if self.memory else torch.cuda.max_memory_allocated() / 2**20


class Jax:
    """The whole step is jitted, its arguments are donated. Without the residual networks."""

    def __init__(self):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        global jax, jnp
        import jax
        import jax.numpy as jnp
        self.name, self.hows = "jax " + jax.__version__, ["jit"]

    def network(self, model, context, key, dtype):
        def uniform(key, shape, inputs):
            return jax.random.uniform(key, shape, minval=-1, maxval=1) / inputs ** 0.5

        def linear(key, i, o, bias=True):
            return [uniform(key, (i, o), i)] + ([jnp.zeros(o)] if bias else [])

        def dense(p, x):
            y = x @ p[0].astype(dtype)
            return y + p[1].astype(dtype) if len(p) > 1 else y

        keys = iter(jax.random.split(key, 256))
        if model.startswith("mlp:"):
            widths = sizes(model)
            weights = [linear(next(keys), a, b) for a, b in zip(widths, widths[1:])]

            def forward(p, x):
                x = x.astype(dtype)
                for layer in p[:-1]:
                    x = jax.nn.relu(dense(layer, x))
                return dense(p[-1], x)
        elif model == "lenet":
            weights = [[uniform(next(keys), (3, 3, 1, 32), 9), jnp.zeros(32)], [uniform(next(keys), (3, 3, 32, 64), 288), jnp.zeros(64)],
                       linear(next(keys), 9216, 128), linear(next(keys), 128, 10)]

            def conv(p, x):
                return jax.lax.conv_general_dilated(x, p[0].astype(dtype), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + p[1].astype(dtype)

            def forward(p, x):
                x = jnp.transpose(x, (0, 2, 3, 1)).astype(dtype)
                x = jax.nn.relu(conv(p[1], jax.nn.relu(conv(p[0], x))))
                n, h, w, c = x.shape
                x = x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))  # reduce_window has no fast gradient in fp16
                return dense(p[3], jax.nn.relu(dense(p[2], x.reshape(n, -1))))
        elif model.startswith("gpt:"):
            layers, heads, width, vocabulary = sizes(model)
            blocks = [dict(qkv=linear(next(keys), width, 3 * width), proj=linear(next(keys), width, width), wide=linear(next(keys), width, 4 * width),
                           out=linear(next(keys), 4 * width, width), norm1=[jnp.ones(width), jnp.zeros(width)], norm2=[jnp.ones(width), jnp.zeros(width)]) for _ in range(layers)]
            weights = dict(tokens=jax.random.normal(next(keys), (vocabulary, width)), places=jax.random.normal(next(keys), (context, width)), blocks=blocks,
                           norm=[jnp.ones(width), jnp.zeros(width)])

            def norm(p, x):
                y = x.astype(jnp.float32)
                y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
                return (y * p[0] + p[1]).astype(dtype)

            def forward(p, ids):
                b, t = ids.shape
                x = p["tokens"][ids] + p["places"][:t]
                for block in p["blocks"]:
                    q, k, v = jnp.split(dense(block["qkv"], norm(block["norm1"], x)).reshape(b, t, 3 * heads, -1), 3, 2)
                    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, width)
                    x = x + dense(block["proj"], y)
                    x = x + dense(block["out"], jax.nn.gelu(dense(block["wide"], norm(block["norm2"], x)), approximate=True))
                return (norm(p["norm"], x) @ p["tokens"].T.astype(dtype)).reshape(b * t, -1)
        else:
            raise RuntimeError(model + " is not written for JAX here")
        return weights, forward

    def open(self, model, batch, context, optimizer, precision, how, device):
        kind, index = (device.split(":") + ["0"])[:2]
        if kind == "cuda" and jax.default_backend() != "gpu":
            raise RuntimeError("this JAX has no CUDA")
        self.device = jax.devices("cpu" if kind == "cpu" else "gpu")[int(index)]
        jax.config.update("jax_default_device", self.device)
        jax.config.update("jax_default_matmul_precision", {"fp32": "highest", "tf32": "tensorfloat32"}.get(precision, "default"))
        dtype = {"fp16": jnp.float16, "bf16": jnp.bfloat16}.get(precision, jnp.float32)
        shape, classes = example(model)
        keys = jax.random.split(jax.random.PRNGKey(0), 5)
        weights, forward = self.network(model, context, keys[0], dtype)
        if shape is None:
            self.data = [(jax.random.randint(keys[1 + i], (batch, context), 0, classes), jax.random.randint(keys[3 + i], (batch * context,), 0, classes)) for i in range(2)]
        else:
            self.data = [(jax.random.normal(keys[1 + i], (batch, *shape)), jax.random.randint(keys[3 + i], (batch,), 0, classes)) for i in range(2)]
        scaled, leaves = precision == "fp16", jax.tree_util.tree_map

        def update(w, m, v, g, n):
            if optimizer == "sgd":
                m = leaves(lambda a, b: 0.9 * a + b, m, g)
                return leaves(lambda a, b: a - 1e-3 * b, w, m), m, v
            m = leaves(lambda a, b: 0.9 * a + 0.1 * b, m, g)
            v = leaves(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
            def one(a, b, c):
                return a * (1 - 1e-5) - 1e-3 * (b / (1 - 0.9 ** n)) / (jnp.sqrt(c / (1 - 0.999 ** n)) + 1e-8)
            return leaves(one, w, m, v), m, v

        def step(state, x, target):
            w, m, v, n, scale, streak = state

            def loss_of(w):
                logs = jax.nn.log_softmax(forward(w, x).astype(jnp.float32))
                loss = -jnp.take_along_axis(logs, target[:, None], 1).mean()
                return loss * scale, loss
            g, loss = jax.grad(loss_of, has_aux=True)(w)
            g = leaves(lambda t: t / scale, g)
            new = update(w, m, v, g, n + 1)
            if not scaled:
                return (*new, n + 1, scale, streak), loss
            finite = jnp.all(jnp.array([jnp.isfinite(t).all() for t in jax.tree_util.tree_leaves(g)]))
            w, m, v = (leaves(lambda a, b: jnp.where(finite, a, b), *pair) for pair in zip(new, (w, m, v)))
            streak = jnp.where(finite, streak + 1, 0)
            scale = jnp.where(finite, jnp.where(streak == 2000, scale * 2, scale), scale / 2)
            return (w, m, v, n + finite, scale, streak % 2000), loss

        zeros = leaves(jnp.zeros_like, weights)
        second = leaves(jnp.zeros_like, weights) if optimizer == "adamw" else ()
        self.state = (weights, zeros, second, jnp.array(0), jnp.array(65536.0 if scaled else 1.0), jnp.array(0))
        self.step, self.done = jax.jit(step, donate_argnums=0), 0

    def run(self, steps):
        for _ in range(steps):
            self.state, self.loss = self.step(self.state, *self.data[self.done % 2])
            self.done += 1
        return jax.block_until_ready(self.loss)

    def close(self):
        peak = (self.device.memory_stats() or {}).get("peak_bytes_in_use", float("nan"))
        self.state = self.data = self.step = self.loss = None
        return peak / 2**20  # of all it did so far


def main():
    def say(*words):
        print(*words, flush=True)

    try:
        peer = {"torch": Torch, "jax": Jax}[sys.argv[1]]()
    except Exception as e:
        return say("absent", e)
    say("hello", peer.name, ",".join(peer.hows))
    child = None
    for line in sys.stdin:
        verb, *rest = line.split()
        try:
            if verb == "open":
                model, batch, context, optimizer, precision, how, device, first_steps = rest
                if device == "cpu" and isinstance(peer, Torch):  # in a process of its own, so that its memory is its own
                    child = os.fork()
                    if child:
                        if os.waitpid(child, 0)[1] != 0:
                            say("refused", "it ended")
                        continue
                peer.open(model, int(batch), int(context), optimizer, precision, how, device)
                say("ready", float(peer.run(max(1, int(first_steps)))))
            elif verb == "run":
                start = time.perf_counter()
                peer.run(int(rest[0]))
                say("took", (time.perf_counter() - start) * 1e3 / int(rest[0]))
            else:
                say("closed", peer.close())
                if child == 0:
                    os._exit(0)
        except Exception as e:
            say("refused", " ".join(str(e).split())[:300] or type(e).__name__)
            if child == 0 and verb == "open":
                os._exit(0)


if __name__ == "__main__":
    main()
