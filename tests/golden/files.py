#!/usr/bin/env python3
"""Writes what other programs write, for our readers and writers to agree with.

arrays.npz   by NumPy: arrays of every dtype that Halftone has, of both byte orders and layouts
events       by TensorBoard's own record writer and protobuf messages: a scalar, a text, a histogram and an image
Made with NumPy 2.4.6 and TensorBoard 2.21.0. `files.py check FOLDER` reads the event files of a
folder with TensorBoard and prints what they hold.
"""

import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def arrays():
    count = np.arange(6)
    made = {
        "f16": (count / 4).astype("<f2").reshape(2, 3),
        "f32": (count / 4).astype("<f4").reshape(2, 3),
        "f64": (count / 4).astype("<f8").reshape(3, 2, 1),
        "i32": (count - 3).astype("<i4"),
        "i64": (count - 3).astype("<i8").reshape(1, 6),
        "u8": count.astype("u1"),
        "b8": count % 2 == 1,
        "scalar": np.float64(2.5),
        "none": np.zeros((0, 3), "<f4"),
        "big": count.astype(">f4"),
        "fortran": np.asfortranarray(count.astype("<i4").reshape(2, 3)),
    }
    out = io.BytesIO()
    np.savez(out, **made)
    (HERE / "arrays.npz").write_bytes(out.getvalue())


def png(rows, channels):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    lines = b"".join(b"\0" + bytes(r) for r in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]) // channels, len(rows), 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    content = b"\x78\x01\x01" + struct.pack("<HH", len(lines), len(lines) ^ 0xFFFF) + lines
    content += struct.pack(">I", zlib.adler32(lines))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def events():
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(open(HERE / "events", "wb"))
    writer.write(Event(wall_time=1000.5, file_version="brain.Event:2").SerializeToString())

    def value(step, v):
        writer.write(Event(wall_time=1000.5, step=step, summary=Summary(value=[v])).SerializeToString())

    value(3, Summary.Value(tag="loss", simple_value=0.1))
    value(300, Summary.Value(tag="notes", metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
                             tensor=TensorProto(dtype=7, string_val=["**fine** \u00e4".encode()],
                                                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]))))
    # 1, 1.5, 2, ..., 16 in 30 buckets.
    numbers = [1 + i / 2 for i in range(31)]
    value(4, Summary.Value(tag="weights", histo=HistogramProto(
        min=1, max=16, num=31, sum=sum(numbers), sum_squares=sum(n * n for n in numbers),
        bucket_limit=numbers[1:], bucket=[1] * 29 + [2])))
    value(5, Summary.Value(tag="digit", image=Summary.Image(
        height=2, width=3, colorspace=1, encoded_image_string=png([[0, 51, 102], [153, 204, 255]], 1))))
    writer.close()


def check(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(path), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0, "images": 0})
    events.Reload()
    tags = events.Tags()
    for tag in tags["scalars"]:
        print("scalar", tag, [(e.step, e.value) for e in events.Scalars(tag)])
    for tag in tags["histograms"]:
        print("histogram", tag, [(e.step, e.histogram_value) for e in events.Histograms(tag)])
    for tag in tags["images"]:
        print("image", tag, [(e.step, e.width, e.height, len(e.encoded_image_string)) for e in events.Images(tag)])
    for tag in tags["tensors"]:
        print("tensor", tag, [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(sys.argv[2])
    else:
        arrays()
        events()
