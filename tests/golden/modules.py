#!/usr/bin/env python3
"""Writes modules.safetensors: what PyTorch's modules compute in float64, from the same weights.

Of each case: the state under its own names ("state/..."), inputs ("x0", ...), outputs ("y0", ...), the gradients of the sum
of all outputs times cos(0.7 i), i their row-major number, over floating inputs ("dx0", ...) and parameters ("grad/..."), and
buffers afterwards ("after/..."). RMSNorm is not in the version used and is written here. Made with PyTorch 1.13.0.
"""

import json
import struct
from pathlib import Path

import torch
from torch import nn

torch.set_default_dtype(torch.float64)


def rand(*shape):
    return torch.randn(shape)


class RMSNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


def attention(m, *x, **kw):
    return m(*x, need_weights=False, **kw)[0]


def causal(n):
    return torch.ones(n, n).triu(1).bool()


PADDING = torch.tensor([[False, False, False], [False, False, True]])


def lstm(m, x, h, c):
    y, (h, c) = m(x, (h, c))
    return y, h, c


L = nn.TransformerEncoderLayer
D = nn.TransformerDecoderLayer
# name: module, inputs, call (the module itself unless given), and whether in evaluation
CASES = {
    "linear": (nn.Linear(3, 4), [rand(2, 3)]),
    "bilinear": (nn.Bilinear(3, 2, 4), [rand(2, 2, 3), rand(2, 2, 2)]),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), [rand(2, 4, 9)]),
    "conv2d": (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), [rand(2, 2, 5, 4)]),
    "conv3d": (nn.Conv3d(1, 2, 2, bias=False), [rand(1, 1, 3, 3, 3)]),
    "conv_transpose1d": (nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), [rand(2, 2, 4)]),
    "conv_transpose2d": (nn.ConvTranspose2d(2, 3, 2, stride=2), [rand(1, 2, 3, 2)]),
    "batch_norm1d": (nn.BatchNorm1d(3), [rand(4, 3)]),
    "batch_norm1d_length": (nn.BatchNorm1d(3, eps=1e-3, momentum=0.3), [rand(2, 3, 4)]),
    "batch_norm2d": (nn.BatchNorm2d(2), [rand(2, 2, 3, 2)]),
    "batch_norm2d_eval": (nn.BatchNorm2d(2).eval(), [rand(2, 2, 3, 2)]),
    "batch_norm2d_untracked": (nn.BatchNorm2d(2, affine=False, track_running_stats=False).eval(), [rand(2, 2, 3, 2)]),
    "layer_norm": (nn.LayerNorm((3, 4), eps=1e-3), [rand(2, 3, 4)]),
    "rms_norm": (RMSNorm(5), [rand(3, 5)]),
    "group_norm": (nn.GroupNorm(2, 4), [rand(2, 4, 3)]),
    "instance_norm1d": (nn.InstanceNorm1d(3), [rand(2, 3, 5)]),
    "instance_norm2d": (nn.InstanceNorm2d(2, affine=True), [rand(2, 2, 3, 2)]),
    "embedding": (nn.Embedding(5, 3, padding_idx=1), [torch.tensor([[0, 1, 4], [1, 1, 0]])]),
    "rnn": (nn.RNN(2, 3, num_layers=2, bidirectional=True), [rand(4, 2, 2), rand(4, 2, 3)]),
    "rnn_relu": (nn.RNN(2, 3, nonlinearity="relu", bias=False, batch_first=True), [rand(2, 4, 2), rand(1, 2, 3)]),
    "lstm": (nn.LSTM(2, 3, num_layers=2, bidirectional=True), [rand(4, 2, 2), rand(4, 2, 3), rand(4, 2, 3)], lstm),
    "lstm_batch_first": (nn.LSTM(2, 3, batch_first=True), [rand(2, 5, 2)], lambda m, x: m(x)[0]),
    "gru": (nn.GRU(2, 3, num_layers=2, bidirectional=True), [rand(4, 2, 2), rand(4, 2, 3)]),
    "rnn_cell": (nn.RNNCell(2, 3), [rand(2, 2), rand(2, 3)]),
    "lstm_cell": (nn.LSTMCell(2, 3), [rand(2, 2), rand(2, 3), rand(2, 3)], lambda m, x, h, c: m(x, (h, c))),
    "gru_cell": (nn.GRUCell(2, 3), [rand(2, 2), rand(2, 3)]),
    "attention": (nn.MultiheadAttention(4, 2), [rand(3, 2, 4)], lambda m, x: attention(m, x, x, x)),
    "attention_cross": (nn.MultiheadAttention(4, 2, batch_first=True), [rand(2, 3, 4), rand(2, 5, 4)],
                        lambda m, q, k: attention(m, q, k, k)),
    "attention_widths": (nn.MultiheadAttention(4, 2, kdim=3, vdim=2, bias=False), [rand(3, 2, 4), rand(5, 2, 3), rand(5, 2, 2)],
                         attention),
    "attention_masked": (nn.MultiheadAttention(4, 2), [rand(3, 2, 4)],
                         lambda m, x: attention(m, x, x, x, attn_mask=causal(3), key_padding_mask=PADDING)),
    "encoder_layer": (L(4, 2, 6, dropout=0.0), [rand(3, 2, 4)]),
    "encoder_layer_first": (L(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True, norm_first=True), [rand(2, 3, 4)]),
    "decoder_layer": (D(4, 2, 6, dropout=0.0), [rand(3, 2, 4), rand(5, 2, 4)], lambda m, x, y: m(x, y, tgt_mask=causal(3))),
    "decoder_layer_first": (D(4, 2, 6, dropout=0.0, norm_first=True), [rand(3, 2, 4), rand(5, 2, 4)]),
    "prelu": (nn.PReLU(3), [rand(2, 3, 4)]),
    "activations": (nn.ModuleList([nn.ReLU6(), nn.Hardtanh(-0.5, 2), nn.Hardsigmoid(), nn.Hardswish(), nn.Hardshrink(0.3),
                                   nn.Softshrink(0.3), nn.Threshold(0.1, 7), nn.ELU(0.7), nn.SELU(), nn.CELU(1.3),
                                   nn.GELU(approximate="tanh"), nn.Mish(), nn.Softplus(2, 3), nn.Softsign(), nn.Tanhshrink(),
                                   nn.LogSigmoid()]),
                    [3 * rand(17)], lambda m, x: tuple(f(x) for f in m)),
    "glu": (nn.GLU(1), [rand(2, 4, 3)]),
    "upsample": (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), [rand(1, 2, 3, 2)]),
    "pixel_shuffle": (nn.PixelShuffle(2), [rand(1, 8, 2, 3)]),
}


