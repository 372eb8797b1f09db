"""What the exchange of a model's gradients will take, and which compressor is worth it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.compressors.half import FP16 as _FP16
from hvd_quant.compressors.none import NoCompression
from hvd_quant.exchange import buckets, compressible, cost, sent_bytes

WORTH = 0.1
"""What a compressor has to save of a step, to be recommended instead of one that loses less."""
_NONE = NoCompression()
FP16 = _FP16()
"""What "auto" compares with, beside none."""

Together = list[tuple[Compressor, list[TensorInfo]]]


@dataclass(frozen=True)
class Prediction:
    """What is expected of one compressor.

    Attributes:
        spec: the compressor, its exchange included.
        payload_bytes: of all gradients of a worker.
        sent_bytes: by one worker in a step.
        exchange_seconds: of an exchange of all gradients by itself.
        step_seconds: of a backward pass and the exchange, part of which goes on beside it; where no backward is known, of the
            exchange.
    """

    spec: str
    payload_bytes: float
    sent_bytes: float
    exchange_seconds: float
    step_seconds: float


def together(compressor: Compressor, infos: Iterable[TensorInfo], costs: cost.Costs) -> Together:
    """What travels together, as what, in the order in which it is started: the last parameters get their gradients first.

    Arguments:
        infos: of the parameters, in their order.
    """
    compressor = compressor.stages()[-1][1] or _NONE
    groups: Together = []
    infos = list(infos)[::-1]
    compressed = [info for info in infos if compressible(compressor, info)]
    for one, members in ((compressor, compressed), (_NONE, [info for info in infos if not compressible(compressor, info)])):
        for places in buckets.fill({place: 4 * info.numel for place, info in enumerate(members)}):
            bucket = [members[place] for place in places]
            groups.append((cost.decide(one, bucket, costs), bucket))
    return groups


def predict(compressor: Compressor, infos: Iterable[TensorInfo], costs: cost.Costs, backward: float = 0.0) -> Prediction:
    """What is expected of a compressor with one exchange; where its exchange is "auto", the cheapest is taken by bucket.

    Arguments:
        infos: of the parameters, in their order.
        backward: seconds of a backward pass.
    """
    groups = together(compressor, infos, costs)
    payloads, sent = map(sum, zip(*(_bytes(one, info) for one, members in groups for info in members)))
    exchange = costs.step(groups)
    return Prediction(compressor.spec, payloads, sent, exchange, costs.step(groups, backward) if backward else exchange)


def _bytes(compressor: Compressor, info: TensorInfo) -> tuple[float, float]:
    """Of the payload, and of what a worker sends for that."""
    if compressor.allreduced:
        payload = 4 * info.numel if compressor.name == "none" else compressor.summed_bytes(info)
        return payload, sent_bytes("allreduce", payload, info.world)
    payload = compressor.payload_bytes(info)
    return payload, sent_bytes(compressor.exchange, payload, info.world)


def predict_all(compressors: Iterable[Compressor], infos: list[TensorInfo], costs: cost.Costs, backward: float = 0.0
                ) -> list[Prediction]:
    """Of no compression, and of each compressor with each exchange that it may take; the fastest first."""
    return sorted((predict(way, infos, costs, backward) for way in ways([_NONE, *compressors])), key=lambda one: one.step_seconds)


def ways(compressors: Iterable[Compressor]) -> list[Compressor]:
    """Each compressor with each exchange that it may take; as it is where it is to choose."""
    found: dict[str, Compressor] = {}
    for compressor in compressors:
        choices = [compressor] if compressor.only_if_faster or compressor.name == "none" else cost.ways(compressor)
        found |= {way.spec: way for way in choices}
    return list(found.values())


def recommend(predictions: list[Prediction]) -> Prediction:
    """Of those that come near the fastest, the one with the longest payloads, since it loses least of the gradient; none, where
    it is one of them."""
    fastest = min(one.step_seconds for one in predictions)
    near = [one for one in predictions if one.step_seconds * (1 - WORTH) <= fastest]
    return max(near, key=lambda one: (one.spec == _NONE.spec, one.payload_bytes, -one.step_seconds))
