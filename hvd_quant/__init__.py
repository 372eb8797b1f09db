"""Compressed gradient exchange for Horovod.

``import hvd_quant`` brings the compressors and their registry and imports no framework; the frontends are
``hvd_quant.torch``, and for each the import takes the place of Horovod's own.
"""

from hvd_quant.compressors import Compressor, TensorInfo
from hvd_quant.registry import Compression as _Compression
from hvd_quant.registry import get_compressor, list_compressors, register

__version__ = "0.1.0"

Compression = _Compression()

__all__ = ["Compression", "Compressor", "TensorInfo", "get_compressor", "list_compressors", "register"]