def run(name, module, inputs, call=None):
    out = {}
    for p in module.parameters():  # biases and gains off their starts
        p.data += 0.1 * torch.randn_like(p)
    for key, t in module.named_buffers():
        if key == "running_mean":
            t += 0.3
        elif key == "running_var":
            t *= 1.7
    for key, t in module.state_dict().items():
        out[f"state/{key}"] = t.clone()
    for x in inputs:
        if x.is_floating_point():
            x.requires_grad_()
    y = (call or (lambda m, *x: m(*x)))(module, *inputs)
    flat = [t for t in (y if isinstance(y, tuple) else (y,))]
    loss = sum((t * torch.cos(0.7 * torch.arange(t.numel())).reshape(t.shape)).sum() for t in flat)
    loss.backward()
    for i, x in enumerate(inputs):
        out[f"x{i}"] = x.detach()
        if x.requires_grad:
            out[f"dx{i}"] = x.grad
    for i, t in enumerate(flat):
        out[f"y{i}"] = t.detach()
    for key, p in module.named_parameters():
        out[f"grad/{key}"] = p.grad
    for key, t in module.named_buffers():
        out[f"after/{key}"] = t
    return {f"{name}/{key}": t for key, t in out.items()}


def write(path, tensors):
    header, data = {}, b""
    for name, t in tensors.items():
        raw = t.contiguous().numpy().tobytes()
        dtype = "I64" if t.dtype == torch.int64 else "F64"
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    torch.manual_seed(0)
    tensors = {}
    for name, case in CASES.items():
        tensors.update(run(name, *case))
    write(Path(__file__).with_suffix(".safetensors"), tensors)
