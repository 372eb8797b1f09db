"""What tests of all kinds share: one of each compressor."""

from hvd_quant import Compression, Compressor

_C = Compression

# min_numel=0, so that tests with small tensors compress them too
CODECS: dict[str, Compressor] = {
    c.spec: c for c in [
        _C.none, _C.fp16, _C.bf16,
        _C.onebit(min_numel=0, block_size=128), _C.onebit(min_numel=0, zeros=True),
        _C.threshold(min_numel=0, tau=0.05),
        _C.adaptive(min_numel=0), _C.adaptive(min_numel=0, ratio=0.25),
        _C.topk(min_numel=0), _C.topk(min_numel=0, ratio=0.1, values="float16"),
        _C.topk(min_numel=0, ratio=0.1, values="2bit"),
        _C.qsgd(min_numel=0, block_size=128), _C.terngrad(min_numel=0, clip=2.5), _C.natural(min_numel=0),
        _C.blockwise8(min_numel=0, block_size=128), _C.signsgd(min_numel=0),
    ]
}
# those that travel in sums alone
LINEAR: dict[str, Compressor] = {
    c.spec: c for c in [
        _C.randomk(min_numel=0, ratio=0.1), _C.randomk(min_numel=0, ratio=0.03, memory="none", seed=7),
        _C.powersgd(min_numel=0), _C.powersgd(min_numel=0, rank=2, memory="none", seed=7),
    ]
}
ERROR_FEEDBACK = {spec: c for spec, c in CODECS.items() if c.memory == "error_feedback"}

try:
    import torch

    torch.set_num_threads(1)  # tests share the machine; small tensors gain nothing from more
except ImportError:
    pass
