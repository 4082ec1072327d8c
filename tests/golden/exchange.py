#!/usr/bin/env python3
"""Weights that PyTorch and Halftone exchange in f32: an MLP, a CNN with batch norm, an LSTM and a transformer block.

    exchange.py               writes exchange.safetensors, which tests/nn_exchange.cpp reads: of each model, trained for some
                              steps, its state_dict ("mlp.state.0.weight"), an input ("mlp.x") and the output in evaluation ("mlp.y")
    exchange.py --check FILE  loads the state_dicts of such a file by Halftone into PyTorch's modules, strictly, and compares the
                              outputs; nn_exchange does so where HALFTONE_PYTHON names an interpreter that has what this needs

Needs torch and safetensors: /usr/bin/python3 with Debian's python3-torch, say, and `pip install safetensors packaging` in a
venv --system-site-packages. Made with PyTorch 1.13.0.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, groups=2)
        self.bn2 = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 4)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 20, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.block(x))


def models():
    return {
        "mlp": nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 8), nn.Tanh()), nn.Linear(8, 4)),
        "cnn": CNN(),
        "lstm": LSTM(),
        "transformer": Transformer(),
    }


def write(path):
    torch.manual_seed(0)
    inputs = {
        "mlp": torch.randn(3, 10),
        "cnn": torch.randn(4, 3, 9, 8),
        "lstm": torch.randint(0, 11, (2, 5)),
        "transformer": torch.randn(2, 6, 8),
    }
    tensors = {}
    for name, net in models().items():
        x, opt = inputs[name], torch.optim.Adam(net.parameters(), lr=0.02)
        for _ in range(5):  # weights and running statistics off their starts
            opt.zero_grad()
            (net(x) - 1).square().mean().backward()
            opt.step()
        tensors[f"{name}.x"], tensors[f"{name}.y"] = x, net.eval()(x).detach()
        tensors.update({f"{name}.state.{key}": t for key, t in net.state_dict().items()})
    save_file(tensors, path)


def check(path):
    tensors = load_file(path)
    for name, net in models().items():
        prefix = f"{name}.state."
        net.load_state_dict({key[len(prefix):]: t for key, t in tensors.items() if key.startswith(prefix)})
        with torch.no_grad():
            y = net.eval()(tensors[f"{name}.x"])
        torch.testing.assert_close(y, tensors[f"{name}.y"])
        print(f"{name}: {len(net.state_dict())} tensors; outputs {list(y.shape)} differ by {(y - tensors[f'{name}.y']).abs().max():.1e} at most")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2])
    else:
        write(Path(__file__).with_suffix(".safetensors"))
