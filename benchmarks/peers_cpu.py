#!/usr/bin/env python3
"""The steps that benchmarks/step trains on a processor, by Halftone and by PyTorch in turn, in processes of their own, on as many
threads. Prints one JSON line a case: medians over the rounds, and their ratio.

    peers_cpu.py build/release/benchmarks/step [--cases mlp_small lenet_64 ...] [--precisions fp32 bf16] [--threads 2] [--rounds 5]
"""
import argparse, json, os, resource, statistics, subprocess, sys, time


def trainer(case, precision):
    import torch
    from torch import nn

    torch.manual_seed(0)

    def perceptron(*widths):
        layers = []
        for i in range(len(widths) - 1):
            layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    class Block(nn.Module):
        def __init__(self, n, out, stride):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(n, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
                                      nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
            self.short = nn.Identity() if stride == 1 and n == out else nn.Sequential(nn.Conv2d(n, out, 1, stride, bias=False), nn.BatchNorm2d(out))

        def forward(self, x):
            return torch.relu(self.body(x) + self.short(x))

    def residual():
        layers, n = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)], 64
        for width in (64, 128, 256, 512):
            for i in range(2):
                layers.append(Block(n, width, 2 if i == 0 and width > 64 else 1))
                n = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    class GptBlock(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.heads = heads

        def forward(self, x):
            b, t, d = x.shape
            q, k, v = (p.view(b, t, self.heads, d // self.heads).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, 2))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
            return h + self.out(nn.functional.gelu(self.wide(self.norm2(h)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self, vocabulary, t, layers, heads, width):
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(t, width)
            self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
            return self.head(self.norm(self.blocks(x))).flatten(0, 1)

    def lenet():
        return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 128),
                             nn.ReLU(), nn.Linear(128, 10))

    made = {"mlp_small": (lambda: perceptron(784, 256, 128, 10), (128, 784), 0, 128, 10, False),
            "mlp_1024": (lambda: perceptron(1024, 1024, 1024, 1024, 1024), (512, 1024), 0, 512, 1024, False),
            "lenet_64": (lenet, (64, 1, 28, 28), 0, 64, 10, True),
            "resnet18_32": (residual, (32, 3, 32, 32), 0, 32, 10, False),
            "gpt_256": (lambda: Gpt(4096, 128, 6, 8, 256), (8, 128), 4096, 8 * 128, 4096, True)}
    build, shape, vocabulary, targets, classes, adam = made[case]
    net = build()
    opt = torch.optim.AdamW(net.parameters(), 1e-3) if adam else torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    x = torch.randint(0, vocabulary, shape) if vocabulary else torch.randn(shape)
    target = torch.randint(0, classes, (targets,))

    def step():
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        opt.step()

    return step


def serve(case, precision, threads):
    """Each line on standard input is a number of steps; the answer is milliseconds a step, of the clock and of all processors."""
    import torch

    torch.set_num_threads(threads)
    step = trainer(case, precision)
    for _ in range(5):
        step()
    print(json.dumps({"version": torch.__version__}), flush=True)
    for line in sys.stdin:
        n = int(line)
        wall, used = time.perf_counter(), time.process_time()
        for _ in range(n):
            step()
        wall, used = time.perf_counter() - wall, time.process_time() - used
        print(json.dumps({"ms": wall * 1e3 / n, "processors_ms": used * 1e3 / n,
                          "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), flush=True)


def ours(program, case, precision, threads):
    run = subprocess.run([program, "--models", case, "--precisions", precision, "--rounds", "3"], capture_output=True, text=True, check=True,
                         env={**os.environ, "HALFTONE_NUM_THREADS": str(threads)})
    return json.loads(run.stdout.splitlines()[-1])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("program")
    p.add_argument("--cases", nargs="+", default=["mlp_small", "mlp_1024", "lenet_64", "resnet18_32", "gpt_256"])
    p.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--python", default=sys.executable, help="the one that has torch")
    a = p.parse_args()
    if a.program == "serve":
        return serve(a.cases[0], a.precisions[0], a.threads)
    for case in a.cases:
        for precision in a.precisions:
            peer = subprocess.Popen([a.python, __file__, "serve", "--cases", case, "--precisions", precision, "--threads", str(a.threads)], text=True,
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            version = json.loads(peer.stdout.readline())["version"]

            def theirs(n):
                print(n, file=peer.stdin, flush=True)
                return json.loads(peer.stdout.readline())

            steps = max(1, int(60 / theirs(1)["ms"]))
            rounds = [(ours(a.program, case, precision, a.threads), theirs(steps)) for _ in range(a.rounds)]
            peer.stdin.close()
            peer.wait()
            median = lambda who, what: statistics.median(r[who][what] for r in rounds)
            row = {"case": case, "precision": precision, "threads": a.threads, "torch": version}
            for what in ("ms", "processors_ms"):
                row[what], row["torch_" + what] = round(median(0, what), 4), round(median(1, what), 4)
                row[what + "_ratio"] = round(statistics.median(t[what] / h[what] for h, t in rounds), 3)
            row["peak_mib"], row["torch_peak_rss_mib"] = median(0, "peak_mib"), round(median(1, "peak_mib"), 1)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
