"""What the exchanges cost, where a user looks: TensorBoard, a progress bar, the end of training.

``source`` is always what has ``compression_stats()``: a distributed optimizer, whatever is wrapped around it, or a tape.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

SECONDS = ("encode_seconds", "wait_seconds", "decode_seconds")
TOTALS = ("dense_bytes", "wire_bytes", *SECONDS, "void_tensors")

_logged: weakref.WeakKeyDictionary[Any, dict[str, dict[str, Any]]] = weakref.WeakKeyDictionary()
"""Of each writer, the statistics that were logged last, by prefix."""


def stats_of(source: Any) -> dict[str, Any]:
    """The statistics of an optimizer or a tape.

    Raises:
        TypeError: for what has none.
    """
    if isinstance(source, Mapping):
        return dict(source)
    inner = source
    while not hasattr(inner, "compression_stats"):
        if not hasattr(inner, "inner_optimizer"):
            raise TypeError(f"a {type(source).__name__} has no compression_stats(): give the distributed optimizer or tape")
        inner = inner.inner_optimizer
    return inner.compression_stats()


def figures(now: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, float]:
    """What statistics come to between two moments.

    Arguments:
        before: from which on; from the start if None.

    Returns:
        A step's mean of ``TOTALS``, and, where they are known, compression_ratio and hidden_share.
    """
    before = before or {}
    steps = now["steps"] - before.get("steps", 0)
    grown = {key: now[key] - before.get(key, 0) for key in TOTALS}
    found = {key: value / max(steps, 1) for key, value in grown.items()}
    if grown["wire_bytes"]:
        found["compression_ratio"] = grown["dense_bytes"] / grown["wire_bytes"]
    flight, wait = (_of_buckets(now, key) - _of_buckets(before, key) for key in ("flight_seconds", "wait_seconds"))
    if flight > 0:
        found["hidden_share"] = min(1.0, max(0.0, 1 - wait / flight))
    return found


def _of_buckets(stats: Mapping[str, Any], key: str) -> float:
    return sum(bucket[key] for bucket in stats.get("buckets", {}).values())


def log_compression(source: Any, writer: Any, step: int, prefix: str = "compression") -> None:
    """Write what this worker's exchanges cost since the last call as scalars for TensorBoard, a step's mean each.

    Example::

        hvd.log_compression(optimizer, writer, step)     # every hundred steps, say

    Arguments:
        source: the distributed optimizer or tape.
        writer: a torch.utils.tensorboard.SummaryWriter or whatever else has ``add_scalar(name, value, step)``, or what
            tf.summary.create_file_writer returned.
        step: to which the values belong.
        prefix: of their names, as compression/wire_bytes.

    Raises:
        TypeError: for another writer, or a source without statistics.
    """
    now = stats_of(source)
    if hasattr(writer, "add_scalar"):
        add = writer.add_scalar
    elif hasattr(writer, "as_default"):
        add = _in_tensorflow(writer)
    else:
        raise TypeError(f"a {type(writer).__name__} writes no scalars: give a torch.utils.tensorboard.SummaryWriter, whatever else "
                        "has add_scalar(name, value, step), or a tf.summary.create_file_writer(folder)")
    logged = _logged.setdefault(writer, {})
    for name, value in figures(now, logged.get(prefix)).items():
        add(f"{prefix}/{name}", value, step)
    logged[prefix] = now


def _in_tensorflow(writer: Any) -> Callable[[str, float, int], None]:
    tf = importlib.import_module("tensorflow")
    # What tf.summary.scalar does, which needs TensorBoard to be installed where it is written.
    kind = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR")

    def add(name: str, value: float, step: int) -> None:
        with writer.as_default():
            tf.summary.write(name, tf.constant(value, tf.float32), step, kind)

    return add


def compression_progress(source: Any) -> str:
    """What this worker's exchanges cost so far, in a few words for a progress bar.

    Example::

        bar.set_postfix_str(hvd.compression_progress(optimizer))     # sent 12.4 MB, 74.1x less, 93 % hidden
    """
    now = stats_of(source)
    found = figures(now)
    parts = [f"sent {format_bytes(now['wire_bytes'])}"]
    if "compression_ratio" in found:
        parts.append(f"{found['compression_ratio']:.3g}x less")
    if "hidden_share" in found:
        parts.append(f"{found['hidden_share']:.0%} hidden".replace("%", " %"))
    return ", ".join(parts)


def compression_summary(source: Any, since: Mapping[str, Any] | None = None) -> str:
    """What this worker's exchanges cost, as a table in text: in all, a step, and by how tensors travelled.

    Example::

        if hvd.rank() == 0:
            print(hvd.compression_summary(optimizer))

    Arguments:
        since: statistics of an earlier moment, from which on they count.
    """
    now, since = stats_of(source), since or {}
    steps = now["steps"] - since.get("steps", 0)
    found = figures(now, since)
    sent, dense = (now[key] - since.get(key, 0) for key in ("wire_bytes", "dense_bytes"))
    lines = [f"{steps} steps: sent {format_bytes(sent)}, dense gradients are {format_bytes(dense)}"
             + (f", {found['compression_ratio']:.3g} times as much" if "compression_ratio" in found else "")]
    spent = (f"{1e3 * found[key]:.3g} ms {doing}" for key, doing in zip(SECONDS, ("encoding", "waiting", "decoding")))
    hidden = f"; {100 * found['hidden_share']:.0f} % of the exchanges' time hidden" if "hidden_share" in found else ""
    lines.append("a step: " + ", ".join(spent) + hidden)
    if void := now["void_tensors"] - since.get("void_tensors", 0):
        lines.append(f"{void} tensors were void, since some worker's gradient was not finite")
    rows = [("travelled as", "by", "tensors", "sent", "times less")]
    ways: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for bucket in now["buckets"].values():
        ways.setdefault((bucket["compressor"], bucket["exchange"]), []).append(bucket)
    for (compressor, exchange), alike in ways.items():
        sent, dense = (sum(bucket[key] for bucket in alike) for key in ("wire_bytes", "dense_bytes"))
        rows.append((compressor, exchange, str(sum(len(bucket["tensors"]) for bucket in alike)), format_bytes(sent),
                     f"{dense / sent:.3g}" if sent else ""))
    if ways:
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines += ["  " + "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                                   for i, (cell, width) in enumerate(zip(row, widths))) for row in rows]
    return "\n".join(["hvd_quant, this worker", *lines])


def format_bytes(n: float) -> str:
    """So many bytes, in three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} bytes"
