"""The compressors, one file a family. Importing this package registers them."""

from hvd_quant.compressors.adaptive import Adaptive
from hvd_quant.compressors.base import Compressor, TensorInfo
from hvd_quant.compressors.blockwise8 import Blockwise8
from hvd_quant.compressors.half import BF16, FP16
from hvd_quant.compressors.natural import Natural
from hvd_quant.compressors.none import NoCompression
from hvd_quant.compressors.onebit import OneBit
from hvd_quant.compressors.powersgd import PowerSGD
from hvd_quant.compressors.qsgd import QSGD
from hvd_quant.compressors.randomk import RandomK
from hvd_quant.compressors.signsgd import SignSGD
from hvd_quant.compressors.terngrad import TernGrad
from hvd_quant.compressors.threshold import Threshold
from hvd_quant.compressors.topk import TopK

__all__ = ["BF16", "FP16", "QSGD", "Adaptive", "Blockwise8", "Compressor", "Natural", "NoCompression", "OneBit", "PowerSGD",
           "RandomK", "SignSGD", "TensorInfo", "TernGrad", "Threshold", "TopK"]
