#!/usr/bin/env python3
"""onnx_check.py FOLDER: runs each NAME.onnx of a folder by onnxruntime on the x of NAME.safetensors and compares with its y.

Needs onnx and onnxruntime. Beside the batch that the file was made with, one of twice the size is run, if y is given for it, too (x2, y2).
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I64": np.int64, "I32": np.int32}


def tensors(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    data = content[8 + length:]
    out = {}
    for name, t in json.loads(content[8:8 + length]).items():
        begin, end = t["data_offsets"]
        out[name] = np.frombuffer(data[begin:end], DTYPES[t["dtype"]]).reshape(t["shape"])
    return out


bad = 0
for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    t = tensors(path.with_suffix(".safetensors"))
    for x, y in (("x", "y"), ("x2", "y2")):
        got = session.run(None, {session.get_inputs()[0].name: t[x]})[0]
        scale = np.abs(t[y]).max()
        error = np.abs(got.astype(np.float64) - t[y]).max() / scale if got.shape == t[y].shape else np.inf
        limit = 2e-3 if t[y].dtype == np.float16 else 1e-5
        print(f"{path.stem} {x}: {got.shape} {got.dtype}, largest difference {error:.1e} of {scale:.2g}")
        bad += not (error <= limit and got.dtype == t[y].dtype)
sys.exit(bad)
