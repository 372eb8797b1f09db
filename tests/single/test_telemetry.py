"""What the exchanges cost, as TensorBoard, a progress bar and a user get it."""

from types import SimpleNamespace

import pytest

from hvd_quant.exchange import telemetry
from hvd_quant.exchange.stats import Bucket, Stats


def optimizer(steps=0):
    """One whose steps each send 10 bytes instead of 1000, in two buckets."""
    stats = Stats(steps=steps, dense_bytes=1000 * steps, wire_bytes=10 * steps, encode_seconds=0.5 * steps, wait_seconds=0.25 * steps,
                  decode_seconds=0.125 * steps)
    if steps:
        stats.buckets = {name: Bucket("allgather", "topk", tensors, 500 * steps, 5 * steps, wait_seconds=wait * steps,
                                      flight_seconds=0.5 * steps) for name, tensors, wait in (("a", ["w"], 0.05), ("b", ["b", "c"], 0.2))}
    return SimpleNamespace(stats=stats, compression_stats=lambda: stats.as_dict())


class Writer:
    def __init__(self):
        self.written = {}

    def add_scalar(self, name, value, step):
        self.written[name] = value, step


FIGURES = {"dense_bytes": 1000, "wire_bytes": 10, "encode_seconds": 0.5, "wait_seconds": 0.25, "decode_seconds": 0.125, "void_tensors": 0,
           "compression_ratio": 100, "hidden_share": pytest.approx(0.75)}


def test_scalars_are_means_of_the_steps_since_the_last_call():
    one, writer, other = optimizer(4), Writer(), Writer()
    telemetry.log_compression(one, writer, 4)
    assert writer.written == {f"compression/{name}": (value, 4) for name, value in FIGURES.items()}
    one.stats.steps, one.stats.wire_bytes, one.stats.void_tensors = 6, 40 + 100, 2
    telemetry.log_compression(one, writer, 6)
    telemetry.log_compression(one, other, 6, prefix="g")
    assert writer.written["compression/wire_bytes"] == (50, 6) and writer.written["compression/void_tensors"] == (1, 6)
    assert other.written["g/wire_bytes"] == (140 / 6, 6)  # another writer's first
    assert writer.written["compression/hidden_share"][1] == 4  # nothing was under way since


def test_before_the_first_step_nothing_is_divided_by_it():
    writer = Writer()
    telemetry.log_compression(optimizer(), writer, 0)
    assert writer.written["compression/wire_bytes"] == (0, 0) and "compression/compression_ratio" not in writer.written
    assert telemetry.compression_progress(optimizer()) == "sent 0 bytes"
    assert telemetry.compression_summary(optimizer()).startswith("hvd_quant, this worker\n0 steps: sent 0 bytes")


def test_buckets_that_were_made_anew_count_from_there():
    before, now = optimizer(50).compression_stats(), optimizer(60).compression_stats()
    now["buckets"] = optimizer(1).compression_stats()["buckets"]
    assert "hidden_share" not in telemetry.figures(now, before)


def test_a_line_for_a_progress_bar():
    assert telemetry.compression_progress(optimizer(500)) == "sent 5 kB, 100x less, 75 % hidden"


def test_a_summary():
    lines = telemetry.compression_summary(optimizer(500)).splitlines()
    assert lines[1] == "500 steps: sent 5 kB, dense gradients are 500 kB, 100 times as much"
    assert lines[2] == "a step: 500 ms encoding, 250 ms waiting, 125 ms decoding; 75 % of the exchanges' time hidden"
    assert [line.split() for line in lines[3:]] == [["travelled", "as", "by", "tensors", "sent", "times", "less"],
                                                    ["topk", "allgather", "3", "5", "kB", "100"]]
    assert len({len(line.rstrip()) for line in lines[3:]}) == 1
    void = optimizer(500).compression_stats() | {"void_tensors": 3}
    assert "3 tensors were void" in telemetry.compression_summary(void)
    assert telemetry.compression_summary(void, since=optimizer(400).compression_stats()).splitlines()[1].startswith("100 steps: sent 1 kB")


def test_what_is_wrapped_is_found_and_what_is_wrong_is_said():
    wrapped = SimpleNamespace(inner_optimizer=SimpleNamespace(inner_optimizer=optimizer(3)))
    assert telemetry.compression_progress(wrapped) == telemetry.compression_progress(optimizer(3).compression_stats())
    with pytest.raises(TypeError, match="a int has no compression_stats"):
        telemetry.compression_progress(7)
    with pytest.raises(TypeError, match="a list writes no scalars"):
        telemetry.log_compression(optimizer(1), [], 1)


def test_tensorflows_writers_are_written_to(tmp_path):
    tf = pytest.importorskip("tensorflow")
    writer = tf.summary.create_file_writer(str(tmp_path))
    telemetry.log_compression(optimizer(4), writer, 4)
    writer.close()
    (file,) = tmp_path.iterdir()
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]
    values = {value.tag: (float(tf.make_ndarray(value.tensor)), event.step) for event in events for value in event.summary.value}
    assert values == {f"compression/{name}": (value, 4) for name, value in FIGURES.items()}
    kinds = {value.metadata.plugin_data.plugin_name for event in events for value in event.summary.value}
    assert kinds == {"scalars"}  # or TensorBoard shows none of it
